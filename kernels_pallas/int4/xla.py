"""Products with grouped 4-bit weights, computed with XLA operations.

R rows, K inputs, N outputs, G groups of `size` inputs. Oracle: numpy in tests/kernels/test_int4.py.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from kernels_pallas.common import SUBLANES
from kernels_pallas.int4.shapes import ROWS


def dequantised(values: Array, scale: Array, offset: Array) -> Array:
    """Return the matrix f32[N, K] given by values [G, size, N], scale [G, N] and offset [G, N].

    >>> dequantised(jnp.asarray([[[1], [2]]]), jnp.asarray([[2.0]]), jnp.asarray([[1.0]])).tolist()
    [[3.0, 5.0]]
    """
    scale, offset = (x.astype(jnp.float32)[:, None] for x in (scale, offset))
    weights = values.astype(jnp.float32) * scale + offset
    return weights.reshape(-1, weights.shape[-1]).T


def dense_int4(x: Array, values: Array, scale: Array, offset: Array) -> Array:
    """Multiply group by group and scale the sums; for many rows, such as a prompt's, dequantise the matrix first."""
    row_count, (num_groups, group_size, _) = x.shape[0], values.shape
    if row_count > ROWS:
        matrix = dequantised(values, scale, offset).astype(x.dtype)
        return lax.dot_general(x, matrix, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    # A TPU would compute integer products with fewer than 8 rows outside its matrix units.
    x_groups = jnp.pad(x, ((0, -row_count % SUBLANES), (0, 0))).reshape(-1, num_groups, group_size)
    # The integers are exact in every float dtype, so scale group sums instead of weights.
    y = jnp.einsum("bgk,gkn->gbn", x_groups, values.astype(x.dtype), preferred_element_type=jnp.float32)
    # f32[G, R, 1]: the sums of x over groups, which the offsets multiply.
    x_sums = jnp.sum(x_groups.astype(jnp.float32), axis=-1).T[..., None]
    scale, offset = (per_group.astype(jnp.float32)[:, None] for per_group in (scale, offset))
    return jnp.sum(y * scale + x_sums * offset, axis=0)[:row_count]
