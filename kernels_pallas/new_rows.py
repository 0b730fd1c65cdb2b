"""New rows of a key-value cache, and the XLA form of writing them.

B batch, W new rows, K heads, D head dimension, S slots.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array


class NewRows(NamedTuple):
    """Keys and values of W tokens for slots `slot[b] .. slot[b] + W - 1`."""

    k: Array  # [B, W, K, D]; keys
    v: Array  # [B, W, K, D]; values
    slot: Array  # i32[B]; slot of the first token; all W slots are inside the cache


def written(k: Array, v: Array, new: NewRows) -> tuple[Array, Array]:
    """Return the caches [B, S, K, D] with the new rows written in the cache's dtype, with one scatter each.

    >>> cache, rows = jnp.zeros((1, 4, 1, 1)), jnp.ones((1, 2, 1, 1))
    >>> written(cache, cache, NewRows(rows, rows, jnp.asarray([1])))[0].ravel().tolist()
    [0.0, 1.0, 1.0, 0.0]
    """
    row = jnp.arange(k.shape[0], dtype=jnp.int32)[:, None]
    slot = new.slot[:, None] + jnp.arange(new.k.shape[1], dtype=jnp.int32)[None]
    caches = [
        cache.at[row, slot].set(
            rows.astype(cache.dtype),
            unique_indices=True,
            indices_are_sorted=True,
            mode="promise_in_bounds",
        )
        for cache, rows in ((k, new.k), (v, new.v))
    ]
    return caches[0], caches[1]
