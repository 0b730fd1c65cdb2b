"""Sums whose bits do not depend on the number of rows. Oracle: `math.fsum`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax


def total(x: Array) -> Array:
    """Sum x f32[..., n] over its last axis: f32[...]. On a CPU, a row's sum does not depend on the number of rows.

    On a CPU, XLA leaves the order of a sum to LLVM, whose order depends on the number of rows. The forward of a draft
    would then differ in its last bits from the forward of a single token. A matrix product with ones has no fixed
    order either.

    >>> total(jnp.ones((2, 3))).tolist()
    [3.0, 3.0]
    """
    return lax.platform_dependent(x, cpu=_by_halves, default=_sum)


def _sum(x: Array) -> Array:
    return jnp.sum(x, axis=-1)


@jax.custom_jvp
def _by_halves(x: Array) -> Array:
    """Add the second half to the first until one value remains; explicit additions are never reordered."""
    while (width := x.shape[-1]) > 1:
        half = (width + 1) // 2
        second = x[..., half:]
        if width % 2:
            second = jnp.pad(second, [(0, 0)] * (x.ndim - 1) + [(0, 1)])
        x = x[..., :half] + second
    return x[..., 0]


@_by_halves.defjvp
def _by_halves_jvp(primals, tangents):
    # A sum is linear, so its tangent is a plain sum; transposing the slices would produce a chain of pads.
    return _by_halves(*primals), _sum(*tangents)
