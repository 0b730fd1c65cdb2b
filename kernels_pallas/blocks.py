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

TWO_CORES = ("TPU v4", "TPU v5", "TPU v5p")
"""Kinds of devices, as jax names them, whose two cores share a kernel's work: v4 and v5p."""


class BlockError(ValueError):
    """A block size that the hardware, or this package, cannot serve."""


class TpuBlocks(NamedTuple):
    """Block of the TPU kernels: `trees` whole trees (rows, where there are no trees) by `tokens` of the
    vocabulary."""

    trees: int  # of a block
    tokens: int  # of a block


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
    # Rows as they lie in memory: each tree's nodes are padded to whole registers of SUBLANES rows.
    padded = block_trees * -(-nodes // SUBLANES) * SUBLANES if nodes > 1 else max(block_trees, SUBLANES)
    tokens = min(BLOCK_BYTES // (padded * itemsize), 4096, -(-vocab // LANES) * LANES)
    return TpuBlocks(block_trees, max(tokens // LANES, 1) * LANES)


def _itemsize(dtype) -> int:
    size = jnp.dtype(dtype).itemsize
    if size not in (2, 4) or not jnp.issubdtype(dtype, jnp.floating):
        raise BlockError(f"logits are {jnp.dtype(dtype).name}: the kernels take float32 or bfloat16.")
    return size


TOP_K_BYTES = 4 * 2**20
"""Bytes of logits per block of `top_k`, which holds whole rows. Two are in flight."""


def top_k_fits(vocab: int, k: int) -> bool:
    """True where a block of rows with `vocab` tokens fits into fast memory, and k entries into a vector.

    >>> top_k_fits(32000, 10), top_k_fits(262144, 10)
    (True, False)
    """
    return k < LANES and SUBLANES * 4 * vocab <= TOP_K_BYTES


class AttentionBlocks(NamedTuple):
    """Blocks of the attention kernel: `slots` of the cache and `queries` of a row at a time; `buffers` blocks of slots
    are on the chip or on their way to it."""

    slots: int  # of a block of the cache
    queries: int  # of a block
    buffers: int = 4  # blocks on the chip


ATTENTION_BYTES = 2**19
"""Bytes of keys per block. Four blocks of keys and of values are 4 MiB of fast memory."""


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
    """`blocks` where they are legal or the default, and what the first slot of a block is a multiple of.

    Args:
      n, heads, group, dim, slots: N, K, G, D and S.
      dtype: of the keys and values.
      scaled: they have scales.

    Raises:
      BlockError: the blocks or the cache are nothing that the kernel can read.
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
