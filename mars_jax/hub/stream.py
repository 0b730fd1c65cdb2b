"""Streaming of tensors from files to arrays on devices, a block of rows at a time.

Host memory holds at most one array of params (or its parts for this host's devices) and one block of rows. Tested
against reading each tensor in one piece (tests/hub/test_stream.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from jax.typing import DTypeLike

from mars_jax.hub.files import Tensor
from mars_jax.models.quantize import Quantized, form_of, form_with, quantize, quantize_4
from mars_jax.utils.errors import MarsError, prefixed

BLOCK = 8 << 20
"""Size in bytes of a block of rows."""

Box = tuple[tuple[int, int], ...]
"""Part of an array, as one range (first, end) for each axis."""


class HostArray:
    """Host buffers for the parts of one array that belong to this host's devices."""

    def __init__(self, shape: tuple[int, ...], dtype: DTypeLike, sharding: Sharding | None):
        self.shape, self.dtype, self.sharding = shape, jnp.dtype(dtype), sharding
        indices: Iterable[Any] = [tuple(slice(n) for n in shape)]
        if sharding is not None:
            indices = sharding.addressable_devices_indices_map(shape).values()
        # Devices with the same part share a buffer.
        self.parts = {box: _empty([b - a for a, b in box], self.dtype) for box in map(self._box, indices)}

    def _box(self, index: Any) -> Box:
        return tuple(s.indices(n)[:2] for s, n in zip(index, self.shape, strict=True))

    def rows(self, number: int | None, axis: int) -> tuple[int, int]:
        """Return the range (first, end) of rows along `axis` that this host needs.

        If tensors are stacked, return the range for tensor `number`, whose rows are on axis 1.
        """
        # Parts may cover different ranges, so return the smallest range that contains them all.
        boxes = list(self.parts)
        if number is not None:
            boxes, axis = [box for box in boxes if box[0][0] <= number < box[0][1]], 1
        return min((b[axis][0] for b in boxes), default=0), max((b[axis][1] for b in boxes), default=0)

    def write(self, number: int | None, axis: int, first: int, block: np.ndarray | jax.Array) -> None:
        """Copy a block of a tensor's rows, starting at row `first` along `axis`; `number` is as for `rows`."""
        ranges = [(0, n) for n in block.shape]
        ranges[axis] = first, first + block.shape[axis]
        if number is None:
            self._copy(tuple(ranges), block)
        else:
            self._copy(((number, number + 1), *ranges), block[None])

    def _copy(self, box: Box, block: np.ndarray | jax.Array) -> None:
        """Copy a block of the array into the parts that overlap it, and cast it to the array's dtype."""
        for part_box, part in self.parts.items():
            common = tuple((max(i, k), min(j, l)) for (i, j), (k, l) in zip(box, part_box, strict=True))
            if all(first < end for first, end in common):
                part[_shifted(common, part_box)] = block[_shifted(common, box)].astype(self.dtype, copy=False)

    def to_devices(self) -> jax.Array:
        """Move the array to its devices, or to JAX's default device if there is no sharding."""
        if self.sharding is None:
            return jax.device_put(next(iter(self.parts.values())))  # jnp.asarray would copy it (twice on CPU)
        return jax.make_array_from_callback(
            self.shape, self.sharding, lambda index: self.parts[self._box(index)], dtype=self.dtype
        )


def _shifted(box: Box, outer: Box) -> tuple[slice, ...]:
    """Return the index of a block inside a larger block that contains it."""
    return tuple(slice(a - low, b - low) for (a, b), (low, _) in zip(box, outer, strict=True))


def _empty(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Allocate an array aligned to a cache line, so that JAX on CPU uses its memory without a copy."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + 64, np.uint8)
    # Distance in bytes from the start of `memory` to the next address that is a multiple of 64.
    begin = -memory.ctypes.data % 64
    return memory[begin : begin + size].view(dtype).reshape(shape)


def read_array(
    tensors: Sequence[tuple[str, Tensor]],
    shape: tuple[int, ...],
    dtype: DTypeLike,
    *,
    sharding: Sharding | None = None,
    bits: int | None = None,
) -> list[HostArray]:
    """Read one array of params into host memory: the array, or the leaves of its quantised form (`quantize.form_of`).

    Args:
      tensors: (name, tensor) pairs: one tensor of `shape`, or several to stack along a new first axis.
      shape: shape of the array.
      dtype: floating-point dtype of the array, or of its dequantised form.
      sharding: sharding of the array, which selects the parts for this host; None reads all of it.
      bits: bits per weight of a quantised matrix; None if it is not quantised. With 4 bits, a tensor that is stored at
        4 bits is not rounded again.

    Raises:
      MarsError: a tensor cannot be read, or does not hold floating-point numbers.
    """
    if bits is not None:
        leaves = form_of(bits, shape).leaves(shape, sharding, tensors[0][1].group)
        host_arrays = [HostArray(*leaf) for leaf in leaves]
    else:
        host_arrays = [HostArray(shape, dtype, sharding)]
    stacked = len(shape) > len(tensors[0][1].shape)
    # In each field of an `Int4` matrix, the last axis runs over the rows of the matrix (the outputs).
    axis = -1 if bits == 4 and len(shape) == 2 else 0
    for i, (name, tensor) in enumerate(tensors):
        number = i if stacked else None
        first, last = host_arrays[0].rows(number, axis)
        # Number of rows per block, at 4 bytes per element.
        step = max(1, BLOCK // (4 * math.prod(tensor.shape[1:])))
        for begin in range(first, last, step):
            end = min(begin + step, last)
            with prefixed(f"tensor {name}"):
                if bits == 4 and tensor.blocks is not None:
                    fields = tensor.blocks(begin, end)
                else:
                    fields = _fields(tensor.rows(begin, end), bits)
            for array, field in zip(host_arrays, fields, strict=True):
                array.write(number, axis, begin, field)
    return host_arrays


def _fields(block: np.ndarray, bits: int | None) -> tuple[np.ndarray | jax.Array, ...]:
    """Return a block of rows as a tuple of one array or, if `bits` is not None, of the fields of its quantised form."""
    # Reject float8 too, because its numbers have no meaning without a scale.
    if not jnp.issubdtype(block.dtype, jnp.floating) or block.dtype.itemsize == 1:
        raise MarsError(f"it holds {block.dtype}: quantised checkpoints are not supported.")
    if bits is None:
        return (block,)
    if bits == 8:
        matrix = quantize(block)
        return matrix.values, matrix.scale
    matrix = quantize_4(block)
    return matrix.values, matrix.scale, matrix.offset


def to_params(arrays: Sequence[HostArray], dtype: DTypeLike) -> jax.Array | Quantized:
    """Move the result of `read_array` to the devices."""
    placed = [array.to_devices() for array in arrays]
    form = form_with(len(arrays), arrays[0].dtype)
    return placed[0] if form is None else form(*placed, dtype=jnp.dtype(dtype))
