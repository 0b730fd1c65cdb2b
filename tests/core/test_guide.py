"""Constraints in the step: tokens and distributions are the masked target's, for every draft and rule."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mars_jax import constraints, drafters, verify
from mars_jax.constraints.batch_tables import compiled
from mars_jax.core import decode
from mars_jax.core.controls import make_controls
from mars_jax.core.edits import make_edits
from mars_jax.core.guide import DEAD, Guide, _mask, _mask_by_words, narrowed
from mars_jax.core.tree import chain
from mars_jax.core.types import GuideRows, GuideTables, Params
from tests.helpers import begin, broken_after, logits_after, ragged, rule_oracles, slow_but
from tests.helpers.constrained import DRAFTERS, PIECES, STOP, TARGET, VOCAB, VOCABULARY, text_of

PATTERNS = (r"(abc)+ 1?2?", r"[ab]+-[ab1]{1,3}", r"abcabcabc(1|2| )*")


def allowed(pattern, tokens):
    """Return bool[V]: whether each token may come next, tested with the pattern's automaton and without tables."""
    automaton = constraints.regex(pattern).automaton
    text = text_of(tokens).encode()
    return [
        (i == STOP and automaton.matches(text.decode())) or (bool(piece) and automaton.begins(text + piece))
        for i, piece in enumerate(PIECES)
    ]


def start(drafter, rule, patterns, *, limit=40, prompts=None, stops=(STOP,), **settings):
    row_constraints = [None if p is None else constraints.regex(p) for p in patterns]
    tables = compiled(row_constraints, VOCABULARY)
    tokens, lengths = prompts or ragged([1, 6, 12, 4][: len(patterns)], limit, VOCAB)
    controls = make_controls(len(patterns), limit=limit, stop_tokens=stops, **settings)
    controls = controls.replace(guides=GuideRows(constraint=tables.rows(row_constraints)))
    params = Params(target=(), draft=(), guides=GuideTables(constraint=tables.tables))
    decoder, state = begin(TARGET, drafter, rule, tokens, lengths, controls=controls, params=params)
    return decoder, params, state


def decoded(*args, **settings):
    decoder, params, state = start(*args, **settings)
    return decode.run(decoder, params, state, record=True)


def texts(state):
    return [
        row[n:m] for row, n, m in zip(state.tokens.tolist(), state.prompt_length, state.length, strict=True)
    ]


ROW_PATTERNS = (PATTERNS[0], None, PATTERNS[1], PATTERNS[2])


def masked_greedy(index, limit):
    """Decode autoregressively, one token at a time, with the unconstrained program and a mask computed in Python."""
    prompts, lengths = ragged([1, 6, 12, 4], limit, VOCAB)
    prompt, new = prompts[index, : lengths[index]].tolist(), []
    while len(prompt) + len(new) < limit and STOP not in new:
        z = logits_after(TARGET, prompt + new, width=limit)
        if ROW_PATTERNS[index] is not None:
            z = np.where(allowed(ROW_PATTERNS[index], new), z, -np.inf)
        new.append(int(np.argmax(z)))
    return new


@pytest.fixture(scope="module")
def references():
    return [masked_greedy(i, 40) for i in range(4)]


def test_after_a_forced_token_that_was_not_drafted_only_forced_tokens_follow():
    _, params, state = start(drafters.none(), verify.exact(), ("1?-c-[ab]",))
    guide = state.controls.guides.constraint
    guide = Guide(
        tables=params.guides.constraint,
        group=guide.group,
        state=guide.start,
        stop_tokens=jnp.asarray([[STOP]]),
    )
    digit, a, c, dash = (PIECES.index(text) for text in (b"1", b"a", b"c", b"-"))
    for drafted, expected in (
        ([digit, dash, c, dash, a], [digit, dash, c, dash, a]),
        ([digit, a, c, dash, a], [digit, dash, c, dash, -1]),
        ([dash, c, a, a, a], [dash, c, dash, -1, -1]),
    ):
        tree = chain(jnp.asarray([[0, *drafted]], jnp.int32))
        assert guide.steered(tree, fill=True).tokens[0, 1:].tolist() == expected


@pytest.mark.parametrize("name", slow_but(DRAFTERS, "dynamic tree"))
def test_greedy_texts_are_the_masked_targets(name, references):
    """Under every kind of draft, rows with and without constraints equal their references token for token."""
    state, stats = decoded(DRAFTERS[name], verify.exact(), ROW_PATTERNS)
    assert texts(state) == references
    assert int(stats.accepted_exact.sum()) > 0


BREAKABLE = broken_after(TARGET)


@pytest.mark.parametrize("broken", [False, True])
def test_a_text_that_no_token_may_follow_ends_and_fails_only_for_broken_weights(broken):
    """There is no stop token, and there are edits, which would fail a row without any possible token."""
    _, params, state = start(drafters.none(), verify.exact(), ("abc",), stops=())
    pieces_with_c = (4, 6, 7)
    params = params._replace(target=np.isin(np.arange(VOCAB), pieces_with_c) & broken)
    decoder = decode.speculative_decoder(BREAKABLE, drafters.none(), verify.exact(), prefill_chunk=16)
    controls = dataclasses.replace(state.controls, edits=make_edits(1))
    state, _ = decode.run(decoder, params, dataclasses.replace(state, controls=controls))
    assert [text_of(tokens) for tokens in texts(state)] == ["abc"]
    assert state.done.all() and state.failed.tolist() == [broken]


def test_a_draft_with_another_vocabulary_is_masked_by_its_own_bits():
    """Compare with the target's bits, picked one by one, and with the state after each token, stop tokens included."""
    tables = compiled([constraints.regex(p) for p in PATTERNS], VOCABULARY)
    ids = jnp.asarray([9, 2, STOP, 7, 5], jnp.int32)
    count = tables.tables.next.shape[0]
    states = jnp.asarray([[s for s in range(count) if s != DEAD]] * 2, jnp.int32)
    guide = Guide(
        tables=tables.tables,
        group=jnp.asarray([1, 2]),
        state=states[:, 0],
        stop_tokens=jnp.asarray([[STOP, -1], [7, STOP]]),
    )
    logits = jax.random.normal(jax.random.key(0), (*states.shape, len(ids)))
    expected = guide.masked(logits, states, ids=lambda: ids)
    narrow = dataclasses.replace(guide, tables=narrowed(tables.tables, ids))
    np.testing.assert_array_equal(narrow.masked(logits, states, ids=lambda: ids), expected)
    start_states = {key: state for key, (state, _) in tables.starts.items()}
    for row, pattern in enumerate(PATTERNS[:2]):  # states of the row's own constraint
        first = start_states[constraints.regex(pattern)]
        place = states[row].tolist().index(first)
        leads = [int(guide.moved(states[:, place : place + 1], jnp.full((2, 1), i))[row, 0]) for i in ids]
        np.testing.assert_array_equal(np.asarray(expected[row, place]) > -np.inf, np.asarray(leads) != DEAD)


def test_both_forms_keep_the_tokens_whose_bits_are_set():
    rng = np.random.default_rng(0)
    words = rng.integers(0, 1 << 32, (2, 3, 5), dtype=np.uint32)
    tokens = np.arange(160)
    bits = (words[..., tokens % 5] >> (tokens // 5).astype(np.uint32)) & 1
    for count in (160, 150):
        logits = jnp.asarray(rng.normal(size=(2, 3, count)), jnp.float32)
        for form in (_mask, _mask_by_words):
            masked = np.asarray(form(jnp.asarray(words), logits))
            np.testing.assert_array_equal(masked, np.where(bits[..., :count], logits, -np.inf))


LAWFUL = {
    "exact, chain": (DRAFTERS["chain"], verify.exact()),
    "exact, dynamic tree": (DRAFTERS["dynamic tree"], verify.exact()),
    "rejection, sampled chain": (DRAFTERS["sampled chain"], verify.rejection()),
    "block, sampled chain": (DRAFTERS["sampled chain"], verify.rejection(block=True)),
    "rejection, sampled tree": (DRAFTERS["sampled tree"], verify.rejection()),
    "rejection, ngram with what is forced": (DRAFTERS["ngram"], verify.rejection()),
    "mars at inf": (DRAFTERS["sampled chain"], verify.mars(base=verify.rejection(), theta=np.inf)),
}
LAW, LAW_PROMPT, NEW = r"[ab]+-[ab1]{1,3}|abcab(1|2)?", (5, 3), 4


def law():
    """Return f64[V, ..., V], the law of `NEW` tokens under the masked target, with zeros after a stop token."""
    joint = np.zeros((VOCAB,) * NEW)

    def extend(text, chance):
        if len(text) == NEW or STOP in text:
            joint[padded(text)] = chance
            return
        z = logits_after(TARGET, [*LAW_PROMPT, *text], width=len(LAW_PROMPT) + NEW).astype(np.float64)
        p = np.exp(np.where(allowed(LAW, text), z, -np.inf) - z.max())
        for token in np.flatnonzero(p):
            extend((*text, int(token)), chance * p[token] / p.sum())

    extend((), 1.0)
    return joint


def padded(text):
    return (*text, *[0] * (NEW - len(text)))


@pytest.mark.slow
def test_the_law_is_the_masked_targets_for_every_lossless_rule():
    rows, expected = 4000, law()
    assert abs(expected.sum() - 1) < 1e-9 and np.sum(expected * rows >= 5) > 8
    width = len(LAW_PROMPT) + NEW
    prompts = jnp.asarray([[*LAW_PROMPT, *[0] * NEW]] * rows, jnp.int32)
    batch = (prompts, jnp.full((rows,), len(LAW_PROMPT), jnp.int32))
    for name, (drafter, rule) in LAWFUL.items():
        state, stats = decoded(drafter, rule, [LAW] * rows, limit=width, prompts=batch, temperature=1.0)
        emitted = np.asarray([padded(text) for text in texts(state)])
        assert rule_oracles.chi_square(emitted, expected) > 1e-4, name
        # Raw log-probabilities are the target's; tokens are drawn from the masked law.
        drawn = np.exp(np.asarray(stats.tokens.processed_log_prob, np.float64))[:50, len(LAW_PROMPT)]
        if rule.lossless:
            first = expected.sum((1, 2, 3))[emitted[:50, 0]]
            np.testing.assert_allclose(drawn, first, rtol=1e-3, err_msg=name)


@pytest.mark.slow
def test_another_constraint_compiles_nothing():
    """Constraints whose tables have equal shapes share one program."""
    batch = DRAFTERS["chain"], verify.exact()
    decoded(*batch, ROW_PATTERNS)
    cache_sizes = decode.run._cache_size(), decode.start_ready._cache_size()
    state, _ = decoded(*batch, ["c[ab]{3,9}"] * 4)
    assert (decode.run._cache_size(), decode.start_ready._cache_size()) == cache_sizes
    for tokens in texts(state):
        text = text_of(tokens)
        assert re.fullmatch("c[ab]{3,9}", text) if tokens[-1] == STOP else text[0] == "c"
