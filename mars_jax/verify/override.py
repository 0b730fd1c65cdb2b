"""Take on where rejection stops: what a lossy rule of edges does over it, along chains and trees alike.

B batch, N nodes, D depth. Oracle: tests/verify/test_mars.py and tests/verify/test_siblings.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from mars_jax.core.controls import is_stop
from mars_jax.core.evidence import Evidence
from mars_jax.core.pick import pick_one
from mars_jax.core.tree import Allowance
from mars_jax.core.types import DraftTree, Verdict

Stretch = Callable[[Array], tuple[Array, Array]]
"""From a node i32[B] as if it were the root: the node where the rule stops, and the token that it emits there."""


class _At(NamedTuple):
    """The place of each row on its way down, [B] each but `relaxed`."""

    start: Array  # i32; the node from which the rule has started afresh
    stop: Array  # i32; the node where it stops
    token: Array  # i32; what it emits there
    run: Array  # i32; relaxed edges in a row
    spent: Array  # f32
    relaxed: Array  # bool[B, D]


def overridden(evidence: Evidence, stretch: Stretch, allowed: Allowance | None) -> Verdict:
    """The verdict of a rule that goes from node to node in stretches.

    Where it stops, the first child whose edge may be relaxed is taken all the same, and the rule starts afresh from it,
    so that what follows is verified as if it were a draft of its own.
    """
    tree, stop_tokens = evidence.tree, evidence.controls.stop_tokens
    batch, n = tree.tokens.shape
    origin = jnp.zeros((batch,), jnp.int32)
    nothing = jnp.zeros((batch, tree.max_depth), bool)
    stop, token = stretch(origin)
    if allowed is None or n == 1:
        return _verdict(tree, stop, token, nothing)
    ids = jnp.arange(n, dtype=jnp.int32)[None]
    may = allowed.edges & (tree.tokens >= 0)

    def override(at: _At) -> tuple[Array, Array, Array, Array]:
        """bool[B]: the walk goes on; the child i32[B] to which; and the run and the sum that the edge would join."""
        # A child with the very token that the rule emits is no relaxation: that token comes out either way.
        children = may & (tree.parents == at.stop[:, None]) & (tree.tokens != at.token[:, None])
        run = jnp.where(at.stop > at.start, 0, at.run)  # accepted edges in between end the run
        room = ~is_stop(at.token, stop_tokens) & (run < allowed.max_run)
        if allowed.max_relaxed is not None:
            room &= jnp.sum(at.relaxed, axis=1, dtype=jnp.int32) < allowed.max_relaxed
        children &= room[:, None]
        if allowed.cost is not None and allowed.budget is not None:
            children &= at.spent[:, None] + allowed.cost <= allowed.budget[:, None]
        child = jnp.min(jnp.where(children, ids, n), axis=1)
        take, child = child < n, jnp.minimum(child, n - 1)
        spent = at.spent if allowed.cost is None else at.spent + pick_one(allowed.cost, child)
        return take, child, run, spent

    def go_on(at: _At) -> _At:
        take, child, run, spent = override(at)
        start = jnp.where(take, child, at.start)
        stop, token = stretch(start)
        # Edge d begins at depth d, where the rule had stopped.
        here = jnp.arange(tree.max_depth, dtype=jnp.int32)[None] == _depth(tree, at.stop)[:, None]
        return _At(
            start=start,
            stop=jnp.where(take, stop, at.stop),
            token=jnp.where(take, token, at.token),
            run=jnp.where(take, run + 1, run),
            spent=jnp.where(take, spent, at.spent),
            relaxed=at.relaxed | (take[:, None] & here),
        )

    # A turn takes one edge in some rows, and a stretch after it; the others stay. D edges at most, so the loop ends.
    begin = _At(origin, stop, token, origin, jnp.zeros((batch,), jnp.float32), nothing)
    end = jax.lax.while_loop(lambda at: jnp.any(override(at)[0]), go_on, begin)
    return _verdict(tree, end.stop, end.token, end.relaxed)


def _depth(tree: DraftTree, node: Array) -> Array:
    """i32[B]"""
    return node if tree.is_chain else pick_one(tree.depths, node)


def _verdict(tree: DraftTree, stop: Array, token: Array, relaxed: Array) -> Verdict:
    depth = _depth(tree, stop)
    if tree.is_chain:
        path = jnp.minimum(jnp.arange(tree.max_depth + 1, dtype=jnp.int32)[None], stop[:, None])
        return Verdict(path=path, num_accepted=depth, next_token=token, relaxed=relaxed)
    # Upwards from the node where the row stops: entry D of the path first, and the same node until its own depth.
    nodes = [stop]
    for above in range(tree.max_depth, 0, -1):
        parent = pick_one(tree.parents, nodes[-1])
        nodes.append(jnp.where(above > depth, nodes[-1], parent))
    return Verdict(path=jnp.stack(nodes[::-1], axis=1), num_accepted=depth, next_token=token, relaxed=relaxed)
