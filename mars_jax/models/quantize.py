"""Quantised weights: int8 per output channel, int4 per group of inputs with a scale and an offset, and MXFP4.

In the params, a quantised matrix replaces the original one. `layers.dense` accepts `Int8` and `Int4`, `layers.embed`
accepts `Int8`, and `moe.dense_by_expert` accepts `Int8` and `Mxfp4`. Products with `Int8` and `Int4` multiply by the
integers, sum in float32 and then apply the scales. The dtypes bfloat16, float16 and float32 represent these integers
exactly.

Tested against the product with the dequantised matrix (tests/models/test_quantize.py).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jax.typing import DTypeLike

from kernels_pallas.experts.xla import BLOCK, dequantised_mxfp4
from kernels_pallas.int4.xla import dequantised
from mars_jax.core import struct
from mars_jax.models.weights import Weight
from mars_jax.utils.errors import MarsError

GROUPS = (128, 64, 32)
"""Group sizes of 4-bit matrices. A matrix uses the first size that divides its number of inputs. Larger groups need
fewer scales and offsets, and with groups of 128 a TPU multiplies 60 rows as fast as 8 rows."""

MeshAxes = str | tuple[str, ...] | None
"""Names of the mesh axes that shard one dimension of an array."""


class Leaf(NamedTuple):
    """Shape, dtype and sharding of one array of a quantised matrix that is not loaded yet."""

    shape: tuple[int, ...]
    dtype: str
    sharding: Sharding | None


@struct.dataclass
class Int8:
    """A matrix [..., out, in] or embedding table [rows, width], stored at 8 bits, with one scale per output or row."""

    values: Array  # i8[..., out, in]; in [-127, 127]
    scale: Array  # f32[..., out]; the matrix is values * scale[..., None]
    # Dtype of the matrix before quantisation, and of rows that are looked up in it.
    dtype: np.dtype = struct.field(pytree_node=False)
    group = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def astype(self, dtype: DTypeLike) -> Array:
        """Return the dequantised matrix."""
        return (self.values.astype(jnp.float32) * self.scale[..., None]).astype(dtype)

    @staticmethod
    def leaves(shape: tuple[int, ...], sharding: Sharding | None, group: int | None = None) -> list[Leaf]:
        """Return a `Leaf` for each array of a matrix of this shape, in the order of the fields."""
        del group  # each scale applies to a whole output channel
        spec = _axes(sharding, len(shape))
        return [
            Leaf(shape, "int8", _at(sharding, spec)),
            Leaf(shape[:-1], "float32", _at(sharding, spec[:-1])),
        ]


@struct.dataclass
class Int4:
    """A matrix [out, in] stored at 4 bits per weight, in groups of G inputs.

    The class also represents GGUF's Q4_0, Q4_1 and Q4_K. The input dimensions come first, because a TPU multiplies
    matrices in this layout. If the outputs came first, the TPU would rearrange the weights in every step.
    """

    values: Array  # i4[in / G, G, out], in [-8, 7]; i8 on a CPU, where i4 is not packed and is slow
    scale: Array  # f16[in / G, out]; the matrix is values * scale + offset in each group
    offset: Array  # f32[in / G, out]
    dtype: np.dtype = struct.field(pytree_node=False)  # dtype of the matrix before quantisation

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape[2], self.values.shape[0] * self.values.shape[1]

    @property
    def group(self) -> int | None:
        return self.values.shape[1]

    def astype(self, dtype: DTypeLike) -> Array:
        """Return the dequantised matrix."""
        return dequantised(self.values, self.scale, self.offset).astype(dtype)

    @staticmethod
    def leaves(shape: tuple[int, ...], sharding: Sharding | None, group: int | None = None) -> list[Leaf]:
        """Return a `Leaf` for each array of a matrix of this shape, in the order of the fields.

        If the inputs are sharded, the groups are divided over the devices. If the groups do not divide evenly, the
        inputs are replicated.
        """
        size = group or group_size(shape[1])
        assert size is not None  # guaranteed by `bits_of`
        outputs, groups = shape[0], shape[1] // size
        out, inner = _axes(sharding, 2)
        inner = _dividing(sharding, inner, groups)
        values, scale_sharding = _at(sharding, (inner, None, out)), _at(sharding, (inner, out))
        return [
            Leaf((groups, size, outputs), "int4" if is_packed(sharding) else "int8", values),
            Leaf((groups, outputs), "float16", scale_sharding),
            Leaf((groups, outputs), "float32", scale_sharding),
        ]


@struct.dataclass
class Mxfp4:
    """A stack of matrices [..., out, in] of 4-bit floats (e2m1).

    Each block of 32 inputs has one scale, a power of two. The experts of gpt-oss are published in this format.
    Source: OCP Microscaling Formats, version 1.0.
    """

    values: Array  # u8[..., out, in / 2]; two numbers per byte, the first one in the low 4 bits
    scale: Array  # u8[..., out, in / 32]; exponents of the scales plus 127
    dtype: np.dtype = struct.field(pytree_node=False)  # dtype of the dequantised matrices
    group = None

    @property
    def shape(self) -> tuple[int, ...]:
        return *self.values.shape[:-1], 2 * self.values.shape[-1]

    def astype(self, dtype: DTypeLike) -> Array:
        """Return the dequantised matrices."""
        return dequantised_mxfp4(self.values, self.scale).astype(dtype)

    @staticmethod
    def leaves(shape: tuple[int, ...], sharding: Sharding | None, group: int | None = None) -> list[Leaf]:
        """Return a `Leaf` for each array of a stack of matrices of this shape, in the order of the fields.

        A sharded dimension is divided into whole blocks of 32, or replicated if the blocks do not divide evenly. This
        applies to outputs as well, because the outputs of gate and up are the inputs of down.
        """
        del group
        *rows, outputs, inputs = shape
        *row_axes, out, inner = _axes(sharding, len(shape))
        out = _dividing(sharding, out, outputs // BLOCK)
        inner = _dividing(sharding, inner, inputs // BLOCK)
        matrix_sharding = _at(sharding, (*row_axes, out, inner))
        return [
            Leaf((*rows, outputs, width), "uint8", matrix_sharding)
            for width in (inputs // 2, inputs // BLOCK)
        ]


Quantized = Int8 | Int4 | Mxfp4


def form_of(bits: int, shape: tuple[int, ...]) -> type[Quantized]:
    """Return the class for a matrix, or a stack of matrices, with this shape and 4 or 8 bits.

    At 4 bits, a single matrix is `Int4` and a stack is `Mxfp4`.

    >>> form_of(4, (64, 32)).__name__, form_of(4, (8, 64, 32)).__name__
    ('Int4', 'Mxfp4')
    """
    if bits == 8:
        return Int8
    return Int4 if len(shape) == 2 else Mxfp4


def form_with(fields: int, values: DTypeLike) -> type[Quantized] | None:
    """Return the class of a stored matrix, given its number of arrays and the dtype of its `values`.

    A matrix that consists of one array is not quantised; in that case, return None.
    """
    if fields == 1:
        return None
    if fields == 3:
        return Int4
    return Mxfp4 if jnp.dtype(values) == jnp.uint8 else Int8


def _dividing(sharding: Sharding | None, axes: MeshAxes, count: int) -> MeshAxes:
    """Return `axes`, the mesh axes of a dimension with `count` groups, or None if the groups do not divide evenly."""
    if axes is None or not isinstance(sharding, NamedSharding):
        return axes
    names = (axes,) if isinstance(axes, str) else axes
    return None if count % math.prod(sharding.mesh.shape[name] for name in names) else axes


def _axes(sharding: Sharding | None, ndim: int) -> tuple[MeshAxes, ...]:
    """Return the mesh axes that shard each dimension of a matrix.

    Raises:
      MarsError: the sharding has no named axes.
    """
    if isinstance(sharding, NamedSharding):
        return (*sharding.spec, *[None] * (ndim - len(sharding.spec)))
    if sharding is None or sharding.is_fully_replicated:
        return (None,) * ndim
    raise MarsError(
        f"quantised weights cannot be sharded by a {type(sharding).__name__}: give a NamedSharding, or a device."
    )


def _at(sharding: Sharding | None, spec: tuple[MeshAxes, ...]) -> Sharding | None:
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, PartitionSpec(*spec))
    return sharding


def quantize(w: np.ndarray | Array, dtype: DTypeLike | None = None) -> Int8:
    """Quantise a numpy or JAX matrix [..., out, in] to 8 bits.

    The scale of a channel is its largest absolute weight divided by 127. No weight changes by more than half of its
    channel's scale. `dtype` is `Int8.dtype`, by default the dtype of w.

    >>> made = quantize(np.asarray([[1.0, -0.5], [0.0, 0.0]], np.float32))
    >>> made.values.tolist(), made.dtype.name
    ([[127, -64], [0, 0]], 'float32')
    """
    xp = w.__array_namespace__()
    with np.errstate(invalid="ignore"):  # callers check the scale for NaN and infinities
        wide = w.astype("float32")
        # The largest absolute weight of a channel becomes 127. A channel of zeros has scale 0.
        scale = xp.max(xp.abs(wide), axis=-1) / 127
        values = xp.round(wide / xp.where(scale == 0, xp.ones_like(scale), scale)[..., None])
        return Int8(values=values.astype("int8"), scale=scale, dtype=jnp.dtype(dtype or w.dtype))


def quantize_4(w: np.ndarray, dtype: DTypeLike | None = None) -> Int4:
    """Quantise a numpy matrix [out, in] to 4 bits, stored as i8; `in` must be a multiple of 32.

    The smallest and largest weights of a group become the lowest and highest of 16 evenly spaced levels. No weight
    changes by much more than half of the distance between two levels. `dtype` is `Int4.dtype`, by default the dtype of
    w.

    >>> made = quantize_4(np.arange(64, dtype=np.float32).reshape(2, 32))
    >>> made.values[0, :3, 0].tolist(), made.scale.shape, float(abs(made.astype("float32")[0, 5] - 5)) < 31 / 30
    ([-8, -8, -7], (1, 2), True)
    """
    with np.errstate(invalid="ignore", over="ignore"):
        # [out, in / G, G]; `values` below is transposed to [in / G, G, out].
        groups = w.astype(np.float32).reshape(len(w), -1, group_size(w.shape[1]) or GROUPS[-1])
        least = groups.min(axis=-1)
        scale = ((groups.max(axis=-1) - least) / 15).astype(np.float16)
        wide = scale.astype(np.float32)
        # Level -8 represents the smallest weight. Compute the levels from the rounded scale, which is the stored one.
        offset = least + 8 * wide
        steps = np.round((groups - offset[..., None]) / np.where(wide == 0, 1, wide)[..., None])
        values = np.clip(steps, -8, 7).astype(np.int8).transpose(1, 2, 0)
    return Int4(values=values, scale=scale.T, offset=offset.T, dtype=jnp.dtype(dtype or w.dtype))


def group_size(inputs: int) -> int | None:
    """Return the 4-bit group size of a matrix with this number of inputs; None if no size in `GROUPS` divides it."""
    return next((size for size in GROUPS if inputs % size == 0), None)


_PRECISE = ("router", "shared_router", "sinks", "kv_b", "delta_ba", "delta_b", "delta_a")
_PRECISE += ("delta_q_conv", "delta_k_conv", "delta_v_conv")
"""Names of weights that are never quantised. Rounding errors could change which experts the router chooses, and would
accumulate in a recurrent state. `models.latent_attention` does not multiply `kv_b` by `layers.dense`, and needs it
unquantised."""


def bits_of(row: Weight, bits: int | None) -> int | None:
    """Return the number of bits at which to store a weight if `bits` are requested, or None to keep its dtype.

    Norms, biases and the weights in `_PRECISE` are never quantised. If 4 bits are requested, embeddings, experts, and
    matrices whose number of inputs is not a multiple of 32 are stored at 8 bits.
    """
    if bits is None or row.init != "normal" or row.path[-1] in _PRECISE:
        return None
    fits = len(row.shape) == 2 and group_size(row.shape[1]) is not None
    return 4 if bits == 4 and fits and row.path[-1] not in ("embed", "unembed") else 8


def is_packed(sharding: Sharding | None) -> bool:
    """Return whether the devices of a sharding store two 4-bit numbers per byte: all platforms except CPUs.

    None stands for JAX's default device.
    """
    if sharding is None:
        return jax.default_backend() != "cpu"
    return next(iter(sharding.device_set)).platform != "cpu"


def num_bytes(x: np.ndarray | Array | jax.ShapeDtypeStruct) -> int:
    """Return the size of a concrete or abstract array on a device, in bytes. Two i4 numbers share a byte."""
    if x.dtype == jnp.int4:
        return x.size // 2
    return x.size * x.dtype.itemsize
