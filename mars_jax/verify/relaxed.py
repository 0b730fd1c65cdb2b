"""Rules that relax edges: a strict rule plus the edges that it may take in addition.

B batch, N nodes, V vocabulary. Oracle: tests/verify/test_rules.py, for every rule in the table.
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
    """Declare the field that selects the strict rule to relax."""
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

    A subclass defines `low`, the nodes at which the target's runner-up is as good as its top token, or `relaxable`, the
    edges themselves. `max_relaxed_run` limits consecutive relaxed edges, and `max_relaxed` limits the relaxed edges per
    step. `cost` and `spend` limit the total cost of the relaxed edges over a row's whole output; the remaining budget
    is part of the rule's state.

    This class implements the guards: an exact sibling has priority; strict rows and spans, the exact prefix, padding,
    tokens forbidden by a ban or a constraint, and stop tokens (the drafted token, the target's top token, or the token
    that the base would emit) are never relaxed.
    """

    base: Any = base_setting()  # Exact or Rejection, or the name of one
    # i32[] or [B]; maximum consecutive relaxed tokens
    max_relaxed_run: Any = struct.setting(
        default=UNLIMITED_RUN,
        kind=int,
        ranges=WHOLE,
        help="relaxed tokens in a row that are allowed",
        word="any",
        flag=True,
    )
    max_relaxed: Any = None  # i32[] or [B]; maximum relaxed tokens per step; None is unlimited
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
        """Return bool[B, N]: nodes where the target is nearly indifferent, so that its runner-up is acceptable."""
        raise MarsError(
            f"the rule {type(self).__name__} defines no relaxation: give it a method low or relaxable."
        )

    def relaxable(self, evidence: Evidence) -> Array:
        """Return bool[B, N]: nodes whose incoming edge may be relaxed.

        By default, these nodes hold one of the target's two best tokens, and `low` is True at their parent.
        """
        shape = evidence.tree.tokens.shape
        low_margin = _spread(self.low(evidence), shape)
        check_array(self, "low", low_margin, "bool", shape)
        return runner_up_edges(evidence, low_margin)

    def cost(self, evidence: Evidence) -> tuple[Array, Array] | None:
        """Return the cost of relaxing the edge into each node, f32[B, N], and each row's remaining budget, f32[B].

        None means no cost and no limit.
        """
        return None

    def spend(self, left: Array) -> Self:
        """Return the rule with the remaining budget f32[B] after a step."""
        raise MarsError(
            f"the rule {type(self).__name__} has a cost and keeps no budget: give it a method spend."
        )

    def guarded(self, evidence: Evidence) -> Array:
        """Return bool[B, N]: the `relaxable` edges that pass the guards."""
        tree, stop_tokens = evidence.tree, evidence.controls.stop_tokens
        # Guards test the edge into a node: its token x, and its parent, whose logits judge x.
        # `strict` rows and the first `exact_prefix` tokens follow the base.
        strict_edges = self.strict_edges(evidence)
        check_array(self, "strict_edges", strict_edges, "int32", tree.tokens.shape[:1])
        may_relax = (tree.depths > strict_edges[:, None]) & (tree.tokens >= 0)
        # id1 is the target's top token, the one that a strict greedy walk would take instead of x.
        # Relaxing a stop token would end an output that the target continues, or continue one that it ends.
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
        # The base walks strictly. Before it stops, it takes an allowed edge, unless it would emit a stop token.
        verdict = self.base.relax(evidence, allowed)
        if cost is None or budget is None:
            return verdict, self
        # f32[B, D]: edge d leads into path[d + 1].
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
    """Broadcast an array whose dimensions have the sizes of `shape` or 1; return any other value unchanged."""
    sizes = getattr(value, "shape", ())
    if len(sizes) == len(shape) and all(size in (1, full) for size, full in zip(sizes, shape, strict=True)):
        return jnp.broadcast_to(value, shape)
    return value


def over(name: str, base: Rule) -> str:
    """Name a rule with its base; omit the default base `exact`."""
    return name if isinstance(base, Exact) else f"{name} over {base.name}"


def runner_up_edges(evidence: Evidence, low: Array) -> Array:
    """Return bool[B, N]: edges into one of the target's two best tokens, if `low` bool[B, N] at the parent."""
    tree, stats = evidence.tree, evidence.stats
    # id1 and id2 are the target's top token and its runner-up at each node.
    is_top_two = (tree.tokens == at_parent(tree, stats.id1)) | (tree.tokens == at_parent(tree, stats.id2))
    return at_parent(tree, low) & is_top_two
