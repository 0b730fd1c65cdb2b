"""Ring communication for prompt chunks on a mesh, in which each device sends rows while it multiplies other rows.

If the inputs of a product are sharded, the devices must add up their partial sums afterwards, and the matrix units of a
TPU are idle in the meantime. For a chunk of a prompt, these sums take half as long as the products. With a ring, each
device stores only its share of the rows between two such sums. The next product needs the rows of all devices, so they
travel around the ring, and each device multiplies the rows that it has while the next ones arrive. After the product,
the partial sums travel around the ring, and each device adds its own contribution. Half of the rows travel in each
direction, which uses both directions of the links.

Source: Wang et al., "Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning Models"
(ASPLOS 2023), sections 3 and 5. Tested against the same rows on one device (tests/models/test_ring.py).

Dimensions: B batch, P devices, n rows per device.
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
"""Names of a layer's arrays whose outputs or heads are sharded, and of its matrices whose inputs are sharded."""


def starts(axes: Axes, n: int) -> list[tuple[Array, Array]]:
    """Return, for each step of the ring, the first row of each half of the piece that this device processes.

    Rows are numbered over all devices, from 0 to P * n - 1. In step s, the first half of the piece belongs to the
    device s places before this one, and the second half to the device s places after it.
    """
    size, me = lax.axis_size(axes), lax.axis_index(axes)
    return [((me - s) % size * n, (me + s) % size * n + n // 2) for s in range(size)]


def around(axes: Axes, x: Array) -> list[Array]:
    """Gather the rows x [B, n, ...] of all devices; return pieces [B, n, ...] in the order of `starts`."""
    pieces = [x]
    for _ in range(lax.axis_size(axes) - 1):
        pieces.append(_passed(axes, pieces[-1]))
    return pieces


def summed(axes: Axes, parts: Sequence[Callable[[], Array]]) -> Array:
    """Add up the partial sums of all devices; return this device's rows [B, n, ...] of the result.

    Args:
      axes: mesh axes of the ring.
      parts: functions that compute this device's partial sum of each piece, in the order of `starts`. Each function is
        called just before its result is added. Devices send sums in the dtype of these results.
    """
    # The sum of a piece starts at a neighbour of the device that owns the rows. The owner adds its own part last.
    first, *remaining = (*parts[1:], parts[0])
    total = first()
    for part in remaining:
        total = part() + _passed(axes, total)
    return total


def _passed(axes: Axes, x: Array) -> Array:
    """Exchange rows: return the first half of the previous device's rows and the second half of the next device's."""
    size, half = lax.axis_size(axes), x.shape[1] // 2
    ends = [
        lax.ppermute(part, axes, [(i, (i + by) % size) for i in range(size)])
        for part, by in ((x[:, :half], 1), (x[:, half:], -1))
    ]
    return jnp.concatenate(ends, axis=1)


def specs(axes: Axes, layer: Mapping[str, PyTree]) -> dict[str, PyTree]:
    """Return the partition specs of a layer's arrays for `shard_map`."""

    def spec(name: str, w: PyTree) -> PyTree:
        out = axes if name.removesuffix("_bias") in _OUTPUTS else None
        inner = axes if name in _INPUTS else None
        if isinstance(w, Int4):
            by_group = P(inner, out)
            return dataclasses.replace(w, values=P(inner, None, out), scale=by_group, offset=by_group)
        if isinstance(w, Int8):
            return dataclasses.replace(w, values=P(out, inner), scale=P(out))
        # Here, w is a matrix or a vector, or a scalar in a user's model.
        return P(*(out, inner)[: getattr(w, "ndim", 0)])

    return {name: spec(name, w) for name, w in layer.items()}


def divides(size: int, layer: Mapping[str, PyTree]) -> bool:
    """Return whether every matrix of a layer can be sharded over `size` devices.

    The inputs of a 4-bit matrix are sharded in whole groups, so `size` must divide the number of groups.
    """
    matrices = [layer.get(name) for name in _INPUTS]
    return all(len(w.values) % size == 0 for w in matrices if isinstance(w, Int4))
