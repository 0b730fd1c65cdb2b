"""Values at places, row by row, in the form that a platform is good at.

Oracle: `jnp.take_along_axis` (tests/core/test_pick.py). B batch, M values of a row, P places.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import Array, lax

SMALL = 1 << 16
"""Comparisons of a row up to which a TPU picks by comparing. A gather goes there element by element, and with what
prepares its indices it is four instructions where the comparison is part of one."""


def pick(values: Array, places: Array) -> Array:
    """values [B, M, ...] at places i32[B, P], each in [0, M): [B, P, ...].

    >>> pick(jnp.asarray([[5, 6, 7]]), jnp.asarray([[2, 0]])).tolist()
    [[7, 5]]
    """
    if places.shape[1] * math.prod(values.shape[1:]) > SMALL:
        return _gather(values, places)
    return lax.platform_dependent(values, places, cpu=_gather, default=_compare)


def _gather(values: Array, places: Array) -> Array:
    return jax.vmap(lambda row, at: row.at[at].get(mode="promise_in_bounds"))(values, places)


def _compare(values: Array, places: Array) -> Array:
    here = places[:, :, None] == jnp.arange(values.shape[1], dtype=places.dtype)[None, None]
    here = here.reshape(here.shape + (1,) * (values.ndim - 2))
    if values.dtype == bool:
        return jnp.any(here & values[:, None], axis=2)
    # One term of each sum is no zero, so that the value comes out as it is, also where others are no numbers.
    return jnp.sum(jnp.where(here, values[:, None], 0), axis=2, dtype=values.dtype)


def put(size: int, places: Array, values: Array) -> Array:
    """[B, size]: values [B, P] of integers at places i32[B, P], all different and in [0, size), and 0 elsewhere.

    >>> put(4, jnp.asarray([[2, 0]]), jnp.asarray([[7, 5]])).tolist()
    [[5, 0, 7, 0]]
    """

    scatter, compare = (functools.partial(form, size=size) for form in (_scatter, _compare_put))
    if size * places.shape[1] > SMALL:
        return scatter(places, values)
    return lax.platform_dependent(places, values, cpu=scatter, default=compare)


def _scatter(places: Array, values: Array, size: int) -> Array:
    empty = jnp.zeros((places.shape[0], size), values.dtype)
    return jax.vmap(lambda row, at, new: row.at[at].set(new, unique_indices=True))(empty, places, values)


def _compare_put(places: Array, values: Array, size: int) -> Array:
    here = places[:, None, :] == jnp.arange(size, dtype=places.dtype)[None, :, None]
    return jnp.sum(jnp.where(here, values[:, None], 0), axis=2, dtype=values.dtype)
