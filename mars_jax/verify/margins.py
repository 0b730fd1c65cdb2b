"""When the target is nearly indifferent between its two best tokens: margins under one interface.

A margin maps `(z1, z2, theta)`, f32 of one shape, to bool: True where relaxing is allowed. z1 >= z2 are the
two largest raw target logits, before temperature and filters. For every margin `theta = inf` is strict.
Oracle: numpy formulas in tests/verify/test_mars.py.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array

Margin = Callable[[Array, Array, Array], Array]


def ratio(z1: Array, z2: Array, theta: Array) -> Array:
    """`z2 / z1 > theta` (MARS, arXiv 2601.15498, Algorithm 1); strict where z1 <= 0, where a ratio says
    nothing.

    It depends on the offset of the logits: 0.9 allows p2 / p1 down to exp(-0.1 z1).

    >>> ratio(jnp.asarray([10.0, -1.0]), jnp.asarray([9.5, -2.0]), jnp.asarray([0.9, 0.9])).tolist()
    [True, False]
    """
    return (z1 > 0) & (z2 / jnp.where(z1 > 0, z1, 1.0) > theta)


def gap(z1: Array, z2: Array, theta: Array) -> Array:
    """`z1 - z2 < theta` in nats; invariant to the offset of the logits.

    >>> gap(jnp.asarray(10.0), jnp.asarray(9.5), jnp.asarray(1.0)).item()
    True
    """
    return (z1 - z2 < theta) & jnp.isfinite(theta)


def prob_ratio(z1: Array, z2: Array, theta: Array) -> Array:
    """`p2 / p1 = exp(z2 - z1) > theta`, at temperature 1.

    >>> prob_ratio(jnp.asarray(10.0), jnp.asarray(9.5), jnp.asarray(0.9)).item()
    False
    """
    return jnp.exp(z2 - z1) > theta


MARGINS: dict[str, Margin] = {"ratio": ratio, "gap": gap, "prob_ratio": prob_ratio}
"""Margins by name."""
