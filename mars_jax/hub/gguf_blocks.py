"""Blocks of 4 bits in a GGUF file, Q4_0, Q4_1 and Q4_K, as `models.quantize.Int4` holds them.

Format: ggml-org/ggml, `block_q4_0`, `block_q4_1` and `block_q4_K` of ggml-common.h, and `get_scale_min_k4` of
ggml-quants.c. A block of 32 weights is a scale d, in Q4_1 a least value m, both float16, and 16 bytes: byte j holds
weight j in its low half and weight j + 16 in its high one.

In Q4_K eight blocks share float16 factors of their scales and of what is taken from their weights, which are whole
numbers of 6 bits; 32 bytes hold one block in their low halves and the next in their high ones. There a scale is a
product, and rounds to float16 by 2^-11 of itself at most. In the other two no weight is rounded again.
Oracle: the package gguf's `dequantize` (tests/hub/test_gguf.py).
"""

from __future__ import annotations

import numpy as np

BLOCK_SIZE = 32
"""Weights of a block."""
KINDS = ("Q4_0", "Q4_1", "Q4_K")


def read_blocks(data: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return values, scale and offset of rows, outputs last.

    Args:
      data: u8[out, bytes], the rows in the file.
      kind: of `KINDS`.

    Returns:
      i8[blocks, 32, out] in [-8, 7], f16[blocks, out] and f32[blocks, out].
    """
    if kind == "Q4_K":
        return _read_of_eight(data)
    head = 2 if kind == "Q4_0" else 4
    blocks = data.reshape(len(data), -1, head + BLOCK_SIZE // 2)
    scale = np.ascontiguousarray(blocks[..., :2]).view(np.float16)[..., 0]
    low, high = blocks[..., head:] & 15, blocks[..., head:] >> 4
    values = np.concatenate([low, high], axis=-1).astype(np.int8) - np.int8(8)
    if kind == "Q4_0":
        offset = np.zeros(scale.shape, np.float32)
    else:
        least = np.ascontiguousarray(blocks[..., 2:4]).view(np.float16)[..., 0]
        offset = least.astype(np.float32) + 8 * scale.astype(np.float32)
    return values.transpose(1, 2, 0), scale.T, offset.T


def _read_of_eight(data: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return what `read_blocks` does, of rows of Q4_K: 2 + 2 bytes of factors, 12 of scales, 128 of weights."""
    shared = data.reshape(len(data), -1, 144)
    factors = np.ascontiguousarray(shared[..., :4]).view(np.float16).astype(np.float32)[..., None]
    low, mid, high = (shared[..., 4 + i : 8 + i] for i in (0, 4, 8))
    # Of the blocks 0 to 3, and of 4 to 7, whose two upper bits are those that the first four leave free.
    steps = np.concatenate([low & 63, high & 15 | low >> 6 << 4], axis=-1)
    taken = np.concatenate([mid & 63, high >> 4 | mid >> 6 << 4], axis=-1)
    scale = (factors[..., 0, :] * steps).astype(np.float16)
    offset = 8 * scale.astype(np.float32) - factors[..., 1, :] * taken
    pairs = shared[..., 16:].reshape(*shared.shape[:2], 4, 32)
    values = np.stack([pairs & 15, pairs >> 4], axis=3).astype(np.int8) - np.int8(8)
    rows = len(data)
    return (
        values.reshape(rows, -1, 32).transpose(1, 2, 0),
        scale.reshape(rows, -1).T,
        offset.reshape(rows, -1).T,
    )
