"""TriSpec's drafter, compared with the paper's loop in Python without caches, and tokens it must never trust."""

import functools
import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from mars_jax import contrib, drafters, verify
from mars_jax.core import decode, fake
from mars_jax.core.types import CORRECTED, TRUSTED
from mars_jax.utils.errors import MarsError
from tests.helpers import begin, decode_rows, logits_after, ragged
from tests.helpers.cascades import BUFFER, MOST, PROXY, SMALL, VOCAB, K, weights

LENGTHS = [1, 6, 12, 17]
TARGET = fake.hash_model(vocab_size=VOCAB, agree=0.8)
INNER = drafters.language_model(SMALL, K)
CASCADE = contrib.cascade(INNER, PROXY, MOST)
SLIM = contrib.cascade(INNER, PROXY, MOST, gate="ratio")
CLOSED = 2.0


def decoded(rule, margin=0.1, rows=slice(None), drafter=CASCADE, **settings):
    """Return the committed tokens of some rows, and the counters."""
    prompts = ragged(LENGTHS, BUFFER, VOCAB)
    return decode_rows(TARGET, drafter, rule, *prompts, rows, params=weights(margin), **settings)


@functools.cache
def best(model, text):
    return int(np.argmax(logits_after(model, list(text), width=64)))


@functools.cache
def proxy_probabilities(text):
    """Return f64[V], divided by the largest one."""
    z = logits_after(PROXY, list(text), width=64).astype(np.float64)
    return np.exp(z - z.max())


def is_sure(text, margin):
    p = proxy_probabilities(text)
    first, second = np.sort(p / p.sum())[-2:][::-1]
    assert abs(first - second - margin) > 1e-6
    return first - second >= margin


def places(text, x, margin):
    """Return the proxy's tokens, t_a and t_m of a draft. `margin` is TriSpec's, or VIA-SD's (accept, escalate)."""
    proxy_tokens = [best(PROXY, text + x[:i]) for i in range(K + 1)]
    if not isinstance(margin, tuple):
        t_a = next((i for i in range(K) if x[i] != proxy_tokens[i]), K)
        return proxy_tokens, t_a, next((i for i in range(K + 1) if not is_sure(text + x[:i], margin)), K + 1)
    r = [proxy_probabilities(text + x[:i])[x[i]] for i in range(K)]
    assert all(abs(value - bound) > 1e-6 for value in r for bound in margin)
    t_a = next((i for i in range(K) if r[i] < margin[0]), K)
    return proxy_tokens, t_a, next((i for i in range(K) if r[i] < margin[1]), K + 1)


def one_draft(text, margin, stops):
    """Return the tokens trusted after a text, and the draft passed to the target."""
    trusted = ()
    while True:
        x = ()
        for _ in range(K):
            x += (best(SMALL, text + trusted + x),)
        proxy_tokens, t_a, t_m = places(text + trusted, x, margin)
        if t_a >= t_m:
            stop = next((i for i in range(t_m) if x[i] in stops), t_m)
            return trusted + x[:stop], x[stop:]
        round_tokens = (*x[:t_a], proxy_tokens[t_a])
        stop = next((i for i, token in enumerate(round_tokens) if token in stops), None)
        if stop is not None:
            return trusted + round_tokens[:stop], round_tokens[stop:]
        if len(trusted) + len(round_tokens) + K + 1 > MOST:
            return trusted + round_tokens[:-1], ()
        trusted += round_tokens


def one_text(prompt, margin, stops=()):
    """Return every token and its kind, up to the end of the buffer or the first stop token."""
    text, kinds = tuple(prompt), []
    while len(text) < BUFFER and (not kinds or text[-1] not in stops):
        trusted, drafted = one_draft(text, margin, stops)
        text, kinds = text + trusted, kinds + [TRUSTED] * len(trusted)
        for token in drafted:
            if token != best(TARGET, text) or (kinds and text[-1] in stops):
                break
            text, kinds = (*text, token), [*kinds, None]
        if not kinds or text[-1] not in stops:
            text, kinds = (*text, best(TARGET, text)), [*kinds, CORRECTED]
    return list(text[:BUFFER]), kinds[: BUFFER - len(prompt)]


@pytest.mark.slow
@pytest.mark.parametrize("stops", [[], [4]])
@pytest.mark.parametrize(
    ("drafter", "margin"), [(CASCADE, 0.1), (SLIM, (0.95, 0.85))], ids=["trispec", "via_sd"]
)
def test_the_text_and_what_is_trusted_are_those_of_the_paper_s_loop(stops, margin, drafter):
    rows, stats = decoded(verify.exact(), margin, drafter=drafter, stop_tokens=[stops or [-1]] * 4)
    tokens, lengths = ragged(LENGTHS, BUFFER, VOCAB)
    steps = np.asarray(stats.steps)
    for row, n in enumerate(lengths.tolist()):
        text, kinds = one_text(np.asarray(tokens)[row, :n].tolist(), margin, tuple(stops))
        assert rows[row] == text
        assert int(stats.accepted_trusted[row]) == kinds.count(TRUSTED)
        assert int(stats.accepted_exact[row]) == kinds.count(None)
        assert steps[row] >= kinds.count(CORRECTED)
    if not stops:
        assert np.asarray(stats.accepted_trusted).sum() > 20 and np.asarray(stats.accepted_exact).sum() > 5
        assert np.asarray(stats.regret).sum() > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "rule",
    [
        verify.exact(),
        verify.mars(theta=0.5),
        contrib.budget(gap=1.0),
        verify.mars(base=verify.rejection(block=True), theta=0.5),
    ],
    ids=["exact", "mars", "budget", "mars over block"],
)
def test_a_closed_gate_a_strict_row_and_a_sampled_row_are_the_inner_draft_s(rule):
    """Compare bit for bit; a row in a batch of one also equals the row in its batch."""
    mixed = {"temperature": [0.0, 0.9, 0.0, 0.0]}
    base, _ = decoded(rule, drafter=INNER, **mixed)
    closed, stats = decoded(rule, CLOSED, **mixed)
    assert closed == base and int(jnp.sum(stats.accepted_trusted)) == 0
    open_, stats = decoded(rule, **mixed)
    assert open_[0] != base[0] and open_[1] == base[1]
    assert np.asarray(stats.accepted_trusted).tolist()[1] == 0 < int(stats.accepted_trusted[0])
    mixed_strict = mixed | {"strict": [False, False, True, True]}
    (strict, _), (inner, _) = decoded(rule, **mixed_strict), decoded(rule, drafter=INNER, **mixed_strict)
    assert strict[:2] == open_[:2] and strict[2:] == inner[2:]
    for row in (0, 3):
        assert decoded(rule, rows=slice(row, row + 1), **mixed)[0] == [open_[row]]


@pytest.mark.slow
def test_the_exact_prefix_of_a_rule_is_not_trusted_and_a_stop_token_never():
    rule = verify.mars(theta=np.inf, exact_prefix=8)
    exact_rows, _ = decoded(verify.exact(), drafter=INNER)
    rows, stats = decoded(rule)
    for row, n in enumerate(LENGTHS):
        assert rows[row][: n + 8] == exact_rows[row][: n + 8]
    assert int(jnp.sum(stats.accepted_trusted)) > 0
    # Stream the steps to see the kind of every token.
    params, stops = weights(0.05), [2, 7]
    batch = ragged(LENGTHS, BUFFER, VOCAB)
    decoder, state = begin(TARGET, CASCADE, verify.exact(), *batch, params=params, stop_tokens=stops)
    trusted = []
    for _, info in itertools.islice(decode.stream(decoder, params, state), 60):
        emitted, kind = np.asarray(info.emitted), np.asarray(info.kind)
        trusted += emitted[kind == TRUSTED].tolist()
        regret = np.asarray(info.regret)
        assert np.all(regret[(kind != TRUSTED) & (kind >= 0)] == 0) and np.all(regret >= 0)
        assert np.all(np.isnan(np.asarray(info.processed_log_prob)[kind == TRUSTED]))
    assert len(trusted) > 3 and not set(trusted) & set(stops)


def test_what_makes_no_cascade_is_refused():
    with pytest.raises(MarsError, match="drafts no chain"):
        contrib.cascade(drafters.language_model(SMALL, tree=(2, 2)), PROXY)
    with pytest.raises(MarsError, match="13 tokens and the proxy one of 11"):
        contrib.cascade(INNER, fake.hash_model(vocab_size=11))
    with pytest.raises(MarsError, match="can give 4 tokens: set num_draft_tokens to at least"):
        contrib.cascade(INNER, PROXY, 3)
    sampled = contrib.cascade(drafters.language_model(SMALL, K, sample=True), PROXY)
    with pytest.raises(MarsError, match="samples: give a cascade one that does not"):
        decoded(verify.exact(), drafter=sampled)
