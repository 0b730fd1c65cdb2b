"""Block sizes of the attention kernel, and the cache layouts that it supports.

Dimensions: B batch, N queries, K key-value heads, G query heads per key-value head, D head dimension, S slots.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from kernels_pallas.common import LANES, SUBLANES, BlockError, round_up, tile_rows


class AttentionBlocks(NamedTuple):
    """Block sizes of the attention kernel."""

    slots: int  # number of cache slots per block
    queries: int  # number of queries of one batch row per block
    buffers: int = 4  # number of slot blocks in VMEM at a time, including those being copied


ATTENTION_BYTES = 2**19
"""Maximum size of a block of keys, in bytes. Four blocks of keys and four blocks of values take 4 MiB of VMEM."""


def attention_blocks(
    blocks: AttentionBlocks | None, queries: tuple[int, ...], slots: int, dtype: DTypeLike, *, scaled: bool
) -> tuple[AttentionBlocks, int]:
    """Check the block sizes, or choose them if they are None.

    Args:
      blocks: block sizes, or None.
      queries: shape of the queries, (B, N, K, G, D).
      slots: S, the number of slots in the cache.
      dtype: dtype of the keys and values.
      scaled: whether keys and values have scales.

    Returns:
      The block sizes, and the alignment of blocks: the first slot of a block must be a multiple of this number.

    Raises:
      BlockError: the kernel does not support this cache or these block sizes.
    """
    _, n, heads, group, dim = queries
    itemsize = jnp.dtype(dtype).itemsize
    packing = 4 // itemsize  # how many numbers share a 32-bit word
    align = 1
    if heads == 1 and packing > 1:
        # The slots are the rows of a matrix, and slices of a matrix must begin at a tile boundary.
        align = tile_rows(dtype)
    elif heads % packing or (heads // packing not in (1, 2, 4) and heads // packing % SUBLANES):
        raise BlockError(
            f"the cache has {heads} heads of {jnp.dtype(dtype).name} on a device: the kernel takes {packing} times "
            f"1, 2, 4 or a multiple of {SUBLANES}, or 1."
        )
    if dim % LANES and dim > LANES:
        raise BlockError(f"heads are {dim} wide: the kernel takes multiples of {LANES}, or less than that.")
    if scaled:
        # The slots of the scales are in lanes, and slices of lanes must begin at a register boundary.
        align = LANES
    if slots % align:
        raise BlockError(
            f"the cache has {slots} slots: this kernel reads a multiple of {align}, so allocate "
            f"{round_up(slots, align)}."
        )
    if blocks is None:
        # Choose a power of two from 64 to 512: the largest one for which the keys of a block take at most
        # `ATTENTION_BYTES`, or 64 if there is none.
        block_slots = 512
        while block_slots > 64 and block_slots * heads * dim * itemsize > ATTENTION_BYTES:
            block_slots //= 2
        # Limit the queries, results and state to about 8 MiB, and the scores to those of 512 queries.
        query_rows = max(2048 * LANES // (heads * max(dim, LANES)), 1)
        blocks = AttentionBlocks(max(block_slots, align), max(min(query_rows, 512) // group, 1))
    if blocks.slots <= 0 or blocks.slots % align:
        raise BlockError(f"blocks.slots is {blocks.slots}: expected a positive multiple of {align}.")
    if blocks.queries <= 0 or blocks.buffers < 2:
        raise BlockError(
            f"blocks has {blocks.queries} queries and {blocks.buffers} buffers: expected at least 1 and at least 2."
        )
    return blocks._replace(slots=min(blocks.slots, slots), queries=min(blocks.queries, n)), align


def is_flat(k: Array) -> bool:
    """Return True if a cache is read as [B, S, D], so that slots instead of heads share 32-bit words."""
    return k.shape[2] == 1 and jnp.dtype(k.dtype).itemsize < 4
