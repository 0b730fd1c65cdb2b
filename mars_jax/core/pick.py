"""Row-wise gather and scatter, each implemented in the fastest way for the platform, and related helpers.

Dimensions: B batch, M values per row, P indices per row. Tested against `jnp.take_along_axis`
(tests/core/test_pick.py).
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import Array, lax

from mars_jax.utils.types import PyTree

SMALL = 1 << 16
"""Maximum number of comparisons per row for which a TPU gathers by comparing indices. A TPU gather processes one
element at a time and compiles to four instructions, including those that prepare the indices. The comparison fuses into
one instruction."""


def pick(values: Array, places: Array) -> Array:
    """Gather `values` [B, M, ...] at the indices `places` i32[B, P] of each row, which must be in [0, M).

    >>> pick(jnp.asarray([[5, 6, 7]]), jnp.asarray([[2, 0]])).tolist()
    [[7, 5]]
    """
    if places.shape[1] * math.prod(values.shape[1:]) > SMALL:
        return _gather(values, places)
    return lax.platform_dependent(values, places, cpu=_gather, default=_compare)


def pick_one(values: Array, place: Array) -> Array:
    """Gather `values` [B, M, ...] at one index per row, `place` i32[B].

    >>> pick_one(jnp.asarray([[5, 6, 7]]), jnp.asarray([2])).tolist()
    [7]
    """
    return pick(values, place[:, None])[:, 0]


def leading(flags: Array) -> Array:
    """Count the leading True entries in each row of `flags` bool[B, M].

    >>> leading(jnp.asarray([[True, True, False, True]])).tolist()
    [2]
    """
    return jnp.sum(jnp.cumprod(flags.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)


def in_rows(rows: Array, if_true: PyTree, if_false: PyTree) -> PyTree:
    """Take each row from `if_true` or `if_false`, two pytrees of arrays [B, ...], according to `rows` bool[B].

    >>> in_rows(jnp.asarray([True, False]), jnp.asarray([[1, 1], [1, 1]]), jnp.asarray([[2, 2], [2, 2]])).tolist()
    [[1, 1], [2, 2]]
    """

    def choose(if_true: Array, if_false: Array) -> Array:
        # An unchanged leaf is the same object in both trees and needs no select.
        if if_true is if_false:
            return if_true
        return jnp.where(rows.reshape((-1,) + (1,) * (if_true.ndim - 1)), if_true, if_false)

    return jax.tree.map(choose, if_true, if_false)


def append(buffers: PyTree, length: Array, new: PyTree, count: Array) -> PyTree:
    """Write the first `count` i32[B] entries of `new` [B, P] to arrays [B, T], from position `length` i32[B].

    >>> append(jnp.asarray([[7, 8, 0, 0]]), jnp.asarray([2]), jnp.asarray([[9, 5]]), jnp.asarray([1])).tolist()
    [[7, 8, 9, 0]]
    """
    buffer_size, new_width = (jax.tree.leaves(x)[0].shape[1] for x in (buffers, new))
    offset = jnp.arange(new_width, dtype=jnp.int32)[None]
    # Entries past `count` get an index past the end of the buffer, so the scatter drops them.
    targets = jnp.where(offset < count[:, None], length[:, None] + offset, buffer_size)
    put = jax.vmap(lambda row, targets, new: row.at[targets].set(new, mode="drop"))
    return jax.tree.map(lambda buffer, new: put(buffer, targets, new), buffers, new)


def _gather(values: Array, places: Array) -> Array:
    return jax.vmap(lambda row, index: row.at[index].get(mode="promise_in_bounds"))(values, places)


def _compare(values: Array, places: Array) -> Array:
    # A one-hot array bool[B, P, M], with one more dimension of size 1 for each trailing dimension of the values.
    one_hot = places[:, :, None] == jnp.arange(values.shape[1], dtype=places.dtype)[None, None]
    one_hot = one_hot.reshape(one_hot.shape + (1,) * (values.ndim - 2))
    if values.dtype == bool:
        return jnp.any(one_hot & values[:, None], axis=2)
    # `where` replaces all other values with 0, even NaN, so each sum has at most one nonzero term and is exact.
    return jnp.sum(jnp.where(one_hot, values[:, None], 0), axis=2, dtype=values.dtype)


def scatter_integers(size: int, places: Array, values: Array) -> Array:
    """Scatter integers [B, P] into zeros [B, size] at `places` i32[B, P], distinct indices in [0, size).

    >>> scatter_integers(4, jnp.asarray([[2, 0]]), jnp.asarray([[7, 5]])).tolist()
    [[5, 0, 7, 0]]
    """

    scatter = functools.partial(_scatter, size=size)
    compare = functools.partial(_compare_put, size=size)
    if size * places.shape[1] > SMALL:
        return scatter(places, values)
    return lax.platform_dependent(places, values, cpu=scatter, default=compare)


def _scatter(places: Array, values: Array, size: int) -> Array:
    zero_rows = jnp.zeros((places.shape[0], size), values.dtype)
    put = jax.vmap(lambda row, index, values: row.at[index].set(values, unique_indices=True))
    return put(zero_rows, places, values)


def _compare_put(places: Array, values: Array, size: int) -> Array:
    # A one-hot array bool[B, size, P]. Indices are distinct, so each sum below has at most one nonzero term.
    one_hot = places[:, None, :] == jnp.arange(size, dtype=places.dtype)[None, :, None]
    return jnp.sum(jnp.where(one_hot, values[:, None], 0), axis=2, dtype=values.dtype)
