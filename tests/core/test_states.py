"""An extended, refilled or one-token state drafts like a fresh one, with every drafter.

Equal tokens do not prove that a draft's cache is complete: the target would correct the draft, in more steps.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mars_jax import contrib, drafters, verify
from mars_jax.core import decode, refill
from mars_jax.core.metrics import zero_stats
from mars_jax.drafters.sized import sized, with_size
from tests.helpers import committed, draft_input, every_drafter
from tests.helpers.every_drafter import CHUNK, ROWS, batch_of, check_same, made_of

# Drafters of several sizes, and the drafter that they resize.
SIZED = {
    "sized model": "model chain",
    "sized n-grams": "ngram",
    "sized head": "eagle chain",
    "sized replay": "replay",
}
NAMES = [*every_drafter.PLAIN, *every_drafter.TRUSTED, *every_drafter.HEADS, "replay", *SIZED]


def drafter_of(name):
    """Return (target, drafter, params, params of steps without a draft, vocabulary)."""
    if name in SIZED:
        target, drafter, params, _, vocab = drafter_of(SIZED[name])
        loaded = sized(
            drafters.LoadedDrafter(drafter, params.draft, resized=lambda _: drafter), [0, drafter.max_depth]
        )
        longest, none = (params._replace(draft=with_size(loaded, size).params) for size in (1, 0))
        return target, loaded, longest, none, vocab
    target, drafter, params, vocab = made_of("ngram" if name == "replay" else name)
    if name == "replay":
        texts = np.random.default_rng(1).integers(0, vocab, (8, 30)).tolist()
        drafter, params = contrib.replay(4, min_ngram=1), params._replace(draft=contrib.corpus(texts, 256))
    return target, drafter, params, params, vocab


class States:
    """States of one drafter, all with the same shapes."""

    def __init__(self, name):
        target, self.drafter, self.params, self.idle, self.vocab = drafter_of(name)
        self.rule = verify.rejection() if "sampled" in name else verify.exact()
        loaded = self.drafter if name in SIZED else drafters.LoadedDrafter(self.drafter, ())
        self.drafter = loaded.drafter
        self.decoder = dataclasses.replace(loaded.decoder(target, self.rule), prefill_chunk=CHUNK)

    def texts(self, *lengths):
        rng = np.random.default_rng(lengths[0])
        return [rng.integers(0, self.vocab, n).tolist() for n in lengths]

    def fresh(self, texts, params=None):
        return decode.start(self.decoder, params or self.params, batch_of(texts, self.rule))

    def run(self, state, steps=99, params=None):
        return decode.run(self.decoder, params or self.params, state, record=True, max_steps=steps)

    def one_token(self):
        """Return a state that began with one token and took steps without a draft, if the drafter supports that."""
        begun = self.fresh(self.texts(1, 1, 1), self.idle)
        state, _ = self.run(begun, 4, self.idle)
        return state, committed(state)

    def extended(self):
        """Return a state that was extended from one token, as at the start of a conversation."""
        texts = self.texts(33, 2, 47)
        state = self.fresh([text[:1] for text in texts])
        return decode.extend(self.decoder, self.params, state, batch_of(texts, self.rule))[0], texts

    def inserted(self):
        """Return a running state after two of its rows were replaced and one stayed."""
        state, _ = self.run(self.fresh(self.texts(5, 20, 1)), 2)
        texts = self.texts(33, 1, 2)
        stats, rows = zero_stats(ROWS, self.decoder.max_depth), jnp.asarray([0, -1, 2])
        state, _ = refill.refill(self.decoder, self.params, state, stats, rows, batch_of(texts, self.rule))
        return state, [texts[0], committed(state)[1], texts[2]]

    def drafted(self, state):
        """Return the tokens of the next draft. An untrained head is seldom right, so its steps prove little."""
        propose = jax.jit(self.drafter.propose)
        return np.asarray(propose(self.params, state.draft, draft_input(state))[0].tokens)


states = functools.cache(States)
IN_TIME = {
    "extended": ["sized model"],
    "inserted": ["sized model", "ngram"],
    "one_token": ["sized model", "medusa chain"],
}
CASES = [
    pytest.param(way, name, marks=[pytest.mark.slow] * (name not in names))
    for way, names in IN_TIME.items()
    for name in NAMES
]


@pytest.mark.parametrize(("way", "name"), CASES)
def test_a_state_drafts_like_a_fresh_one(way, name):
    made = states(name)
    state, texts = getattr(made, way)()
    fresh = made.fresh(texts)
    if made.drafter.reads is not None:
        np.testing.assert_array_equal(made.drafted(state), made.drafted(fresh))
    found = []
    for one in (fresh, state):
        ended, stats = made.run(one)
        found.append((committed(ended), jax.tree.map(np.asarray, stats)))
    check_same(*found)
