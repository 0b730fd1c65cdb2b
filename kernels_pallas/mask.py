"""Masks of queries that attend to all slots before `first`, and to some rows of a region from there on.

B batch, N queries, R rows of the region, S slots. Oracle: masks built slot by slot in Python
(tests/core/test_visible.py).
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax


def region(
    seen: Array | None, positions: Array, seen_positions: Array | None, window: int | None
) -> tuple[Array | None, Array | None]:
    """Apply the window to the visibility of the region.

    Args:
      seen: bool[B or 1, N, R]; None: the queries are consecutive tokens with a causal mask.
      positions: i32[B, N]; of the queries.
      seen_positions: i32[B, R]; of the region's rows; None: the rows are the queries.
      window: hide keys `window` or more positions before the query; None: hide none.

    Returns:
      The rows of the region that each query sees, bool[B or 1, N, R], or None for the causal mask of consecutive
      queries; and the last position that the window of each query hides, i32[B, N], or None without a window.
    """
    n = positions.shape[1]
    # A key at position p is seen if p > position - window, so `position - window` is the last hidden position.
    last_hidden = None if window is None else positions - window
    if seen is None and seen_positions is None:
        return None, last_hidden
    if seen is None:
        seen = jnp.tril(jnp.ones((n, n), bool))[None]
    if last_hidden is not None:
        rows = positions if seen_positions is None else seen_positions
        seen = seen & (rows[:, None, :] > last_hidden[:, :, None])
    return seen, last_hidden


def dense(first: Array, n: int, slots: int, inside: Array | None, after: Array | None) -> Array:
    """Return the mask bool[B, N, S] over all slots from the results of `region`."""
    slot = jnp.arange(slots, dtype=jnp.int32)
    offset = slot[None] - first[:, None]  # i32[B, S]: the row that each slot holds
    if inside is None:
        # Query i is row i and sees slots up to its own, `first + i`.
        sees_slot = offset[:, None, :] <= jnp.arange(n, dtype=jnp.int32)[None, :, None]
        # The queries are consecutive, so slot s holds the token at position s.
        return sees_slot if after is None else sees_slot & (slot[None, None] > after[:, :, None])
    # Multiply by a one-hot matrix instead of gathering: there are few queries, and products are fast on every platform.
    if inside.shape[2] == slots:  # then `first` is 0
        return jnp.broadcast_to(inside, (offset.shape[0], *inside.shape[1:]))
    rows = jnp.arange(inside.shape[2], dtype=jnp.int32)
    one_hot = (offset[:, None, :] == rows[None, :, None]).astype(jnp.float32)
    inside = jnp.broadcast_to(inside, (one_hot.shape[0], *inside.shape[1:])).astype(jnp.float32)
    # [B, N, R] by [B, R, S]: column s is the one-hot of the row in slot s, or 0 if the slot is outside the region.
    sees_row = jnp.einsum("bnr,brs->bns", inside, one_hot) > 0
    sees_prefix = jnp.broadcast_to((offset < 0)[:, None], sees_row.shape)
    if after is not None:
        sees_prefix &= slot[None, None] > after[:, :, None]
    return sees_prefix | sees_row


def pack(seen: Array) -> Array:
    """Pack bool[..., R] into i32[..., ceil(R / 32)]: element r is bit r % 32 of word r // 32.

    >>> pack(jnp.asarray([True, False, True])).tolist()
    [5]
    """
    rows = seen.shape[-1]
    padded = jnp.pad(seen, [(0, 0)] * (seen.ndim - 1) + [(0, -rows % 32)])
    # [..., W, 32], each bit shifted to its place. The bits are distinct, so their sum is their union.
    words = padded.reshape(*seen.shape[:-1], -1, 32).astype(jnp.uint32)
    bits = words << lax.broadcasted_iota(jnp.uint32, words.shape, words.ndim - 1)
    return jnp.sum(bits, axis=-1, dtype=jnp.uint32).astype(jnp.int32)
