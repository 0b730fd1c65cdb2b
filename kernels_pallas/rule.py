"""Which drafted edges a margin-aware rule accepts, and the walk over them, in operations that every
backend has.

B batch, N tree nodes, D tree depth, M stop tokens. Everything is [B, N] or [B, 1]: no gather and no sort,
so the same lines run in XLA and in the last block of the TPU kernel. Oracle: `reference.decide`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from kernels_pallas.stats import MarginStats


class AcceptControls(NamedTuple):
    """What may differ between the rows of one batch."""

    theta: Array  # f32[B]; threshold in the units of the margin; inf is strict
    strict: Array  # bool[B]; True relaxes nothing in the row
    max_relaxed_run: Array  # i32[B]; relaxed edges allowed in a row
    stop_tokens: Array  # i32[B, M]; padded with -1


class Acceptance(NamedTuple):
    """How far down the tree the target follows, the token it adds, and the statistics of every node."""

    path: Array  # i32[B, D + 1]; node ids from the root; past num_accepted it repeats the last node
    num_accepted: Array  # i32[B]; edges walked
    next_token: Array  # i32[B]; y of the node where the walk stops
    relaxed: Array  # bool[B, D]; edge accepted only thanks to relaxation
    stats: MarginStats  # [B, N] each


def _ratio(z1: Array, z2: Array, theta: Array) -> Array:
    return (z1 > 0) & (z2 / jnp.where(z1 > 0, z1, 1.0) > theta)


def _gap(z1: Array, z2: Array, theta: Array) -> Array:
    return (z1 - z2 < theta) & (theta < jnp.inf)


def _prob_ratio(z1: Array, z2: Array, theta: Array) -> Array:
    return jnp.exp(z2 - z1) > theta


MARGINS = {"ratio": _ratio, "gap": _gap, "prob_ratio": _prob_ratio}
"""`(z1, z2, theta)` -> bool, True where relaxing is allowed: z2 / z1 > theta and z1 > 0 (MARS, arXiv
2601.15498), z1 - z2 < theta nats, exp(z2 - z1) > theta. An infinite theta is strict for each of them."""


def check_margin(margin: str) -> None:
    """Raises ValueError for an unknown margin."""
    if margin not in MARGINS:
        raise ValueError(f"margin is {margin!r}: expected one of {', '.join(MARGINS)}.")


class Walk(NamedTuple):
    path: list[Array]  # D + 1 of i32[B, 1]
    relaxed: list[Array]  # D of i32[B, 1], 0 or 1
    num_accepted: Array  # i32[B, 1]
    next_token: Array  # i32[B, 1]


def walk(
    stats: MarginStats,
    tokens: Array,
    parents: Array,
    y: Array,
    theta: Array,
    strict: Array,
    max_run: Array,
    stops: Array,
    *,
    max_depth: int,
    margin: str,
) -> Walk:
    """Descend from the root while a child is acceptable; the exact child first, then the lowest node id.

    Instead of gathering every node's parent it looks, at each depth, only at the node where each row stands:
    a one-hot selection over N.

    Args:
      stats: [B, N] each.
      tokens, parents, y: i32[B, N].
      theta, strict, max_run: f32, bool and i32 [B, 1].
      stops: i32[B, M].
    """
    count = tokens.shape[1]
    ids = lax.broadcasted_iota(jnp.int32, tokens.shape, 1)

    def is_stop(values: Array) -> Array:
        hit = jnp.zeros(values.shape, bool)
        for m in range(stops.shape[1]):
            hit |= values == stops[:, m : m + 1]
        return hit & (values >= 0)

    def first(candidates: Array) -> Array:
        return jnp.min(jnp.where(candidates, ids, count), axis=1, keepdims=True)

    low = MARGINS[margin](stats.top1, stats.top2, jnp.broadcast_to(theta, stats.top1.shape))
    # 1 where a child may be relaxed, as an integer: the selection below is a sum.
    open_node = (low & ~strict & ~is_stop(stats.id1) & ~is_stop(y)).astype(jnp.int32)
    real = tokens >= 0
    may_relax = real & ~is_stop(tokens)

    node = jnp.zeros(theta.shape, jnp.int32)
    run, accepted, going = node, node, node == 0
    path, relaxed = [node], []
    for _ in range(max_depth):
        here = ids == node

        def at_node(values: Array, here: Array = here) -> Array:
            return jnp.sum(jnp.where(here, values, 0), axis=1, keepdims=True)

        child = (parents == node) & going
        exact = tokens == at_node(y)
        best = (tokens == at_node(stats.id1)) | (tokens == at_node(stats.id2))
        room = (at_node(open_node) > 0) & (run < max_run)
        by_exact = first(child & exact & real)
        by_relaxed = first(child & best & ~exact & may_relax & room)
        is_relaxed = (by_exact == count) & (by_relaxed < count)
        chosen = jnp.where(is_relaxed, by_relaxed, by_exact)
        going = chosen < count
        node = jnp.where(going, chosen, node)
        run = jnp.where(is_relaxed, run + 1, 0)
        accepted += going.astype(jnp.int32)
        path.append(node)
        relaxed.append(is_relaxed.astype(jnp.int32))
    next_token = jnp.sum(jnp.where(ids == node, y, 0), axis=1, keepdims=True)
    return Walk(path, relaxed, accepted, next_token)


def decide(
    stats: MarginStats,
    tokens: Array,
    parents: Array,
    y: Array,
    controls: AcceptControls,
    max_depth: int,
    margin: str,
) -> Acceptance:
    """`walk` between arrays of the public shapes; see `margin_accept`."""
    done = walk(
        stats,
        tokens,
        parents,
        y,
        controls.theta[:, None],
        controls.strict[:, None],
        controls.max_relaxed_run[:, None],
        controls.stop_tokens,
        max_depth=max_depth,
        margin=margin,
    )
    relaxed = (
        jnp.concatenate(done.relaxed, axis=1) > 0 if done.relaxed else jnp.zeros((tokens.shape[0], 0), bool)
    )
    return Acceptance(
        jnp.concatenate(done.path, axis=1), done.num_accepted[:, 0], done.next_token[:, 0], relaxed, stats
    )
