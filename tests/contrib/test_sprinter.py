"""SPRINTER's drafter, compared with the paper's loop in Python token by token, and tokens it must never trust."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chisquare

from mars_jax import contrib, drafters, verify
from mars_jax.core import fake
from mars_jax.core.types import Params, Visible
from mars_jax.utils.errors import MarsError
from tests.helpers import decode_all, decode_rows, logits_after, ragged
from tests.helpers.sprinters import BUFFER, MOST, SMALL, SURE_BELOW, VOCAB, weights

LENGTHS = [1, 6, 12, 17]
TARGET = fake.hash_model(vocab_size=VOCAB, agree=0.8)
DRAFTER, SAMPLED = contrib.sprinter(SMALL, MOST), contrib.sprinter(SMALL, MOST, sample=True)


def decoded(rule, threshold=0.5, rows=slice(None), drafter=DRAFTER, params=None, **settings):
    """Return the committed tokens of some rows, and the counters."""
    params = weights(threshold) if params is None else params
    prompts = ragged(LENGTHS, BUFFER, VOCAB)
    return decode_rows(TARGET, drafter, rule, *prompts, rows, params=params, **settings)


@functools.cache
def best(model, text):
    return int(np.argmax(logits_after(model, list(text), width=64)))


@functools.partial(jax.jit, static_argnums=0)
def _hidden(width, tokens, length):
    visible = Visible.causal(jnp.zeros((1,), jnp.int32), width)
    out = SMALL.forward((), tokens, visible, SMALL.init_cache(1, width))
    return out.hidden[0, length - 1, 0]


@functools.cache
def is_sure(text):
    """Return whether the classifier trusts the last token."""
    padded = np.zeros((1, 64), np.int32)
    padded[0, : len(text)] = text
    hidden = int(_hidden(64, jnp.asarray(padded), jnp.int32(len(text))))
    assert abs(hidden / SURE_BELOW - 1) > 1e-5
    return hidden < SURE_BELOW


def one_text(prompt, stops=()):
    """Return every token, and the number of trusted tokens."""
    text, count = tuple(prompt), 0
    while len(text) < BUFFER and (text == tuple(prompt) or text[-1] not in stops):
        x = (best(SMALL, text),)
        while len(x) < MOST and is_sure(text + x) and x[-1] not in stops:
            x += (best(SMALL, text + x),)
        text, count = text + x[:-1], count + len(x) - 1
        target_token = best(TARGET, text)
        text += (target_token,)
        if target_token == x[-1] and target_token not in stops:
            text += (best(TARGET, text),)
    return list(text), count


@pytest.mark.slow
@pytest.mark.parametrize("stops", [[], [4]])
def test_the_text_and_what_is_trusted_are_those_of_the_paper_s_loop(stops):
    rows, stats = decoded(verify.exact(), stop_tokens=[stops or [-1]] * 4)
    tokens, lengths = ragged(LENGTHS, BUFFER, VOCAB)
    trusted = np.asarray(stats.accepted_trusted)
    for row, n in enumerate(lengths.tolist()):
        text, count = one_text(np.asarray(tokens)[row, :n].tolist(), tuple(stops))
        assert rows[row] == text[: len(rows[row])] and len(rows[row]) == min(BUFFER, len(text))
        # The last draft may pass the end of the buffer.
        assert count - MOST <= trusted[row] <= count
    if not stops:
        assert trusted.sum() > 40 and np.asarray(stats.regret).sum() > 0


@pytest.mark.slow
def test_a_closed_classifier_drafts_one_token_and_trusts_none():
    """Compare bit for bit with a draft of one token, sampled or greedy, and each row with a batch of one."""
    mixed = {"temperature": [0.0, 0.9, 0.0, 0.7]}
    for rule, drafter, sample in ((verify.exact(), DRAFTER, False), (verify.rejection(), SAMPLED, True)):
        single = drafters.language_model(SMALL, 1, sample=sample)
        base, _ = decoded(rule, drafter=single, params=Params(()), **mixed)
        closed, stats = decoded(rule, 2.0, drafter=drafter, **mixed)
        assert closed == base and int(jnp.sum(stats.accepted_trusted)) == 0
        opened, stats = decoded(rule, drafter=drafter, **mixed)
        trusted = np.asarray(stats.accepted_trusted)
        assert trusted[0] > 0 and (trusted[1] > 0) == sample
        for row in (0, 3):
            assert decoded(rule, rows=slice(row, row + 1), drafter=drafter, **mixed)[0] == [opened[row]]


@pytest.mark.slow
def test_strict_rows_and_the_exact_prefix_trust_nothing():
    target_rows, _ = decoded(verify.exact(), drafter=drafters.none(), params=Params(()))
    strict, stats = decoded(verify.exact(), strict=[True, False, True, False])
    assert strict[0] == target_rows[0] and strict[2] == target_rows[2]
    trusted = np.asarray(stats.accepted_trusted)
    assert trusted[[0, 2]].sum() == 0 < trusted[[1, 3]].sum()
    rows, stats = decoded(verify.mars(theta=np.inf, exact_prefix=8))
    assert all(rows[row][: n + 8] == target_rows[row][: n + 8] for row, n in enumerate(LENGTHS))
    assert int(jnp.sum(stats.accepted_trusted)) > 0


@pytest.mark.slow
def test_trusted_tokens_of_a_drawn_draft_have_the_small_model_s_law():
    """A classifier that trusts all but the last token: the first draws follow q by chi-square."""
    rows, prompt = 4000, [3, 1, 4]
    always = Params((), contrib.SprinterParams((), jnp.zeros((1,)), jnp.asarray(5.0, jnp.float32)))
    tokens = np.zeros((rows, len(prompt) + 2), np.int32)
    tokens[:, : len(prompt)] = prompt
    drafter, lengths = contrib.sprinter(SMALL, 3, sample=True), jnp.full((rows,), len(prompt), jnp.int32)
    state, _ = decode_all(
        TARGET, drafter, verify.rejection(), jnp.asarray(tokens), lengths, params=always, temperature=1.0
    )
    z = logits_after(SMALL, prompt, width=64).astype(np.float64)
    q = np.exp(z - z.max()) / np.exp(z - z.max()).sum()
    counts = np.bincount(np.asarray(state.tokens)[:, len(prompt)], minlength=VOCAB)
    assert chisquare(counts, q * rows).pvalue > 1e-4


def test_a_draft_of_nothing_is_refused():
    with pytest.raises(MarsError, match="num_draft_tokens is 0"):
        contrib.sprinter(SMALL, 0)
