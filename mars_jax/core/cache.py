"""Key-value cache: allocate, write the rows of one forward, move the accepted rows of a tree.

Oracle: a cache rebuilt from the committed tokens alone (tests/core/test_cache.py). B batch, S slots, N nodes.
"""

from __future__ import annotations

from typing import Any, ClassVar

import flax.struct
import jax
import jax.numpy as jnp
from jax import Array, lax


@flax.struct.dataclass(kw_only=True)
class KVCache:
    """Keys and values per layer. Row b is valid in slots `[0, length[b] - 1)`; the rest is never read."""

    logical_axes: ClassVar[tuple[str | None, ...]] = ("rows", None, "kv_heads", None)
    """How each array is divided over a mesh; see `mesh.logical_axes`."""

    k: tuple[Array, ...]  # each [B, S, kv_heads, head_dim]
    v: tuple[Array, ...]

    @property
    def slots(self) -> int:
        return self.k[0].shape[1]


def init_cache(*, layers: int, batch: int, slots: int, kv_heads: int, head_dim: int, dtype) -> KVCache:
    """An empty cache of `layers` pairs of [batch, slots, kv_heads, head_dim]."""
    shape = (batch, slots, kv_heads, head_dim)
    return KVCache(
        k=tuple(jnp.zeros(shape, dtype) for _ in range(layers)),
        v=tuple(jnp.zeros(shape, dtype) for _ in range(layers)),
    )


def write(buffer: Array, rows: Array, start: Array) -> Array:
    """Write rows [B, N, ...] into buffer [B, S, ...] at slots `start[b] .. start[b] + N - 1`, in place under jit."""
    return jax.vmap(lambda b, r, s: lax.dynamic_update_slice_in_dim(b, r, s, axis=0))(
        buffer, rows.astype(buffer.dtype), start
    )


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
    source = start[:, None] + path[:, 1:]

    def move(buffer: Array) -> Array:
        rows = jax.vmap(lambda b, s: b[s])(buffer, source)
        return write(buffer, rows, start + 1)

    return jax.tree.map(move, cache)


def select(rows: Array, new: Any, old: Any) -> Any:
    """The cache `new` in the rows bool[B] that are True, and `old` in the others; every leaf [B, S, ...].

    >>> old, new = jnp.zeros((2, 3)), jnp.ones((2, 3))
    >>> select(jnp.asarray([True, False]), new, old)[:, 0].tolist()
    [1.0, 0.0]
    """

    def choose(a: Array, b: Array) -> Array:
        return jnp.where(rows.reshape((-1,) + (1,) * (a.ndim - 1)), a, b)

    return jax.tree.map(choose, new, old)
