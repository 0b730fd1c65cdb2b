"""Biases and penalties: equal to transformers and to OpenAI's formula, and exact after drafted tokens."""

import jax.numpy as jnp
import numpy as np
import pytest

from mars_jax import drafters, verify
from mars_jax.core import decode
from mars_jax.core.controls import make_controls
from mars_jax.core.edits import edited, make_edits
from mars_jax.utils.errors import MarsError
from tests.helpers import NO_WEIGHTS, begin, ragged
from tests.helpers.fake_drafters import TARGET, VOCAB
from tests.helpers.random_trees import N, random_tree

BIAS = [{2: -np.inf, 3: 1.5}, {}, {11: -2.0}]
PENALTIES = {
    "repetition_penalty": [1.3, 1.0, 0.8],
    "presence_penalty": [0.0, 0.7, -0.4],
    "frequency_penalty": [0.2, 0.0, 0.5],
}


def test_every_node_is_edited_after_the_tokens_before_it():
    """Compare a padded tree with transformers' processors over the text of each node, and with OpenAI's formula."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    rng = np.random.default_rng(0)
    tree = random_tree(rng, 3)
    (tokens, lengths), prompt_length = ragged([6, 9, 17], 20, VOCAB), jnp.asarray([6, 4, 10], jnp.int32)
    root = jnp.take_along_axis(tokens, lengths[:, None] - 1, axis=1)
    tree = tree.replace(tokens=jnp.concatenate([root, tree.tokens[:, 1:]], axis=1))
    logits = rng.normal(size=(3, N, VOCAB)).astype(np.float32) * 3
    # The first row has no output yet, the second has 5 tokens, and the third 7.
    edits = make_edits(3, logit_bias=BIAS, **PENALTIES, min_new_tokens=(least := [2, 0, 8]))
    stops = [[1, 4], [2], [7]]
    stop_tokens = jnp.asarray([[1, 4], [2, -1], [7, -1]], jnp.int32)
    actual = np.asarray(edited(jnp.asarray(logits), edits, tree, tokens, prompt_length, lengths, stop_tokens))
    assert np.isneginf(actual[[0, 2]]).sum() > 2
    for b in range(3):
        texts = {-1: tokens[b, : lengths[b] - 1].tolist()}
        for i, (token, parent) in enumerate(
            zip(tree.tokens[b].tolist(), tree.parents[b].tolist(), strict=True)
        ):
            if token < 0 or parent not in texts:
                continue  # the logits of padding are never read
            text = texts[i] = [*texts[parent], token]
            ids, z = torch.tensor([text]), torch.tensor(logits[b, i][None])
            bias = {(token,): value for token, value in BIAS[b].items()}
            if bias:
                z = transformers.SequenceBiasLogitsProcessor(bias)(ids, z)
            z = transformers.RepetitionPenaltyLogitsProcessor(PENALTIES["repetition_penalty"][b])(ids, z)
            counts = np.bincount(text[prompt_length[b] :], minlength=VOCAB)
            expected = z[0].numpy() - PENALTIES["presence_penalty"][b] * (counts > 0)
            expected = expected - PENALTIES["frequency_penalty"][b] * counts
            minimum = transformers.MinNewTokensLengthLogitsProcessor(
                int(prompt_length[b]), least[b], torch.tensor(stops[b]), device="cpu"
            )
            expected = minimum(ids, torch.tensor(expected[None]))[0].numpy()
            np.testing.assert_allclose(actual[b, i], expected, atol=1e-5)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"logit_bias": {3: np.inf}}, "logit_bias has 3: inf: expected a token id and a number"),
        ({"logit_bias": {3: np.nan}}, "logit_bias has 3: nan"),
        ({"logit_bias": {3: 1e39}}, "logit_bias has 3: 1e.39: expected"),
        ({"logit_bias": [{}, {}]}, "logit_bias has 2 rows: expected one mapping"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0: expected a finite number above 0"),
    ],
)
def test_bad_edits_get_a_sentence(given, sentence):
    with pytest.raises(MarsError, match=sentence):
        make_edits(3, **given)


def run_with_bias(target, logit_bias):
    prompts, lengths = ragged([3, 5], 12, VOCAB)
    controls = make_controls(2, limit=12).replace(edits=make_edits(2, logit_bias=logit_bias))
    decoder, state = begin(target, drafters.none(), verify.exact(), prompts, lengths, controls=controls)
    state, _ = decode.run(decoder, NO_WEIGHTS, state)
    return state.failed.tolist(), state.length.tolist()


def test_only_the_row_whose_tokens_are_all_banned_fails():
    bans = [dict.fromkeys(range(VOCAB), -np.inf), {}]
    assert run_with_bias(TARGET, bans) == ([True, False], [3, 12])


def test_a_ban_hides_no_broken_logit():
    """An infinite logit means broken weights, even if the request bans that token."""

    def unembed(params, hidden):
        return TARGET.unembed(params, hidden).at[..., 5].set(jnp.inf)

    assert run_with_bias(TARGET._replace(unembed=unembed), {5: -np.inf}) == ([True, True], [3, 5])
