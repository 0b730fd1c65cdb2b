"""Blocks of 4 bits in a GGUF file, Q4_0 and Q4_1, as `models.quantize.Int4` holds them: no weight is rounded again.

Format: ggml-org/ggml, `block_q4_0` and `block_q4_1` of ggml-common.h. A block of 32 weights is a scale d, in Q4_1 a
least value m, both float16, and 16 bytes: byte j holds weight j in its low half and weight j + 16 in its high one.
Oracle: the package gguf's `dequantize` (tests/hub/test_gguf.py).
"""

from __future__ import annotations

import numpy as np

BLOCK_SIZE = 32
"""Weights of a block."""
KINDS = ("Q4_0", "Q4_1")


def read_blocks(data: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return values, scale and offset of rows, outputs last.

    Args:
      data: u8[out, bytes], the rows in the file.
      kind: of `KINDS`.

    Returns:
      i8[blocks, 32, out] in [-8, 7], f16[blocks, out] and f32[blocks, out].
    """
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
