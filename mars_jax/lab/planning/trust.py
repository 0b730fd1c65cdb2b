"""What `planning.cost` was checked on: programs whose cost is known, compiled and read by the same code.

A product of large matrices against the published peak of the matrix units, a copy against its bytes, the margin kernel
against its bytes, and a gather of single elements against what is known of it: that it is slow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mars_jax.lab.planning.chips import Topology
from mars_jax.lab.planning.constants import SPEEDS
from mars_jax.lab.planning.cost import read_step
from mars_jax.lab.planning.dump import compile_scheduled
from mars_jax.lab.planning.estimate import estimate, figures

CANNOT_SEE = (
    "stalls inside of a routine (a bundle is counted as one cycle)",
    "the latency of a copy between HBM and the core, and how full the bursts are",
    "contention of copies, and of collectives on the links",
    "how long an instruction takes to begin (0.2 and 1.5 us are assumptions)",
    "predicated regions that do not run (all are counted)",
    "loops whose length depends on data (counted once, and named)",
)


def check(where: Topology, generation: str) -> list[dict[str, Any]]:
    """Each program with what was found and what was expected.

    Args:
      where: any slice; one device of it is used. `dump.dump_folder()` has to be called before it was made.
      generation: such as "v5e".
    """
    speed, bandwidth = SPEEDS[generation], where.bandwidth
    devices = len(where.devices) // where.chips
    mesh = Mesh(np.array(where.devices[:1]), ("model",))

    def cost_of(function: Callable, *shapes: tuple[tuple[int, ...], Any]) -> dict[str, Any]:
        place = NamedSharding(mesh, PartitionSpec())
        arguments = [jax.ShapeDtypeStruct(shape, dtype, sharding=place) for shape, dtype in shapes]
        module, schedule = compile_scheduled(jax.jit(function).lower(*arguments))
        step = read_step(module, schedule, live=0)
        found = figures(step, speed, bandwidth)
        bundles = sum(part.get("bundles", 0) for part in found["parts"].values())
        flops = sum(part.get("flops", 0) for part in found["parts"].values())
        total = estimate(found, speed, bandwidth)
        return {
            "bytes": total["bytes"],
            "flops": flops,
            "bundle_seconds": bundles / speed.clock,
            "ops": total["ops"],
        }

    size, rows, long = 8192, 2**16, 2**16
    product = cost_of(lambda a, b: a @ b, *[((size, size), jnp.bfloat16)] * 2)
    copied = cost_of(lambda x: x + 1, ((rows, 1024), jnp.float32))
    kernel = cost_of(_margin_stats, ((8, 128256), jnp.float32))
    taken = cost_of(
        lambda x, i: jnp.take_along_axis(x, i, axis=1), ((8, long), jnp.bool_), ((8, long), jnp.int32)
    )
    return [
        {
            "program": f"product of two bfloat16 matrices of {size} x {size}",
            "expected": "operations found over operations done is 1; bundles over the clock are at most 1.1 of the "
            "operations over the published peak, and less where the units stall: so the peak is a floor as well",
            "ratio": product["flops"] / (2 * size**3),
            "bundles_over_peak": product["bundle_seconds"] / (2 * size**3 / (speed.peak_bf16 / devices)),
            **product,
        },
        {
            "program": f"float32 array of {rows} x 1024, plus 1",
            "expected": "its bytes exactly, once read and once written; fewer seconds of bundles than of bytes",
            "ratio": copied["bytes"] / (2 * rows * 1024 * 4),
            **copied,
        },
        {
            "program": "the margin kernel on float32 logits of 8 x 128256",
            "expected": "the bytes of the logits, within 1% (its results are 8 rows of statistics)",
            "ratio": kernel["bytes"] / (8 * 128256 * 4),
            **kernel,
        },
        {
            "program": f"gather of 8 x {long} single booleans",
            "expected": "more than five bundles an element (bundles an element)",
            "ratio": taken["bundle_seconds"] * speed.clock / (8 * long),
            **taken,
        },
    ]


def _margin_stats(logits: jax.Array) -> Any:
    import kernels_pallas

    return kernels_pallas.margin_stats(logits, implementation="pallas_tpu")
