"""Token trees: how to build, mask and walk them. Oracles: the Python walk and mask in tests/core/test_tree.py.

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
from mars_jax.core.types import NO_NODE, NO_TOKEN, ROOT, DraftTree, Verdict, Visible


def static_topology(branching: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Build the tree in which every node at depth l has `branching[l]` children, numbered breadth first.

    Returns `(parents i32[N], depths i32[N])`; `parents[0] == NO_NODE`.

    >>> static_topology((2, 1))[0].tolist()
    [-1, 0, 0, 1, 2]
    """
    parents, depths, level = [NO_NODE], [0], [ROOT]
    # A level's nodes get consecutive ids, in the order of their parents, so parents precede their children.
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
    """Return bool[B, N, N]: entry [b, i, j] is True if node j is node i or one of its ancestors.

    Doubling: after k rounds a row reaches 2**k generations up, so `ceil(log2(D + 1))` small products suffice.
    """
    n = parents.shape[-1]
    ids = jnp.arange(n, dtype=jnp.int32)
    # One generation: node i itself and its parent. The root's parent -1 matches no node.
    reaches = (ids[None, :] == ids[:, None])[None] | (parents[:, :, None] == ids[None, None, :])
    generations = 1
    while generations < max_depth:
        # i reaches k if it reaches some j that reaches k: a product of 0-1 matrices, which counts every such j.
        path_counts = jnp.einsum("bij,bjk->bik", reaches.astype(jnp.float32), reaches.astype(jnp.float32))
        reaches, generations = path_counts > 0, generations * 2
    return reaches


def visible(tree: DraftTree, start: Array) -> Visible:
    """Let the nodes of a tree attend to the committed slots `[0, start)`, themselves and their ancestors.

    Node j is written to slot `start + j` and has position `start + depth`.
    """
    # The slots of a chain are in the order of its positions, so it is causal and needs no mask. In a tree, siblings
    # share a position but not a slot, so positions come from depths.
    seen = None if tree.is_chain else ancestors(tree.parents, tree.max_depth)
    return Visible(first=start, positions=start[:, None] + tree.depths, slot=start, seen=seen)


class Allowance(NamedTuple):
    """The edges that a walk may relax, and the limits on relaxing them."""

    edges: Array  # bool[B, N]; the edge into node i may be taken although it is not exact
    max_run: Array  # i32[B]; maximum number of consecutive relaxed edges
    cost: Array | None = None  # f32[B, N], at least 0; cost of relaxing the edge into node i
    budget: Array | None = None  # f32[B]; maximum total cost of a walk; None if `cost` is
    max_relaxed: Array | None = None  # i32[B]; maximum relaxed edges of a walk; None is unlimited


def walk(tree: DraftTree, exact: Array, allowed: Allowance | None) -> tuple[Array, Array, Array]:
    """Descend from the root while a child is acceptable; prefer the exact child, then the lowest node id.

    Args:
      tree: the drafted tree.
      exact: bool[B, N]; node i holds the token that the target chose at its parent.
      allowed: the edges that are acceptable although they are not exact; None allows none.

    Returns:
      `(path i32[B, D + 1], num_accepted i32[B], relaxed_edge bool[B, D])` as in `Verdict`.
    """
    batch, n = exact.shape
    ids = jnp.arange(n, dtype=jnp.int32)[None]
    # Entry [b, i] describes the edge into node i, whose token is judged by the logits of its parent. Padding is never
    # accepted.
    is_token = tree.tokens >= 0
    exact = exact & is_token
    relaxable = jnp.zeros_like(exact) if allowed is None else allowed.edges & is_token & ~exact

    def first(candidates: Array) -> Array:
        """Return i32[B]: the lowest id among the candidates; n if there is none."""
        return jnp.min(jnp.where(candidates, ids, n), axis=1)

    # [B] each: current node, relaxed edges since the last exact one, relaxed edges in total, their cost, has stopped.
    node = jnp.zeros((batch,), jnp.int32)
    run_length = jnp.zeros((batch,), jnp.int32)
    num_relaxed = jnp.zeros((batch,), jnp.int32)
    spent = jnp.zeros((batch,), jnp.float32)
    stopped = jnp.zeros((batch,), bool)
    path, relaxed_edges = [node], []
    # One iteration per depth, unrolled since D is small. A stopped row keeps its node.
    for _ in range(tree.max_depth):
        is_child = (tree.parents == node[:, None]) & ~stopped[:, None]
        next_node = best_exact = first(is_child & exact)
        is_relaxed = jnp.zeros((batch,), bool)
        if allowed is not None:
            # bool[B, N]: the relaxed edges out of `node` that stay within every limit.
            can_relax = is_child & relaxable & (run_length < allowed.max_run)[:, None]
            if allowed.max_relaxed is not None:
                can_relax &= (num_relaxed < allowed.max_relaxed)[:, None]
            if allowed.cost is not None and allowed.budget is not None:
                can_relax &= spent[:, None] + allowed.cost <= allowed.budget[:, None]
            best_relaxed = first(can_relax)
            # An exact sibling always has priority: relax only if the strict walk would stop.
            is_relaxed = (best_exact == n) & (best_relaxed < n)
            next_node = jnp.where(is_relaxed, best_relaxed, best_exact)
            if allowed.cost is not None:
                is_best = ids == next_node[:, None]  # all False if `next_node` is n, and then the cost is 0
                spent += jnp.where(is_relaxed, jnp.sum(jnp.where(is_best, allowed.cost, 0.0), axis=1), 0.0)
        stopped = next_node == n
        node = jnp.where(stopped, node, next_node)
        # An exact edge ends a run of relaxed ones.
        run_length = jnp.where(is_relaxed, run_length + 1, 0)
        num_relaxed += is_relaxed.astype(jnp.int32)
        path.append(node)
        relaxed_edges.append(is_relaxed)
    path = jnp.stack(path, axis=1)
    # A path repeats its last node past its end, so every change of node is an accepted edge.
    is_accepted = path[:, 1:] != path[:, :-1]
    relaxed_edge = jnp.stack(relaxed_edges, axis=1) if relaxed_edges else jnp.zeros((batch, 0), bool)
    return path, jnp.sum(is_accepted, axis=1, dtype=jnp.int32), relaxed_edge


def at_parent(tree: DraftTree, values: Array) -> Array:
    """Gather per-node values at each node's parent: values [B, N, ...] -> [B, N, ...]. The root gets its own value."""
    if tree.is_chain:
        return jnp.concatenate([values[:, :1], values[:, :-1]], axis=1)  # parents[i] == i - 1: a shift
    return pick(values, jnp.maximum(tree.parents, 0))  # the root's parent -1 becomes itself


def last_token(inputs: DraftInput) -> Array:
    """Return i32[B, 1]: the last committed token of each row, which is the root of every draft."""
    return pick(inputs.tokens, inputs.length[:, None] - 1)


def chain(tokens: Array, draft_logits: Array | None = None, *, expected: Array | None = None) -> DraftTree:
    """Build a chain of tokens i32[B, N]. The first one, the root, is the last committed token."""
    batch, n = tokens.shape
    ids = jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32), (batch, n))
    return DraftTree(
        tokens=tokens,
        # NO_NODE for the root, then 0, 1, 2, ...
        parents=ids - 1,
        depths=ids,
        draft_logits=draft_logits,
        expected=expected,
        max_depth=n - 1,
        is_chain=True,
    )


def following(tree: DraftTree) -> Array:
    """Return i32[B, N]: the token drafted after each node of a chain; NO_TOKEN if there is none."""
    return jnp.pad(tree.tokens[:, 1:], ((0, 0), (0, 1)), constant_values=NO_TOKEN)


def step_tokens(tree: DraftTree, verdict: Verdict) -> Array:
    """Return i32[B, D + 1], the tokens that a step adds: the path after the root, then copies of `next_token`.

    >>> verdict = Verdict(path=jnp.asarray([[0, 1, 1]]), num_accepted=jnp.asarray([1]), next_token=jnp.asarray([9]),
    ...                   relaxed=jnp.zeros((1, 2), bool))
    >>> step_tokens(chain(jnp.asarray([[3, 1, 4]])), verdict).tolist()
    [[1, 9, 9]]
    """
    drafted = pick(tree.tokens, verdict.path)
    # Drop the root, which is already committed, so that entry d is the token at depth d + 1. The last column is
    # arbitrary, as it is never accepted.
    drafted = jnp.concatenate([drafted[:, 1:], drafted[:, -1:]], axis=1)
    entry = jnp.arange(drafted.shape[1], dtype=jnp.int32)[None]
    return jnp.where(entry < verdict.num_accepted[:, None], drafted, verdict.next_token[:, None])
