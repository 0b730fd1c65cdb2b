"""Build, mask and walk token trees. Oracles: the Python walk and mask in tests/core/test_tree.py.

B batch, N nodes, D depth, S cache slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from mars_jax.core.drafter import DraftInput
from mars_jax.core.pick import pick
from mars_jax.core.types import NO_NODE, ROOT, DraftTree, Verdict, Visible


def static_topology(branching: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Parents and depths of the tree in which every node of depth l has `branching[l]` children, breadth first.

    Returns `(parents i32[N], depths i32[N])`; `parents[0] == NO_NODE`.

    >>> static_topology((2, 1))[0].tolist()
    [-1, 0, 0, 1, 2]
    """
    parents, depths, level = [NO_NODE], [0], [ROOT]
    for depth, width in enumerate(branching, start=1):
        children = []
        for node in level:
            for _ in range(width):
                children.append(len(parents))
                parents.append(node)
                depths.append(depth)
        level = children
    return np.asarray(parents, np.int32), np.asarray(depths, np.int32)


def ancestors(parents: Array, max_depth: int) -> Array:
    """bool[B, N, N]: entry [b, i, j] is True where node j is node i or one of its ancestors.

    Doubling: after k rounds a row reaches 2**k generations up, so `ceil(log2(D + 1))` small products suffice.
    """
    n = parents.shape[-1]
    ids = jnp.arange(n, dtype=jnp.int32)
    # One generation: node i itself, and its parent. The root's parent -1 is no node.
    reach = (ids[None, :] == ids[:, None])[None] | (parents[:, :, None] == ids[None, None, :])
    generations = 1
    while generations < max_depth:
        # i reaches k where it reaches some j that reaches k: a product of matrices of 0 and 1, which counts the js.
        counts = jnp.einsum("bij,bjk->bik", reach.astype(jnp.float32), reach.astype(jnp.float32))
        reach, generations = counts > 0, generations * 2
    return reach


def visible(tree: DraftTree, start: Array) -> Visible:
    """Let the nodes of a tree attend to the committed slots `[0, start)`, themselves and their ancestors.

    Node j is written to slot `start + j` and stands at position `start + depth`.
    """
    seen = None if tree.is_chain else ancestors(tree.parents, tree.max_depth)
    return Visible(first=start, positions=start[:, None] + tree.depths, slot=start, seen=seen)


class Allowance(NamedTuple):
    """The freedom of a walk beyond the strict rule: the edges it may relax, and how far."""

    edges: Array  # bool[B, N]; the edge into node i may be taken although it is not exact
    max_run: Array  # i32[B]; relaxed edges allowed in a row
    cost: Array | None = None  # f32[B, N], at least 0; what relaxing the edge into node i spends
    budget: Array | None = None  # f32[B]; what a walk may spend; None with a cost of None
    max_relaxed: Array | None = None  # i32[B]; relaxed edges allowed in a walk; None is any


def walk(tree: DraftTree, exact: Array, allowed: Allowance | None) -> tuple[Array, Array, Array]:
    """Descend from the root while a child is acceptable; the exact child first, then the lowest node id.

    Args:
      tree: the drafted tree.
      exact: bool[B, N]; the edge into node i carries the token the target named at its parent.
      allowed: the edges that are acceptable although they are not exact; None allows none.

    Returns:
      `(path i32[B, D + 1], num_accepted i32[B], relaxed_edge bool[B, D])` as in `Verdict`.
    """
    batch, n = exact.shape
    ids = jnp.arange(n, dtype=jnp.int32)[None]
    real = tree.tokens >= 0
    exact = exact & real
    relaxed = jnp.zeros_like(exact) if allowed is None else allowed.edges & real & ~exact

    def first(candidates: Array) -> Array:
        """i32[B]: the lowest of the nodes; n where there is none."""
        return jnp.min(jnp.where(candidates, ids, n), axis=1)

    # i32[B] each: where a row stands, relaxed edges since the last exact one, and relaxed edges in all.
    node = jnp.zeros((batch,), jnp.int32)
    run = jnp.zeros((batch,), jnp.int32)
    count = jnp.zeros((batch,), jnp.int32)
    spent = jnp.zeros((batch,), jnp.float32)
    stopped = jnp.zeros((batch,), bool)
    path, relaxed_edges = [node], []
    # One turn per depth, unrolled, as D is small; a row that has stopped stays where it is.
    for _ in range(tree.max_depth):
        child = (tree.parents == node[:, None]) & ~stopped[:, None]
        best = best_exact = first(child & exact)
        is_relaxed = jnp.zeros((batch,), bool)
        if allowed is not None:
            may = child & relaxed & (run < allowed.max_run)[:, None]
            if allowed.max_relaxed is not None:
                may &= (count < allowed.max_relaxed)[:, None]
            if allowed.cost is not None and allowed.budget is not None:
                may &= spent[:, None] + allowed.cost <= allowed.budget[:, None]
            best_relaxed = first(may)
            # An exact sibling goes first, whatever its id: relaxing is for where the target would stop.
            is_relaxed = (best_exact == n) & (best_relaxed < n)
            best = jnp.where(is_relaxed, best_relaxed, best_exact)
            if allowed.cost is not None:
                here = ids == best[:, None]  # `best` may be n, which no node is: then nothing is spent
                spent += jnp.where(is_relaxed, jnp.sum(jnp.where(here, allowed.cost, 0.0), axis=1), 0.0)
        stopped = best == n
        node = jnp.where(stopped, node, best)
        run = jnp.where(is_relaxed, run + 1, 0)
        count += is_relaxed.astype(jnp.int32)
        path.append(node)
        relaxed_edges.append(is_relaxed)
    path = jnp.stack(path, axis=1)
    # Past its end a path repeats its last node, so every change of node is an accepted edge.
    moved = path[:, 1:] != path[:, :-1]
    edges = jnp.stack(relaxed_edges, axis=1) if relaxed_edges else jnp.zeros((batch, 0), bool)
    return path, jnp.sum(moved, axis=1, dtype=jnp.int32), edges


def at_parent(tree: DraftTree, values: Array) -> Array:
    """Gather per-node values at each node's parent: values [B, N, ...] -> [B, N, ...]. The root gets its own value."""
    if tree.is_chain:
        return jnp.concatenate([values[:, :1], values[:, :-1]], axis=1)  # parents[i] == i - 1: a shift
    return pick(values, jnp.maximum(tree.parents, 0))  # the root's parent -1 becomes itself


def last_token(given: DraftInput) -> Array:
    """i32[B, 1]: the last committed token of each row, which is the root of every draft."""
    return pick(given.tokens, given.length[:, None] - 1)


def chain(tokens: Array, draft_logits: Array | None = None, *, expected: Array | None = None) -> DraftTree:
    """The tree of a chain of tokens i32[B, N] whose first is the last committed token."""
    batch, n = tokens.shape
    ids = jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32), (batch, n))
    return DraftTree(
        tokens=tokens,
        parents=ids - 1,
        depths=ids,
        draft_logits=draft_logits,
        expected=expected,
        max_depth=n - 1,
        is_chain=True,
    )


def said(tree: DraftTree, verdict: Verdict) -> Array:
    """i32[B, D + 1]: the tokens after the root that a step says: those of the path, then `next_token` again and again.

    >>> verdict = Verdict(path=jnp.asarray([[0, 1, 1]]), num_accepted=jnp.asarray([1]), next_token=jnp.asarray([9]),
    ...                   relaxed=jnp.zeros((1, 2), bool))
    >>> said(chain(jnp.asarray([[3, 1, 4]])), verdict).tolist()
    [[1, 9, 9]]
    """
    drafted = gather_path(tree.tokens, verdict.path)
    # Entry d is the token at depth d + 1; what the last column holds does not matter, as it is never accepted.
    drafted = jnp.concatenate([drafted[:, 1:], drafted[:, -1:]], axis=1)
    place = jnp.arange(drafted.shape[1], dtype=jnp.int32)[None]
    return jnp.where(place < verdict.num_accepted[:, None], drafted, verdict.next_token[:, None])


def gather_path(values: Array, path: Array) -> Array:
    """values [B, N, ...] at the nodes of path i32[B, P] -> [B, P, ...]."""
    return pick(values, path)
