"""Published figures of TPU chips, and the topologies that libtpu compiles for.

Memory and bandwidth of a chip: Google's Cloud TPU documentation, pages v4, v5e, v5p and v6e (Trillium), 2026.
"""

from __future__ import annotations

import math
import os
from typing import Any, NamedTuple

from mars_jax.core.errors import MarsError


class Chip(NamedTuple):
    """One chip. A v4 chip is two devices for the compiler, which share what it has."""

    hbm_bytes: int
    bandwidth: float  # bytes a second between HBM and the core
    dims: int  # of a topology's name


CHIPS = {
    "v4": Chip(32 * 2**30, 1200e9, 3),
    "v5e": Chip(16 * 2**30, 819e9, 2),
    "v5p": Chip(95 * 2**30, 2765e9, 3),
    "v6e": Chip(32 * 2**30, 1600e9, 2),
}


class Topology(NamedTuple):
    """A slice: its name, and the devices the compiler sees in it."""

    name: str
    chip: Chip
    chips: int
    devices: tuple[Any, ...]

    @property
    def hbm_bytes(self) -> int:
        """Of one device."""
        return self.chip.hbm_bytes * self.chips // len(self.devices)

    @property
    def bandwidth(self) -> float:
        """Of one device, bytes a second."""
        return self.chip.bandwidth * self.chips / len(self.devices)


def topology(name: str) -> Topology:
    """The slice that `name`, such as "v5e:4x4" or "v5p:2x2x2", stands for; no TPU is needed.

    Raises:
      MarsError: no such generation or shape, or libtpu is not installed.

    >>> topology("v5e:2x4").chips  # doctest: +SKIP
    8
    """
    generation, _, shape = name.partition(":")
    sizes = shape.split("x")
    chip = CHIPS.get(generation)
    # At most 9 digits: Python converts no text of more than 4,300.
    whole = all(size.isascii() and size.isdigit() and len(size) < 10 and int(size) for size in sizes)
    if chip is None or len(sizes) != chip.dims or not whole:
        raise MarsError(
            f"the topology is {name!r}: expected {', '.join(CHIPS)} and a shape, of two numbers such as v5e:4x4, or of "
            "three for v4 and v5p, such as v5p:2x2x2."
        )
    # Before libtpu is loaded: it must not look for a TPU host, and several processes may load it side by side.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    from jax.experimental import topologies

    counts = [int(size) for size in sizes]
    # A host holds 2x2 chips unless the slice is smaller than that.
    host = [min(ours, theirs) for ours, theirs in zip([*counts, 1][:3], (2, 2, 1), strict=True)]
    try:
        devices = topologies.get_topology_desc(
            platform="tpu", topology_name=name, chips_per_host_bounds=host
        ).devices
    except Exception as error:  # of whatever type jaxlib finds fit
        text = str(error)
        if "libtpu" in text.lower() or isinstance(error, ImportError):
            raise MarsError(
                "compiling for a TPU needs libtpu: pip install 'mars-jax[tpu]' on Linux x86-64."
            ) from None
        raise MarsError(
            f"libtpu knows no topology {name!r} ({text.splitlines()[0]}): choose another shape."
        ) from None
    return Topology(name, chip, math.prod(counts), tuple(devices))
