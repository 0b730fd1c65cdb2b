"""Streaming of tensors from files to arrays on devices, a block of rows at a time.

Host memory holds only one array of params, or the parts of it for this host's devices, and one block of rows.
Oracle: reading each tensor at once (tests/hub/test_stream.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from mars_jax.hub.files import Tensor
from mars_jax.models.quantize import (
    FORMS,
    Quantized,
    quantize,
    quantize_4,
)
from mars_jax.utils.errors import MarsError

BLOCK = 8 << 20
"""Size in bytes of a block of rows."""

BITS = {1: None, 2: 8, 3: 4}
"""Bits per weight of a matrix, by its number of fields (values, scale, offset); None if it is not quantised."""

Box = tuple[tuple[int, int], ...]
"""Range (first, end) along each axis of a part of an array."""


class HostArray:
    """Host buffers for the parts of one array that belong to this host's devices."""

    def __init__(self, shape: tuple[int, ...], dtype: Any, sharding: Sharding | None):
        self.shape, self.dtype, self.sharding = shape, jnp.dtype(dtype), sharding
        whole_index = tuple(slice(0, n) for n in shape)
        indices = (
            [whole_index] if sharding is None else sharding.addressable_devices_indices_map(shape).values()
        )
        self.parts = {box: _empty([b - a for a, b in box], self.dtype) for box in map(self._box, indices)}

    def _box(self, index: Any) -> Box:
        return tuple(s.indices(n)[:2] for s, n in zip(index, self.shape, strict=True))

    def rows(self, at: int | None, axis: int = 0) -> tuple[int, int]:
        """Return the range (first, end) of rows that this host needs, of tensor number `at` if tensors are stacked."""
        boxes = [box for box in self.parts if at is None or box[0][0] <= at < box[0][1]]
        axis = axis if at is None else 1
        return min((b[axis][0] for b in boxes), default=0), max((b[axis][1] for b in boxes), default=0)

    def write(self, at: int | None, first: int, block: np.ndarray) -> None:
        """Copy a block of a tensor's rows, beginning at `first`. `at` is the tensor's number if tensors are stacked."""
        box = ((first, first + len(block)), *((0, n) for n in block.shape[1:]))
        if at is None:
            self.place(box, block)
        else:
            self.place(((at, at + 1), *box), block[None])

    def place(self, box: Box, block: np.ndarray) -> None:
        """Copy a block of the array into the parts that overlap it, cast to their dtype."""
        for part_box, part in self.parts.items():
            if (common := _common(box, part_box)) is not None:
                target = tuple(
                    slice(a - low, b - low) for (a, b), (low, _) in zip(common, part_box, strict=True)
                )
                source = tuple(slice(a - low, b - low) for (a, b), (low, _) in zip(common, box, strict=True))
                part[target] = block[source].astype(self.dtype, copy=False)

    def to_devices(self) -> jax.Array:
        """Move the array to its devices, or to JAX's default device if there is no sharding."""
        if self.sharding is None:
            return jax.device_put(next(iter(self.parts.values())))  # jnp.asarray would copy it (twice on CPU)
        return jax.make_array_from_callback(
            self.shape, self.sharding, lambda index: self.parts[self._box(index)], dtype=self.dtype
        )


def _common(one: Box, other: Box) -> Box | None:
    """Return the intersection of two blocks; None if it is empty."""
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return common if all(first < end for first, end in common) else None


def _empty(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Allocate an array aligned to a cache line, so that JAX on CPU uses its memory without a copy."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + 64, np.uint8)
    begin = -memory.ctypes.data % 64
    return memory[begin : begin + size].view(dtype).reshape(shape)


def read_array(
    tensors: Sequence[tuple[str, Tensor]],
    shape: tuple[int, ...],
    dtype: Any,
    *,
    sharding: Sharding | None = None,
    bits: int | None = None,
) -> list[HostArray]:
    """Read one array of params into host memory: the array, or the leaves of its quantised form (`quantize.FORMS`).

    Args:
      tensors: (name, tensor) pairs: one tensor of `shape`, or several to stack along a new first axis.
      shape: shape of the array.
      dtype: floating-point dtype of the array, or of its dequantised form.
      sharding: sharding of the array, which selects the parts for this host; None reads all of it.
      bits: bits per weight of a quantised matrix; None if it is not quantised. With 4, a tensor that is stored at 4
        bits is not rounded again.

    Raises:
      MarsError: a tensor cannot be read, or does not hold floating-point numbers.
    """
    if bits is not None:
        host_arrays = [HostArray(*leaf) for leaf in FORMS[bits].leaves(shape, sharding, tensors[0][1].group)]
    else:
        host_arrays = [HostArray(shape, dtype, sharding)]
    stacked = len(shape) > len(tensors[0][1].shape)
    for number, (name, tensor) in enumerate(tensors):
        stack_index = number if stacked else None
        first, last = host_arrays[0].rows(stack_index, axis=-1 if bits == 4 else 0)
        step = max(1, BLOCK // (4 * math.prod(tensor.shape[1:])))
        for begin in range(first, last, step):
            end = min(begin + step, last)
            try:
                if bits == 4 and tensor.blocks is not None:
                    _write_4(host_arrays, begin, tensor.blocks(begin, end))
                    continue
                block = tensor.rows(begin, end)
                if not jnp.issubdtype(block.dtype, jnp.floating):
                    raise MarsError(f"it holds {block.dtype}: quantised checkpoints are not supported.")
            except MarsError as error:
                raise MarsError(f"tensor {name}: {error}") from None
            if bits == 4:
                small = quantize_4(block)
                _write_4(host_arrays, begin, (small.values, small.scale, small.offset))  # pyright: ignore[reportArgumentType]
            elif bits == 8:
                small = quantize(block)
                host_arrays[0].write(stack_index, begin, small.values)  # pyright: ignore[reportArgumentType]
                host_arrays[1].write(stack_index, begin, small.scale)  # pyright: ignore[reportArgumentType]
            else:
                host_arrays[0].write(stack_index, begin, block)
    return host_arrays


def _write_4(made: Sequence[HostArray], first: int, parts: Sequence[np.ndarray]) -> None:
    """Copy some rows of a 4-bit matrix, whose fields have the rows on their last axis."""
    for array, part in zip(made, parts, strict=True):
        ends = (first, first + part.shape[-1])
        array.place((*((0, n) for n in part.shape[:-1]), ends), part)


def to_params(arrays: Sequence[HostArray], dtype: Any) -> jax.Array | Quantized:
    """Move the result of `read_array` to the devices."""
    placed = [array.to_devices() for array in arrays]
    bits = BITS[len(arrays)]
    return placed[0] if bits is None else FORMS[bits](*placed, dtype=jnp.dtype(dtype))
