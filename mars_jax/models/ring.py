"""Rows of a prompt on a mesh, divided over devices and passed around them while the ones before are multiplied.

After a product over divided inputs devices add up what each has, and a TPU's matrix units wait for the sum: of a
prompt's chunk that takes half as long as the products. Here the rows between two such sums are divided. Before a
product every device passes its rows on and multiplies those that come; after it the sums are passed on, and every
device adds its part. Half of the rows go each way, as links do. Source: Wang et al., "Overlap Communication with
Dependent Computation via Decomposition in Large Deep Learning Models" (ASPLOS 2023), sections 3 and 5.

P devices, n rows of each. Oracle: the same rows on one device (tests/models/test_ring.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from mars_jax.models.quantize import Int4, Int8

Axes = tuple[str, ...]

_OUTPUTS = ("q", "k", "v", "gate", "up")
_INPUTS = ("o", "down")
"""Matrices of a layer whose outputs are divided, and those whose inputs are."""


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
    # What begins with the piece that is one step away comes back to its device with its own.
    first, *remaining = (*parts[1:], parts[0])
    total = first()
    for part in remaining:
        total = part() + _passed(axes, total)
    return total


def _passed(axes: Axes, x: Array) -> Array:
    """Return the first half of the rows of the device before this one, and the second half of the next one's."""
    size, half = lax.axis_size(axes), x.shape[1] // 2
    ends = [
        lax.ppermute(part, axes, [(i, (i + by) % size) for i in range(size)])
        for part, by in ((x[:, :half], 1), (x[:, half:], -1))
    ]
    return jnp.concatenate(ends, axis=1)


def specs(axes: Axes, layer: Mapping[str, Any]) -> dict[str, Any]:
    """Return how a layer's arrays are divided over the axes, for `shard_map`."""
    return {name: _spec(axes, name, w) for name, w in layer.items()}


def divides(size: int, layer: Mapping[str, Any]) -> bool:
    """Tell whether so many devices have a part of each matrix: one in 4 bits may have too few groups of inputs."""
    inner = [layer[name] for name in _INPUTS if name in layer]
    return all(len(w.values) % size == 0 for w in inner if isinstance(w, Int4))


def _spec(axes: Axes, name: str, w: Any) -> Any:
    out = axes if name.removesuffix("_bias") in _OUTPUTS else None
    inner = axes if name in _INPUTS else None
    if isinstance(w, Int4):
        by_group = P(inner, out)
        return dataclasses.replace(w, values=P(inner, None, out), scale=by_group, offset=by_group)
    if isinstance(w, Int8):
        return dataclasses.replace(w, values=P(out, inner), scale=P(out))
    if getattr(w, "ndim", 0) == 0:  # something of a model of one's own
        return P()
    return P(out, inner) if w.ndim == 2 else P(out)
