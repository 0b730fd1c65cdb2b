"""Estimates of a step's time on a TPU, from counted bytes and a table of measured overheads.

For each generation of chips, `overheads.json` lists the time that a step takes in addition to reading its bytes:
launches, collectives, and computation that takes longer than the reads. `python -m scripts.tpu_schedule --overheads`
derives these overheads from the schedules of libtpu's compiler. An estimate is a range, since a launch takes between
0.2 and 1.5 us.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import NamedTuple

from mars_jax.lab.planning.chips import Chip
from mars_jax.utils.types import JsonObject

TABLE = Path(__file__).with_name("overheads.json")
LAUNCH_SECONDS = (0.2e-6, 1.5e-6)
"""Time to launch one instruction: a lower bound, with all operands in fast memory, and an upper bound."""
HOP_SECONDS = 1e-6
"""Latency between neighbouring chips. How to Scale Your Model (2025), chapter 3: "about 1 us"."""
MAX_CONTEXT = 8192
"""Longest context for which the table was checked."""
LAYER_COLLECTIVES = 2
"""Number of all-reduces in a layer: after attention and after the MLP."""


class StepBytes(NamedTuple):
    """Bytes that one device must read in a step."""

    # The target's layers, its final norm and its live cache.
    layers: int
    # The target's unembedding matrix.
    unembed: int
    # The draft's weights and its live cache, summed over all passes.
    draft: int

    @property
    def total(self) -> int:
        return self.layers + self.unembed + self.draft


class Work(NamedTuple):
    """The work of one step on one device."""

    bytes: StepBytes
    # Floating-point operations in the target's matrix products.
    flops: float
    dtype: str
    # Number of tokens that the target scores, over all rows on the device.
    tokens: int
    context: int
    num_layers: int
    hidden_size: int
    num_experts: int
    # Number of devices that share a layer.
    devices: int
    # A key under "drafts" in the table, or the name of a drafter that was not measured.
    draft: str
    # Number of passes per draft, and number of transformer layers per pass.
    passes: int
    draft_layers: int


class StepTime(NamedTuple):
    """The time of a step in seconds: the roofline bound from bytes and operations, and the estimated range.

    If the table does not cover the step, `missing` states the reason, and both ends of the range equal the roofline
    bound.
    """

    floor_seconds: float
    low_seconds: float
    high_seconds: float
    missing: str = ""


@functools.cache
def overheads() -> JsonObject:
    """Load the table of overheads, keyed by generation."""
    return json.loads(TABLE.read_text(encoding="utf-8"))["chips"]


def step_time(work: Work, generation: str, device: Chip) -> StepTime:
    """Estimate the time of a step.

    Args:
      work: from `fit.count_work`.
      generation: generation of the chip, such as "v5e".
      device: bandwidth, peak FLOP/s and link bandwidth of a device.
    """
    bandwidth = device.bandwidth
    floor_seconds = max(work.bytes.total / bandwidth, work.flops / device.peak_flops)
    if missing := _missing(work, generation):
        return StepTime(floor_seconds, floor_seconds, floor_seconds, missing)
    chip_table = overheads()[generation]
    # Use the row with the smallest token count that is at least the step's.
    layer_rows = chip_table["layers"][work.dtype]
    layer_overheads = layer_rows[str(min(count for count in map(int, layer_rows) if count >= work.tokens))]
    draft_overheads = chip_table["drafts"][work.draft]
    # The measured drafts have one layer per pass.
    extra_layers = work.passes * max(work.draft_layers - 1, 0)

    # Time to read weights: a layer takes `stretch` times as long as its bytes would take at full bandwidth.
    seconds = layer_overheads["stretch"] * work.bytes.layers / bandwidth
    seconds += (work.bytes.unembed + work.bytes.draft) / bandwidth
    seconds += draft_overheads["step_seconds"] + work.passes * draft_overheads["pass_seconds"]

    # Collectives: all-reduces of bfloat16 hidden states, and all-reduces in the draft, which are so small that their
    # bytes are neglected.
    sum_bytes = 2 * work.tokens * work.hidden_size
    all_reduce_seconds = functools.partial(
        collective_seconds, "all-reduce", devices=work.devices, link=device.link
    )
    seconds += LAYER_COLLECTIVES * work.num_layers * all_reduce_seconds(sent=sum_bytes, received=sum_bytes)
    num_small = draft_overheads["step_collectives"] + work.passes * draft_overheads["pass_collectives"]
    num_small += LAYER_COLLECTIVES * extra_layers
    seconds += num_small * all_reduce_seconds(sent=0, received=0)

    num_launches = (work.num_layers + extra_layers) * layer_overheads["launches"]
    num_launches += draft_overheads["step_launches"] + work.passes * draft_overheads["pass_launches"]
    low, high = (max(floor_seconds, seconds + num_launches * launch) for launch in LAUNCH_SECONDS)
    return StepTime(floor_seconds, low, high)


def _missing(work: Work, generation: str) -> str:
    """Return the reason why the table does not cover a step, or "" if it does."""
    chip_table = overheads().get(generation)
    if chip_table is None or work.dtype not in chip_table["layers"]:
        return f"{work.dtype} on {generation} was not measured"
    if work.num_experts:
        return "mixtures of experts were not measured"
    if work.draft not in chip_table["drafts"]:
        return f"{work.draft} drafts were not measured"
    max_tokens = max(map(int, chip_table["layers"][work.dtype]))
    if work.tokens > max_tokens:
        return f"a device scores {work.tokens} tokens, and at most {max_tokens} were measured"
    if work.context > MAX_CONTEXT:
        return f"contexts above {MAX_CONTEXT} tokens were not measured"
    return ""


def collective_seconds(kind: str, sent: int, received: int, devices: int, link: float) -> float:
    """Return the time of a collective on a bidirectional ring in seconds: hop latencies plus transfer time.

    An all-reduce is a reduce-scatter of its operand and an all-gather of its result. A permute takes one hop.

    Args:
      kind: the opcode of the collective.
      sent: size of a device's operands in bytes.
      received: size of a device's results in bytes.
      devices: number of devices that take part.
      link: bytes per second of a link, both directions together.

    >>> round(1e6 * collective_seconds("all-reduce", 16384, 8192, 4, 90e9), 2)
    4.2
    """
    if devices < 2:
        return 0.0
    if kind.startswith("collective-permute"):
        return HOP_SECONDS + received / (link / 2)
    if kind.startswith("all-reduce"):
        num_hops, moved_bytes = 2 * (devices // 2), sent + received
    else:
        num_hops, moved_bytes = devices // 2, max(sent, received)
    return num_hops * HOP_SECONDS + moved_bytes * (devices - 1) / devices / link
