"""Rows inserted into a running state decode as in a batch of one, and leave the other rows unchanged."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mars_jax import contrib, drafters, verify
from mars_jax.core import decode, refill
from mars_jax.core.axes import parse_mesh
from mars_jax.core.controls import make_controls
from mars_jax.core.edits import make_edits
from mars_jax.core.given import check_places
from mars_jax.core.metrics import zero_stats
from mars_jax.core.types import NO_TOKEN, Prompts, keys_from_seeds
from mars_jax.drafters import Dynamic
from mars_jax.utils.errors import MarsError
from tests.helpers import NO_WEIGHTS, begin, committed, ragged, slow_but
from tests.helpers.every_drafter import of_model
from tests.helpers.fake_drafters import DRAFTERS, SMALL, TARGET, VOCAB

ROWS, BUFFER = 3, 40
# Seven requests pass through three rows: one ends at once, one is long, and their settings differ.
LENGTHS = [1, 6, 12, 17, 2, 9, 30]
LIMITS = [40, 7, 30, 22, 25, 40, 36]
TEMPERATURES = [0.0, 0.9, 0.0, 1.3, 0.8, 0.0, 1.0]

COVERING = {
    "ngram, mars": (DRAFTERS["ngram"], verify.mars(theta=0.5)),
    "chain, fly": (DRAFTERS["chain"], contrib.fly(window=1)),
    "sampled chain, rejection": (DRAFTERS["sampled chain"], verify.rejection()),
    "sampled chain, mars over block": (
        DRAFTERS["sampled chain"], verify.mars(base=verify.rejection(block=True), theta=0.5),
    ),
    "static tree, budget": (DRAFTERS["static tree"], contrib.budget(gap=1.0, total=4.0)),
    "dynamic tree, mars": (
        drafters.language_model(SMALL, tree=Dynamic(top_k=3, depth=3, nodes=9)), verify.mars(theta=0.5),
    ),
}  # fmt: skip
"""Every kind of draft and of rule."""


class Served:
    """All requests decoded in a few rows, which are refilled one by one."""

    def __init__(self, target, drafter, rule, params=NO_WEIGHTS, *, vocab=VOCAB):
        self.decoder = decode.speculative_decoder(target, drafter, rule, prefill_chunk=16)
        self.rule, self.params = rule, params
        self.prompts, self.lengths = ragged(LENGTHS, BUFFER, vocab)

    def batch(self, requests):
        """Return the prompts of some requests. The first request has two stop tokens, the others one."""
        index = np.asarray(requests)
        controls = make_controls(
            len(requests),
            limit=[LIMITS[i] for i in requests],
            temperature=[TEMPERATURES[i] for i in requests],
            stop_tokens=[[3, 5] if i == 0 else [3, -1] for i in requests],
        )
        keys = keys_from_seeds(jnp.asarray(index, jnp.uint32))
        return Prompts(self.prompts[index], self.lengths[index], controls, self.rule, keys)

    def start(self, requests):
        return decode.start(self.decoder, self.params, self.batch(requests))

    def decode_one(self, i):
        """Decode one request in a batch of one, through `run`."""
        state, stats = decode.run(self.decoder, self.params, self.start([i]), record=True)
        return committed(state)[0], row_of(stats, 0)

    def decode_all(self):
        """Return (tokens, counters) of every request, and the number of steps of the whole batch."""
        state, stats, steps = (
            self.start([0, 1, 2]),
            zero_stats(ROWS, self.decoder.max_depth, record=BUFFER),
            0,
        )
        in_rows, waiting, results = [0, 1, 2], [3, 4, 5, 6], {}
        while any(i is not None for i in in_rows):
            state, stats, num_steps = refill.advance(self.decoder, self.params, state, stats)
            steps += int(num_steps[0])
            for row, i in enumerate(in_rows):
                if i is None or not bool(state.done[row]):
                    continue
                results[i] = committed(state)[row], row_of(stats, row)
                in_rows[row] = waiting.pop(0) if waiting else None
                if in_rows[row] is not None:
                    previous = jax.tree.map(np.asarray, without_keys(state))
                    batch = self.batch([in_rows[row]])
                    # Prompts may be narrower than the buffer of the state.
                    batch = dataclasses.replace(batch, tokens=batch.tokens[:, : max(LENGTHS)])
                    rows = jnp.asarray([row])
                    state, stats = refill.refill(self.decoder, self.params, state, stats, rows, batch)
                    check_untouched(previous, without_keys(state), row)
        return results, steps


def row_of(stats, row):
    return jax.tree.map(lambda x: np.asarray(x)[row].tolist(), stats)


def without_keys(state):
    """Return the state with its keys as numbers."""
    return jax.tree.map(
        lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x, state
    )


def check_untouched(previous, current, row):
    """Check that every leaf of the other rows is unchanged, bit for bit."""
    other_rows = [r for r in range(ROWS) if r != row]
    for old, new in zip(jax.tree.leaves(previous), jax.tree.leaves(current), strict=True):
        assert np.asarray(old)[other_rows].tobytes() == np.asarray(new)[other_rows].tobytes()


@pytest.mark.parametrize("pair", slow_but(COVERING, "ngram, mars"))
def test_a_row_put_into_a_running_state_decodes_as_it_does_alone(pair):
    """Compare tokens, counters and token kinds; the state of a rule and of a draft also starts again."""
    served = Served(TARGET, *COVERING[pair])
    results, steps = served.decode_all()
    assert len(results) == len(LENGTHS)
    for i, result in results.items():
        # Compare strings, since NaN does not equal NaN as a float.
        assert repr(result) == repr(served.decode_one(i))
    assert steps < sum(stats.steps for _, stats in results.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eagle tree", "medusa tree", "ngram, sinks"])
def test_rows_are_put_into_each_part_of_a_mesh(name):
    """The head reads the prompt's features. Compare a mesh of two by two devices with one device."""
    target, drafter, params, vocab = of_model(name)
    served = Served(target, drafter, verify.mars(theta=0.5), params, vocab=vocab)

    def decoded():
        state, stats = served.start([0, 1, 2, 6]), zero_stats(4, drafter.max_depth, record=BUFFER)
        # Stop when two rows are done. The others continue after the refill.
        state, stats, _ = refill.advance(served.decoder, params, state, stats, 2)
        batch = served.batch([3, 4])
        state, stats = refill.refill(served.decoder, params, state, stats, jnp.asarray([1, 2]), batch)
        state, stats, _ = refill.advance(served.decoder, params, state, stats, 4)
        return committed(state), np.asarray(stats.steps).tolist()

    with jax.set_mesh(parse_mesh("data=2,model=2")):
        divided, steps = decoded()
    assert (divided, steps) == decoded()
    for row, request in enumerate((0, 3, 4, 6)):
        assert divided[row] == served.decode_one(request)[0]


def test_an_advance_ends_when_the_first_row_ends():
    served = Served(TARGET, drafters.none(), verify.exact())
    state, stats = served.start([0, 1, 2]), zero_stats(ROWS, served.decoder.max_depth)
    state, stats, steps = refill.advance(served.decoder, NO_WEIGHTS, state, stats)
    assert int(state.done.sum()) == 1 and steps.tolist() == [int(stats.steps.max())] * ROWS
    state, stats, _ = refill.advance(served.decoder, NO_WEIGHTS, state, stats, 2)
    assert state.done.all() and stats.tokens is None


def test_a_row_of_another_shard_is_refused():
    with jax.set_mesh(parse_mesh("data=2")):
        check_places(jnp.asarray([1, 2]), 2, 4)
        with pytest.raises(MarsError, match=r"rows are \[2, 1\] on a mesh with data=2: expected the first 1"):
            check_places(jnp.asarray([2, 1]), 2, 4)


def test_a_row_has_at_most_as_many_biased_tokens_as_the_state():
    batch = (TARGET, drafters.none(), verify.exact(), *ragged([3, 5], 12, VOCAB))

    def edits_of(state_bias, row_bias):
        """Return the edits of a state of two rows after the insertion of a row with another bias."""
        controls = make_controls(2, limit=12).replace(edits=make_edits(2, logit_bias=state_bias))
        decoder, state = begin(*batch, controls=controls)
        controls = make_controls(1, limit=12).replace(edits=make_edits(1, logit_bias=row_bias))
        row = Prompts(batch[3][:1], batch[4][:1], controls, verify.exact(), keys_from_seeds(jnp.arange(1)))
        return decoder.insert(NO_WEIGHTS, state, jnp.asarray([1]), row).controls.edits

    edits = edits_of({1: 0.5, 2: -1.0, 3: 2.0}, {5: 1.5})
    assert edits.bias_tokens.tolist() == [[1, 2, 3], [5, NO_TOKEN, NO_TOKEN]]
    assert edits.bias.tolist() == [[0.5, -1.0, 2.0], [1.5, 0.0, 0.0]]
    with pytest.raises(MarsError, match="a row has 2 biased tokens and the state has room for 1"):
        edits_of({5: 1.5}, {5: 1.5, 6: 1.0})
