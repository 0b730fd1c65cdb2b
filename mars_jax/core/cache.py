"""Key-value cache: allocate, write the rows of one forward, move the accepted rows of a tree.

Oracle: a cache rebuilt from the committed tokens alone (tests/core/test_cache.py). B batch, S slots, N nodes.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax

from mars_jax.core.types import KVCache


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


def commit(cache: KVCache, start: Array, path: Array) -> KVCache:
    """Move the rows of the accepted path to where a chain would have put them.

    Node j was written to slot `start + j`; the node at depth d of the path must end in slot `start + d`. The
    root is in place already, so at most D rows move. Keys were rotated at position `start + depth`, so a moved
    row needs no correction. Rows past the accepted depth are garbage that nothing reads.

    Args:
      cache: the cache after the tree's forward.
      start: i32[B]; slot of the root.
      path: i32[B, D + 1]; node ids from the root.
    """
    source = start[:, None] + path[:, 1:]

    def move(buffer: Array) -> Array:
        rows = jax.vmap(lambda b, s: b[s])(buffer, source)
        return write(buffer, rows, start + 1)

    return KVCache(k=tuple(map(move, cache.k)), v=tuple(map(move, cache.v)))
