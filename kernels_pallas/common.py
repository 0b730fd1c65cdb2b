"""Constants and helpers that the kernels share: sizes of TPU registers, device kinds, sentinels, and bit casts.

In shapes, `...` stands for any number of dimensions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

if TYPE_CHECKING:
    # Importing Pallas is slow, and programs without a kernel do not need it.
    from jax.experimental.pallas import tpu as pltpu

LANES = 128
"""Number of lanes in a TPU vector register, the same in all generations so far."""
SUBLANES = 8
"""Number of rows of a float32 vector register. Two bfloat16 rows share a register row, so the number of rows in a
bfloat16 block must be a multiple of 16."""
TWO_CORES = ("TPU v4", "TPU v5", "TPU v5p")
"""JAX's names of device kinds with two cores, which share the work of a kernel: TPU v4 and v5p."""
LAST_ID = 2**31 - 1
"""Replaces the id of a missing entry in comparisons, so that the entry loses every tie."""
LOWEST = -3.4028234663852886e38
"""The lowest finite float32. It is subtracted from rows of -inf before exp, because subtracting -inf would give NaN."""
Axis = str | tuple[str, ...]
"""The name of a mesh axis, or the names of several axes."""
Interpret: TypeAlias = "bool | pltpu.InterpretParams"
"""False to compile a kernel; True, or the parameters of a simulated TPU, to run it in an interpreter on a CPU."""


class BlockError(ValueError):
    """Error for shapes or block sizes that the hardware or this package does not support."""


def tile_rows(dtype: DTypeLike) -> int:
    """Return the number of rows in one tile of a matrix: 8 for float32, 16 for bfloat16."""
    return SUBLANES * 4 // jnp.dtype(dtype).itemsize


def round_up(size: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `size`.

    >>> round_up(129, 128)
    256
    """
    return -(-size // multiple) * multiple


def block_width(size: int, limit: int) -> int:
    """Return the width of the blocks into which a dimension of length `size` is divided.

    The width is `size` if that is at most `limit`. Otherwise, it is the largest divisor of `size` that is at most
    `limit` and a multiple of `LANES`, or `limit` if there is no such divisor.

    >>> block_width(14336, 2048), block_width(13824, 2048), block_width(96, 1024)
    (2048, 1536, 96)
    """
    if size <= limit:
        return size
    return next((width for width in range(limit // LANES * LANES, 0, -LANES) if size % width == 0), limit)


def bits(x: Array) -> Array:
    """Reinterpret f32[...] or i32[...] as i32[...] with the same bits.

    Use this to store floats and ids in one array of integers. In an array of floats, a small id would be a denormal
    number, which may be flushed to 0.
    """
    return lax.bitcast_convert_type(x, jnp.int32)
