"""Meshes: which of their axes holds what, and the mesh a program is being traced for.

Oracle: the same program on one device (tests/test_sharding.py).

Three axes have a meaning: `data` holds rows of the batch, `model` heads, hidden units and vocabulary, `expert` the
experts of a mixture. A mesh has any of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from mars_jax.errors import MarsError

RULES: Mapping[str, tuple[str, ...]] = {
    "rows": ("data",),
    "vocab": ("model", "expert"),
    "heads": ("model", "expert"),
    "kv_heads": ("model", "expert"),
    "hidden": ("model", "expert"),
    "features": ("model", "expert"),
    "experts": ("expert", "model"),
    "expert_hidden": ("model",),
}
"""Mesh axes of each logical axis, the outermost first. What does not divide over all of them is divided over fewer."""

AXES = ("data", "model", "expert")


def parse_mesh(text: str, devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh that `--mesh` names, over the first devices, with axes of type Auto.

    Args:
      text: axes with their sizes, the outermost first, such as "data=2,model=4".
      devices: default: all of `jax.devices()`.

    Raises:
      MarsError: no such axis, or more devices than there are.

    >>> dict(parse_mesh("model=1").shape)
    {'model': 1}
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = (piece.strip() for piece in part.partition("="))
        if name not in AXES or name in sizes or not (size.isascii() and size.isdigit() and int(size)):
            raise MarsError(
                f"the mesh is {text!r}: expected axes among {', '.join(AXES)}, each once with its number of devices, "
                "such as data=2,model=4."
            )
        sizes[name] = int(size)
    devices = list(jax.devices() if devices is None else devices)
    count = math.prod(sizes.values())
    if count > len(devices):
        raise MarsError(
            f"the mesh {text} is of {count} devices and there are {len(devices)}: make it smaller."
        )
    return Mesh(
        np.array(devices[:count]).reshape(tuple(sizes.values())),
        tuple(sizes),
        axis_types=(AxisType.Auto,) * len(sizes),
    )


def axes_of(
    logical: str, size: int, mesh: Mesh | AbstractMesh, *, without: tuple[str, ...] = ()
) -> tuple[str, ...]:
    """The mesh axes over which `size` things of a logical axis are divided; () where each device has them all.

    >>> axes_of("kv_heads", 8, AbstractMesh((2, 4), ("data", "model"))), axes_of(
    ...     "kv_heads", 2, AbstractMesh((4,), ("model",)))
    (('model',), ())
    """
    axes = [name for name in RULES[logical] if mesh.shape.get(name, 1) > 1 and name not in without]
    while axes and size % math.prod(mesh.shape[name] for name in axes):
        axes.pop()
    return tuple(axes)
