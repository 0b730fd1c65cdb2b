"""Conditions on a text beside the rule, as one seam: edits of the logits, constraints and spans.

B batch, N nodes, V vocabulary. Each of the three is None where no row asks for it, and then nothing of it is compiled.
Oracle: transformers' processors, and autoregression (tests/core/test_edits.py, tests/core/test_guide.py).
"""

from __future__ import annotations

from typing import NamedTuple

from jax import Array

from mars_jax.core.edits import edited
from mars_jax.core.guide import Followed, Guide, guide_of
from mars_jax.core.pick import in_rows
from mars_jax.core.types import DecodeState, DraftTree, Edits, Guides, Params, Verdict


class Conditions(NamedTuple):
    """The conditions of a step, at the last committed token of each row."""

    edits: Edits | None
    constraint: Guide | None
    span: Guide | None

    @classmethod
    def of(cls, params: Params, state: DecodeState) -> Conditions:
        """The conditions of a state, whose tables are in `params`.

        Raises:
          MarsError: rows have a constraint or a span, and there are no tables for it.
        """
        edits = state.controls.edits
        return cls(edits, guide_of("constraint", params, state), guide_of("span", params, state))

    def steered(self, tree: DraftTree, *, fill: bool) -> DraftTree:
        """A draft without what may not follow; see `Guide.steered`."""
        return tree if self.constraint is None else self.constraint.steered(tree, fill=fill)

    def at(self, tree: DraftTree) -> Nodes:
        """The conditions at the nodes of a tree."""
        constraint = None if self.constraint is None else self.constraint.on(tree)
        return Nodes(self.edits, constraint, None if self.span is None else self.span.on(tree))


class Nodes(NamedTuple):
    """Conditions at the nodes of a tree."""

    edits: Edits | None
    constraint: Followed | None
    span: Followed | None

    @property
    def forbid(self) -> bool:
        """True where a token may have a logit of -inf that the target did not give it."""
        return self.edits is not None or self.constraint is not None

    @property
    def strict(self) -> Array | None:
        """bool[B, N]: a span lets no rule relax the edges below these nodes; None without spans."""
        return None if self.span is None else self.span.strict

    def on(self, raw: Array, tree: DraftTree, state: DecodeState) -> Array:
        """The target's logits f32[B, N, V] as they were asked for: edited, and -inf where a token may not follow."""
        # In this order: a bias cannot bring back what a constraint forbids.
        logits = raw
        if self.edits is not None:
            logits = edited(raw, self.edits, tree, state.tokens, state.prompt_length, state.length)
        return logits if self.constraint is None else self.constraint.masked(logits)

    def ended(self, verdict: Verdict) -> Array | None:
        """bool[B]: nothing may follow what a step accepted; None without a constraint."""
        return None if self.constraint is None else self.constraint.ended(verdict)

    def after(self, verdict: Verdict, state: DecodeState) -> Guides | None:
        """The states of the automata of live rows after a step; None without any."""
        if state.guides is None:
            return None
        # Each automaton reads the accepted path and `next_token`; rows that are done stay where they are.
        moved = Guides(
            constraint=None if self.constraint is None else self.constraint.after(verdict),
            span=None if self.span is None else self.span.after(verdict),
        )
        return in_rows(state.done, state.guides, moved)
