"""Block sizes of the attention kernel, and the cache layouts that it can read.

N queries, K key-value heads, G query heads per key-value head, D head dimension, S slots.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from kernels_pallas.common import LANES, SUBLANES, BlockError, round_up, tile_rows


class AttentionBlocks(NamedTuple):
    """Blocks of the attention kernel."""

    slots: int  # cache slots per block
    queries: int  # queries of one row per block
    buffers: int = 4  # blocks of slots that are in VMEM or being copied to it


ATTENTION_BYTES = 2**19
"""Bytes of keys per block. Four blocks of keys and four of values take 4 MiB of VMEM."""


def attention_blocks(
    blocks: AttentionBlocks | None, queries: tuple[int, ...], slots: int, dtype: DTypeLike, *, scaled: bool
) -> tuple[AttentionBlocks, int]:
    """Return `blocks` after validation, or the default if it is None, and the alignment of a block's first slot.

    Args:
      queries: shape of the queries, (B, N, K, G, D).
      slots: S.
      dtype: dtype of the keys and values.
      scaled: whether keys and values have scales.

    Raises:
      BlockError: the kernel cannot read such blocks or such a cache.
    """
    _, n, heads, group, dim = queries
    itemsize = jnp.dtype(dtype).itemsize
    packing = 4 // itemsize  # numbers that share a 32-bit word
    align = 1
    if heads == 1 and packing > 1:
        # Slots are the rows of a matrix, whose slices must begin at whole tiles.
        align = tile_rows(dtype)
    elif heads % packing or (heads // packing not in (1, 2, 4) and heads // packing % SUBLANES):
        raise BlockError(
            f"the cache has {heads} heads of {jnp.dtype(dtype).name} on a device: the kernel takes {packing} times "
            f"1, 2, 4 or a multiple of {SUBLANES}, or 1."
        )
    if dim % LANES and dim > LANES:
        raise BlockError(f"heads are {dim} wide: the kernel takes multiples of {LANES}, or less than that.")
    if scaled:
        # Scales have their slots in the lanes, whose slices must begin at whole registers.
        align = LANES
    if slots % align:
        raise BlockError(
            f"the cache has {slots} slots: this kernel reads a multiple of {align}, so allocate "
            f"{round_up(slots, align)}."
        )
    if blocks is None:
        # Slots per block: the largest power of two, from 64 to 512, whose keys take at most `ATTENTION_BYTES`.
        block_slots = 512
        while block_slots > 64 and block_slots * heads * dim * itemsize > ATTENTION_BYTES:
            block_slots //= 2
        # Allow about 8 MiB of queries, results and state, and the scores of 512 queries.
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
    """Return whether to read a cache as [B, S, D], because slots rather than heads share 32-bit words."""
    return k.shape[2] == 1 and jnp.dtype(k.dtype).itemsize < 4
