"""A step in figures: what each part executes and moves, and the milliseconds that follow from it.

A part takes the longest of its bytes over the bandwidth, its bundles over the clock and its products over the peak of
the matrix units, as if copying and computing overlapped without loss; collectives come on top, by the model of
`constants`; and an instruction's own time, of which nothing is known, comes on top twice, at 0.2 and at 1.5 us.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

from mars_jax.lab.planning.constants import OP_SECONDS, Speed, collective_seconds
from mars_jax.lab.planning.cost import COPIES, Step
from mars_jax.lab.planning.in_order import seconds_in_order

Figures = dict[str, Any]
"""Nested dicts of numbers, ready for JSON; a key that is missing is 0."""


def _zeros() -> dict[str, float]:
    return defaultdict(int)


def figures(step: Step, speed: Speed, bandwidth: float) -> Figures:
    """The figures of a step: what it executes and moves.

    Args:
      step: from `cost.read_step`.
      speed: of the generation.
      bandwidth: of a device's HBM, bytes a second.
    """
    parts: dict[str, dict[str, float]] = defaultdict(_zeros)
    collectives: Counter[str] = Counter()
    sorts: Counter[str] = Counter()
    gathers: Counter[str] = Counter()
    for op in step.ops():
        part = parts[op.part]
        # The start of a copy that runs beside what follows takes next to no time of its own.
        part["copies" if op.opcode in COPIES else "scalars" if op.scalar else "ops"] += op.times
        part["read_bytes"] += op.times * op.traffic.read
        part["written_bytes"] += op.times * op.traffic.written
        part["bundles"] += op.times * op.bundles
        part["flops"] += op.times * op.flops
        if op.devices:
            seconds = collective_seconds(op.opcode, op.sent, op.received, op.devices, speed.link)
            part["collectives"] += op.times
            part["collective_seconds"] += 0 if op.way else op.times * seconds
            collectives[f"{op.opcode} of {op.received} bytes over {op.devices} in {op.part}"] += op.times
        if op.sorted:
            sorts[f"{op.sorted} in {op.part}"] += op.times
        if op.gathered:
            gathers[f"{op.gathered} in {op.part}"] += op.times
    for part, bundles in step.overhead.items():
        parts[part]["bundles"] += bundles
    in_order, waited = seconds_in_order(step, speed, bandwidth)
    for part, seconds in in_order.items():
        parts[part]["in_order_seconds"] += seconds
    for part, seconds in waited.items():  # of what is sent ahead only the wait comes on top
        parts[part]["collective_seconds"] += seconds
    return {
        "parts": {name: dict(part) for name, part in sorted(parts.items())},
        "collectives": dict(collectives),
        "sorts": dict(sorts),
        "gathers": dict(gathers),
        "loops": dict(Counter(f"{loop.turns} turns" if loop.known else "unknown" for loop in step.loops())),
        "resident_bytes": step.resident_bytes,
        "largest_written_bytes": max((op.traffic.written for op in step.ops()), default=0),
    }


def estimate(found: Figures, speed: Speed, bandwidth: float) -> Figures:
    """Seconds of a step, from its figures.

    Returns:
      "bytes_seconds", all bytes over the bandwidth, below which no schedule gets; "parts", what each takes without the
      instructions' own time; "low_seconds" and "high_seconds", the sum with 0.2 and with 1.5 us an instruction;
      "in_order_seconds", the schedule run in order, with 0.2 us an instruction; and the totals.
    """
    parts, beyond = {}, 0.0
    total = _zeros()
    for name, part in found["parts"].items():
        for key, value in part.items():
            total[key] += value
        moving = (part.get("read_bytes", 0) + part.get("written_bytes", 0)) / bandwidth
        computing = max(part.get("bundles", 0) / speed.clock, part.get("flops", 0) / speed.peak_bf16)
        beyond += max(0.0, computing - moving)
        parts[name] = max(moving, computing) + part.get("collective_seconds", 0.0)
    low, high = (sum(parts.values()) + total["ops"] * own for own in OP_SECONDS)
    return {
        "bytes": total["read_bytes"] + total["written_bytes"],
        "bytes_seconds": (total["read_bytes"] + total["written_bytes"]) / bandwidth,
        "computing_seconds": beyond,  # beyond the bytes
        "collective_seconds": total["collective_seconds"],
        "ops": total["ops"],
        "scalars": total["scalars"],
        "collectives": total["collectives"],
        "parts": parts,
        "low_seconds": low,
        "high_seconds": high,
        "in_order_seconds": total["in_order_seconds"] + total["ops"] * OP_SECONDS[0],
    }
