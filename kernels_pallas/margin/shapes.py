"""Block sizes of the margin kernels. R rows = B trees * N nodes, V vocabulary."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike

from kernels_pallas.common import LANES, SUBLANES, BlockError, round_up

BLOCK_BYTES = 2 * 2**20
"""Bytes of logits per block. Two blocks are in flight; with the state they stay far below the 16 MiB of VMEM that a
kernel gets by default on every generation."""
MAX_ROWS = 1024
"""Maximum number of rows per block. The state takes 2.5 KiB per row."""


class TpuBlocks(NamedTuple):
    """Block of the TPU kernels: `trees` whole trees (or rows, for plain logits) by `tokens` of the vocabulary."""

    trees: int  # trees (or rows) per block
    tokens: int  # tokens per block


def tpu_blocks(
    blocks: TpuBlocks | None, *, trees: int, nodes: int, vocab: int, dtype: DTypeLike, group: int
) -> TpuBlocks:
    """Return `blocks` after validation, or the default if it is None.

    Args:
      group: a block must hold a multiple of this many trees, or all of them.

    Raises:
      BlockError: the blocks are not legal for these shapes.
    """
    itemsize = jnp.dtype(dtype).itemsize
    if itemsize not in (2, 4) or not jnp.issubdtype(dtype, jnp.floating):
        raise BlockError(f"logits are {jnp.dtype(dtype).name}: the kernels take float32 or bfloat16.")
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
    # The caller's block may be twice as large as a default one: two such blocks still fit into VMEM.
    block_rows = blocks.trees * nodes
    if block_rows > MAX_ROWS or block_rows * blocks.tokens * itemsize > 2 * BLOCK_BYTES:
        raise BlockError(
            f"a block of {blocks.trees} trees of {nodes} nodes by {blocks.tokens} tokens does not fit: at "
            f"most {MAX_ROWS} rows and {2 * BLOCK_BYTES} bytes, so take fewer trees or tokens."
        )
    return blocks


def _default(trees: int, nodes: int, vocab: int, itemsize: int, group: int) -> TpuBlocks:
    if trees <= group:
        block_trees = trees
    else:
        # About 256 rows per block, and at least two blocks, which chips with two cores (v4, v5p) share.
        target_trees = max(min(256 // nodes, trees // 2), 1)
        block_trees = round_up(target_trees, group)
    # Rows in memory: the nodes of each tree are padded to a multiple of SUBLANES rows.
    if nodes > 1:
        padded_rows = block_trees * round_up(nodes, SUBLANES)
    else:
        padded_rows = max(block_trees, SUBLANES)
    # The kernel's loop over chunks of 128 tokens is unrolled, so limit the tokens per block even for few rows.
    block_tokens = min(BLOCK_BYTES // (padded_rows * itemsize), 4096, round_up(vocab, LANES))
    return TpuBlocks(block_trees, max(block_tokens // LANES, 1) * LANES)
