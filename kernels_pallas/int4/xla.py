"""Matrix products with grouped 4-bit weights, computed with XLA operations.

Tested against numpy (tests/kernels/test_int4.py). Dimensions: R rows, K inputs, N outputs, G groups of `size` inputs.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from kernels_pallas.common import SUBLANES
from kernels_pallas.int4.shapes import ROWS


def dequantised(values: Array, scale: Array, offset: Array) -> Array:
    """Dequantise values [G, size, N] with scale [G, N] and offset [G, N]; return the matrix f32[N, K].

    >>> dequantised(jnp.asarray([[[1], [2]]]), jnp.asarray([[2.0]]), jnp.asarray([[1.0]])).tolist()
    [[3.0, 5.0]]
    """
    scale, offset = (x.astype(jnp.float32)[:, None] for x in (scale, offset))
    weights = values.astype(jnp.float32) * scale + offset
    return weights.reshape(-1, weights.shape[-1]).T


def dense_int4(x: Array, values: Array, scale: Array, offset: Array) -> Array:
    """Multiply x [R, K] by a matrix of 4-bit weights; return f32[R, N].

    If x has only a few rows, compute one product per group and scale the results. If it has many, as in prefill,
    dequantise the matrix first.
    """
    row_count, (num_groups, group_size, _) = x.shape[0], values.shape
    if row_count > ROWS:
        matrix = dequantised(values, scale, offset).astype(x.dtype)
        return lax.dot_general(x, matrix, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    # Pad to a multiple of 8 rows, because a TPU multiplies fewer than 8 rows without its matrix units.
    x_groups = jnp.pad(x, ((0, -row_count % SUBLANES), (0, 0))).reshape(-1, num_groups, group_size)
    # bfloat16 and float32 represent 4-bit integers exactly, so multiply by the integers and scale each group's sums.
    y = jnp.einsum("bgk,gkn->gbn", x_groups, values.astype(x.dtype), preferred_element_type=jnp.float32)
    # f32[G, R, 1]; sums of x over groups, which are multiplied by the offsets.
    x_sums = jnp.sum(x_groups.astype(jnp.float32), axis=-1).T[..., None]
    scale, offset = (per_group.astype(jnp.float32)[:, None] for per_group in (scale, offset))
    return jnp.sum(y * scale + x_sums * offset, axis=0)[:row_count]
