"""Sums whose bits do not depend on how many are made at once. Oracle: `math.fsum`."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

_COLUMNS = 8
"""Of ones. A product with one column, or of one row, is by a vector, and its order depends on the rows as well."""


def total(x: Array) -> Array:
    """Sum x f32[..., n] over its last axis: f32[...]. On a CPU a row's sum is the same among any number of rows.

    There XLA leaves the order of a sum to LLVM, which takes another one for a few rows than for many, so that a draft's
    forward would differ in its last bits from one of a single token. A product with ones has the order of all products.

    >>> total(jnp.ones((2, 3))).tolist()
    [3.0, 3.0]
    """
    return lax.platform_dependent(x, cpu=_by_product, default=lambda x: jnp.sum(x, axis=-1))


def _by_product(x: Array) -> Array:
    ones = jnp.ones((_COLUMNS, x.shape[-1]), x.dtype)
    alone = x.size == x.shape[-1]
    rows = jnp.stack([x, x]) if alone else x
    sums = lax.dot_general(rows, ones, (((rows.ndim - 1,), (1,)), ((), ())))[..., 0]
    return sums[0] if alone else sums
