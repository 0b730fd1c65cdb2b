"""Constraints and spans of requests: their tables, and the start states of rows.

Oracle: tests/serve/test_constraints.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax

from mars_jax.constraints import vocabulary
from mars_jax.constraints.automaton import FIRST
from mars_jax.constraints.batch_tables import Compiled, compiled, joined
from mars_jax.constraints.spans import state_after
from mars_jax.constraints.vocabulary import Vocabulary
from mars_jax.core.types import GuideRows, GuideTables
from mars_jax.hub.pretrained import Pretrained
from mars_jax.mesh.hosts import put
from mars_jax.serve.requests import Request
from mars_jax.utils.errors import MarsError


class RequestGuides(NamedTuple):
    """Tables with which a step follows the completions of requests; None if no request has a constraint or spans."""

    constraint: Compiled | None = None
    span: Compiled | None = None
    words: Vocabulary | None = None

    @property
    def tables(self) -> GuideTables | None:
        """The tables for `Params.guides`."""
        if self.constraint is None and self.span is None:
            return None
        return GuideTables(
            constraint=self.constraint and self.constraint.tables, span=self.span and self.span.tables
        )

    def rows(self, own: Sequence[Request]) -> GuideRows | None:
        """Return `Controls.guides` for the requests of a batch."""
        if self.constraint is None and self.span is None:
            return None
        spans = [request.spans for request in own]
        start_states = [
            FIRST
            if span is None or self.words is None
            else state_after(span, self.words, request.prompt_tokens)
            for request, span in zip(own, spans, strict=True)
        ]
        return GuideRows(
            constraint=self.constraint and self.constraint.rows([r.constraint for r in own]),
            span=self.span and self.span.rows(spans, start_states),
        )


def guides_of(target: Pretrained, requests: Sequence[Request]) -> RequestGuides:
    """Return the tables of the requests' constraints and spans, built once for equal ones.

    Raises:
      MarsError: the target has no tokenizer, so the text of its tokens is unknown; or as `Constraint.table`.
    """
    constraints = [r.constraint for r in requests if r.constraint is not None]
    spans = dict.fromkeys(r.spans for r in requests if r.spans is not None)
    if not constraints and not spans:
        return RequestGuides()
    words = _vocabulary(target, any(c.kind != "tokens" for c in constraints) or bool(spans))
    return RequestGuides(
        constraint=compiled(constraints, words) if constraints else None,
        span=joined({span: span.table(words) for span in spans}, len(words.tokens)) if spans else None,
        words=words,
    )


def placed(tables: GuideTables | None, target: Pretrained) -> GuideTables | None:
    """Put tables on every device of the target's mesh."""
    if tables is None or target.mesh is None:
        return tables
    replicated = jax.sharding.NamedSharding(target.mesh, jax.sharding.PartitionSpec())
    return put(tables, jax.tree.map(lambda _: replicated, tables))


def _vocabulary(target: Pretrained, text: bool) -> Vocabulary:
    size = target.config.vocab_size
    if not text:
        return Vocabulary(tokens=(None,) * size)
    if not target.has_tokenizer:
        raise MarsError(
            f"'{target.name}' has no tokenizer, so the text of its tokens is unknown: constrain it by tokens alone."
        )
    return vocabulary(target.tokenizer, size)
