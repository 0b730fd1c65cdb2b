"""Ahead-of-time compilation for TPUs on a machine without one: libtpu compiles for a named topology.

Mosaic compiles for real and rejects what a TPU would reject; nothing is executed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mars_jax.lab.planning.chips import topology
from mars_jax.lab.planning.compiled_program import compile_program, held_bytes

__all__ = ["TOPOLOGIES", "abstract", "compile_for", "compile_program", "held_bytes", "mesh"]

TOPOLOGIES = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
LARGER = {"v5p": "v5p:2x2x2"}
"""Topologies of 8 devices."""
NEW = {"tpu7x": "tpu7x:2x2x1"}
"""Generations for which a few tests compile."""


def compile_for(
    function: Callable[..., Any], *arguments: Any, watch: int | None = None, **jit_options: Any
) -> dict[str, Any]:
    """Compile a function for its abstract arguments and report; see `compile_program`."""
    return compile_program(jax.jit(function, **jit_options).lower(*arguments), watch=watch)


def hbm_bytes(generation: str) -> int:
    """Memory of one device."""
    return topology(TOPOLOGIES[generation]).hbm_bytes


def mesh(generation: str, *, devices: int = 1, axis: str = "model") -> Mesh:
    """The first devices of a topology of `generation` as a mesh of one axis."""
    found = topology((TOPOLOGIES | NEW)[generation] if devices <= 4 else LARGER[generation]).devices
    return Mesh(np.array(found[:devices]), (axis,))


def abstract(tree: Any, on: Mesh, spec: PartitionSpec | None = None) -> Any:
    """The shapes of a tree of arrays or `ShapeDtypeStruct`s, placed on a mesh; replicated where no spec is
    given."""
    sharding = NamedSharding(on, spec or PartitionSpec())
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)
