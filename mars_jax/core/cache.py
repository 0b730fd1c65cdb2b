"""Key-value cache: allocate, write the rows of one forward, move the accepted rows of a tree.

Oracle: a cache rebuilt from the committed tokens alone (tests/core/test_cache.py). B batch, S slots, N nodes.
"""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from mars_jax.core import struct


@struct.dataclass
class Int8Rows:
    """Keys or values in 8 bits: symmetric, each token and head with the largest of its numbers at 127.

    Every reader gets the rounded numbers, in the step that writes them too. So a token means the same while it is a
    node of a draft and when it is committed.
    """

    values: Array  # i8[B, S, kv_heads, head_dim]; in [-127, 127]
    scale: Array  # f32[B, S, kv_heads]; the rows are values * scale[..., None]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def dtype(self) -> Any:
        return self.values.dtype

    @staticmethod
    def of(rows: Array) -> Int8Rows:
        """Rows [..., head_dim] of floats in 8 bits; no number moves by more than half of its scale.

        >>> made = Int8Rows.of(jnp.asarray([[[[1.0, -0.5]]]]))
        >>> made.values.tolist(), made.scale.shape
        ([[[[127, -64]]]], (1, 1, 1))
        """
        wide = rows.astype(jnp.float32)
        # One scale per token and head, f32[..., heads]: a new token never changes what others are rounded to.
        scale = jnp.max(jnp.abs(wide), axis=-1) / 127
        # A row of zeros has the scale 0 and stays 0 whatever it is divided by.
        values = jnp.round(wide / jnp.where(scale == 0, 1.0, scale)[..., None])
        return Int8Rows(values=values.astype(jnp.int8), scale=scale)


Rows = Array | Int8Rows
"""Keys or values of a layer, [B, S, kv_heads, head_dim]."""


@struct.dataclass(kw_only=True)
class KVCache:
    """Keys and values per layer. Row b is valid in slots `[0, length[b] - 1)`; the rest is never read."""

    logical_axes: ClassVar[tuple[str | None, ...]] = ("rows", None, "kv_heads", None)
    """The logical axis of each dimension, which says how a mesh divides it; see `mesh.logical_axes`."""

    k: tuple[Rows, ...]  # each [B, S, kv_heads, head_dim]
    v: tuple[Rows, ...]  # as k

    @property
    def slots(self) -> int:
        return self.k[0].shape[1]


def init_cache(*, layers: int, batch: int, slots: int, kv_heads: int, head_dim: int, dtype) -> KVCache:
    """An empty cache of `layers` pairs of [batch, slots, kv_heads, head_dim]; of `Int8Rows` where dtype is int8."""
    shape = (batch, slots, kv_heads, head_dim)

    def empty() -> Rows:
        zeros = jnp.zeros(shape, dtype)
        return zeros if zeros.dtype != jnp.int8 else Int8Rows(zeros, jnp.zeros(shape[:-1], jnp.float32))

    return KVCache(k=tuple(empty() for _ in range(layers)), v=tuple(empty() for _ in range(layers)))


def write(buffer: Any, rows: Array, start: Array) -> Any:
    """Write rows [B, N, ...] into buffer [B, S, ...] at slots `start[b] .. start[b] + N - 1`, in place under jit.

    All of them are slots of the buffer, an array or `Int8Rows`, which rounds what it is given.
    """
    if isinstance(buffer, Int8Rows):
        return jax.tree.map(lambda b, r: write(b, r, start), buffer, Int8Rows.of(rows))
    rows = rows.astype(buffer.dtype)
    if buffer.shape[0] == 1:  # the same on every platform, and without a loop or a scatter
        return lax.dynamic_update_slice_in_dim(buffer, rows, start[0], axis=1)
    tpu = _write_short if _is_short(buffer) else _write_rows
    return lax.platform_dependent(buffer, rows, start, cpu=_write_slices, tpu=tpu, default=_write_rows)


def _write_slices(buffer: Array, rows: Array, start: Array) -> Array:
    """A copy per row of the batch, in a loop."""
    return jax.vmap(lambda b, r, s: lax.dynamic_update_slice_in_dim(b, r, s, axis=0))(buffer, rows, start)


def _write_rows(buffer: Array, rows: Array, start: Array) -> Array:
    """One scatter of B * N rows; of slices a TPU would make a loop over the batch."""
    row = jnp.arange(rows.shape[0], dtype=jnp.int32)[:, None]
    slot = start[:, None] + jnp.arange(rows.shape[1], dtype=jnp.int32)[None]
    return buffer.at[row, slot].set(
        rows, unique_indices=True, indices_are_sorted=True, mode="promise_in_bounds"
    )


def _is_short(buffer: Array) -> bool:
    """Tell whether rows are shorter than a TPU's 128 lanes, as the scales of a token's heads are.

    A scatter or a gather of rows has them in the lanes, padded, and would copy the whole buffer to that. A select over
    all slots has the slots there, as the buffer is stored and attention reads it.
    """
    return buffer.ndim == 3 and buffer.shape[2] < 128


def _write_short(buffer: Array, rows: Array, start: Array) -> Array:
    slot = start[:, None] + jnp.arange(rows.shape[1], dtype=jnp.int32)[None]
    there = _at(buffer, slot)
    found = jnp.sum(jnp.where(there, rows[:, :, None], 0), axis=1, dtype=buffer.dtype)
    return jnp.where(jnp.any(there, axis=1), found, buffer)


def _take_short(buffer: Array, slot: Array) -> Array:
    return jnp.sum(jnp.where(_at(buffer, slot), buffer[:, None], 0), axis=2, dtype=buffer.dtype)


def _take_rows(buffer: Array, slot: Array) -> Array:
    return jax.vmap(lambda b, s: b.at[s].get(mode="promise_in_bounds"))(buffer, slot)


def _at(buffer: Array, slot: Array) -> Array:
    """bool[B, N, S, 1]: which of the slots each of slot i32[B, N] is."""
    return (slot[..., None] == jnp.arange(buffer.shape[1], dtype=jnp.int32)[None, None])[..., None]


def slots(cache: Any) -> int:
    """S of a cache whose every leaf is [B, S, ...], which is what these functions take.

    >>> slots(init_cache(layers=1, batch=2, slots=8, kv_heads=1, head_dim=4, dtype=jnp.float32))
    8
    """
    return jax.tree.leaves(cache)[0].shape[1]


def commit(cache: Any, start: Array, path: Array) -> Any:
    """Move the rows of the accepted path to where a chain would have put them.

    Node j was written to slot `start + j`; the node at depth d of the path must end in slot `start + d`. The
    root is in place already, so at most D rows move. Keys were rotated at position `start + depth`, so a moved
    row needs no correction. Rows past the accepted depth are garbage that nothing reads.

    Args:
      cache: the cache after the tree's forward; every leaf [B, S, ...].
      start: i32[B]; slot of the root.
      path: i32[B, D + 1]; node ids from the root.
    """
    # i32[B, D]: the slot of the node at depth d + 1. All rows are read before any is written. Past the accepted depth
    # the path repeats its last node, and those copies go to slots that the next step writes again.
    source = start[:, None] + path[:, 1:]

    def move(buffer: Array) -> Array:
        tpu = _take_short if _is_short(buffer) else _take_rows
        rows = lax.platform_dependent(buffer, source, tpu=tpu, default=_take_rows)
        return write(buffer, rows, start + 1)

    return jax.tree.map(move, cache)


def put(cache: Any, rows: Array, new: Any) -> Any:
    """The cache with the rows i32[b] replaced by those of `new`, in place under jit; every leaf begins with the rows.

    An entry of B or more is dropped, and no row is named twice.

    >>> old, new = jnp.zeros((3, 2)), jnp.ones((2, 2))
    >>> put(old, jnp.asarray([2, 3]), new)[:, 0].tolist()
    [0.0, 0.0, 1.0]
    """
    return jax.tree.map(lambda a, b: a.at[rows].set(b, mode="drop"), cache, new)
