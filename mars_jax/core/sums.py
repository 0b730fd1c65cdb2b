"""Sums whose bits do not depend on how many are made at once. Oracle: `math.fsum`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax


def total(x: Array) -> Array:
    """Sum x f32[..., n] over its last axis: f32[...]. On a CPU a row's sum is the same among any number of rows.

    There XLA leaves the order of a sum to LLVM, which takes another one for a few rows than for many, so that a draft's
    forward would differ in its last bits from one of a single token. A product with ones has no fixed order either.

    >>> total(jnp.ones((2, 3))).tolist()
    [3.0, 3.0]
    """
    return lax.platform_dependent(x, cpu=_by_halves, default=_sum)


def _sum(x: Array) -> Array:
    return jnp.sum(x, axis=-1)


@jax.custom_jvp
def _by_halves(x: Array) -> Array:
    """Add the second half to the first until one is left: additions that are written out stay in their order."""
    while (width := x.shape[-1]) > 1:
        half = -(-width // 2)
        rest = x[..., half:]
        x = x[..., :half] + (jnp.pad(rest, [(0, 0)] * (x.ndim - 1) + [(0, 1)]) if width % 2 else rest)
    return x[..., 0]


@_by_halves.defjvp
def _by_halves_jvp(primals, tangents):
    # A sum is linear, and the transpose of slices would be a chain of paddings.
    return _by_halves(*primals), _sum(*tangents)
