"""Operands and masks of tree attention: queries attend to all slots before `first` and to some of the slots after it.

Tested against masks that are built slot by slot in Python (tests/core/test_visible.py).

Dimensions: B batch, N queries, K key-value heads, G query heads per key-value head, D head dimension, S slots, R rows
of the region, W new rows.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike


class NewRows(NamedTuple):
    """Keys and values of W tokens, to be written to the slots from `slot[b]` to `slot[b] + W - 1`."""

    k: Array  # [B, W, K, D]; keys
    v: Array  # [B, W, K, D]; values
    slot: Array  # i32[B]; slot of the first token; all W slots must be inside the cache


class Operands(NamedTuple):
    """Arguments of `kernels_pallas.tree_attention`, with the defaults of `positions` and `scale` filled in."""

    q: Array  # [B, N, K, G, D]
    k: Array  # [B, S, K, D]
    v: Array  # [B, S, K, D]
    first: Array  # i32[B]
    seen: Array | None  # bool[B or 1, N, R]; None: R == N, causal
    positions: Array  # i32[B, N]
    seen_positions: Array | None  # i32[B, R]; None: the rows are the queries
    window: int | None
    cap: float | None
    scale: float
    k_scale: Array | None = None  # f32[B, S, K]
    v_scale: Array | None = None  # f32[B, S, K]
    sinks: Array | None = None  # f32[K, G]

    @property
    def product_dtype(self) -> DTypeLike:
        """Dtype of the inputs of both products: the dtype of the cache, or of the queries if the cache is int8."""
        return self.k.dtype if self.k_scale is None else self.q.dtype

    def region(self) -> tuple[Array | None, Array | None]:
        """Call the function `region` with these operands."""
        return region(self.seen, self.positions, self.seen_positions, self.window)


def region(
    seen: Array | None, positions: Array, seen_positions: Array | None, window: int | None
) -> tuple[Array | None, Array | None]:
    """Apply the sliding window to the mask of the region.

    Args:
      seen: bool[B or 1, N, R]; None: the queries are consecutive tokens with a causal mask.
      positions: i32[B, N]; positions of the queries.
      seen_positions: i32[B, R]; positions of the region's rows; None: the rows are the queries.
      window: mask keys that are `window` or more positions before the query; None: no window.

    Returns:
      The rows of the region that each query attends to, bool[B or 1, N, R], or None for a causal mask; and the last
      position before the window of each query, i32[B, N], or None without a window.
    """
    n = positions.shape[1]
    # A query sees only positions above `position - window`, so this position is the last hidden one.
    last_hidden = None
    if window is not None:
        last_hidden = positions - window
    if seen is None:
        if seen_positions is None:
            return None, last_hidden
        seen = jnp.tril(jnp.ones((n, n), bool))[None]
    if seen_positions is None:
        seen_positions = positions
    if last_hidden is not None:
        # The rows of the region may be in any order, so compare their positions instead of their slots.
        seen = seen & (seen_positions[:, None, :] > last_hidden[:, :, None])
    return seen, last_hidden


def dense_mask(first: Array, n: int, slots: int, inside: Array | None, last_hidden: Array | None) -> Array:
    """Build the mask bool[B, N, S] over all slots from the results of `region`.

    Args:
      first: i32[B]; first slot of the region.
      n: number of queries.
      slots: S, the number of slots in the cache.
      inside, last_hidden: results of `region`.
    """
    slot_ids = jnp.arange(slots, dtype=jnp.int32)
    # i32[B, S]; the row of the region that is in each slot; negative for slots before the region.
    slot_row = slot_ids[None] - first[:, None]
    if inside is None:
        # Query i is row i of the region, and attends to the slots up to `first + i`.
        sees_slot = slot_row[:, None, :] <= jnp.arange(n, dtype=jnp.int32)[None, :, None]
        # With a causal mask, positions are consecutive, so slot s contains the token at position s.
        if last_hidden is None:
            return sees_slot
        return sees_slot & (slot_ids[None, None] > last_hidden[:, :, None])
    if inside.shape[2] == slots:
        # The region is the whole cache, so `first` is 0.
        return jnp.broadcast_to(inside, (slot_row.shape[0], *inside.shape[1:]))
    # Multiply by a one-hot matrix instead of using a gather: there are only a few queries, and products are fast on
    # every platform.
    row_ids = jnp.arange(inside.shape[2], dtype=jnp.int32)
    row_in_slot = (slot_row[:, None, :] == row_ids[None, :, None]).astype(jnp.float32)
    inside = jnp.broadcast_to(inside, (row_in_slot.shape[0], *inside.shape[1:])).astype(jnp.float32)
    # Multiply [B, N, R] by [B, R, S]. Column s of the latter is the one-hot vector of the row in slot s, or 0 if the
    # slot is outside the region.
    sees_row = jnp.einsum("bnr,brs->bns", inside, row_in_slot) > 0
    sees_prefix = jnp.broadcast_to((slot_row < 0)[:, None], sees_row.shape)
    if last_hidden is not None:
        sees_prefix &= slot_ids[None, None] > last_hidden[:, :, None]
    return sees_prefix | sees_row


def pack_bits(seen: Array) -> Array:
    """Pack bool[..., R] into words i32[..., ceil(R / 32)]: element r becomes bit r % 32 of word r // 32.

    >>> pack_bits(jnp.asarray([True, False, True])).tolist()
    [5]
    """
    num_rows = seen.shape[-1]
    padded_seen = jnp.pad(seen, [(0, 0)] * (seen.ndim - 1) + [(0, -num_rows % 32)])
    # Shift each bit of [..., words, 32] to its place in the word. The bits of a word do not overlap, so add them up.
    bits_of_words = padded_seen.reshape(*seen.shape[:-1], -1, 32).astype(jnp.uint32)
    shifted = bits_of_words << lax.broadcasted_iota(jnp.uint32, bits_of_words.shape, bits_of_words.ndim - 1)
    return jnp.sum(shifted, axis=-1, dtype=jnp.uint32).astype(jnp.int32)
