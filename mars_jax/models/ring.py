"""Rows of a prompt on a mesh, divided over devices and passed around them while the ones before are multiplied.

After a product over divided inputs devices add up what each has, and a TPU's matrix units wait for the sum: of a
prompt's chunk that takes half as long as the products. Here the rows between two such sums are divided. Before a
product every device passes its rows on and multiplies those that come; after it the sums are passed on, and every
device adds its part. Half of the rows go each way, as links do. Source: Wang et al., "Overlap Communication with
Dependent Computation via Decomposition in Large Deep Learning Models" (ASPLOS 2023), sections 3 and 5.

P devices, n rows of each. Oracle: the same rows on one device (tests/models/test_ring.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jax import Array, lax

Axes = tuple[str, ...]


def starts(axes: Axes, n: int) -> list[tuple[Array, Array]]:
    """Return where the halves of each piece begin among all P n rows, by the step in which it is here.

    In step s that is the first half of the device s before this one, and the second half of the one s after it.
    """
    size, me = lax.axis_size(axes), lax.axis_index(axes)
    return [((me - s) % size * n, (me + s) % size * n + n // 2) for s in range(size)]


def around(axes: Axes, x: Array) -> list[Array]:
    """Return the rows of all devices, given each one's x [B, n, ...]: pieces [B, n, ...] in the order of `starts`."""
    pieces = [x]
    for _ in range(lax.axis_size(axes) - 1):
        pieces.append(_passed(axes, pieces[-1]))
    return pieces


def summed(axes: Axes, parts: Sequence[Callable[[], Array]]) -> Array:
    """Return this device's rows [B, n, ...] of the sum over devices of pieces in the order of `starts`.

    A part is called where it is added, and sums travel in its dtype.
    """
    total = None
    # What begins with the piece that is s away comes back to its device with the last one.
    for part in (*parts[1:], parts[0]):
        total = part() if total is None else part() + _passed(axes, total)
    return total


def _passed(axes: Axes, x: Array) -> Array:
    """Return the first half of the rows of the device before this one, and the second half of the next one's."""
    size, half = lax.axis_size(axes), x.shape[1] // 2
    ends = [
        lax.ppermute(part, axes, [(i, (i + by) % size) for i in range(size)])
        for part, by in ((x[:, :half], 1), (x[:, half:], -1))
    ]
    return jnp.concatenate(ends, axis=1)
