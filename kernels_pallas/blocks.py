"""Block sizes of the kernels: validation and defaults.

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
"""Bytes of logits per block. Two blocks are in flight; with the state they stay far below the 16 MiB of VMEM that a
kernel gets by default on every generation."""
MAX_ROWS = 1024
"""Maximum number of rows per block. The state takes 2.5 KiB per row."""

TWO_CORES = ("TPU v4", "TPU v5", "TPU v5p")
"""Device kinds (jax's names) with two cores that share a kernel's work: v4 and v5p."""


class BlockError(ValueError):
    """A block size that the hardware or this package does not support."""


class TpuBlocks(NamedTuple):
    """Block of the TPU kernels: `trees` whole trees (or rows, for plain logits) by `tokens` of the vocabulary."""

    trees: int  # per block
    tokens: int  # per block


def tile_rows(dtype) -> int:
    """Return the rows of one tile of a matrix: 8 for float32, 16 for bfloat16."""
    return SUBLANES * 4 // jnp.dtype(dtype).itemsize


def tpu_blocks(
    blocks: TpuBlocks | None, *, trees: int, nodes: int, vocab: int, dtype, group: int
) -> TpuBlocks:
    """Return `blocks` after validation, or the default if it is None.

    Args:
      group: a block must hold a multiple of this many trees, or all of them.

    Raises:
      BlockError: the blocks are not legal for these shapes.
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
    """Return whether the smallest legal number of trees fits into a block."""
    return min(trees, group) * nodes <= MAX_ROWS


def _default(trees: int, nodes: int, vocab: int, itemsize: int, group: int) -> TpuBlocks:
    if trees <= group:
        block_trees = trees
    else:
        # About 256 rows per block, and at least two blocks, which chips with two cores (v4, v5p) share.
        target_trees = max(min(256 // nodes, trees // 2), 1)
        block_trees = -(-target_trees // group) * group
    # Rows in memory: the nodes of each tree are padded to a multiple of SUBLANES rows.
    padded_rows = block_trees * -(-nodes // SUBLANES) * SUBLANES if nodes > 1 else max(block_trees, SUBLANES)
    tokens = min(BLOCK_BYTES // (padded_rows * itemsize), 4096, -(-vocab // LANES) * LANES)
    return TpuBlocks(block_trees, max(tokens // LANES, 1) * LANES)


def _itemsize(dtype) -> int:
    size = jnp.dtype(dtype).itemsize
    if size not in (2, 4) or not jnp.issubdtype(dtype, jnp.floating):
        raise BlockError(f"logits are {jnp.dtype(dtype).name}: the kernels take float32 or bfloat16.")
    return size


TOP_K_BYTES = 4 * 2**20
"""Bytes of logits per block of `top_k`, which holds whole rows. Two blocks are in flight."""


def top_k_fits(vocab: int, k: int) -> bool:
    """Return whether a block of rows of `vocab` tokens fits into VMEM, and k entries into a vector.

    >>> top_k_fits(32000, 10), top_k_fits(262144, 10)
    (True, False)
    """
    return k < LANES and SUBLANES * 4 * vocab <= TOP_K_BYTES


class AttentionBlocks(NamedTuple):
    """Blocks of the attention kernel."""

    slots: int  # cache slots per block
    queries: int  # queries of one row per block
    buffers: int = 4  # blocks of slots that are in VMEM or being copied to it


ATTENTION_BYTES = 2**19
"""Bytes of keys per block. Four blocks of keys and four of values take 4 MiB of VMEM."""


def attention_blocks(
    blocks: AttentionBlocks | None,
    *,
    n: int,
    heads: int,
    group: int,
    dim: int,
    slots: int,
    dtype,
    scaled: bool,
) -> tuple[AttentionBlocks, int]:
    """Return `blocks` after validation, or the default if it is None, and the alignment of a block's first slot.

    Args:
      n, heads, group, dim, slots: N, K, G, D and S.
      dtype: of the keys and values.
      scaled: whether keys and values have scales.

    Raises:
      BlockError: the kernel cannot read such blocks or such a cache.
    """
    itemsize = jnp.dtype(dtype).itemsize
    packing = 4 // itemsize  # numbers that share a word of 32 bits
    align = 1
    if heads == 1 and packing > 1:
        align = tile_rows(dtype)
    elif heads % packing or (heads // packing not in (1, 2, 4) and heads // packing % SUBLANES):
        raise BlockError(
            f"the cache has {heads} heads of {jnp.dtype(dtype).name} on a device: the kernel takes {packing} times "
            f"1, 2, 4 or a multiple of {SUBLANES}" + (", or 1." if packing > 1 else ".")
        )
    if dim % LANES and dim > LANES:
        raise BlockError(f"heads are {dim} wide: the kernel takes multiples of {LANES}, or less than that.")
    if scaled:
        align = LANES
    if slots % align:
        raise BlockError(
            f"the cache has {slots} slots: this kernel reads a multiple of {align}, so allocate "
            f"{-(-slots // align) * align}."
        )
    if blocks is None:
        size = 512
        while size > 64 and size * heads * dim * itemsize > ATTENTION_BYTES:
            size //= 2
        # About 8 MiB of queries, results and state, and scores of 512 queries.
        rows = max(2048 * LANES // (heads * max(dim, LANES)), 1)
        blocks = AttentionBlocks(max(size, align), max(min(rows, 512) // group, 1))
    if blocks.slots <= 0 or blocks.slots % align:
        raise BlockError(f"blocks.slots is {blocks.slots}: expected a positive multiple of {align}.")
    if blocks.queries <= 0 or blocks.buffers < 2:
        raise BlockError(
            f"blocks has {blocks.queries} queries and {blocks.buffers} buffers: expected 1 or more, and 2 or more."
        )
    return blocks._replace(slots=min(blocks.slots, slots), queries=min(blocks.queries, n)), align
