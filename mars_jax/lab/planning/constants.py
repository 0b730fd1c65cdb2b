"""The numbers that `planning.cost` judges by. They are frozen: before and after a change are judged by the same ones.

Clocks: what libtpu's schedules count cycles of (v5e 1.5 GHz, v5p and v6e 1.75 GHz, v4 1.05 GHz, tpu7x 2.2 GHz), by
which its matrix units reach the published peak figures ("trust" in scripts/results/tpu_cost.json). Links: Google's
Cloud TPU documentation, bytes a second of a chip over all links, here of one link in both directions. Hops: "about 1
us", How to Scale Your Model (2025), chapter 3. An instruction's own time is not known: 0.2 us is what a program without
launches can reach with operands in fast memory, 1.5 us an upper bound; every estimate names both.
"""

from __future__ import annotations

from typing import NamedTuple


class Speed(NamedTuple):
    """Speeds of a generation, beside `chips.CHIPS`."""

    clock: float  # bundles a second
    link: float  # bytes a second of one inter-chip link, both directions together
    peak_bf16: float  # published, operations a second of a chip; v4's two cores share it, those of tpu7x have half each


SPEEDS = {
    "v4": Speed(1.05e9, 90e9, 275e12),
    "v5e": Speed(1.5e9, 90e9, 197e12),
    "v5p": Speed(1.75e9, 180e9, 459e12),
    "v6e": Speed(1.75e9, 180e9, 918e12),
    "tpu7x": Speed(2.2e9, 200e9, 2307e12 / 2),
}
HOP_SECONDS = 1e-6
OP_SECONDS = (0.2e-6, 1.5e-6)


def collective_seconds(kind: str, sent: int, received: int, devices: int, link: float) -> float:
    """A ring of devices that passes both ways: the hops, and the bytes over one link.

    An all-reduce is a reduce-scatter of what is given and an all-gather of what comes out; a permute is one hop.

    Args:
      kind: the opcode.
      sent: bytes of a device's operands.
      received: bytes of a device's results.
      devices: of a group.
      link: bytes a second of a link in both directions.

    >>> round(1e6 * collective_seconds("all-reduce", 16384, 8192, 4, 90e9), 2)
    4.2
    """
    if devices < 2:
        return 0.0
    if kind.startswith("collective-permute"):
        return HOP_SECONDS + received / (link / 2)
    passes = 2 if kind.startswith("all-reduce") else 1
    moved = sent + received if passes == 2 else max(sent, received)
    return passes * (devices // 2) * HOP_SECONDS + moved * (devices - 1) / devices / link
