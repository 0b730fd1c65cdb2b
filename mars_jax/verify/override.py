"""Relaxation of `rejection`, on chains and trees: instead of stopping, the rule may take a relaxed edge.

Tests: tests/verify/test_mars.py and tests/verify/test_siblings.py. Dimensions: B batch, N nodes, D depth.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from mars_jax.core.controls import is_stop
from mars_jax.core.pick import pick_one
from mars_jax.core.rule import Evidence
from mars_jax.core.tree import Allowance
from mars_jax.core.types import DraftTree, Verdict

Stretch = Callable[[Array], tuple[Array, Array]]
"""A function that runs a rule from start nodes i32[B], one per row, as if they were roots. It returns the nodes where
the rule stops, and the tokens that it emits there, i32[B] each."""


class _WalkState(NamedTuple):
    """Loop carry: the progress of the walk in each row."""

    start: Array  # i32[B]; node where the current stretch starts
    stop: Array  # i32[B]; node where the rule stops
    token: Array  # i32[B]; token that the rule emits at `stop`
    run: Array  # i32[B]; number of consecutive relaxed edges up to `start`
    spent: Array  # f32[B]; total cost of the relaxed edges so far
    relaxed: Array  # bool[B, D]; edges that were relaxed


def overridden(evidence: Evidence, stretch: Stretch, allowed: Allowance | None) -> Verdict:
    """Verify a draft in several stretches that are connected by relaxed edges.

    When the rule stops, take the first outgoing edge that may be relaxed, and restart the rule at the child. The tokens
    below the child are verified as a new draft.

    Args:
      evidence: evidence of the step.
      stretch: function that runs the rule from a start node in each row.
      allowed: edges that may be relaxed; None allows no edges.
    """
    tree, stop_tokens = evidence.tree, evidence.controls.stop_tokens
    batch, n = tree.tokens.shape
    # The first stretch begins at the root. If no edge is relaxed, this stretch is the whole walk.
    origin = jnp.zeros((batch,), jnp.int32)
    no_edges = jnp.zeros((batch, tree.max_depth), bool)
    stop, token = stretch(origin)
    if allowed is None or n == 1:
        return _verdict(tree, stop, token, no_edges)
    ids = jnp.arange(n, dtype=jnp.int32)[None]
    can_relax = allowed.edges & (tree.tokens >= 0)

    def override(walk: _WalkState) -> tuple[Array, Array, Array, Array]:
        """Return, for each row, whether it relaxes an edge, the child of this edge, the run length before it, and the
        total cost including it."""
        # If the rule emits the token of a child anyway, taking the edge to this child is not a relaxation.
        children = can_relax & (tree.parents == walk.stop[:, None]) & (tree.tokens != walk.token[:, None])
        # If the rule accepted an edge in the current stretch, a new run of relaxed edges begins.
        run = jnp.where(walk.stop > walk.start, 0, walk.run)
        may_relax = ~is_stop(walk.token, stop_tokens) & (run < allowed.max_run)
        if allowed.max_relaxed is not None:
            may_relax &= jnp.sum(walk.relaxed, axis=1, dtype=jnp.int32) < allowed.max_relaxed
        children &= may_relax[:, None]
        if allowed.cost is not None and allowed.budget is not None:
            children &= walk.spent[:, None] + allowed.cost <= allowed.budget[:, None]
        # Take the child with the lowest id. If there is none, `child` is n. Clamp n to a valid id; the results for this
        # id are discarded.
        child = jnp.min(jnp.where(children, ids, n), axis=1)
        takes_edge, child = child < n, jnp.minimum(child, n - 1)
        spent = walk.spent if allowed.cost is None else walk.spent + pick_one(allowed.cost, child)
        return takes_edge, child, run, spent

    def continue_walk(walk: _WalkState) -> _WalkState:
        takes_edge, child, run, spent = override(walk)
        start = jnp.where(takes_edge, child, walk.start)
        stop, token = stretch(start)
        # Edge d starts at depth d, so the number of the relaxed edge is the depth of the stop node at which it starts.
        is_edge = jnp.arange(tree.max_depth, dtype=jnp.int32)[None] == _depth(tree, walk.stop)[:, None]
        return _WalkState(
            start=start,
            stop=jnp.where(takes_edge, stop, walk.stop),
            token=jnp.where(takes_edge, token, walk.token),
            run=jnp.where(takes_edge, run + 1, run),
            spent=jnp.where(takes_edge, spent, walk.spent),
            relaxed=walk.relaxed | (takes_edge[:, None] & is_edge),
        )

    # In each iteration, at least one row takes a relaxed edge and starts a new stretch. Rows that take none do not
    # change. A path has at most D edges, so the loop terminates.
    initial_state = _WalkState(origin, stop, token, origin, jnp.zeros((batch,), jnp.float32), no_edges)
    final_state = jax.lax.while_loop(lambda walk: jnp.any(override(walk)[0]), continue_walk, initial_state)
    return _verdict(tree, final_state.stop, final_state.token, final_state.relaxed)


def _depth(tree: DraftTree, node: Array) -> Array:
    """Return the depth of one node per row, i32[B], given the node ids i32[B]."""
    if tree.is_chain:
        return node
    return pick_one(tree.depths, node)


def _verdict(tree: DraftTree, stop: Array, token: Array, relaxed: Array) -> Verdict:
    depth = _depth(tree, stop)
    if tree.is_chain:
        path = jnp.minimum(jnp.arange(tree.max_depth + 1, dtype=jnp.int32)[None], stop[:, None])
        return Verdict(path=path, num_accepted=depth, next_token=token, relaxed=relaxed)
    # Build the path from entry D down to entry 0. Entries deeper than the stop node repeat it, and every other entry is
    # the parent of the next entry.
    nodes = [stop]
    for entry in range(tree.max_depth, 0, -1):
        parent = pick_one(tree.parents, nodes[-1])
        nodes.append(jnp.where(entry > depth, nodes[-1], parent))
    return Verdict(path=jnp.stack(nodes[::-1], axis=1), num_accepted=depth, next_token=token, relaxed=relaxed)
