"""Conditions that a request can add to the rule: edits of the logits, constraints and spans.

A condition that no row uses is None and adds nothing to the compiled program. Dimensions: B batch, N nodes, V
vocabulary. Tested against the logits processors of transformers, and against autoregression (tests/core/test_edits.py,
tests/core/test_guide.py).
"""

from __future__ import annotations

from typing import NamedTuple

from jax import Array

from mars_jax.core.edits import edited
from mars_jax.core.guide import Followed, Guide, guide_of
from mars_jax.core.pick import in_rows
from mars_jax.core.types import DecodeState, DraftTree, Edits, GuideStates, Params, Verdict


class Conditions(NamedTuple):
    """The conditions of all rows in one step. The state of each automaton is that after the last committed token."""

    edits: Edits | None
    constraint: Guide | None
    span: Guide | None

    @classmethod
    def of(cls, params: Params, state: DecodeState) -> Conditions:
        """Collect the conditions of a decoding state, with the tables of their automata from `params`.

        Raises:
          MarsError: the rows have a constraint or a span, but `params` contains no tables for it.
        """
        constraint, span = guide_of("constraint", params, state), guide_of("span", params, state)
        return cls(state.controls.edits, constraint, span)

    def steered(self, tree: DraftTree, *, fill: bool) -> DraftTree:
        """Remove from a draft the tokens that the constraint forbids; see `Guide.steered`."""
        if self.constraint is None:
            return tree
        return self.constraint.steered(tree, fill=fill)

    def at(self, tree: DraftTree) -> Nodes:
        """Evaluate the conditions at every node of a draft tree."""
        # A condition that no row uses is None, and `x and f(x)` keeps it None.
        return Nodes(
            self.edits, self.constraint and self.constraint.on(tree), self.span and self.span.on(tree)
        )


class Nodes(NamedTuple):
    """The conditions at every node of a draft tree."""

    edits: Edits | None
    constraint: Followed | None
    span: Followed | None

    @property
    def strict(self) -> Array | None:
        """bool[B, N], True if a span forbids relaxed acceptance of the node's children; None without spans."""
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
        """Return bool[B], True if the constraint allows no token after the accepted path; None without a constraint."""
        return self.constraint and self.constraint.ended(verdict)

    def after(self, verdict: Verdict, state: DecodeState) -> GuideStates | None:
        """Return the automaton states after the tokens of a step, or None if no row has an automaton."""
        if state.guides is None:
            return None
        # Each automaton reads the accepted path and `next_token`. Finished rows keep their states.
        next_states = GuideStates(
            constraint=self.constraint and self.constraint.after(verdict),
            span=self.span and self.span.after(verdict),
        )
        return in_rows(state.done, state.guides, next_states)
