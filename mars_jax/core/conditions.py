"""Conditions that a request sets in addition to the rule: edits of the logits, constraints and spans.

B batch, N nodes, V vocabulary. Each of the three is None if no row uses it, and then adds nothing to the program.
Oracle: transformers' processors, and autoregression (tests/core/test_edits.py, tests/core/test_guide.py).
"""

from __future__ import annotations

from typing import NamedTuple

from jax import Array

from mars_jax.core.edits import edited
from mars_jax.core.guide import Followed, Guide, guide_of
from mars_jax.core.pick import in_rows
from mars_jax.core.types import DecodeState, DraftTree, Edits, GuideStates, Params, Verdict


class Conditions(NamedTuple):
    """The conditions of a step, at the last committed token of each row."""

    edits: Edits | None
    constraint: Guide | None
    span: Guide | None

    @classmethod
    def of(cls, params: Params, state: DecodeState) -> Conditions:
        """Return the conditions of a state; `params` holds the automata's tables.

        Raises:
          MarsError: rows have a constraint or a span, but `params` has no tables for it.
        """
        constraint, span = guide_of("constraint", params, state), guide_of("span", params, state)
        return cls(state.controls.edits, constraint, span)

    def steered(self, tree: DraftTree, *, fill: bool) -> DraftTree:
        """Remove the nodes that the constraint forbids from a draft; see `Guide.steered`."""
        if self.constraint is None:
            return tree
        return self.constraint.steered(tree, fill=fill)

    def at(self, tree: DraftTree) -> Nodes:
        """Return the conditions at the nodes of a tree."""
        # `x and f(x)` is None for a condition that no row uses.
        return Nodes(
            self.edits, self.constraint and self.constraint.on(tree), self.span and self.span.on(tree)
        )


class Nodes(NamedTuple):
    """Conditions at the nodes of a tree."""

    edits: Edits | None
    constraint: Followed | None
    span: Followed | None

    @property
    def strict(self) -> Array | None:
        """bool[B, N]: nodes below which a span forbids relaxed acceptance; None without spans."""
        return self.span and self.span.strict

    def on(self, raw: Array, tree: DraftTree, state: DecodeState) -> Array:
        """Apply the conditions to the target's logits f32[B, N, V]: edits, then -inf for forbidden tokens."""
        logits = raw
        if self.edits is not None:
            stop_tokens = state.controls.stop_tokens
            logits = edited(
                raw, self.edits, tree, state.tokens, state.prompt_length, state.length, stop_tokens
            )
        # The constraint comes last, so that a bias cannot re-enable a forbidden token.
        if self.constraint is not None:
            logits = self.constraint.masked(logits)
        return logits

    def ended(self, verdict: Verdict) -> Array | None:
        """Return bool[B]: whether the constraint allows no token after the accepted path; None without a constraint."""
        return self.constraint and self.constraint.ended(verdict)

    def after(self, verdict: Verdict, state: DecodeState) -> GuideStates | None:
        """Advance the automata of live rows by the tokens of a step; None without automata."""
        if state.guides is None:
            return None
        # Each automaton reads the accepted path and `next_token`; rows that are done keep their state.
        next_states = GuideStates(
            constraint=self.constraint and self.constraint.after(verdict),
            span=self.span and self.span.after(verdict),
        )
        return in_rows(state.done, state.guides, next_states)
