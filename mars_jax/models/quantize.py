"""Weights in 8 bits: per output channel, symmetric, the largest of each channel at 127.

A quantised matrix stands in params where the matrix would: `layers.dense`, `layers.embed` and
`moe.dense_by_expert` take either. Products are made of the integers, which every float dtype in use holds exactly, and
scaled afterwards; sums stay float32. Oracle: the product of the dequantised matrix (tests/models/test_quantize.py).
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from mars_jax.core import struct
from mars_jax.core.errors import MarsError
from mars_jax.models.weights import Weight


@struct.dataclass
class Int8:
    """A matrix [..., out, in], or a table of rows, in 8 bits."""

    values: Array  # i8[..., out, in]; in [-127, 127]
    scale: Array  # f32[..., out]; the matrix is values * scale[..., None]
    # That of the matrix it stands for, and of what is looked up in it.
    dtype: Any = struct.field(pytree_node=False)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def astype(self, dtype: Any) -> Array:
        """Return the matrix itself."""
        return (self.values.astype(jnp.float32) * self.scale[..., None]).astype(dtype)


def quantize(w: Any, dtype: Any = None) -> Int8:
    """Return a matrix [..., out, in] of numpy or JAX in 8 bits; `dtype` is the one it is to stand for, default its own.

    No weight moves by more than half of its channel's scale, the channel's largest over 127.

    >>> made = quantize(np.asarray([[1.0, -0.5], [0.0, 0.0]], np.float32))
    >>> made.values.tolist(), made.dtype.name
    ([[127, -64], [0, 0]], 'float32')
    """
    xp = w.__array_namespace__()
    with np.errstate(invalid="ignore"):  # what is no number shows in the scale, where it is looked for
        wide = w.astype("float32")
        scale = xp.max(xp.abs(wide), axis=-1) / 127
        values = xp.round(wide / xp.where(scale == 0, xp.ones_like(scale), scale)[..., None])
        return Int8(values=values.astype("int8"), scale=scale, dtype=jnp.dtype(dtype or w.dtype))


def is_quantized(row: Weight) -> bool:
    """Tell whether a row of a table of weights is kept in 8 bits: matrices and tables, not norms, biases and routers.

    A router is small, and what it says is a choice that rounding can turn.
    """
    return row.init == "normal" and "router" not in row.path


def scale_sharding(sharding: Sharding, ndim: int) -> Sharding:
    """Return the sharding of the scale of a quantised matrix of `ndim` axes: the matrix's own, without its last axis.

    Raises:
      MarsError: the sharding does not name its axes.
    """
    if isinstance(sharding, NamedSharding):
        spec = (*sharding.spec, *[None] * (ndim - len(sharding.spec)))
        return NamedSharding(sharding.mesh, PartitionSpec(*spec[:-1]))
    if sharding.is_fully_replicated:
        return sharding
    raise MarsError(
        f"int8 weights cannot be spread by a {type(sharding).__name__}: give a NamedSharding, or a device."
    )
