"""Spans in the step: a lossy rule relaxes where they allow it, and equals its strict base everywhere else."""

import numpy as np
import pytest

from mars_jax import verify
from mars_jax.constraints.batch_tables import join_tables
from mars_jax.constraints.spans import Spans
from mars_jax.core import decode
from mars_jax.core.controls import make_controls
from mars_jax.core.types import RELAXED, GuideRows, GuideTables, Params
from tests.helpers import begin, ragged, slow_but
from tests.helpers.constrained import DRAFTERS, TARGET, VOCAB, VOCABULARY, text_of

LIMIT, LENGTHS = 60, [1, 6, 12, 4]
# No token has an "x". Its table has the shape of that of "b...c", so both share a program.
NEVER = "x...c"
PROMPTS = ragged(LENGTHS, LIMIT, VOCAB)


def decoded(drafter, rule, spans, **settings):
    prompts, lengths = PROMPTS
    controls = make_controls(4, limit=LIMIT, **settings)
    params = Params(target=(), draft=())
    if spans is not None:
        tables = join_tables({spans: spans.table(VOCABULARY)}, VOCAB)
        row_states = [spans.table(VOCABULARY).run(prompts[b, :n].tolist()) for b, n in enumerate(LENGTHS)]
        controls = controls.replace(guides=GuideRows(span=tables.rows([spans] * 4, row_states)))
        params = params._replace(guides=GuideTables(span=tables.tables))
    decoder, state = begin(TARGET, drafter, rule, prompts, lengths, controls=controls, params=params)
    state, stats = decode.run(decoder, params, state, record=True)
    return state, np.asarray(stats.tokens.kind)


def ends_in_span(tokens):
    """Return whether a text ends inside a span from "b" to "c"."""
    text = text_of(tokens)
    return text.rfind("b") > text.rfind("c")


RULES = {
    "chain": verify.mars(theta=0.5),
    "static tree": verify.typical(),
    "sampled chain": verify.mixture(weight=0.2),
}


@pytest.mark.parametrize("name", slow_but(RULES, "static tree"))
def test_a_rule_relaxes_only_in_spans(name):
    """Tags occur in drafts and in prompts. Drafts are a chain and a tree; rules relax edges or distributions."""
    spans, drafter, rule = Spans(relax_in=("b...c",)), DRAFTERS[name], RULES[name]
    sampled = {"temperature": 1.0} if name == "sampled chain" else {}
    state, kinds = decoded(drafter, rule, spans, **sampled)
    relaxed_inside = 0
    for b, n in enumerate(LENGTHS):
        row = state.tokens[b].tolist()
        for place in range(n, LIMIT):
            if kinds[b, place] == RELAXED:
                assert ends_in_span(row[:place]), (b, place)
                relaxed_inside += 1
    if not sampled:
        assert relaxed_inside > 3
    # Strict everywhere, the rule equals its base; strict nowhere, it behaves as if there were no span.
    never, _ = decoded(drafter, rule, Spans(relax_in=(NEVER,)), **sampled)
    strict, _ = decoded(drafter, rule, None, strict=True, **sampled)
    assert never.tokens.tolist() == strict.tokens.tolist()
    always, _ = decoded(drafter, rule, Spans(strict_in=(NEVER,)), **sampled)
    free, _ = decoded(drafter, rule, None, **sampled)
    assert always.tokens.tolist() == free.tokens.tolist() != strict.tokens.tolist()
