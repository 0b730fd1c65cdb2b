"""Ring communication for a prompt's rows on a mesh: devices send rows while they multiply the previous ones.

After a product with sharded inputs, devices add up partial sums while a TPU's matrix units wait for the result. For a
prompt's chunk the sums take half as long as the products. Here the rows are divided over devices between two such sums.
Before a product, every device passes its rows on and multiplies the rows that it receives. After the product, devices
pass partial sums on, and every device adds its part. Half of the rows travel in each direction, to use both directions
of the links.
Source: Wang et al., "Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning Models"
(ASPLOS 2023), sections 3 and 5.

P devices, n rows per device. Oracle: the same rows on one device (tests/models/test_ring.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from mars_jax.core.types import PyTree
from mars_jax.models.quantize import Int4, Int8

Axes = tuple[str, ...]

_OUTPUTS = ("q", "k", "v", "sinks", "gate", "up")
_INPUTS = ("o", "down")
"""Arrays of a layer with sharded outputs or heads, and matrices with sharded inputs."""


def starts(axes: Axes, n: int) -> list[tuple[Array, Array]]:
    """Return the start of this device's piece in each step: the first row of each half, among all P n rows.

    In step s, the first half comes from the device s places before this one, and the second half from the device s
    places after it.
    """
    size, me = lax.axis_size(axes), lax.axis_index(axes)
    return [((me - s) % size * n, (me + s) % size * n + n // 2) for s in range(size)]


def around(axes: Axes, x: Array) -> list[Array]:
    """Gather the rows x [B, n, ...] of all devices: pieces [B, n, ...] in the order of `starts`."""
    pieces = [x]
    for _ in range(lax.axis_size(axes) - 1):
        pieces.append(_passed(axes, pieces[-1]))
    return pieces


def summed(axes: Axes, parts: Sequence[Callable[[], Array]]) -> Array:
    """Sum pieces, in the order of `starts`, over devices, and return this device's rows [B, n, ...] of the sum.

    Each part is called just before it is added. Sums are sent in the dtype of the parts.
    """
    # Each sum starts at a neighbour of the device that owns it, and the owner adds the last part.
    first, *remaining = (*parts[1:], parts[0])
    total = first()
    for part in remaining:
        total = part() + _passed(axes, total)
    return total


def _passed(axes: Axes, x: Array) -> Array:
    """Return the first half of the previous device's rows, and the second half of the next device's rows."""
    size, half = lax.axis_size(axes), x.shape[1] // 2
    ends = [
        lax.ppermute(part, axes, [(i, (i + by) % size) for i in range(size)])
        for part, by in ((x[:, :half], 1), (x[:, half:], -1))
    ]
    return jnp.concatenate(ends, axis=1)


def specs(axes: Axes, layer: Mapping[str, PyTree]) -> dict[str, PyTree]:
    """Return the `shard_map` specs of a layer's arrays."""

    def spec(name: str, w: PyTree) -> PyTree:
        out = axes if name.removesuffix("_bias") in _OUTPUTS else None
        inner = axes if name in _INPUTS else None
        if isinstance(w, Int4):
            by_group = P(inner, out)
            return dataclasses.replace(w, values=P(inner, None, out), scale=by_group, offset=by_group)
        if isinstance(w, Int8):
            return dataclasses.replace(w, values=P(out, inner), scale=P(out))
        # A vector, a matrix, or a scalar of a user's model.
        return P(*(out, inner)[: getattr(w, "ndim", 0)])

    return {name: spec(name, w) for name, w in layer.items()}


def divides(size: int, layer: Mapping[str, PyTree]) -> bool:
    """Return whether `size` devices can share every matrix; a 4-bit matrix may have too few groups of inputs."""
    matrices = [layer.get(name) for name in _INPUTS]
    return all(len(w.values) % size == 0 for w in matrices if isinstance(w, Int4))
