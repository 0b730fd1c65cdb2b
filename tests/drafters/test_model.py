"""The small-model drafter against the same model run from an empty cache each round."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mars_jax import drafters, verify
from mars_jax.core import decode
from mars_jax.core.controls import make_controls
from mars_jax.core.drafter import DraftInput
from mars_jax.core.errors import MarsError
from mars_jax.core.types import Prompts, keys_from_seeds
from tests.helpers import NO_WEIGHTS, draft_input, logits_after, ragged
from tests.helpers.fake_drafters import SMALL, TARGET, VOCAB


def scores(tokens):
    return logits_after(SMALL, tokens, width=48)


@pytest.mark.parametrize("branching", [pytest.param((1, 1, 1, 1), marks=pytest.mark.slow), (3, 2, 1)])
def test_drafts_are_those_of_a_fresh_model_after_rounds_of_mixed_acceptance(branching):
    drafter = drafters.language_model(SMALL, tree=branching)
    decoder = decode.speculative_decoder(TARGET, drafter, verify.exact(), prefill_chunk=16)
    prompts, lengths = ragged([1, 2, 9], 40, VOCAB)
    state = decode.start(
        decoder,
        NO_WEIGHTS,
        Prompts(
            prompts,
            lengths,
            make_controls(3, limit=40),
            verify.exact(),
            keys_from_seeds(jnp.arange(3, dtype=jnp.uint32)),
        ),
    )
    seen, propose = set(), jax.jit(drafter.propose)
    for _ in range(8):
        tree, _ = propose(NO_WEIGHTS, state.draft, draft_input(state))
        for row in range(3):
            past = state.tokens[row, : state.length[row]].tolist()
            parents, tokens = tree.parents[row].tolist(), tree.tokens[row].tolist()
            assert tokens[0] == past[-1]
            for node in range(len(tokens)):
                kids = [tokens[i] for i in range(len(tokens)) if parents[i] == node]
                branch, at = [], node
                while at > 0:
                    branch, at = [tokens[at], *branch], parents[at]
                best = np.argsort(-scores(past + branch), kind="stable")[: len(kids)]
                assert kids == best.tolist()
        state, info = decode.jitted_step(decoder, NO_WEIGHTS, state)
        seen |= set(info.num_emitted.tolist())
    assert {1, 2} <= seen  # rejections and acceptances both happened


def test_sampled_drafts_follow_the_processed_distribution_they_report():
    drafter = drafters.language_model(SMALL, 2, sample=True)
    rows = 4000
    prompts, lengths = (jnp.broadcast_to(x, (rows, *x.shape[1:])) for x in ragged([4], 12, VOCAB))
    chosen = make_controls(rows, limit=12, temperature=0.7, top_k=4)
    keys = keys_from_seeds(jnp.arange(rows, dtype=jnp.uint32))
    state = jax.jit(drafter.init)(NO_WEIGHTS, prompts, lengths)
    given = DraftInput(keys=keys, tokens=prompts, length=lengths, controls=chosen)
    tree, _ = jax.jit(drafter.propose)(NO_WEIGHTS, state, given)
    z = scores(prompts[0, :4].tolist()) / 0.7
    z[np.argsort(-z)[4:]] = -np.inf
    want = np.exp(z - z.max()) / np.exp(z - z.max()).sum()
    np.testing.assert_allclose(jax.nn.softmax(tree.draft_logits[0, 0]), want, atol=1e-6)
    got = np.bincount(tree.tokens[:, 1], minlength=VOCAB) / rows
    # Five standard deviations of a share estimated from 4000 draws.
    np.testing.assert_allclose(got, want, atol=5 * 0.5 / rows**0.5)


def test_arguments_that_make_no_draft_are_refused():
    with pytest.raises(MarsError, match="num_draft_tokens is 0: expected a whole number from 1 to 128"):
        drafters.language_model(SMALL, 0)
    with pytest.raises(MarsError, match="expected the children per node"):
        drafters.language_model(SMALL, tree=(2, 0))
    with pytest.raises(MarsError, match="20 children in a vocabulary of 13"):
        drafters.language_model(SMALL, tree=(20,))
