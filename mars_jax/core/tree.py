"""Build, mask and walk token trees. Oracles: the Python walk and mask in tests/core/test_tree.py.

B batch, N nodes, D depth, S cache slots.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mars_jax.core.types import NO_NODE, ROOT, DraftTree


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
    reach = (ids[None, :] == ids[:, None])[None] | (parents[:, :, None] == ids[None, None, :])
    generations = 1
    while generations < max_depth:
        counts = jnp.einsum("bij,bjk->bik", reach.astype(jnp.float32), reach.astype(jnp.float32))
        reach, generations = counts > 0, generations * 2
    return reach


def attention_mask(tree: DraftTree, start: Array, slots: int) -> Array:
    """bool[B, N, S]: node i sees the committed slots `[0, start)` and the slots of itself and its ancestors.

    Node j lies in slot `start + j`.
    """
    n = tree.tokens.shape[1]
    offset = jnp.arange(slots, dtype=jnp.int32)[None] - start[:, None]  # i32[B, S]: node id of each slot
    if tree.is_chain:
        return offset[:, None, :] <= jnp.arange(n, dtype=jnp.int32)[None, :, None]
    seen = ancestors(tree.parents, tree.max_depth)
    column = jnp.clip(offset, 0, n - 1)[:, None, :]
    in_tree = jnp.take_along_axis(seen, jnp.broadcast_to(column, (seen.shape[0], n, slots)), axis=2)
    return jnp.where(offset[:, None, :] < 0, True, in_tree & (offset < n)[:, None, :])


def walk(tree: DraftTree, exact: Array, relaxed: Array, max_relaxed_run: Array) -> tuple[Array, Array, Array]:
    """Descend from the root while a child is acceptable; the exact child first, then the lowest node id.

    Args:
      tree: the drafted tree.
      exact: bool[B, N]; the edge into node i carries the token the target named at its parent.
      relaxed: bool[B, N]; the edge into node i is acceptable although it is not exact.
      max_relaxed_run: i32[B]; no more than this many relaxed edges in a row.

    Returns:
      `(path i32[B, D + 1], num_accepted i32[B], relaxed_edge bool[B, D])` as in `Verdict`.
    """
    batch, n = exact.shape
    ids = jnp.arange(n, dtype=jnp.int32)[None]
    real = tree.tokens >= 0
    exact, relaxed = exact & real, relaxed & real & ~exact

    def first(candidates: Array) -> Array:
        return jnp.min(jnp.where(candidates, ids, n), axis=1)

    node = jnp.zeros((batch,), jnp.int32)
    run = jnp.zeros((batch,), jnp.int32)
    stopped = jnp.zeros((batch,), bool)
    path, relaxed_edges = [node], []
    for _ in range(tree.max_depth):
        child = (tree.parents == node[:, None]) & ~stopped[:, None]
        best_exact = first(child & exact)
        best_relaxed = first(child & relaxed & (run < max_relaxed_run)[:, None])
        is_relaxed = (best_exact == n) & (best_relaxed < n)
        chosen = jnp.where(is_relaxed, best_relaxed, best_exact)
        stopped = chosen == n
        node = jnp.where(stopped, node, chosen)
        run = jnp.where(is_relaxed, run + 1, 0)
        path.append(node)
        relaxed_edges.append(is_relaxed)
    path = jnp.stack(path, axis=1)
    moved = path[:, 1:] != path[:, :-1]
    edges = jnp.stack(relaxed_edges, axis=1) if relaxed_edges else jnp.zeros((batch, 0), bool)
    return path, jnp.sum(moved, axis=1, dtype=jnp.int32), edges


def at_parent(tree: DraftTree, values: Array) -> Array:
    """Gather per-node values at each node's parent: values [B, N] -> [B, N]. The root gets its own value."""
    if tree.is_chain:
        return jnp.concatenate([values[:, :1], values[:, :-1]], axis=1)
    return jnp.take_along_axis(values, jnp.maximum(tree.parents, 0), axis=1)


def chain(tokens: Array, draft_logits: Array | None = None) -> DraftTree:
    """The tree of a chain of tokens i32[B, N] whose first is the last committed token."""
    batch, n = tokens.shape
    ids = jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32), (batch, n))
    return DraftTree(
        tokens=tokens, parents=ids - 1, depths=ids, draft_logits=draft_logits, max_depth=n - 1, is_chain=True
    )


def gather_path(values: Array, path: Array) -> Array:
    """values [B, N, ...] at the nodes of path i32[B, P] -> [B, P, ...]."""
    return jax.vmap(lambda v, p: v[p])(values, path)
