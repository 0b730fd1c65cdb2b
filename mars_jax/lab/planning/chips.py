"""Published specifications of TPU chips, and the topologies that libtpu can compile for.

Sources: Google's Cloud TPU documentation, pages v4, v5e, v5p, v6e (Trillium) and TPU7x (Ironwood), 2026. The pages list
the memory, bandwidth, peak FLOP/s and link bandwidth of each chip, and the slice shape of each accelerator type.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
from typing import Any, NamedTuple

from mars_jax.utils.errors import MarsError


class Chip(NamedTuple):
    """One chip. The compiler treats a v4 or tpu7x chip as two devices that share its memory and its compute units."""

    hbm_bytes: int
    # Bytes per second between HBM and the cores.
    bandwidth: float
    # Floating-point operations per second in bfloat16.
    peak_flops: float
    # Bytes per second over one link between chips, both directions together.
    link: float
    # Number of dimensions in a topology's name.
    dims: int


CHIPS = {
    "v4": Chip(32 * 2**30, 1200e9, 275e12, 90e9, 3),
    "v5e": Chip(16 * 2**30, 819e9, 197e12, 90e9, 2),
    "v5p": Chip(95 * 2**30, 2765e9, 459e12, 180e9, 3),
    "v6e": Chip(32 * 2**30, 1600e9, 918e12, 180e9, 2),
    "tpu7x": Chip(192 * 2**30, 7380e9, 2307e12, 200e9, 3),
}


SHAPES = {
    2: {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"},
    3: {
        4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4", 128: "4x4x8", 256: "4x8x8", 512: "8x8x8",
        1024: "8x8x16", 2048: "8x16x16",
    },
}  # fmt: skip
"""Shapes of slices in Google Cloud, keyed by the number of dimensions and the number of chips."""


def slice_of(name: str) -> str:
    """Return the generation and shape of an accelerator type. Return all other names unchanged.

    The number in an accelerator type counts chips, or cores in generations with two cores per chip. These are the
    generations whose slices have three dimensions.

    Raises:
      MarsError: the accelerator type has no slice of that size.

    >>> slice_of("v5litepod-8"), slice_of("v5p-8"), slice_of("v6e:2x2")
    ('v5e:2x4', 'v5p:2x2x1', 'v6e:2x2')
    """
    kind, dash, size = name.partition("-")
    generation = "v5e" if kind == "v5litepod" else kind
    if not dash or generation not in CHIPS:
        return name
    dims = CHIPS[generation].dims
    # The size of a three-dimensional slice is given in cores, two per chip, and that of a two-dimensional slice in
    # chips.
    counts_per_chip, unit_words = {2: (1, "chips"), 3: (2, "cores, two a chip")}[dims]
    shape_by_count = {str(chips * counts_per_chip): shape for chips, shape in SHAPES[dims].items()}
    if size not in shape_by_count:
        raise MarsError(
            f"the topology is {name!r}: {kind} comes in {', '.join(shape_by_count)} {unit_words}; name one of these, "
            f"or a shape such as {generation}:{SHAPES[dims][4]}."
        )
    return f"{generation}:{shape_by_count[size]}"


def larger(name: str) -> list[str]:
    """Return the slices of the same generation with more chips, smallest first.

    >>> larger("v5e:4x8")
    ['v5e:8x8', 'v5e:8x16', 'v5e:16x16']
    """
    generation, _, shape = slice_of(name).partition(":")
    chips = math.prod(int(size) for size in shape.split("x"))
    shape_by_chips = SHAPES[CHIPS[generation].dims]
    return [f"{generation}:{shape}" for count, shape in shape_by_chips.items() if count > chips]


class Topology(NamedTuple):
    """A slice and its devices."""

    name: str
    chips: int
    devices: tuple[Any, ...]
    # Specification of one device, with its share of the chip's memory, bandwidth and peak FLOP/s.
    device: Chip

    @property
    def generation(self) -> str:
        """Generation of the chips, a key of `CHIPS`."""
        return self.name.partition(":")[0]


def topology(name: str) -> Topology:
    """Look up a slice, such as "v5e:4x4", "v5p:2x2x2" or "v5litepod-16". No TPU is needed.

    Raises:
      MarsError: the generation or shape does not exist, or libtpu is not installed.

    >>> topology("v5e:2x4").chips  # doctest: +SKIP
    8
    """
    name = slice_of(name)
    generation, _, shape = name.partition(":")
    size_texts = shape.split("x")
    chip = CHIPS.get(generation)
    # Limit sizes to 9 digits, since Python refuses to convert strings of more than 4,300 digits.
    has_valid_sizes = all(re.fullmatch("[1-9][0-9]{0,8}", size) for size in size_texts)
    if chip is None or len(size_texts) != chip.dims or not has_valid_sizes:
        raise MarsError(
            f"the topology is {name!r}: expected {', '.join(CHIPS)} and a shape, of two numbers such as v5e:4x4, or of "
            "three for v4, v5p and tpu7x, such as v5p:2x2x2; or a type such as v5litepod-4, v5p-8 or v6e-8."
        )
    # Cloud TPU images may set an environment variable to the path of libtpu instead of installing the package.
    if importlib.util.find_spec("libtpu") is None and "TPU_LIBRARY_PATH" not in os.environ:
        raise MarsError("a plan needs libtpu: pip install 'jax[tpu]' on Linux x86-64.")
    # Set these before loading libtpu: it must not look for a TPU host, and several processes may load it concurrently.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    from jax.experimental import topologies

    chip_counts = [int(size) for size in size_texts]
    # A host holds 2x2 chips unless the slice is smaller than that.
    host_bounds = [min(count, limit) for count, limit in zip([*chip_counts, 1][:3], (2, 2, 1), strict=True)]
    try:
        devices = topologies.get_topology_desc(
            platform="tpu", topology_name=name, chips_per_host_bounds=host_bounds
        ).devices
    except Exception as error:  # jaxlib raises errors of several types
        [reason, *_] = str(error).splitlines()
        raise MarsError(f"libtpu has no topology {name!r} ({reason}): choose another shape.") from None
    chips = math.prod(chip_counts)
    devices_per_chip = len(devices) // chips
    device = chip._replace(
        hbm_bytes=chip.hbm_bytes // devices_per_chip,
        bandwidth=chip.bandwidth / devices_per_chip,
        peak_flops=chip.peak_flops / devices_per_chip,
    )
    return Topology(name, chips, tuple(devices), device)
