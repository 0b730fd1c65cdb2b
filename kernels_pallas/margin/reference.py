"""Short, slow versions of `margin_stats` and `margin_accept`, against which tests check all other implementations.

Tested against numpy and plain Python (tests/kernels).

Dimensions: B batch, N tree nodes, D tree depth, V vocabulary, M stop tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from kernels_pallas.margin.rule import MARGINS, NO_ID, Acceptance, AcceptControls, MarginStats


class _Position(NamedTuple):
    """State of the tree walk in one row."""

    node: Array  # i32[]; current node
    run: Array  # i32[]; number of relaxed edges since the last exact edge
    stopped: Array  # bool[]; True if no child was acceptable


def margin_stats(logits: Array, *, logsumexp: bool = False) -> MarginStats:
    """Compute the statistics of each row of logits [..., V], bfloat16 or float32.

    >>> margin_stats(jnp.asarray([1.0, 3.0, 2.0])).id2.tolist()
    2
    """
    z = logits.astype(jnp.float32)
    # top_k ranks 0 above -0, but these logits are equal, and the smaller id must come first. So replace -0 with 0.
    z = jnp.where(z == 0, 0.0, z)
    log_sum_exp = jax.nn.logsumexp(z, axis=-1) if logsumexp else None
    if z.shape[-1] == 1:
        z = jnp.concatenate([z, jnp.full_like(z, -jnp.inf)], axis=-1)
    top_logits, ids = lax.top_k(z, 2)
    id2 = ids[..., 1]
    if logits.shape[-1] == 1:
        id2 = jnp.full_like(id2, NO_ID)
    return MarginStats(top_logits[..., 0], ids[..., 0], top_logits[..., 1], id2, log_sum_exp)


def accept_by_edges(
    stats: MarginStats,
    tokens: Array,
    parents: Array,
    y: Array | None,
    controls: AcceptControls,
    max_depth: int,
    margin: str,
) -> Acceptance:
    """Compute `margin_accept` from the statistics of the logits: find all acceptable edges, and then walk the tree."""

    def at_parent(values: Array) -> Array:
        return jnp.take_along_axis(values, jnp.maximum(parents, 0), axis=1)

    def is_stop(ids: Array) -> Array:
        return jnp.any((ids[..., None] == controls.stop_tokens[:, None]) & (ids >= 0)[..., None], axis=-1)

    # y is the target's token at every node. At temperature 0, it is the argmax.
    y = stats.id1 if y is None else jnp.where(y < 0, stats.id1, y)
    # Entry i of an array of edges is the edge from the parent of node i to node i. Three conditions at the parent must
    # hold for the edge to be relaxed: the margin is low, y is not a stop token, and the best token is not a stop token.
    low_margin = MARGINS[margin](stats.top1, stats.top2, jnp.broadcast_to(controls.theta[:, None], y.shape))
    open_node = low_margin & ~is_stop(stats.id1) & ~is_stop(y)
    exact = (tokens >= 0) & (tokens == at_parent(y))
    # If a sampled y differs from the target's best token, edges to both the best token and the runner-up may be
    # relaxed.
    is_top_two = (tokens == at_parent(stats.id1)) | (tokens == at_parent(stats.id2))
    relaxable = (tokens >= 0) & ~exact & is_top_two & at_parent(open_node) & ~is_stop(tokens)

    def row(parents: Array, exact: Array, relaxable: Array, max_run: Array, strict: Array):
        def step(position: _Position, depth: Array):
            # bool[N] each; the current node's children, the exact children, and the children that may be relaxed.
            child = (parents == position.node) & ~position.stopped
            by_exact = child & exact
            by_relaxed = child & relaxable & (position.run < max_run) & (depth >= strict)
            is_relaxed = ~jnp.any(by_exact) & jnp.any(by_relaxed)
            has_child = jnp.any(by_exact) | is_relaxed
            # The argmax of a bool array is the index of the first True, so the lowest node id is chosen.
            next_child = jnp.argmax(jnp.where(is_relaxed, by_relaxed, by_exact)).astype(jnp.int32)
            node = jnp.where(has_child, next_child, position.node)
            # An exact edge ends a run of relaxed edges.
            run = jnp.where(is_relaxed, position.run + 1, 0)
            return _Position(node, run, ~has_child), (node, has_child, is_relaxed)

        start = _Position(jnp.int32(0), jnp.int32(0), jnp.zeros((), bool))
        _, (path, has_child, relaxed) = lax.scan(step, start, jnp.arange(max_depth, dtype=jnp.int32))
        return jnp.pad(path, (1, 0)), jnp.sum(has_child, dtype=jnp.int32), relaxed

    path, num_accepted, relaxed = jax.vmap(row)(
        parents, exact, relaxable, controls.max_relaxed_run, controls.strict
    )
    next_token = jnp.take_along_axis(y, path[:, -1:], axis=1)[:, 0]
    return Acceptance(path, num_accepted, next_token, relaxed, stats)
