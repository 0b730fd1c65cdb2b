"""`extend`: tokens, drafts and counters equal those of a fresh state, and only new tokens are read."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mars_jax import drafters, verify
from mars_jax.core import decode
from mars_jax.core.controls import make_controls
from mars_jax.core.errors import MarsError
from mars_jax.core.mesh import parse_mesh
from mars_jax.core.types import Prompts, keys_from_seeds
from tests.helpers import NO_WEIGHTS, committed, slow_but
from tests.helpers.every_drafter import (
    BUFFER,
    CHUNK,
    HEADS,
    PLAIN,
    ROWS,
    TRUSTED,
    batch_of,
    check_same,
    made_of,
)  # fmt: skip
from tests.helpers.fake_drafters import TARGET

FIRST = [5, 2, 17]
"""Tokens of the first prompts."""


class Reads(list):
    """A list that records the first position of every chunked forward of a model, for all rows."""

    @functools.cache  # noqa: B019 one object, so that its compiled programs are reused
    def of(self, model):
        def forward(params, tokens, visible, cache):
            if tokens.shape[1] == CHUNK:
                jax.debug.callback(lambda at: self.append(np.asarray(at).tolist()), visible.slot)
            return model.forward(params, tokens, visible, cache)

        features = model.with_features
        return model._replace(
            forward=forward, with_features=features and (lambda layers: self.of(features(layers)))
        )

    __hash__ = object.__hash__


class Talk:
    """Turns of a conversation over one state."""

    def __init__(self, name, rule, *, target=None):
        own, self.drafter, self.params, self.vocab = made_of(name)
        made = self.drafter
        if isinstance(made, drafters.LoadedDrafter):
            self.drafter = made.drafter
            self.decoder = dataclasses.replace(made.decoder(target or own, rule), prefill_chunk=CHUNK)
        else:
            self.decoder = decode.speculative_decoder(target or own, made, rule, prefill_chunk=CHUNK)
        self.rule, self.state = rule, None
        self.rng = np.random.default_rng(0)

    def new(self, count):
        return self.rng.integers(0, self.vocab, count).tolist()

    def batch(self, texts, more):
        limit = np.minimum([len(text) + more for text in texts], BUFFER)
        return batch_of(texts, self.rule, limit=limit, stop_tokens=[[3]] * ROWS)

    def turn(self, texts, more=9, steps=99):
        """Decode from the running state and from a fresh one.

        Return (texts, counters) of both, and the number of tokens that `extend` read in each row.
        """
        batch = self.batch(texts, more)
        fresh = decode.start(self.decoder, self.params, batch)
        if self.state is None:
            self.state, read = decode.start(self.decoder, self.params, batch), None
        else:
            self.state, read = decode.extend(self.decoder, self.params, self.state, batch)
        results = []
        for state in (fresh, self.state):
            self.state, stats = decode.run(self.decoder, self.params, state, record=True, max_steps=steps)
            results.append((committed(self.state), jax.tree.map(np.asarray, stats)))
        return results, None if read is None else read.tolist()

    @property
    def texts(self):
        return committed(self.state)


def conversation(talk):
    """Yield four turns: all texts grow, then one changes in the middle, then one is cut short, then nothing is new.

    Each is the turn, the texts before it, the tokens that each row shares with its new prompt, the prompts, the results
    of `Talk.turn`, and the tokens read.
    """
    talk.turn([talk.new(n) for n in FIRST])
    for change in range(4):
        before = talk.texts
        texts = [text + talk.new(extra) for text, extra in zip(before, (3, 1, 7), strict=True)]
        if change == 1:
            texts[2] = [*texts[2][:11], (texts[2][11] + 1) % talk.vocab, *texts[2][12:]]
        if change == 2:
            texts[0] = before[0][:7]
        if change == 3:
            texts = before
        held = [
            next((i for i, (a, b) in enumerate(zip(x, y, strict=False)) if a != b), min(len(x), len(y)))
            for x, y in zip(before, texts, strict=True)
        ]
        # Stopped after one step, the rows are not done, and no step has fed their last tokens to the draft again.
        found, read = talk.turn(texts, more=6, steps=99 if change % 2 else 1)
        yield change, before, held, texts, found, read


IN_TIME = ("none", "model, dynamic tree")


@pytest.mark.parametrize("name", slow_but([*PLAIN, *TRUSTED, *HEADS], *IN_TIME))
def test_every_turn_decodes_like_a_fresh_state(name):
    """Tokens, steps, drafts and the kind of each token are equal, so the draft's own state equals a fresh one too."""
    rule = verify.rejection() if "sampled" in name else verify.mars(theta=0.5)
    talk = Talk(name, rule)
    for change, before, held, texts, found, read in conversation(talk):
        check_same(*found)
        again = talk.drafter.reads is not None
        wanted = [
            len(text) - 1 - min(h - again, len(old) - 1, len(text) - 1 - again)
            for text, old, h in zip(texts, before, held, strict=True)
        ]
        assert read == wanted, change
        assert max(read) <= 1 + again + max(len(t) - h for t, h in zip(texts, held, strict=True))


@pytest.mark.slow
def test_an_adaptive_draft_continues_with_the_same_text():
    """The drafter keeps its estimates between turns, so its steps differ."""
    talk = Talk("sized", verify.exact())
    for *_, (fresh, found), _ in conversation(talk):
        for ours, theirs in zip(found[0], fresh[0], strict=True):
            both = min(len(ours), len(theirs))  # steps of another size may emit more tokens
            assert ours[:both] == theirs[:both]


def test_tokens_in_the_cache_are_not_read_again():
    """Count the forwards of the target in chunks of 16; a fresh state of this length takes three."""
    reads = Reads()
    talk = Talk("model chain", verify.exact(), target=reads.of(TARGET))
    talk.turn([talk.new(33)] * ROWS, more=2)
    texts = [text + talk.new(4) for text in talk.texts]
    given = talk.batch(texts, 2)
    jax.effects_barrier()
    reads.clear()
    state, read = decode.extend(talk.decoder, talk.params, talk.state, given)
    jax.block_until_ready(state.tokens)
    jax.effects_barrier()
    assert reads == [[len(text) - 5 for text in texts]] and read.tolist() == [4] * ROWS
    reads.clear()
    jax.block_until_ready(decode.start(talk.decoder, talk.params, given).tokens)
    jax.effects_barrier()
    assert sorted(at[0] for at in reads) == [0, 16, 32]


@pytest.mark.slow
def test_turns_share_one_compilation():
    talk = Talk("ngram of 6", verify.mars(theta=0.25))  # no other test compiles for this drafter
    talk.turn([talk.new(n) for n in FIRST])
    extended = decode._extend._cache_size()
    for _ in range(3):
        talk.turn([text + talk.new(2) for text in talk.texts], more=4)
    assert decode._extend._cache_size() == extended + 1


def test_a_drafter_without_catch_up_reads_the_text_again():
    talk = Talk("model chain", verify.mars(theta=0.5))
    talk.drafter = talk.drafter._replace(catch_up=None)
    talk.decoder = decode.speculative_decoder(TARGET, talk.drafter, talk.rule, prefill_chunk=CHUNK)
    for *_, results, _ in conversation(talk):
        check_same(*results)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["model chain", "eagle tree"])
def test_rows_divided_over_a_mesh_are_extended(name):
    def turns():
        talk = Talk(name, verify.mars(theta=0.5))

        def two_rows(texts):
            batch = talk.batch([*texts, [1]], 6)
            return jax.tree.map(lambda x: x[:2] if getattr(x, "ndim", 0) else x, batch)

        state = decode.start(talk.decoder, talk.params, two_rows([talk.new(5), talk.new(9)]))
        state, _ = decode.run(talk.decoder, talk.params, state)
        texts = [text + talk.new(3) for text in committed(state)]
        state, read = decode.extend(talk.decoder, talk.params, state, two_rows(texts))
        state, _ = decode.run(talk.decoder, talk.params, state)
        return committed(state), read.tolist()

    with jax.set_mesh(parse_mesh("data=2")):
        divided = turns()
    assert divided == turns()


@pytest.mark.parametrize(
    ("rows", "width", "sentence"),
    [
        (3, 73, r"the prompts are \[3, 73\] and the state has 3 rows of 72 tokens"),
        (2, 72, r"the prompts are \[2, 72\]"),
    ],
)
def test_prompts_of_another_shape_are_refused(rows, width, sentence):
    talk = Talk("none", verify.exact())
    talk.turn([talk.new(n) for n in FIRST])
    keys, controls = keys_from_seeds(jnp.arange(rows, dtype=jnp.uint32)), make_controls(rows, limit=8)
    tokens, lengths = jnp.ones((rows, width), jnp.int32), jnp.full((rows,), 3, jnp.int32)
    with pytest.raises(MarsError, match=sentence):
        talk.decoder.extend(NO_WEIGHTS, talk.state, Prompts(tokens, lengths, controls, talk.rule, keys))
