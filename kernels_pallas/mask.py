"""Masks of queries that attend to everything before `first`, and to rows of a region after it.

B batch, N queries, R rows of the region, S slots. Oracle: masks made slot by slot in Python
(tests/core/test_visible.py).
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax


def region(
    seen: Array | None, positions: Array, seen_positions: Array | None, window: int | None
) -> tuple[Array | None, Array | None]:
    """The window's part of what the queries see.

    Args:
      seen: bool[B or 1, N, R], or None for queries in a row.
      positions: i32[B, N] of the queries.
      seen_positions: i32[B, R] of the region's rows; None: they are the queries.
      window: keys `window` or more positions before the query are hidden; None hides none.

    Returns:
      Which rows of the region each query sees, bool[B or 1, N, R], None where that is those up to its own and its
      window's; and the last position that its window hides, i32[B, N], None without a window.
    """
    n = positions.shape[1]
    # A key at position p is seen where p > position - window, so `position - window` is the last hidden one.
    after = None if window is None else positions - window
    if seen is None and seen_positions is None:
        return None, after
    if seen is None:
        seen = jnp.tril(jnp.ones((n, n), bool))[None]
    if after is not None:
        rows = positions if seen_positions is None else seen_positions
        seen = seen & (rows[:, None, :] > after[:, :, None])
    return seen, after


def dense(first: Array, n: int, slots: int, inside: Array | None, after: Array | None) -> Array:
    """The mask bool[B, N, S] of what `region` gives."""
    slot = jnp.arange(slots, dtype=jnp.int32)
    offset = slot[None] - first[:, None]  # i32[B, S]: the row that each slot holds
    if inside is None:
        # Query i is row i, and sees slots up to `first + i`, its own.
        seen = offset[:, None, :] <= jnp.arange(n, dtype=jnp.int32)[None, :, None]
        # The queries are in a row, so that every slot holds its own position.
        return seen if after is None else seen & (slot[None, None] > after[:, :, None])
    # A product with a one-hot, not a gather: few queries, and every platform is good at products.
    if inside.shape[2] == slots:  # then `first` is 0
        return jnp.broadcast_to(inside, (offset.shape[0], *inside.shape[1:]))
    rows = jnp.arange(inside.shape[2], dtype=jnp.int32)
    here = (offset[:, None, :] == rows[None, :, None]).astype(jnp.float32)
    inside = jnp.broadcast_to(inside, (here.shape[0], *inside.shape[1:])).astype(jnp.float32)
    # [B, N, R] by [B, R, S], whose column s is the one-hot of the row in slot s, and 0 for a slot that holds none.
    found = jnp.einsum("bnr,brs->bns", inside, here) > 0
    before = jnp.broadcast_to((offset < 0)[:, None], found.shape)
    if after is not None:
        before &= slot[None, None] > after[:, :, None]
    return before | found


def pack(seen: Array) -> Array:
    """bool[..., R] as i32[..., ceil(R / 32)]: bit r % 32 of word r // 32.

    >>> pack(jnp.asarray([True, False, True])).tolist()
    [5]
    """
    rows = seen.shape[-1]
    padded = jnp.pad(seen, [(0, 0)] * (seen.ndim - 1) + [(0, -rows % 32)])
    # [..., W, 32], each bit shifted to its place; a sum of different bits is their union.
    words = padded.reshape(*seen.shape[:-1], -1, 32).astype(jnp.uint32)
    bits = words << lax.broadcasted_iota(jnp.uint32, words.shape, words.ndim - 1)
    return jnp.sum(bits, axis=-1, dtype=jnp.uint32).astype(jnp.int32)
