"""Values at places, row by row, in the form that a platform is good at; and rows chosen, counted and appended to.

Oracle: `jnp.take_along_axis` (tests/core/test_pick.py). B batch, M values of a row, P places.
"""

from __future__ import annotations

import functools
import math
from typing import Any

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


def pick_one(values: Array, place: Array) -> Array:
    """values [B, M, ...] at one place of each row, i32[B]: [B, ...].

    >>> pick_one(jnp.asarray([[5, 6, 7]]), jnp.asarray([2])).tolist()
    [7]
    """
    return pick(values, place[:, None])[:, 0]


def leading(flags: Array) -> Array:
    """i32[B]: the number of flags bool[B, M] that are set before the first one that is not.

    >>> leading(jnp.asarray([[True, True, False, True]])).tolist()
    [2]
    """
    return jnp.sum(jnp.cumprod(flags.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)


def in_rows(rows: Array, there: Any, elsewhere: Any) -> Any:
    """A pytree of arrays [B, ...]: those of `there` in the rows bool[B], and those of `elsewhere` in the others.

    >>> in_rows(jnp.asarray([True, False]), jnp.asarray([[1, 1], [1, 1]]), jnp.asarray([[2, 2], [2, 2]])).tolist()
    [[1, 1], [2, 2]]
    """

    def choose(there: Array, elsewhere: Array) -> Array:
        if there is elsewhere:  # what a step leaves as it is
            return there
        return jnp.where(rows.reshape((-1,) + (1,) * (there.ndim - 1)), there, elsewhere)

    return jax.tree.map(choose, there, elsewhere)


def append(texts: Any, length: Array, new: Any, count: Array) -> Any:
    """A pytree of arrays [B, T] with the first `count` i32[B] entries of `new` [B, P] after the first `length` i32[B].

    >>> append(jnp.asarray([[7, 8, 0, 0]]), jnp.asarray([2]), jnp.asarray([[9, 5]]), jnp.asarray([1])).tolist()
    [[7, 8, 9, 0]]
    """
    buffer, width = (jax.tree.leaves(x)[0].shape[1] for x in (texts, new))
    place = jnp.arange(width, dtype=jnp.int32)[None]
    # An entry that is not wanted goes past the end, where a scatter drops it.
    at = jnp.where(place < count[:, None], length[:, None] + place, buffer)
    put = jax.vmap(lambda row, at, new: row.at[at].set(new, mode="drop"))
    return jax.tree.map(lambda text, new: put(text, at, new), texts, new)


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
