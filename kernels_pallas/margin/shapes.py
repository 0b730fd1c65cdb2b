"""Block sizes of the margin kernels. Dimensions: B trees, N nodes, R = B * N rows, V vocabulary."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike

from kernels_pallas.common import LANES, SUBLANES, BlockError, round_up

BLOCK_BYTES = 2 * 2**20
"""Size of a block of logits, in bytes. Two blocks and the state are in VMEM at a time. They take far less than 16 MiB,
which a kernel may use by default on every TPU generation."""
MAX_ROWS = 1024
"""Maximum number of rows per block. The state takes 2.5 KiB per row."""


class TpuBlocks(NamedTuple):
    """Block size of the TPU kernels for the margin."""

    trees: int  # number of trees per block, or of rows if there are no trees
    tokens: int  # number of tokens of the vocabulary per block


def tpu_blocks(
    blocks: TpuBlocks | None, *, trees: int, nodes: int, vocab: int, dtype: DTypeLike, group: int
) -> TpuBlocks:
    """Check the block size, or choose one if it is None.

    Args:
      blocks: block size, or None.
      trees: number of trees, or of rows if there are no trees.
      nodes: number of nodes per tree; 1 if there are no trees.
      vocab: V, the number of tokens in the vocabulary.
      dtype: dtype of the logits.
      group: the number of trees per block must be a multiple of this, or equal to `trees`.

    Raises:
      BlockError: the kernel does not support these shapes or this block size.
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
    # A block chosen by the caller may be twice as large as a default block. Two such blocks still fit in VMEM.
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
        # Use about 256 rows per block, and at least two blocks, so that both cores of a chip (v4, v5p) are busy.
        target_trees = max(min(256 // nodes, trees // 2), 1)
        block_trees = round_up(target_trees, group)
    # In memory, the nodes of each tree are padded to a multiple of SUBLANES rows.
    if nodes > 1:
        padded_rows = block_trees * round_up(nodes, SUBLANES)
    else:
        padded_rows = max(block_trees, SUBLANES)
    # The kernel unrolls its loop over chunks of 128 tokens, so limit the tokens per block even if there are few rows.
    block_tokens = min(BLOCK_BYTES // (padded_rows * itemsize), 4096, round_up(vocab, LANES))
    return TpuBlocks(block_trees, max(block_tokens // LANES, 1) * LANES)
