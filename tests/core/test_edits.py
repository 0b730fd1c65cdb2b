"""Biases and penalties: equal to transformers and to OpenAI's formula, and exact after drafted tokens."""

import jax.numpy as jnp
import numpy as np
import pytest

from mars_jax import drafters, verify
from mars_jax.core import decode
from mars_jax.core.controls import make_controls
from mars_jax.core.edits import edited, make_edits
from mars_jax.core.errors import MarsError
from mars_jax.core.types import DraftTree
from tests.helpers import NO_WEIGHTS, begin, committed, ragged
from tests.helpers.fake_drafters import DRAFTERS, TARGET, VOCAB

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
    tokens, lengths = rng.integers(0, VOCAB, (3, 20)), np.asarray([6, 9, 17])
    prompt_lengths = np.asarray([6, 4, 10])
    parents = np.asarray([[-1, 0, 0, 1, 3], [-1, 0, 1, 2, 0], [-1, 0, 1, 2, 3]])
    drafted = rng.integers(0, VOCAB, (3, 5))
    drafted[:, 0] = tokens[np.arange(3), lengths - 1]
    drafted[1, 4] = -1
    depths = np.zeros_like(parents)
    for i in range(1, 5):
        depths[:, i] = np.take_along_axis(depths, parents[:, i : i + 1], 1)[:, 0] + 1
    logits = rng.normal(size=(3, 5, VOCAB)).astype(np.float32) * 3
    as_int = lambda x: jnp.asarray(x, jnp.int32)  # noqa: E731
    tree = DraftTree(
        tokens=as_int(drafted), parents=as_int(parents), depths=as_int(depths), max_depth=4, is_chain=False
    )
    made = make_edits(3, logit_bias=BIAS, **PENALTIES)
    found = np.asarray(
        edited(jnp.asarray(logits), made, tree, as_int(tokens), as_int(prompt_lengths), as_int(lengths))
    )
    for b in range(3):
        for i in range(5):
            path, node = [], i
            while node > 0:
                path, node = [drafted[b, node], *path], parents[b, node]
            text = [*tokens[b, : lengths[b]], *path]
            if -1 in text:
                continue  # the logits of padding are never read
            ids, z = torch.tensor([text]), torch.tensor(logits[b, i][None])
            bias = {(token,): value for token, value in BIAS[b].items()}
            if bias:
                z = transformers.SequenceBiasLogitsProcessor(bias)(ids, z)
            z = transformers.RepetitionPenaltyLogitsProcessor(PENALTIES["repetition_penalty"][b])(ids, z)
            counts = np.bincount(text[prompt_lengths[b] :], minlength=VOCAB)
            want = z[0].numpy() - PENALTIES["presence_penalty"][b] * (counts > 0)
            want = want - PENALTIES["frequency_penalty"][b] * counts
            np.testing.assert_allclose(found[b, i], want, atol=1e-5)


def decoded(drafter, edits):
    """Decode a greedy row, a sampled one without filters and a sampled one with top-k."""
    prompts, lengths = ragged([1, 6, 12], 48, VOCAB)
    controls = make_controls(3, limit=48, temperature=[0.0, 1.0, 0.7], top_k=[0, 0, 5]).replace(edits=edits)
    decoder, state = begin(TARGET, drafter, verify.exact(), prompts, lengths, controls=controls)
    return decode.run(decoder, NO_WEIGHTS, state, record=True)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["chain", "static tree"])
def test_a_draft_changes_no_token(drafter):
    edits = make_edits(3, logit_bias=BIAS, **PENALTIES)
    plain, _ = decoded(drafters.none(), edits)
    state, stats = decoded(DRAFTERS[drafter], edits)
    assert committed(state) == committed(plain)
    assert 2 not in committed(plain)[0][1:]
    assert int(stats.accepted_exact.sum()) > 0
    # Edits change the distribution that a token is drawn from. `temperature_log_prob` is that of the raw target.
    assert np.abs(drawn_minus_raw(stats)).max() > 0.05


@pytest.mark.slow
def test_neutral_edits_change_nothing():
    plain, _ = decoded(drafters.none(), None)
    neutral, stats = decoded(DRAFTERS["chain"], make_edits(3))
    assert committed(neutral) == committed(plain)
    np.testing.assert_allclose(drawn_minus_raw(stats), 0, atol=1e-5)


def drawn_minus_raw(stats):
    """Return log-probabilities of the sampled row without filters, as drawn minus those of the raw target."""
    return np.asarray(stats.tokens.processed_log_prob - stats.tokens.temperature_log_prob)[1]


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
