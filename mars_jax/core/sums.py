"""Sums whose rounding does not depend on the number of rows. Tested against `math.fsum`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax


def total(x: Array) -> Array:
    """Sum `x` f32[..., n] over its last axis, so that on a CPU the rounding does not depend on the number of rows.

    On a CPU, LLVM chooses the order of the additions in an XLA sum, and this order depends on the number of rows. With
    XLA sums, a forward pass over a draft would differ in its last bits from a forward pass over one token. A matrix
    product with a vector of ones does not have a fixed order of summation either.

    >>> total(jnp.ones((2, 3))).tolist()
    [3.0, 3.0]
    """
    return lax.platform_dependent(x, cpu=_by_halves, default=_sum)


def _sum(x: Array) -> Array:
    return jnp.sum(x, axis=-1)


@jax.custom_jvp
def _by_halves(x: Array) -> Array:
    """Add the second half to the first repeatedly, until one value remains. The compiler keeps this order."""
    while (width := x.shape[-1]) > 1:
        half = (width + 1) // 2
        second = x[..., half:]
        if width % 2:
            second = jnp.pad(second, [(0, 0)] * (x.ndim - 1) + [(0, 1)])
        x = x[..., :half] + second
    return x[..., 0]


@_by_halves.defjvp
def _by_halves_jvp(primals, tangents):
    # A sum is linear, so the tangent of the sum is the sum of the tangents. The default derivative would transpose the
    # slices above into a chain of pads.
    return _by_halves(*primals), _sum(*tangents)
