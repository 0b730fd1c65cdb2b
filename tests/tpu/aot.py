"""Ahead-of-time compilation for TPUs on a machine without one: libtpu compiles for a named topology.

Mosaic compiles for real and rejects what a TPU would reject; nothing is executed.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

# Before libtpu is loaded: it must not look for a TPU host, and several processes may load it side by side.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

TOPOLOGIES = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
LARGER = {"v5p": "v5p:2x2x2"}
"""Topologies of 8 devices."""
HBM_BYTES = {"v4": 16 * 2**30, "v5e": 16 * 2**30, "v5p": 95 * 2**30, "v6e": 32 * 2**30}
"""Memory of one device, from Google's TPU documentation. A v4 chip of 32 GiB is two devices here."""
COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")


def mesh(generation: str, *, devices: int = 1, axis: str = "model") -> Mesh:
    """The first devices of a topology of `generation` as a mesh of one axis."""
    name = TOPOLOGIES[generation] if devices <= 4 else LARGER[generation]
    found = topologies.get_topology_desc(platform="tpu", topology_name=name).devices
    return Mesh(np.array(found[:devices]), (axis,))


def abstract(tree: Any, on: Mesh, spec: PartitionSpec | None = None) -> Any:
    """The shapes of a tree of arrays or `ShapeDtypeStruct`s, placed on a mesh; replicated where no spec is
    given."""
    sharding = NamedSharding(on, spec or PartitionSpec())
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def compile_for(
    function: Callable[..., Any], *arguments: Any, watch: int | None = None, **jit_options: Any
) -> dict[str, Any]:
    """Compile a function for its abstract arguments and report."""
    return compile_program(jax.jit(function, **jit_options).lower(*arguments), watch=watch)


def compile_program(lowered: jax.stages.Lowered, *, watch: int | None = None) -> dict[str, Any]:
    """Compile and report: seconds, what the compiler counts, and the collectives in the program.

    Args:
      watch: report how many arrays of this many elements the program writes.
    """
    started = time.perf_counter()
    compiled = lowered.compile()
    seconds = time.perf_counter() - started
    memory = compiled.memory_analysis()
    text = compiled.as_text()
    watched = {} if watch is None else {"arrays_of_logits": arrays_written(text, watch)}
    return {
        **watched,
        "seconds": round(seconds, 2),
        "bytes_accessed": int(compiled.cost_analysis()["bytes accessed"]),
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "aliased_bytes": memory.alias_size_in_bytes,
        "mosaic_kernels": text.count('custom_call_target="tpu_custom_call"'),
        "collectives": collectives(text),
    }


def collectives(program: str) -> dict[str, int]:
    """Each collective of an HLO text with the shape of its result, and how often it occurs."""
    pattern = re.compile(rf"= (.*?) ({'|'.join(COLLECTIVES)})(?:-start)?\(")
    found = (pattern.search(line) for line in program.splitlines())
    return dict(Counter(f"{hit[2]} {re.sub(r'{[^}]*}', '', hit[1])}" for hit in found if hit))


def arrays_written(program: str, elements: int) -> int:
    """How many instructions of the entry computation of an HLO text write an array of so many elements."""
    entry = program[program.index("\nENTRY ") :].split("\n}", 1)[0]
    pattern = re.compile(r" = \w+\[([\d,]+)\]\S* (?!bitcast|parameter|get-tuple-element)[\w-]+\(")
    return sum(math.prod(map(int, hit[1].split(","))) == elements for hit in pattern.finditer(entry))


def hbm_bytes(report: dict[str, Any]) -> int:
    """What the program holds at once: arguments, results that reuse none of them, and temporaries."""
    return (
        report["argument_bytes"]
        + report["output_bytes"]
        - report["aliased_bytes"]
        + report["temporary_bytes"]
    )
