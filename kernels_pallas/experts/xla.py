"""Matrix products of rows sorted by expert, computed with XLA's ragged product.

Tested against the product of each row with its expert's matrix (tests/models/test_moe.py).

Dimensions: R rows, K inputs, N outputs, X experts.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax

BLOCK = 32
"""Number of inputs that share a scale in MXFP4."""

_ROWS_TIMES_WEIGHTS = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
)


def ragged_product(x: Array, w: Array, sizes: Array) -> Array:
    """Multiply the rows of x [R, K] by their experts' matrices w [X, N, K], floats or integers; return f32[R, N].

    The rows are sorted by expert, and expert e has `sizes[e]` rows.
    """
    # Pass int8 weights without `astype`, which would copy all experts. XLA converts them while it reads them.
    return lax.ragged_dot_general(x, w, sizes, _ROWS_TIMES_WEIGHTS, preferred_element_type=jnp.float32)


def scaled(product: Callable[..., Array]) -> Callable[..., Array]:
    """Return a function that multiplies by int8 weights: it calls `product` on the integers and scales the result."""

    def scaled_product(x: Array, values: Array, scale: Array, sizes: Array) -> Array:
        # i32[R]; expert of each row.
        expert = jnp.repeat(jnp.arange(values.shape[0]), sizes, total_repeat_length=x.shape[0])
        return product(x, values, sizes) * scale[expert]

    return scaled_product


def dense_by_expert_int8(x: Array, values: Array, scale: Array, sizes: Array) -> Array:
    """Multiply the rows of x [R, K] by their experts' int8 matrices; return f32[R, N].

    The matrices are values i8[X, N, K] times scale f32[X, N]. The rows are sorted by expert, and expert e has
    `sizes[e]` rows. The results of rows after the first `sum(sizes)` rows are undefined.
    """
    return scaled(ragged_product)(x, values, scale, sizes)


def dequantised_mxfp4(values: Array, scale: Array) -> Array:
    """Dequantise MXFP4 matrices, values u8[..., N, K / 2] and scale u8[..., N, K / 32], to f32[..., N, K].

    See `models.quantize.Mxfp4` for the format. The result is exact for exponents from 1 to 254.

    >>> dequantised_mxfp4(jnp.full((1, 16), 0xA7, jnp.uint8), jnp.asarray([[128]], jnp.uint8))[0, :2].tolist()
    [12.0, -2.0]
    """
    codes = jnp.stack([values & 15, values >> 4], axis=-1).astype(jnp.int32)
    numbers = mxfp4_numbers(codes).reshape(*scale.shape, BLOCK)
    return (numbers * mxfp4_powers(scale)[..., None]).reshape(*values.shape[:-1], -1)


def mxfp4_numbers(codes: Array) -> Array:
    """Convert E2M1 codes i32[...], a sign bit and an index into (0, 0.5, 1, 1.5, 2, 3, 4, 6), to f32[...]."""
    count = codes & 7
    halves = (count + jnp.maximum(count, 4) + 2 * jnp.maximum(count, 6) - 16).astype(jnp.float32)
    return jnp.where(codes > 7, -halves, halves) * 0.5


def mxfp4_powers(scale: Array) -> Array:
    """Convert E8M0 exponents u8[...] to powers of two f32[...]. As in float32, an exponent of 127 represents 1."""
    return lax.bitcast_convert_type(scale.astype(jnp.int32) << 23, jnp.float32)


def dense_by_expert_mxfp4(x: Array, values: Array, scale: Array, sizes: Array) -> Array:
    """Multiply the rows of x [R, K] by their experts' MXFP4 matrices; return f32[R, N].

    The matrices are values u8[X, N, K / 2] with scale u8[X, N, K / 32]. The rows are sorted by expert, and expert e has
    `sizes[e]` rows.
    """
    return ragged_product(x, dequantised_mxfp4(values, scale).astype(x.dtype), sizes)
