"""Compilation of programs for devices that are not attached, and the compiler's report."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax

from mars_jax.utils import activity
from mars_jax.utils.types import JsonObject

COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")


class OutOfMemory(Exception):
    """The error of a program that does not fit. `used` is the number of bytes per device, 0 if unknown."""

    def __init__(self, used: int):
        super().__init__(f"{used} bytes")
        self.used = used


@activity.doing("compiling")
def compile_program(lowered: jax.stages.Lowered, *, read: Callable[[str], Any] | None = None) -> JsonObject:
    """Compile a program and report the compile time, the compiler's counts, and the collectives.

    Args:
      lowered: program lowered for abstract arguments with shardings on the devices to compile for.
      read: maps the program's text to the report's entry "read".

    Raises:
      OutOfMemory: the program does not fit.
    """
    start_time = time.perf_counter()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise _out_of_memory(str(error)) from None
    compile_seconds = time.perf_counter() - start_time
    memory, program_text, costs = compiled.memory_analysis(), compiled.as_text(), compiled.cost_analysis()
    # XLA's TPU compiler returns all three.
    assert memory is not None and program_text is not None and costs is not None
    return {
        "read": None if read is None else read(program_text),
        "seconds": round(compile_seconds, 2),
        "bytes_accessed": int(costs["bytes accessed"]),
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "aliased_bytes": memory.alias_size_in_bytes,
        "mosaic_kernels": program_text.count('custom_call_target="tpu_custom_call"'),
        "collectives": collectives(program_text),
    }


def _out_of_memory(text: str) -> OutOfMemory:
    """Parse a message such as "... Used 20.95G of 15.75G hbm ..."."""
    unit_bytes = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
    match = re.search(r"Used ([\d.]+)([KMGT]?) of [\d.]+[KMGT]? hbm", text)
    if match is None:
        return OutOfMemory(0)
    return OutOfMemory(int(float(match[1]) * unit_bytes[match[2]]))


def collectives(program: str) -> dict[str, int]:
    """Count the collectives of an HLO program, by kind and shape of the result."""
    # An asynchronous collective has a -start and a -done instruction; the pattern matches only the first. The last
    # line removes the layouts, which are in braces, from the shapes.
    pattern = re.compile(rf"= (.*?) ({'|'.join(COLLECTIVES)})(?:-start)?\(")
    matches = (pattern.search(line) for line in program.splitlines())
    return dict(Counter(f"{hit[2]} {re.sub(r'{[^}]*}', '', hit[1])}" for hit in matches if hit))


def held_bytes(report: JsonObject) -> int:
    """Return the peak bytes of a program on a device: arguments, results that do not alias them, and temporaries."""
    return (
        report["argument_bytes"]
        + report["output_bytes"]
        - report["aliased_bytes"]
        + report["temporary_bytes"]
    )
