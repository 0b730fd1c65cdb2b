"""Products for rows sorted by expert, computed with XLA's ragged product.

R rows, K inner and N outer width, X experts. Oracle: each row times its matrix (tests/models/test_moe.py).
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax

_ROWS_TIMES_WEIGHTS = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
)


def ragged_product(x: Array, w: Array, sizes: Array) -> Array:
    """Multiply x [R, K] by w [X, N, K] of floats or integers: f32[R, N]. Expert e has `sizes[e]` rows."""
    # XLA converts int8 weights as it reads them; `astype` would copy all experts.
    return lax.ragged_dot_general(x, w, sizes, _ROWS_TIMES_WEIGHTS, preferred_element_type=jnp.float32)


def scaled(product: Callable[..., Array]) -> Callable[..., Array]:
    """Return a product for int8 weights: `product` multiplies the integers, and the result is scaled."""

    def scaled_product(x: Array, values: Array, scale: Array, sizes: Array) -> Array:
        # i32[R]: the expert of each row.
        expert = jnp.repeat(jnp.arange(values.shape[0]), sizes, total_repeat_length=x.shape[0])
        return product(x, values, sizes) * scale[expert]

    return scaled_product


def dense_by_expert_int8(x: Array, values: Array, scale: Array, sizes: Array) -> Array:
    """See `api.dense_by_expert_int8`."""
    return scaled(ragged_product)(x, values, scale, sizes)
