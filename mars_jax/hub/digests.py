"""Checksums of an array: one of all its bytes, and one of each block that is stored together.

A process that reads a part of an array compares the blocks of that part. Oracle: `zlib.crc32`.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from mars_jax.hub.stream import Box


class Digest(NamedTuple):
    """The checksums of one array, all CRC-32."""

    whole: int
    block: tuple[int, ...]  # shape of a block; at the far ends of an array they are smaller
    blocks: tuple[int, ...]  # in C order of the blocks

    def parts(self, shape: Sequence[int]) -> Iterator[tuple[Box, int]]:
        """Return every block of an array of this shape, with its checksum.

        Raises:
          ValueError: the digest is of an array of another shape.
        """
        return zip(grid(shape, self.block), self.blocks, strict=True)


def grid(shape: Sequence[int], block: Sequence[int]) -> Iterator[Box]:
    """Return the blocks of an array, in C order.

    >>> list(grid((3, 2), (2, 2)))
    [((0, 2), (0, 2)), ((2, 3), (0, 2))]
    """
    axes = [
        [(first, min(first + step, n)) for first in range(0, n, step)]
        for n, step in zip(shape, block, strict=True)
    ]
    return itertools.product(*axes)


def checksum(array: np.ndarray) -> int:
    """Return the CRC-32 of the bytes of an array.

    >>> checksum(np.zeros(3, np.float32)) == zlib.crc32(bytes(12))
    True
    """
    data: Any = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return zlib.crc32(data)


def digest(array: np.ndarray, block: Sequence[int]) -> Digest:
    """Return the checksums of an array that is stored in blocks of a shape.

    >>> array = np.arange(6, dtype=np.int8).reshape(3, 2)
    >>> made = digest(array, (2, 2))
    >>> made.blocks == (zlib.crc32(bytes([0, 1, 2, 3])), zlib.crc32(bytes([4, 5])))
    True
    """
    parts = (array[tuple(slice(*ends) for ends in box)] for box in grid(array.shape, block))
    return Digest(checksum(array), tuple(block), tuple(checksum(part) for part in parts))
