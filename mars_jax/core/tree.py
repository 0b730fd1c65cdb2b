"""Functions that build, mask and walk draft trees.

Dimensions: B batch, N nodes, D depth, S cache slots. Tested against a walk and a mask in Python
(tests/core/test_tree.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from mars_jax.core.drafter import DraftInput
from mars_jax.core.pick import pick
from mars_jax.core.types import NO_NODE, NO_TOKEN, ROOT, DraftTree, Verdict, Visible


def static_topology(branching: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Build a tree in which every node at depth l has `branching[l]` children, with nodes in breadth-first order.

    Return `(parents i32[N], depths i32[N])`, where `parents[0] == NO_NODE`.

    >>> static_topology((2, 1))[0].tolist()
    [-1, 0, 0, 1, 2]
    """
    parents, depths, level = [NO_NODE], [0], [ROOT]
    # The nodes of a level get consecutive ids in the order of their parents, so parents precede their children.
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
    """Return bool[B, N, N], where entry [b, i, j] is True if node j is node i or an ancestor of node i.

    Each of about log2(D) rounds doubles the number of generations that an entry covers, with one small matrix product.
    """
    n = parents.shape[-1]
    ids = jnp.arange(n, dtype=jnp.int32)
    # At first, each node reaches itself and its parent (one generation). The root's parent, -1, matches no node.
    reaches = (ids[None, :] == ids[:, None])[None] | (parents[:, :, None] == ids[None, None, :])
    generations = 1
    while generations < max_depth:
        # Node i reaches node k if it reaches some j that reaches k. The product of the 0-1 matrices counts all such j.
        path_counts = jnp.einsum("bij,bjk->bik", reaches.astype(jnp.float32), reaches.astype(jnp.float32))
        reaches, generations = path_counts > 0, generations * 2
    return reaches


def visible(tree: DraftTree, start: Array) -> Visible:
    """Return the attention pattern of a draft tree.

    Each node attends to the committed slots `[0, start)`, to itself and to its ancestors. Node j is written to slot
    `start + j` and has the position `start + depth`.
    """
    # The slots of a chain are in the same order as its positions, so its attention is causal and needs no mask. In a
    # tree, siblings have the same position but different slots, so positions are computed from depths.
    seen = None if tree.is_chain else ancestors(tree.parents, tree.max_depth)
    return Visible(first=start, positions=start[:, None] + tree.depths, slot=start, seen=seen)


class Allowance(NamedTuple):
    """The edges that a walk may relax, and limits on the relaxed edges of a walk."""

    edges: Array  # bool[B, N]; True if the edge into node i may be accepted although it is not exact
    max_run: Array  # i32[B]; maximum number of consecutive relaxed edges
    cost: Array | None = None  # f32[B, N], at least 0; cost of relaxing the edge into node i
    budget: Array | None = None  # f32[B]; maximum total cost of a walk; None if `cost` is None
    max_relaxed: Array | None = None  # i32[B]; maximum number of relaxed edges of a walk; None means no limit


def walk(tree: DraftTree, exact: Array, allowed: Allowance | None) -> tuple[Array, Array, Array]:
    """Walk down from the root while a child is acceptable. Prefer an exact child, then the child with the lowest id.

    Args:
      tree: the drafted tree.
      exact: bool[B, N]; True if the token of node i is the one that the target chose at its parent.
      allowed: the edges that may be accepted although they are not exact. None allows only exact edges.

    Returns:
      `(path i32[B, D + 1], num_accepted i32[B], relaxed_edge bool[B, D])` as in `Verdict`.
    """
    batch, n = exact.shape
    ids = jnp.arange(n, dtype=jnp.int32)[None]
    # Entry [b, i] describes the edge into node i. The token of node i is judged by the logits of its parent. Padding is
    # never accepted.
    is_token = tree.tokens >= 0
    exact = exact & is_token
    relaxable = jnp.zeros_like(exact) if allowed is None else allowed.edges & is_token & ~exact

    def first(candidates: Array) -> Array:
        """Return the lowest id among the candidates of each row, i32[B], or n if there are none."""
        return jnp.min(jnp.where(candidates, ids, n), axis=1)

    # The state of the walk, [B] each: the current node, the number of relaxed edges since the last exact edge, the
    # total number of relaxed edges and their cost, and whether the walk has stopped.
    node = jnp.zeros((batch,), jnp.int32)
    run_length = jnp.zeros((batch,), jnp.int32)
    num_relaxed = jnp.zeros((batch,), jnp.int32)
    spent = jnp.zeros((batch,), jnp.float32)
    stopped = jnp.zeros((batch,), bool)
    path, relaxed_edges = [node], []
    # Run one iteration per depth, unrolled because D is small. A stopped row stays at its node.
    for _ in range(tree.max_depth):
        is_child = (tree.parents == node[:, None]) & ~stopped[:, None]
        next_node = best_exact = first(is_child & exact)
        is_relaxed = jnp.zeros((batch,), bool)
        if allowed is not None:
            # bool[B, N]: the edges from `node` that can be relaxed without exceeding any limit.
            can_relax = is_child & relaxable & (run_length < allowed.max_run)[:, None]
            if allowed.max_relaxed is not None:
                can_relax &= (num_relaxed < allowed.max_relaxed)[:, None]
            if allowed.cost is not None and allowed.budget is not None:
                can_relax &= spent[:, None] + allowed.cost <= allowed.budget[:, None]
            best_relaxed = first(can_relax)
            # An exact child always has priority, so relax an edge only if the strict walk would stop.
            is_relaxed = (best_exact == n) & (best_relaxed < n)
            next_node = jnp.where(is_relaxed, best_relaxed, best_exact)
            if allowed.cost is not None:
                is_best = ids == next_node[:, None]  # all False if `next_node` is n; the cost is then 0
                spent += jnp.where(is_relaxed, jnp.sum(jnp.where(is_best, allowed.cost, 0.0), axis=1), 0.0)
        stopped = next_node == n
        node = jnp.where(stopped, node, next_node)
        # An exact edge ends a run of relaxed edges.
        run_length = jnp.where(is_relaxed, run_length + 1, 0)
        num_relaxed += is_relaxed.astype(jnp.int32)
        path.append(node)
        relaxed_edges.append(is_relaxed)
    path = jnp.stack(path, axis=1)
    # Paths are padded with their last node, so an edge was accepted if and only if its two nodes differ.
    is_accepted = path[:, 1:] != path[:, :-1]
    relaxed_edge = jnp.stack(relaxed_edges, axis=1) if relaxed_edges else jnp.zeros((batch, 0), bool)
    return path, jnp.sum(is_accepted, axis=1, dtype=jnp.int32), relaxed_edge


def at_parent(tree: DraftTree, values: Array) -> Array:
    """Gather the value of each node's parent from per-node values [B, N, ...]. The root gets its own value."""
    if tree.is_chain:
        return jnp.concatenate([values[:, :1], values[:, :-1]], axis=1)  # parents[i] == i - 1
    return pick(values, jnp.maximum(tree.parents, 0))  # the root's parent, -1, becomes the root


def last_token(inputs: DraftInput) -> Array:
    """Return the last committed token of each row, i32[B, 1], which is the root of its next draft."""
    return pick(inputs.tokens, inputs.length[:, None] - 1)


def chain(tokens: Array, draft_logits: Array | None = None, *, expected: Array | None = None) -> DraftTree:
    """Build a draft without branches from tokens i32[B, N]. The first token, the root, is the last committed token."""
    batch, n = tokens.shape
    ids = jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32), (batch, n))
    return DraftTree(
        tokens=tokens,
        # The parent of the root is NO_NODE. The other parents are 0, 1, 2, ...
        parents=ids - 1,
        depths=ids,
        draft_logits=draft_logits,
        expected=expected,
        max_depth=n - 1,
        is_chain=True,
    )


def following(tree: DraftTree) -> Array:
    """Return the token that follows each node of a chain, i32[B, N]; NO_TOKEN after the last node."""
    return jnp.pad(tree.tokens[:, 1:], ((0, 0), (0, 1)), constant_values=NO_TOKEN)


def step_tokens(tree: DraftTree, verdict: Verdict) -> Array:
    """Return the tokens that a step adds, i32[B, D + 1]: the accepted drafted tokens, then copies of `next_token`.

    >>> verdict = Verdict(path=jnp.asarray([[0, 1, 1]]), num_accepted=jnp.asarray([1]), next_token=jnp.asarray([9]),
    ...                   relaxed=jnp.zeros((1, 2), bool))
    >>> step_tokens(chain(jnp.asarray([[3, 1, 4]])), verdict).tolist()
    [[1, 9, 9]]
    """
    drafted = pick(tree.tokens, verdict.path)
    # Drop the root, which is already committed, so that entry d is the token at depth d + 1. The last column is
    # arbitrary, because it is always replaced by `next_token`.
    drafted = jnp.concatenate([drafted[:, 1:], drafted[:, -1:]], axis=1)
    entry = jnp.arange(drafted.shape[1], dtype=jnp.int32)[None]
    return jnp.where(entry < verdict.num_accepted[:, None], drafted, verdict.next_token[:, None])
