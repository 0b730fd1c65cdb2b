"""Shapes of matrix products that the kernel for int4 weights supports."""

from __future__ import annotations

CHUNK = 128
"""Number of inputs that are unpacked together: the depth of a matrix unit."""
ROWS = 64
"""Maximum number of rows of a product. Rows are split by group only if the number of rows after the split does not
exceed this maximum."""


def supports_product(rows: int, inputs: int, outputs: int, size: int) -> bool:
    """Return whether the kernel supports a product with a matrix of this shape, in groups of `size` inputs.

    >>> supports_product(60, 4096, 14336, 128), supports_product(60, 13824, 5120, 32)
    (True, True)
    >>> supports_product(60, 576, 1536, 64), supports_product(512, 4096, 4096, 128)
    (False, False)
    """
    return rows <= ROWS and inputs % CHUNK == 0 and outputs % 128 == 0 and size in (32, 64, CHUNK)
