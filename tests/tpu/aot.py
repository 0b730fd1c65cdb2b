"""Ahead-of-time compilation for TPUs on a machine without one: libtpu compiles for a named topology.

Mosaic compiles for real and rejects every program that a TPU would reject; nothing is executed.
"""

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mars_jax.lab.planning.chips import topology
from mars_jax.lab.planning.pair_programs import compile_program, held_bytes

__all__ = ["TOPOLOGIES", "abstract", "compile_for", "compile_program", "held_bytes", "mesh"]

TOPOLOGIES = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
LARGER = {"v5p": "v5p:2x2x2"}
"""Topologies of 8 devices."""
NEW = {"tpu7x": "tpu7x:2x2x1"}
"""Newest generations, for which only a few tests compile."""


def turn(number: int) -> str:
    """Return the generations in turn, for cases that need only one each."""
    return list(TOPOLOGIES)[number % len(TOPOLOGIES)]


def compile_for(
    function: Callable[..., Any], *arguments: Any, watch: int | None = None, **jit_options: Any
) -> dict[str, Any]:
    """Compile a function for its abstract arguments and report; see `compile_program`.

    `arrays_of_logits` counts the arrays of `watch` elements that the program writes.
    """
    lowered = jax.jit(function, **jit_options).lower(*arguments)
    if watch is None:
        return compile_program(lowered)
    report = compile_program(lowered, read=lambda text: arrays_written(text, watch))
    return report | {"arrays_of_logits": report["read"]}


def arrays_written(program: str, elements: int) -> int:
    """Count the instructions in the entry computation of an HLO text that write an array of `elements` to HBM.

    Prefetches of an operand into a chip's fast memory do not count.
    """
    entry = program[program.index("\nENTRY ") :].split("\n}", 1)[0]
    pattern = re.compile(r" = \w+\[([\d,]+)\](\S*) (?!bitcast|parameter|get-tuple-element)[\w-]+\(")
    return sum(
        math.prod(map(int, hit[1].split(","))) == elements and "S(" not in hit[2]
        for hit in pattern.finditer(entry)
    )


class Instruction(NamedTuple):
    """A line of an HLO text. `dtype`, `size` and `dims` describe the first array of its result."""

    opcode: str
    dtype: str
    size: int
    dims: tuple[int, ...]
    text: str


def instructions(program: str) -> list[Instruction]:
    """Return the instructions of an HLO text whose result is an array or begins with one."""
    pattern = re.compile(r"^\s+(?:ROOT )?%[\w.\-]+ = \(*(\w+)\[([\d,]*)\].*? ([a-z][\w\-]*)\(.*$", re.M)
    parsed = []
    for match in pattern.finditer(program):
        dtype, sizes, opcode = match.groups()
        dims = tuple(int(size) for size in sizes.split(",") if size)
        parsed.append(Instruction(opcode, dtype, math.prod(dims), dims, match[0]))
    return parsed


def hbm_bytes(generation: str) -> int:
    """Return the memory of one device in bytes."""
    return topology(TOPOLOGIES[generation]).device.hbm_bytes


def mesh(generation: str, *, devices: int = 1, axis: str = "model") -> Mesh:
    """Return the first devices of a topology of `generation` as a mesh of one axis."""
    chips = topology((TOPOLOGIES | NEW)[generation] if devices <= 4 else LARGER[generation]).devices
    return Mesh(np.array(chips[:devices]), (axis,))


def abstract(tree: Any, on: Mesh, spec: PartitionSpec | None = None) -> Any:
    """Return the shapes of a tree of arrays or `ShapeDtypeStruct`s, placed on a mesh; replicated by default."""
    sharding = NamedSharding(on, spec or PartitionSpec())
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)
