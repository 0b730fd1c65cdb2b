"""Attention over all slots with XLA operations, and the scatter of new rows into the cache.

Tested against `reference.tree_attention`.

Dimensions: B batch, N queries, K key-value heads, G query heads per key-value head, D head dimension, S slots.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from kernels_pallas.common import LOWEST
from kernels_pallas.tree_attention.operands import NewRows, Operands, dense_mask


def tree_attention(operands: Operands) -> Array:
    """Compute `kernels_pallas.tree_attention` over all slots of the cache at once, in the dtype of keys and values.

    The scales of an int8 cache are applied to the scores and weights, which avoids a copy of the cache in a wider
    dtype.
    """
    q, k, v, cap = operands.q, operands.k, operands.v, operands.cap
    mask = dense_mask(operands.first, q.shape[1], k.shape[1], *operands.region())
    dtype = operands.product_dtype

    # Reshape f32[B, S, K] to f32[B, K, 1, 1, S], to multiply scores [B, K, G, N, S].
    def per_slot(x: Array) -> Array:
        return jnp.transpose(x, (0, 2, 1))[:, :, None, None]

    scores = jnp.einsum(
        "bnkgd,bskd->bkgns", q.astype(dtype), k.astype(dtype), preferred_element_type=jnp.float32
    )
    scores = scores * operands.scale
    if operands.k_scale is not None:
        scores = scores * per_slot(operands.k_scale)
    if cap is not None:
        scores = cap * jnp.tanh(scores / cap)
    # f32[B, K, G, N, S]; if a query attends to no slot, its scores are all -inf. Subtract LOWEST from them, because
    # subtracting their maximum would result in NaN.
    scores = jnp.where(mask[:, None, None], scores, -jnp.inf)
    lowest, sinks = LOWEST, operands.sinks
    if sinks is not None:
        lowest = sinks = sinks[None, :, :, None, None]
    top_score = jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), lowest)
    weights = jnp.exp(scores - top_score)
    weight_sum = jnp.sum(weights, axis=-1)
    if sinks is not None:
        weight_sum += jnp.exp(sinks - top_score)[..., 0]
    # Apply the scales of the values only after summing the weights: the softmax denominator must not include them.
    if operands.v_scale is not None:
        weights = weights * per_slot(operands.v_scale)
    weighted_values = jnp.einsum(
        "bkgns,bskd->bkgnd", weights.astype(dtype), v.astype(dtype), preferred_element_type=jnp.float32
    )
    # Divide after the sum over slots, which takes N * D divisions instead of N * S.
    weighted_values = weighted_values / jnp.where(weight_sum == 0, 1.0, weight_sum)[..., None]
    return jnp.transpose(weighted_values, (0, 3, 1, 2, 4)).astype(q.dtype)


def write_new_rows(k: Array, v: Array, new: NewRows) -> tuple[Array, Array]:
    """Write the new rows to both caches [B, S, K, D], with one scatter each; return the updated caches.

    The rows are cast to the dtype of the cache.

    >>> cache, rows = jnp.zeros((1, 4, 1, 1)), jnp.ones((1, 2, 1, 1))
    >>> write_new_rows(cache, cache, NewRows(rows, rows, jnp.asarray([1])))[0].ravel().tolist()
    [0.0, 1.0, 1.0, 0.0]
    """
    # Batch row b writes its W rows to the slots from `slot[b]` to `slot[b] + W - 1`.
    batch_row = jnp.arange(k.shape[0], dtype=jnp.int32)[:, None]
    slot = new.slot[:, None] + jnp.arange(new.k.shape[1], dtype=jnp.int32)[None]
    caches = [
        cache.at[batch_row, slot].set(
            rows.astype(cache.dtype), unique_indices=True, indices_are_sorted=True, mode="promise_in_bounds"
        )
        for cache, rows in ((k, new.k), (v, new.v))
    ]
    return caches[0], caches[1]
