"""Block sizes: what is legal, and what is chosen where the caller names none.

R rows = B trees * N nodes, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

LANES = 128
"""Vector lanes of every TPU so far."""
SUBLANES = 8
"""Rows of a float32 vector register; two bfloat16 rows share one, so bfloat16 blocks come in 16."""
BLOCK_BYTES = 2 * 2**20
"""Bytes of logits per block. Two are in flight, and together with the state they stay far below the 16 MiB of
fast memory that every generation grants a kernel by default."""
MAX_ROWS = 1024
"""Rows per block. The state takes 2.5 KiB a row."""


class BlockError(ValueError):
    """A block size that the hardware, or this package, cannot serve."""


class TpuBlocks(NamedTuple):
    """Block of the TPU kernels: `trees` whole trees (rows, where there are no trees) by `tokens` of the
    vocabulary."""

    trees: int
    tokens: int


def tile_rows(dtype) -> int:
    """Rows of one tile of a matrix of `dtype`: 8 of float32, 16 of bfloat16."""
    return SUBLANES * 4 // jnp.dtype(dtype).itemsize


def tpu_blocks(
    blocks: TpuBlocks | None, *, trees: int, nodes: int, vocab: int, dtype, group: int
) -> TpuBlocks:
    """`blocks` where it is legal, or the default.

    Args:
      group: a block takes a multiple of this many trees, or all of them.

    Raises:
      BlockError: with what is wrong and what would be right.
    """
    itemsize = _itemsize(dtype)
    if trees == 0 or nodes == 0 or vocab == 0:
        raise BlockError(f"logits have {trees} trees, {nodes} nodes and {vocab} tokens: expected 1 or more.")
    if blocks is None:
        blocks = _default(trees, nodes, vocab, itemsize, group)
    if blocks.tokens <= 0 or blocks.tokens % LANES:
        raise BlockError(f"blocks.tokens is {blocks.tokens}: expected a positive multiple of {LANES}.")
    if blocks.trees != trees and (blocks.trees <= 0 or blocks.trees % group):
        raise BlockError(
            f"blocks.trees is {blocks.trees}: expected a positive multiple of {group} for "
            f"{jnp.dtype(dtype).name} logits, or all {trees} of them."
        )
    rows = blocks.trees * nodes
    if rows > MAX_ROWS or rows * blocks.tokens * itemsize > 2 * BLOCK_BYTES:
        raise BlockError(
            f"a block of {blocks.trees} trees of {nodes} nodes by {blocks.tokens} tokens does not fit: at "
            f"most {MAX_ROWS} rows and {2 * BLOCK_BYTES} bytes, so take fewer trees or tokens."
        )
    return blocks


def fits(trees: int, nodes: int, group: int) -> bool:
    """True where the fewest trees that make a block fit in one."""
    return min(trees, group) * nodes <= MAX_ROWS


def _default(trees: int, nodes: int, vocab: int, itemsize: int, group: int) -> TpuBlocks:
    if trees <= group:
        block_trees = trees
    else:
        # Two blocks or more, so that the chips with two cores (v4, v5p) share the rows; about 256 rows each.
        wanted = max(min(256 // nodes, trees // 2), 1)
        block_trees = -(-wanted // group) * group
    padded = block_trees * -(-nodes // SUBLANES) * SUBLANES if nodes > 1 else max(block_trees, SUBLANES)
    tokens = min(BLOCK_BYTES // (padded * itemsize), 4096, -(-vocab // LANES) * LANES)
    return TpuBlocks(block_trees, max(tokens // LANES, 1) * LANES)


def _itemsize(dtype) -> int:
    size = jnp.dtype(dtype).itemsize
    if size not in (2, 4) or not jnp.issubdtype(dtype, jnp.floating):
        raise BlockError(f"logits are {jnp.dtype(dtype).name}: the kernels take float32 or bfloat16.")
    return size


class GpuBlocks(NamedTuple):
    """Blocks of the GPU kernel: each row's vocabulary is cut into `splits` programs of `warps` warps, each of
    which steps over `tokens` at a time."""

    splits: int
    tokens: int = 2048
    warps: int = 8


PROGRAMS = 1024
"""Programs that keep a large GPU busy: an H200 has 132 multiprocessors with room for 8 of these each."""


def gpu_blocks(blocks: GpuBlocks | None, *, rows: int, vocab: int, dtype) -> GpuBlocks:
    """`blocks` where it is legal, or the default.

    Raises:
      BlockError: with what is wrong and what would be right.
    """
    _itemsize(dtype)
    if rows == 0 or vocab == 0:
        raise BlockError(f"logits have {rows} rows of {vocab} tokens: neither may be 0.")
    if blocks is None:
        tokens = min(GpuBlocks(1).tokens, max(_power_of_two(vocab), 128))
        splits = min(_power_of_two(-(-PROGRAMS // rows)), _power_of_two(-(-vocab // tokens)))
        return GpuBlocks(splits, tokens, max(tokens // 256, 1))
    for name, value, limit in (("splits", blocks.splits, 2**16), ("tokens", blocks.tokens, 2**15)):
        if value <= 0 or value & (value - 1) or value > limit:
            raise BlockError(f"blocks.{name} is {value}: expected a power of two from 1 to {limit}.")
    if blocks.warps not in (1, 2, 4, 8, 16, 32):
        raise BlockError(f"blocks.warps is {blocks.warps}: expected a power of two from 1 to 32.")
    return blocks


def _power_of_two(at_least: int) -> int:
    return 1 << (at_least - 1).bit_length()
