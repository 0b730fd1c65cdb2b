"""Constraints in the step: greedy texts and distributions equal the masked target's, for every draft and rule."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mars_jax import constraints, drafters, verify
from mars_jax.constraints.batch_tables import compiled
from mars_jax.core import decode, refill
from mars_jax.core.controls import make_controls
from mars_jax.core.edits import make_edits
from mars_jax.core.guide import DEAD, Guide, Guides, _mask, _mask_by_words, narrowed
from mars_jax.core.metrics import zero_stats
from mars_jax.core.types import Params, Prompts, Visible, keys_from_seeds
from tests.helpers import begin, ragged, slow_but
from tests.helpers.constrained import DRAFTERS, PIECES, STOP, TARGET, VOCAB, VOCABULARY, text_of

PATTERNS = (r"(abc)+ 1?2?", r"[ab]+-[ab1]{1,3}", r"abcabcabc(1|2| )*")


def masked_logits(pattern, row):
    """Return bool[V], the tokens that may follow a text. Without tables: test each with the pattern's automaton."""
    automaton = constraints.regex(pattern).automaton
    said = text_of(row).encode()
    return [
        (i == STOP and automaton.matches(said.decode())) or (bool(piece) and automaton.begins(said + piece))
        for i, piece in enumerate(PIECES)
    ]


def start(drafter, rule, chosen, *, limit=40, prompts=None, stops=(STOP,), forced=True, **settings):
    made = [None if p is None else constraints.regex(p) for p in chosen]
    found = compiled(made, VOCABULARY, forced=forced)
    tokens, lengths = prompts or ragged([1, 6, 12, 4][: len(chosen)], limit, VOCAB)
    controls = make_controls(len(chosen), limit=limit, stop_tokens=stops, **settings)
    controls = controls.replace(guides=Guides(constraint=found.rows(made)))
    params = Params(target=(), draft=(), guides=Guides(constraint=found.tables))
    decoder, state = begin(TARGET, drafter, rule, tokens, lengths, controls=controls, params=params)
    return decoder, params, state


def decoded(*given, **settings):
    decoder, params, state = start(*given, **settings)
    return decode.run(decoder, params, state, record=True)


def texts(state):
    return [
        row[n:m] for row, n, m in zip(state.tokens.tolist(), state.prompt_length, state.length, strict=True)
    ]


CHOSEN = (PATTERNS[0], None, PATTERNS[1], PATTERNS[2])


def greedy_by_hand(index, limit):
    """Decode autoregressively, one token at a time, with the unconstrained program and a mask made in Python."""
    prompts, lengths = ragged([1, 6, 12, 4], limit, VOCAB)
    row, n = prompts[index].tolist(), int(lengths[index])
    said = row[:n]
    logits_of = jax.jit(lambda tokens, at: all_logits(tokens)[at])
    while len(said) < limit and STOP not in said[n:]:
        z = np.array(logits_of(jnp.asarray(said + [0] * (limit - len(said)), jnp.int32), len(said) - 1))
        if CHOSEN[index] is not None:
            z[~np.asarray(masked_logits(CHOSEN[index], said[n:]))] = -np.inf
        said.append(int(np.argmax(z)))
    return said[n:]


def all_logits(tokens):
    cache = TARGET.init_cache(1, tokens.shape[0])
    visible = Visible.causal(jnp.zeros((1,), jnp.int32), tokens.shape[0])
    output = TARGET.forward((), tokens[None], visible, cache)
    return TARGET.unembed((), output.hidden)[0]


@pytest.fixture(scope="module")
def by_hand():
    return [greedy_by_hand(i, 40) for i in range(4)]


@pytest.mark.parametrize("name", slow_but(DRAFTERS, "dynamic tree"))
def test_greedy_texts_are_the_masked_targets(name, by_hand):
    """Rows with and without constraints, under every kind of draft, equal masking by hand token for token."""
    state, stats = decoded(DRAFTERS[name], verify.exact(), CHOSEN)
    assert texts(state) == by_hand
    assert int(stats.accepted_exact.sum()) > 0


def test_a_text_that_no_token_may_follow_ends_without_failing():
    """There is no stop token, and there are edits, which would fail a row without any possible token."""
    decoder, params, state = start(drafters.none(), verify.exact(), ("abc",), stops=())
    controls = dataclasses.replace(state.controls, edits=make_edits(1))
    state, _ = decode.run(decoder, params, dataclasses.replace(state, controls=controls))
    assert [text_of(tokens) for tokens in texts(state)] == ["abc"]
    assert state.done.all() and not state.failed.any()


def test_broken_logits_at_the_end_of_a_text_fail_its_row():
    """Broken weights fail the row there too, although they choose no further token."""

    def forward(params, tokens, visible, cache):
        output = TARGET.forward(params, tokens, visible, cache)
        last = jnp.isin(tokens, jnp.asarray([4, 6, 7]))[:, :, None].astype(
            jnp.uint32
        )  # pieces that end with c
        return output._replace(hidden=jnp.concatenate([output.hidden, last], axis=2))

    def unembed(params, hidden):
        return jnp.where(hidden[:, :, 1:] > 0, jnp.nan, TARGET.unembed(params, hidden[:, :, :1]))

    _, params, state = start(drafters.none(), verify.exact(), ("abc",), stops=())
    broken = TARGET._replace(forward=forward, unembed=unembed)
    decoder = decode.speculative_decoder(broken, drafters.none(), verify.exact(), prefill_chunk=16)
    controls = dataclasses.replace(state.controls, edits=make_edits(1))
    state, _ = decode.run(decoder, params, dataclasses.replace(state, controls=controls))
    assert [text_of(tokens) for tokens in texts(state)] == ["abc"] and state.failed.all()


def test_a_draft_with_another_vocabulary_is_masked_by_its_own_bits():
    """Compare with the target's bits, picked one by one, and with the state after each token, stop tokens included."""
    made = [constraints.regex(p) for p in PATTERNS]
    found = compiled(made, VOCABULARY)
    ids = jnp.asarray([9, 2, STOP, 7, 5], jnp.int32)
    count = found.tables.next.shape[0]
    states = jnp.asarray([[s for s in range(count) if s != DEAD]] * 2, jnp.int32)
    guide = Guide(
        tables=found.tables,
        group=jnp.asarray([1, 2]),
        state=states[:, 0],
        stop_tokens=jnp.asarray([[STOP, -1], [7, STOP]]),
    )
    logits = jax.random.normal(jax.random.key(0), (*states.shape, len(ids)))
    plain = guide.masked(logits, states, ids=lambda: ids)
    own = dataclasses.replace(guide, tables=narrowed(found.tables, ids))
    np.testing.assert_array_equal(own.masked(logits, states, ids=lambda: ids), plain)
    owned = {key: state for key, (state, _) in found.starts.items()}
    for row, pattern in enumerate(PATTERNS[:2]):  # states of the row's own constraint
        first = owned[constraints.regex(pattern)]
        place = states[row].tolist().index(first)
        leads = [int(guide.moved(states[:, place : place + 1], jnp.full((2, 1), i))[row, 0]) for i in ids]
        np.testing.assert_array_equal(np.asarray(plain[row, place]) > -np.inf, np.asarray(leads) != DEAD)


def test_both_forms_keep_the_tokens_whose_bits_are_set():
    rng = np.random.default_rng(0)
    words = rng.integers(0, 1 << 32, (2, 3, 5), dtype=np.uint32)
    tokens = np.arange(160)
    want = (words[..., tokens % 5] >> (tokens // 5).astype(np.uint32)) & 1
    for count in (160, 150):
        logits = jnp.asarray(rng.normal(size=(2, 3, count)), jnp.float32)
        for form in (_mask, _mask_by_words):
            made = np.asarray(form(jnp.asarray(words), logits))
            np.testing.assert_array_equal(made, np.where(want[..., :count], logits, -np.inf))


LAWFUL = {
    "exact, chain": (DRAFTERS["chain"], verify.exact()),
    "exact, dynamic tree": (DRAFTERS["dynamic tree"], verify.exact()),
    "rejection, sampled chain": (DRAFTERS["sampled chain"], verify.rejection()),
    "block, sampled chain": (DRAFTERS["sampled chain"], verify.rejection(block=True)),
    "rejection, sampled tree": (DRAFTERS["sampled tree"], verify.rejection()),
    "rejection, ngram with what is forced": (DRAFTERS["ngram"], verify.rejection()),
    "mars at inf over rejection": (
        DRAFTERS["sampled chain"],
        verify.mars(base=verify.rejection(), theta=np.inf),
    ),
}
LAW, LAW_PROMPT, NEW = r"[ab]+-[ab1]{1,3}|abcab(1|2)?", (5, 3), 4


def law():
    """Enumerate the texts of at most `NEW` tokens, with their probabilities under the masked target."""
    logits_of = jax.jit(jax.vmap(all_logits))
    width = len(LAW_PROMPT) + NEW
    found, open_ = {}, {(): 1.0}
    for _ in range(NEW):
        rows = list(open_)
        padded = np.zeros((len(rows), width), np.int32)
        for i, row in enumerate(rows):
            padded[i, : len(LAW_PROMPT) + len(row)] = [*LAW_PROMPT, *row]
        z = np.array(logits_of(jnp.asarray(padded)), np.float64)
        following = {}
        for i, row in enumerate(rows):
            own = z[i, len(LAW_PROMPT) + len(row) - 1]
            own = np.where(masked_logits(LAW, row), own, -np.inf)
            p = np.exp(own - own.max())
            for token in np.flatnonzero(p):
                to = found if token == STOP else following
                to[(*row, int(token))] = open_[row] * p[token] / p.sum()
        open_ = following
    return found | open_


@pytest.mark.slow
def test_the_law_is_the_masked_targets_for_every_lossless_rule():
    from scipy.stats import chisquare

    rows = 4000
    want = law()
    assert abs(sum(want.values()) - 1) < 1e-9
    width = len(LAW_PROMPT) + NEW
    prompts = jnp.asarray([[*LAW_PROMPT, *[0] * NEW]] * rows, jnp.int32)
    lengths = jnp.full((rows,), len(LAW_PROMPT), jnp.int32)
    for name, (drafter, rule) in LAWFUL.items():
        batch = (prompts, lengths)
        state, stats = decoded(drafter, rule, [LAW] * rows, limit=width, prompts=batch, temperature=1.0)
        emitted = [tuple(text) for text in texts(state)]
        counts = dict.fromkeys(want, 0)
        for text in emitted:
            # KeyError: the masked target never emits this text.
            counts[text] += 1
        common = [text for text in want if want[text] * rows >= 5]
        assert len(common) > 8
        observed = [counts[text] for text in common]
        expected = [want[text] * rows for text in common]
        # Merge the rare completions into one category.
        observed, expected = ([*x, rows - sum(x)] for x in (observed, expected))
        assert chisquare(observed, expected).pvalue > 1e-4, name
        # Raw log-probabilities are the target's; tokens are drawn from the masked law.
        drawn = np.exp(np.asarray(stats.tokens.processed_log_prob, np.float64))
        first = np.asarray([want_first(want, text[0]) for text in emitted[:50]])
        if rule.lossless:
            np.testing.assert_allclose(drawn[:50, len(LAW_PROMPT)], first, rtol=1e-3, err_msg=name)


def want_first(want, token):
    return sum(p for text, p in want.items() if text[0] == token)


@pytest.mark.slow
def test_rows_come_with_their_constraints_and_another_one_compiles_nothing(by_hand):
    """Rows that `refill` puts into a running state decode as in a separate batch."""
    drafter, rule, order = DRAFTERS["chain"], verify.exact(), [3, 2, 1, 0]
    decoder, params, state = start(drafter, rule, CHOSEN)
    stats = zero_stats(4, decoder.max_depth)
    state, stats, _ = refill.advance(decoder, params, state, stats, most=3)
    # Every row restarts with the prompt and the constraint of another row.
    prompts, lengths = ragged([1, 6, 12, 4], 40, VOCAB)
    constraint_of = [pattern and constraints.regex(pattern) for pattern in CHOSEN]
    tables = compiled([one for one in constraint_of if one], VOCABULARY)
    guides = Guides(constraint=tables.rows([constraint_of[i] for i in order]))
    controls = make_controls(4, limit=40, stop_tokens=(STOP,)).replace(guides=guides)
    keys, at = keys_from_seeds(jnp.arange(4)), jnp.asarray(order)
    batch = Prompts(prompts[at], lengths[at], controls, rule, keys)
    state, stats = refill.refill(decoder, params, state, stats, jnp.arange(4, dtype=jnp.int32), batch)
    state, stats, _ = refill.advance(decoder, params, state, stats, ended=4)
    assert texts(state) == [by_hand[i] for i in order]
    # A constraint whose tables have the same shapes is another value of the same program.
    other = constraints.regex("c[ab]{3,9}")
    tables = compiled([other], VOCABULARY)
    params = params._replace(guides=Guides(constraint=tables.tables))
    controls = controls.replace(guides=Guides(constraint=tables.rows([other] * 4)))
    decode.run(*start(drafter, rule, CHOSEN))
    compiled_before = decode.run._cache_size(), decode._start._cache_size()
    state = decode.start(decoder, params, Prompts(prompts, lengths, controls, rule, keys))
    state, _ = decode.run(decoder, params, state)
    assert (decode.run._cache_size(), decode._start._cache_size()) == compiled_before
    for tokens in texts(state):
        text = text_of(tokens)
        assert re.fullmatch("c[ab]{3,9}", text) if tokens[-1] == STOP else text[0] == "c"
