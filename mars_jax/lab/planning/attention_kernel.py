"""The table that attention's kernel reads for rows of a known length, and the blocks that it copies.

A schedule does not have the table, which says how often the kernel's loop over blocks of slots turns. Its name has the
sizes of blocks. Oracle: tests/lab/planning/test_cost.py, by `tile_table`, which makes the table for the kernel.
"""

from __future__ import annotations

import re

from kernels_pallas.mosaic.attend import COUNT, WORDS
from mars_jax.lab.planning.hlo import Instruction
from mars_jax.lab.planning.traffic import Traffic


def attention_table(instruction: Instruction, operands: list[Instruction], live: int) -> list[list[int]]:
    """Return the rows of the table (`attend.FIRST` and so on), [] of any other instruction.

    Every row of the batch has so many live slots, its new ones among them, and no window hides any. Of queries in a
    row, the last one is in the last live slot.
    """
    sizes = _sizes(instruction)
    if sizes is None:
        return []
    queries, size = sizes
    columns, tiles, words = (x.shapes[0].dims[i] for x, i in zip(operands, (1, 1, 3), strict=False))
    behind = [(tiles - 1 - t) * queries if words == WORDS else 0 for t in range(tiles)]
    ends = [max(live - by, 1) for by in behind] * (columns // tiles)
    firsts = [max(end - queries, 0) for end in ends]
    return [firsts, [0] * columns, [-(-end // size) for end in ends], [-1] * columns, firsts]


def read_by_blocks(
    instruction: Instruction, operands: list[Instruction], whole: Traffic, rows: list[list[int]]
) -> Traffic:
    """Return the traffic of a call, of which `whole` takes each row of keys and values for read once and whole."""
    sizes = _sizes(instruction)
    assert sizes is not None  # it has a table
    caches = [shape for x in operands[3:5] for shape in x.shapes]
    slots = caches[0].dims[0] * caches[0].dims[1]
    moved = sum(rows[COUNT]) * sizes[1] * sum(shape.bytes for shape in caches) // slots
    return whole._replace(read=whole.read - sum(shape.bytes for shape in caches) + moved)


def _sizes(instruction: Instruction) -> tuple[int, int] | None:
    """Return the queries and slots of a block."""
    found = re.match(r"tree_attention-bq(\d+)-bkv(\d+)", instruction.name)
    return None if found is None else (int(found[1]), int(found[2]))
