"""Key-value cache: functions that allocate it, write rows to it, and move the accepted rows of a draft tree.

Tested against a cache that is rebuilt from only the committed tokens (tests/core/test_cache.py). Dimensions: B batch, S
slots, N nodes.
"""

from __future__ import annotations

from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from mars_jax.core import struct
from mars_jax.utils.types import PyTree


@struct.dataclass
class Int8Rows:
    """Keys or values quantized symmetrically to int8, with one scale per token and head (absmax maps to 127).

    Attention always reads the quantized values, even in the step that writes them. A token therefore contributes the
    same to attention before and after it is committed.
    """

    values: Array  # i8[B, S, kv_heads, head_dim]; in [-127, 127]
    scale: Array  # f32[B, S, kv_heads]; the rows are values * scale[..., None]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def dtype(self) -> jnp.dtype:
        return self.values.dtype

    @staticmethod
    def of(rows: Array) -> Int8Rows:
        """Quantize float rows [..., head_dim]; the rounding error is at most half the scale.

        >>> rows = Int8Rows.of(jnp.asarray([[[[1.0, -0.5]]]]))
        >>> rows.values.tolist(), rows.scale.shape
        ([[[[127, -64]]]], (1, 1, 1))
        """
        float_rows = rows.astype(jnp.float32)
        # One scale per token and head, f32[..., heads], so a new token never changes the rounding of earlier ones.
        scale = jnp.max(jnp.abs(float_rows), axis=-1) / 127
        # A row of zeros has scale 0, so divide it by 1 instead.
        values = jnp.round(float_rows / jnp.where(scale == 0, 1.0, scale)[..., None])
        return Int8Rows(values=values.astype(jnp.int8), scale=scale)


Rows = Array | Int8Rows
"""Keys or values of a layer, [B, S, kv_heads, head_dim]."""


@struct.dataclass(kw_only=True)
class KVCache:
    """Keys and values per layer. Row b is valid in slots `[0, length[b] - 1)`; other slots are never read."""

    logical_axes: ClassVar[tuple[str | None, ...]] = ("rows", None, "kv_heads", None)
    """The logical axis of each dimension, which determines how a mesh shards it; see `axes.logical_axes`."""

    k: tuple[Rows, ...]  # each [B, S, kv_heads, head_dim]
    v: tuple[Rows, ...]  # same shape as k

    @property
    def slots(self) -> int:
        return self.k[0].shape[1]


def init_cache(layers: int, shape: tuple[int, int, int, int], dtype: DTypeLike) -> KVCache:
    """Allocate a cache of zeros, with keys and values of shape (batch, slots, kv_heads, head_dim) in every layer."""

    def zero_rows() -> Rows:
        zeros = jnp.zeros(shape, dtype)
        if zeros.dtype == jnp.int8:
            return Int8Rows(zeros, jnp.zeros(shape[:-1], jnp.float32))
        return zeros

    return KVCache(k=tuple(zero_rows() for _ in range(layers)), v=tuple(zero_rows() for _ in range(layers)))


def write_slots(buffer: PyTree, rows: Array, start: Array) -> PyTree:
    """Write rows [B, N, ...] to slots `start[b] .. start[b] + N - 1` of a buffer [B, S, ...], in place under jit.

    The last slot must be within the buffer. If the buffer is an `Int8Rows`, the rows are quantized first.
    """
    if isinstance(buffer, Int8Rows):
        return jax.tree.map(lambda b, r: write_slots(b, r, start), buffer, Int8Rows.of(rows))
    rows = rows.astype(buffer.dtype)
    # A batch of one row needs only one slice update, without a loop or a scatter.
    if buffer.shape[0] == 1:
        return lax.dynamic_update_slice_in_dim(buffer, rows, start[0], axis=1)
    tpu_write = _write_short if _is_short(buffer) else _write_rows
    return lax.platform_dependent(buffer, rows, start, cpu=_write_slices, tpu=tpu_write, default=_write_rows)


def _write_slices(buffer: Array, rows: Array, start: Array) -> Array:
    """Write one slice per batch row, in a loop."""
    return jax.vmap(lambda b, r, s: lax.dynamic_update_slice_in_dim(b, r, s, axis=0))(buffer, rows, start)


def _write_rows(buffer: Array, rows: Array, start: Array) -> Array:
    """Write B * N rows with one scatter, because slice updates would become a loop over the batch on a TPU."""
    # Node i of row b is written to buffer[b, start[b] + i]. These indices are unique and sorted, as the flags below
    # state.
    batch_row = jnp.arange(rows.shape[0], dtype=jnp.int32)[:, None]
    slot = start[:, None] + jnp.arange(rows.shape[1], dtype=jnp.int32)[None]
    return buffer.at[batch_row, slot].set(
        rows, unique_indices=True, indices_are_sorted=True, mode="promise_in_bounds"
    )


def _is_short(buffer: Array) -> bool:
    """Return True if each token has fewer values than a TPU has lanes (128); the scales of int8 rows are an example.

    A scatter or gather of such rows would pad each of them to 128 lanes and copy the whole buffer into that layout. A
    select over all slots keeps the layout that attention reads, with the slots along the lanes.
    """
    return buffer.ndim == 3 and buffer.shape[2] < 128


def _write_short(buffer: Array, rows: Array, start: Array) -> Array:
    slot = start[:, None] + jnp.arange(rows.shape[1], dtype=jnp.int32)[None]
    # Rewrite every slot of the buffer with a select, which is cheap because the rows are short. At most one node is
    # written to each slot, so the sum over nodes has at most one nonzero term and is exact.
    is_target = _one_hot(buffer, slot)
    written_rows = jnp.sum(jnp.where(is_target, rows[:, :, None], 0), axis=1, dtype=buffer.dtype)
    return jnp.where(jnp.any(is_target, axis=1), written_rows, buffer)


def _take_short(buffer: Array, slot: Array) -> Array:
    return jnp.sum(jnp.where(_one_hot(buffer, slot), buffer[:, None], 0), axis=2, dtype=buffer.dtype)


def _take_rows(buffer: Array, slot: Array) -> Array:
    return jax.vmap(lambda b, s: b.at[s].get(mode="promise_in_bounds"))(buffer, slot)


def _one_hot(buffer: Array, slot: Array) -> Array:
    """Return the one-hot encoding of `slot` i32[B, N] over the S slots of the buffer, as bool[B, N, S, 1]."""
    return (slot[..., None] == jnp.arange(buffer.shape[1], dtype=jnp.int32)[None, None])[..., None]


def slots(cache: PyTree) -> int:
    """Return S, the number of slots of a cache. Every leaf must be [B, S, ...], as in all functions of this module.

    >>> slots(init_cache(1, (2, 8, 1, 4), jnp.float32))
    8
    """
    return jax.tree.leaves(cache)[0].shape[1]


def commit_path(cache: PyTree, start: Array, path: Array) -> PyTree:
    """Move the cache rows of the accepted path to consecutive slots, as if the draft had been a chain.

    The forward pass wrote node j to slot `start + j`, but the node at depth d of the path belongs in slot `start + d`.
    The root is already in place, so at most D rows move. Keys were rotated by their final position, `start + depth`, so
    moved rows need no correction. Slots past the accepted depth contain garbage that is never read.

    Args:
      cache: the cache after the forward pass over the tree; every leaf is [B, S, ...].
      start: i32[B]; slot of the root.
      path: i32[B, D + 1]; node ids from the root.
    """
    # i32[B, D]: entry d is the current slot of the path's node at depth d + 1. All rows are read before any is written.
    # Past the accepted depth, the path repeats its last node, and the next step overwrites the copies of this node.
    source_slots = start[:, None] + path[:, 1:]

    def move(buffer: Array) -> Array:
        tpu = _take_short if _is_short(buffer) else _take_rows
        moved_rows = lax.platform_dependent(buffer, source_slots, tpu=tpu, default=_take_rows)
        return write_slots(buffer, moved_rows, start + 1)

    return jax.tree.map(move, cache)


def put_rows(cache: PyTree, rows: Array, new: PyTree) -> PyTree:
    """Replace the batch rows `rows` i32[b] of a cache with those of `new`, in place under jit.

    The first axis of every leaf is the batch. Row numbers must be unique. Rows of `new` with a number >= B are dropped.

    >>> old, new = jnp.zeros((3, 2)), jnp.ones((2, 2))
    >>> put_rows(old, jnp.asarray([2, 3]), new)[:, 0].tolist()
    [0.0, 0.0, 1.0]
    """
    return jax.tree.map(lambda a, b: a.at[rows].set(b, mode="drop"), cache, new)
