"""Constants and helpers shared by the kernels: TPU registers and cores, sentinels, and bit casts of floats.

`...` stands for any dimensions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

if TYPE_CHECKING:
    # Importing Pallas takes a while, and programs without a kernel do not need it.
    from jax.experimental.pallas import tpu as pltpu

LANES = 128
"""Vector lanes of every TPU so far."""
SUBLANES = 8
"""Rows of a float32 vector register. Two bfloat16 rows share one, so bfloat16 blocks have multiples of 16 rows."""
TWO_CORES = ("TPU v4", "TPU v5", "TPU v5p")
"""Device kinds (jax's names) with two cores that share a kernel's work: v4 and v5p."""
LAST_ID = 2**31 - 1
"""Replaces a missing id in comparisons, so that a missing entry loses every tie."""
LOWEST = -3.4028234663852886e38
"""The lowest finite float32. Rows of -inf subtract it before exp, because subtracting -inf would give NaN."""
Axis = str | tuple[str, ...]
"""A mesh axis, or several."""
Interpret: TypeAlias = "bool | pltpu.InterpretParams"
"""False compiles a kernel; True, or the parameters of a simulated TPU, interpret it on a CPU."""


class BlockError(ValueError):
    """A block size that the hardware or this package does not support."""


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
    """Return the width of blocks for `size` numbers.

    It is `size` if that is at most `limit`, else the largest divisor of `size` that is at most `limit` and a multiple
    of `LANES`, or `limit` if there is no such divisor.

    >>> block_width(14336, 2048), block_width(13824, 2048), block_width(96, 1024)
    (2048, 1536, 96)
    """
    if size <= limit:
        return size
    return next((width for width in range(limit // LANES * LANES, 0, -LANES) if size % width == 0), limit)


def bits(x: Array) -> Array:
    """Reinterpret f32[...] or i32[...] as i32[...] with the same bits.

    Floats are stored as integers because a small id stored as a float is denormal and may be flushed to 0.
    """
    return lax.bitcast_convert_type(x, jnp.int32)
