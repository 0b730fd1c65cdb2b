"""Extended, refilled and one-token states decode like fresh ones: tokens, drafts and steps, with every drafter."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mars_jax import contrib, drafters, verify
from mars_jax.core import decode, refill
from mars_jax.core.axes import parse_mesh
from mars_jax.core.drafter import Drafter
from mars_jax.core.metrics import zero_stats
from mars_jax.drafters.sized import sized, with_size
from mars_jax.drafters.skipping import FEATURES
from tests.helpers import committed, draft_input, every_drafter, slow_but
from tests.helpers.every_drafter import BUFFER, CHUNK, ROWS, batch_of, check_same, made_of
from tests.helpers.fake_drafters import TARGET

# Names of sized drafters, and of the drafters that they resize.
SIZED = {
    "sized model": "model chain",
    "sized n-grams": "ngram",
    "sized head": "eagle chain",
    "sized replay": "replay",
}
NAMES = [*every_drafter.NAMES, "replay", *SIZED]


def drafter_of(name):
    """Return (target, drafter, params, params of steps without a draft, vocabulary)."""
    if name in SIZED:
        target, drafter, params, _, vocab = drafter_of(SIZED[name])
        chain = drafters.LoadedDrafter(drafter, params.draft)
        loaded = sized(chain, [0, drafter.max_depth])
        longest, none = (params._replace(draft=with_size(loaded, size).params) for size in (1, 0))
        return target, loaded, longest, none, vocab
    target, drafter, params, vocab = made_of("ngram" if name == "replay" else name)
    if name == "replay":
        texts = np.random.default_rng(1).integers(0, vocab, (8, 30)).tolist()
        drafter, params = contrib.replay(4, min_ngram=1), params._replace(draft=contrib.corpus(texts, 256))
    return target, drafter, params, params, vocab


class States:
    """States of one drafter, all with the same shapes."""

    def __init__(self, name, rule=None, *, target=None):
        default, drafter, self.params, self.idle, self.vocab = drafter_of(name)
        self.rule = rule or (verify.rejection() if "sampled" in name else verify.exact())
        loaded = drafter if name in SIZED else drafters.LoadedDrafter(drafter, ())
        self.decoder = dataclasses.replace(loaded.decoder(target or default, self.rule), prefill_chunk=CHUNK)
        self.drafter = self.decoder.drafter
        self.rng = np.random.default_rng(0)

    def texts(self, *lengths):
        return [self.rng.integers(0, self.vocab, n).tolist() for n in lengths]

    def batch(self, texts, max_new=BUFFER, stop_tokens=()):
        """Return prompts that may grow by `max_new` tokens."""
        limit = np.minimum([len(text) + max_new for text in texts], BUFFER)
        return batch_of(texts, self.rule, limit=limit, stop_tokens=stop_tokens)

    def start(self, batch, params=None):
        return decode.start(self.decoder, params or self.params, batch)

    def run(self, state, steps=99, params=None):
        return decode.run(self.decoder, params or self.params, state, record=True, max_steps=steps)

    def extend(self, state, batch):
        return decode.extend(self.decoder, self.params, state, batch)

    def run_and_compare(self, state, batch, steps=99):
        """Run a fresh state and `state`, check that both decode the same, and return the end of the second run."""
        results = []
        for initial in (self.start(batch), state):
            ended, stats = self.run(initial, steps)
            results.append((committed(ended), jax.tree.map(np.asarray, stats)))
        check_same(*results)
        return ended

    def one_token(self, steps=4, lengths=(1, 1, 1)):
        """Return a state that began with one token and took steps without a draft, if the drafter supports that."""
        begun = self.start(self.batch(self.texts(*lengths)), self.idle)
        state, _ = self.run(begun, steps, self.idle)
        return state, committed(state)

    def idle_for_long(self):
        """Return a state after more steps without a draft than a head's features are kept for."""
        return self.one_token(FEATURES + 6, (1, 5, 17))

    def extended_after_idling(self):
        """Return a state that was extended after steps without a draft, and its texts."""
        state, texts = self.one_token()
        texts = [text[:4] + new for text, new in zip(texts, self.texts(9, 1, 20), strict=True)]
        return self.extend(state, self.batch(texts))[0], texts

    def extended(self):
        """Return a state that was extended from one token, as at the start of a conversation."""
        texts = self.texts(33, 2, 47)
        state = self.start(self.batch([text[:1] for text in texts]))
        return self.extend(state, self.batch(texts))[0], texts

    def inserted_after_idling(self):
        """Return a running state after some rows were replaced, which until then had taken steps without a draft."""
        return self.inserted(FEATURES + 6, self.idle)

    def inserted(self, steps=2, params=None):
        """Return a running state after two of its rows were replaced and one stayed."""
        state, _ = self.run(self.start(self.batch(self.texts(5, 20, 1)), params), steps, params)
        texts = self.texts(33, 1, 2)
        stats, rows = zero_stats(ROWS, self.decoder.max_depth), jnp.asarray([0, -1, 2])
        state, _ = refill.refill(self.decoder, self.params, state, stats, rows, self.batch(texts))
        return state, [texts[0], committed(state)[1], texts[2]]

    def drafted(self, state):
        """Return the tokens of the next draft. An untrained head is seldom right, so its steps prove little."""
        propose = jax.jit(self.drafter.propose)
        return np.asarray(propose(self.params, state.draft, draft_input(state))[0].tokens)


states_of = functools.cache(States)
IDLE = ("idle_for_long", "extended_after_idling", "inserted_after_idling")
PAIRS = [(origin, name) for origin in ("extended", "inserted", "one_token") for name in NAMES]
PAIRS += [(origin, name) for origin in IDLE for name in SIZED]
FAST = [("extended", "sized model")]


@pytest.mark.parametrize(("origin", "name"), slow_but(PAIRS, *FAST))
def test_a_state_drafts_like_a_fresh_one(origin, name):
    states = states_of(name)
    state, texts = getattr(states, origin)()
    batch = states.batch(texts)
    if states.drafter.reads is not None:
        np.testing.assert_array_equal(states.drafted(state), states.drafted(states.start(batch)))
    states.run_and_compare(state, batch)


def conversation(states):
    """Check four turns: all prompts grow, one changes in the middle, one is cut short, and none has new tokens.

    Yield the tokens before each turn, how many each shares with its new prompt, the prompts, and the tokens read.
    """
    stops = [[3]] * ROWS
    state, _ = states.run(states.start(states.batch(states.texts(5, 2, 17), 9, stops)))
    for change in range(4):
        previous = committed(state)
        texts = [text + new for text, new in zip(previous, states.texts(3, 1, 7), strict=True)]
        if change == 1:
            texts[2] = [*texts[2][:11], (texts[2][11] + 1) % states.vocab, *texts[2][12:]]
        if change == 2:
            texts[0] = previous[0][:7]
        if change == 3:
            texts = previous
        shared = [
            next((i for i, (a, b) in enumerate(zip(x, y, strict=False)) if a != b), min(len(x), len(y)))
            for x, y in zip(previous, texts, strict=True)
        ]
        batch = states.batch(texts, 6, stops)
        state, read = states.extend(state, batch)
        # Rows that stop after one step are not done, and the draft has not read their last tokens yet.
        state = states.run_and_compare(state, batch, steps=99 if change % 2 else 1)
        yield previous, shared, texts, read.tolist()


@pytest.mark.parametrize("name", slow_but(every_drafter.NAMES, "none"))
def test_every_turn_decodes_like_a_fresh_state(name):
    """Tokens, steps, drafts and the kind of each token are equal, so the draft's own state equals a fresh one too."""
    states = States(name, None if "sampled" in name else verify.mars(theta=0.5))
    overlap = states.drafter.reads is not None
    for previous, shared, texts, read in conversation(states):
        assert read == [
            len(text) - 1 - min(n - overlap, len(old) - 1, len(text) - 1 - overlap)
            for text, old, n in zip(texts, previous, shared, strict=True)
        ]
        assert max(read) <= 1 + overlap + max(len(text) - n for text, n in zip(texts, shared, strict=True))


def test_tokens_in_the_cache_are_not_read_again():
    """Count the forwards of the target in chunks of 16; a fresh state of this length takes three."""
    reads = []

    def forward(params, tokens, visible, cache):
        if tokens.shape[1] == CHUNK:
            jax.debug.callback(lambda first: reads.append(np.asarray(first).tolist()), visible.slot)
        return TARGET.forward(params, tokens, visible, cache)

    states = States("model chain", target=TARGET._replace(forward=forward))
    state, _ = states.run(states.start(states.batch(states.texts(33) * ROWS, 2)))
    texts = [text + new for text, new in zip(committed(state), states.texts(4, 4, 4), strict=True)]
    batch = states.batch(texts, 2)
    jax.effects_barrier()
    reads.clear()
    state, read = states.extend(state, batch)
    jax.block_until_ready(state.tokens)
    jax.effects_barrier()
    assert reads == [[len(text) - 5 for text in texts]] and read.tolist() == [4] * ROWS
    reads.clear()
    jax.block_until_ready(states.start(batch).tokens)
    jax.effects_barrier()
    assert sorted(slots[0] for slots in reads) == [0, 16, 32]


class Rereading(drafters.language_model):
    catch_up = Drafter.catch_up


def test_a_drafter_without_catch_up_reads_the_text_again():
    states = States("model chain", verify.mars(theta=0.5))
    drafter = Rereading(states.drafter.model, states.drafter.num_draft_tokens)
    states.decoder = decode.speculative_decoder(TARGET, drafter, states.rule, prefill_chunk=CHUNK)
    assert len(list(conversation(states))) == 4


@pytest.mark.slow
@pytest.mark.parametrize(("name", "rule"), [("eagle tree", verify.mars(theta=0.5)), ("sized head", None)])
def test_rows_divided_over_a_mesh_are_extended(name, rule):
    def turns(states):
        state, _ = states.run(states.start(states.batch(states.texts(5, 2, 9), 6)))
        texts = [text + new for text, new in zip(committed(state), states.texts(3, 3, 3), strict=True)]
        state, read = states.extend(state, states.batch(texts, 6))
        return committed(states.run(state)[0]), read.tolist()

    one_device, divided = (States(name, rule) for _ in range(2))
    expected = turns(one_device)
    with jax.set_mesh(parse_mesh("data=3")):
        assert turns(divided) == expected
