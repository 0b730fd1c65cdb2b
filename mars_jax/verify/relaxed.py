"""Base class of rules that relax a strict rule: they also accept some edges that the strict rule rejects.

Tests: tests/verify/test_rules.py, which tests every registered rule.

Dimensions: B batch, N nodes, D depth.
"""

from __future__ import annotations

from typing import Any, ClassVar, Self

import jax.numpy as jnp
from jax import Array

from mars_jax.core import struct
from mars_jax.core.controls import is_stop
from mars_jax.core.pick import pick
from mars_jax.core.rule import Evidence, Rule, check_array, check_same_rule, impossible, wrong_result
from mars_jax.core.struct import settings_of
from mars_jax.core.tree import Allowance, at_parent
from mars_jax.core.types import Verdict
from mars_jax.utils.errors import MarsError, short_repr
from mars_jax.utils.user_code import described
from mars_jax.verify.exact import Exact
from mars_jax.verify.lossy import Lossy
from mars_jax.verify.ranges import WHOLE
from mars_jax.verify.rejection import Rejection

UNLIMITED_RUN = 1 << 30
"""Default of `max_relaxed_run`: longer than any draft."""


def base_setting(default: str = "exact") -> Any:
    """Declare the dataclass field that selects the strict rule to relax."""
    return struct.setting(
        default=default,
        kind=str,
        choices={"exact": "a token must equal the target's own", "rejection": "speculative sampling"},
        help="the strict rule that is relaxed",
        flag=True,
    )


@struct.dataclass(kw_only=True)
class Relaxed(Lossy):
    """Base class of rules that accept some edges that a strict rule rejects. Subclass it to write such a rule.

    A subclass defines either `low`, which returns the nodes at which the target's runner-up is about as good as its top
    token, or `relaxable`, which returns the edges that may be relaxed. `max_relaxed_run` limits the number of
    consecutive relaxed edges, and `max_relaxed` limits the number of relaxed edges per step. With `cost` and `spend`, a
    rule can limit the total cost of the relaxed edges in the whole output of a row. The remaining budget is then part
    of the rule's state.

    This class implements the guards. An exact sibling has priority over a relaxed one. No edge is relaxed in strict
    rows, in strict spans or in the exact prefix. Edges to padding, and to tokens that a ban or a constraint forbids,
    are never relaxed. No edge is relaxed if the drafted token, the target's top token, or the token that the base would
    emit is a stop token.
    """

    base: Any = base_setting()  # an Exact or Rejection object, or the name of the rule
    # i32[] or [B]; maximum number of consecutive relaxed tokens
    max_relaxed_run: Any = struct.setting(
        default=UNLIMITED_RUN,
        kind=int,
        ranges=WHOLE,
        help="maximum number of consecutive relaxed tokens",
        word="any",
        flag=True,
    )
    max_relaxed: Any = None  # i32[] or [B]; maximum number of relaxed tokens per step; None for no limit
    needs: ClassVar[tuple[str, ...]] = ("draft",)

    def __post_init__(self) -> None:
        base = settings_of(type(self))["base"].default if self.base is None else self.base
        if isinstance(base, str):
            base = {"exact": Exact(), "rejection": Rejection()}.get(base, base)
        if not isinstance(base, Exact | Rejection):
            raise MarsError(
                f"base is {short_repr(base)}: expected exact() or rejection(...), the rules that "
                f"{type(self).__name__.lower()} can relax."
            )
        object.__setattr__(self, "base", base)
        super().__post_init__()

    @property
    def name(self) -> str:
        return over(type(self).__name__.lower(), self.base)

    def low(self, evidence: Evidence) -> Array:
        """Return a mask bool[B, N] of the nodes at which the target's runner-up is acceptable as the next token."""
        raise MarsError(
            f"the rule {type(self).__name__} defines no relaxation: give it a method low or relaxable."
        )

    def relaxable(self, evidence: Evidence) -> Array:
        """Return a mask bool[B, N] of the nodes whose incoming edge may be relaxed.

        By default, the edge into a node may be relaxed if the node's token is one of the target's two best tokens and
        `low` is True at its parent.
        """
        shape = evidence.tree.tokens.shape
        low_margin = _spread(self.low(evidence), shape)
        check_array(self, "low", low_margin, "bool", shape)
        return runner_up_edges(evidence, low_margin)

    def cost(self, evidence: Evidence) -> tuple[Array, Array] | None:
        """Return the cost of relaxing the edge into each node, f32[B, N], and the remaining budget of each row, f32[B].

        By default, return None, which sets no limit on the total cost.
        """
        return None

    def spend(self, left: Array) -> Self:
        """Return a copy of the rule with the budget f32[B] that remains after a step."""
        raise MarsError(
            f"the rule {type(self).__name__} has a cost but keeps no budget: give it a method spend."
        )

    def guarded(self, evidence: Evidence) -> Array:
        """Return a mask bool[B, N] of the `relaxable` edges that pass the guards."""
        tree, stop_tokens = evidence.tree, evidence.controls.stop_tokens
        # Entry i of each mask describes the edge into node i: the drafted token x of the node, and the target's logits
        # at the parent of the node. Strict rows and the first `exact_prefix` tokens follow the base.
        strict_edges = self.strict_edges(evidence)
        check_array(self, "strict_edges", strict_edges, "int32", tree.tokens.shape[:1])
        may_relax = (tree.depths > strict_edges[:, None]) & (tree.tokens >= 0)
        # id1 is the target's top token, which a strict greedy walk would take instead of x. If x is a stop token,
        # accepting it would end an output that the target would continue. If id1 is a stop token, accepting x would
        # continue an output that the target would end.
        may_relax &= ~is_stop(tree.tokens, stop_tokens) & ~at_parent(
            tree, is_stop(evidence.stats.id1, stop_tokens)
        )
        if evidence.strict_nodes is not None:
            may_relax &= ~at_parent(tree, evidence.strict_nodes)
        relaxable = _spread(self.relaxable(evidence), tree.tokens.shape)
        check_array(self, "relaxable", relaxable, "bool", tree.tokens.shape)
        return relaxable & may_relax & ~impossible(evidence)

    def __call__(self, evidence: Evidence) -> tuple[Verdict, Self]:
        cost, budget = self._cost_and_budget(evidence)
        guarded_edges = self.guarded(evidence)
        check_array(self, "guarded", guarded_edges, "bool", evidence.tree.tokens.shape)
        allowed = Allowance(guarded_edges, self.max_relaxed_run, cost, budget, self.max_relaxed)
        # The base walks the tree. If no strict edge continues the walk, the base follows an allowed edge, unless it
        # must emit a stop token there.
        verdict = self.base.relax(evidence, allowed)
        if cost is None or budget is None:
            return verdict, self
        # f32[B, D]; edge d leads to node path[d + 1].
        edge_cost = jnp.where(verdict.relaxed, pick(cost, verdict.path[:, 1:]), 0.0)
        next_rule = self.spend(budget - jnp.sum(edge_cost, axis=1))
        check_same_rule(self, "spend", next_rule)
        return verdict, next_rule

    def _cost_and_budget(self, evidence: Evidence) -> tuple[Array, Array] | tuple[None, None]:
        cost_and_budget = self.cost(evidence)
        if cost_and_budget is None:
            return None, None
        if not (isinstance(cost_and_budget, tuple) and len(cost_and_budget) == 2):
            raise wrong_result(self, "cost", described(cost_and_budget))
        cost, budget = cost_and_budget
        shape = evidence.tree.tokens.shape
        check_array(self, "cost", cost, "floating", shape, place="a cost ")
        check_array(self, "cost", budget, "floating", shape[:1], place="a budget ")
        return cost, budget


def _spread(value: Array, shape: tuple[int, ...]) -> Array:
    """Broadcast an array to `shape` if each of its dimensions already has the right size or has size 1.

    Return any other value unchanged.
    """
    sizes = getattr(value, "shape", ())
    if len(sizes) == len(shape) and all(size in (1, full) for size, full in zip(sizes, shape, strict=True)):
        return jnp.broadcast_to(value, shape)
    return value


def over(name: str, base: Rule) -> str:
    """Return the name of a rule, followed by the name of its base unless the base is `exact`."""
    return name if isinstance(base, Exact) else f"{name} over {base.name}"


def runner_up_edges(evidence: Evidence, low: Array) -> Array:
    """Return a mask bool[B, N] of the edges from a node with a low margin to one of the target's two best tokens.

    `low` bool[B, N] is True at nodes with a low margin.
    """
    tree, stats = evidence.tree, evidence.stats
    # id1 and id2 are the target's top token and its runner-up at each node.
    is_top_two = (tree.tokens == at_parent(tree, stats.id1)) | (tree.tokens == at_parent(tree, stats.id2))
    return at_parent(tree, low) & is_top_two
