"""Tensors of files into arrays on devices, some rows at a time.

What the host holds is one array of params, or the part of it that its devices are to have, and a block of rows.
Oracle: reading everything whole (tests/hub/test_stream.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from mars_jax.core.errors import MarsError
from mars_jax.hub.files import Tensor
from mars_jax.models.quantize import (
    FORMS,
    Quantized,
    quantize,
    quantize_4,
)

BLOCK = 8 << 20
"""Bytes of the rows that are read at a time."""

BITS = {1: None, 2: 8, 3: 4}
"""Bits of a matrix by its number of fields: values, scale and offset; None is floating."""

Box = tuple[tuple[int, int], ...]
"""First and last index of a part of an array along each axis."""


class HostArray:
    """The parts of one array that this host's devices are to have, in host memory while they are filled."""

    def __init__(self, shape: tuple[int, ...], dtype: Any, sharding: Sharding | None):
        self.shape, self.dtype, self.sharding = shape, jnp.dtype(dtype), sharding
        whole = tuple(slice(0, n) for n in shape)
        indices = [whole] if sharding is None else sharding.addressable_devices_indices_map(shape).values()
        self.parts = {box: _empty([b - a for a, b in box], self.dtype) for box in map(self._box, indices)}

    def _box(self, index: Any) -> Box:
        return tuple(s.indices(n)[:2] for s, n in zip(index, self.shape, strict=True))

    def rows(self, at: int | None, axis: int = 0) -> tuple[int, int]:
        """Return first and last of the rows that are needed here; of number `at`, where tensors are stacked."""
        boxes = [box for box in self.parts if at is None or box[0][0] <= at < box[0][1]]
        axis = axis if at is None else 1
        return min((b[axis][0] for b in boxes), default=0), max((b[axis][1] for b in boxes), default=0)

    def write(self, at: int | None, first: int, block: np.ndarray) -> None:
        """Put rows of a tensor there, of number `at` where tensors are stacked, from `first` on."""
        box = ((first, first + len(block)), *((0, n) for n in block.shape[1:]))
        if at is None:
            self.place(box, block)
        else:
            self.place(((at, at + 1), *box), block[None])

    def place(self, box: Box, block: np.ndarray) -> None:
        """Put a block of the array there, in whatever dtype of its kind."""
        for own, part in self.parts.items():
            if (common := _common(box, own)) is not None:
                target = tuple(slice(a - low, b - low) for (a, b), (low, _) in zip(common, own, strict=True))
                source = tuple(slice(a - low, b - low) for (a, b), (low, _) in zip(common, box, strict=True))
                part[target] = block[source].astype(self.dtype, copy=False)

    def to_devices(self) -> jax.Array:
        """Put the array on its devices; on JAX's default device where no sharding is given."""
        if self.sharding is None:
            return jax.device_put(next(iter(self.parts.values())))  # jnp.asarray would copy it, on CPU twice
        return jax.make_array_from_callback(
            self.shape, self.sharding, lambda index: self.parts[self._box(index)], dtype=self.dtype
        )


def _common(one: Box, other: Box) -> Box | None:
    """Return the block that two blocks share; None if they share nothing."""
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return common if all(first < end for first, end in common) else None


def _empty(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Make an array that begins with a cache line: on CPU it becomes the device's as it is."""
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
    """Read one array of params in host memory: the array, or the leaves of it in so many bits (`quantize.FORMS`).

    Args:
      tensors: what it consists of, by name: one tensor of `shape`, or all that are stacked along a new first axis.
      shape: of the array.
      dtype: floating; of the array, or of what the quantised one stands for.
      sharding: which parts this host needs, and where they go; None is all of it.
      bits: of the matrix; in 4, a tensor that has its own 4 bits is kept as it is.

    Raises:
      MarsError: a tensor that cannot be read, or does not hold floating numbers.
    """
    if bits is not None:
        made = [HostArray(*leaf) for leaf in FORMS[bits].leaves(shape, sharding, tensors[0][1].group)]
    else:
        made = [HostArray(shape, dtype, sharding)]
    stacked = len(shape) > len(tensors[0][1].shape)
    for number, (name, tensor) in enumerate(tensors):
        at = number if stacked else None
        first, last = made[0].rows(at, axis=-1 if bits == 4 else 0)
        step = max(1, BLOCK // (4 * math.prod(tensor.shape[1:])))
        for begin in range(first, last, step):
            end = min(begin + step, last)
            try:
                if bits == 4 and tensor.blocks is not None:
                    _write_4(made, begin, tensor.blocks(begin, end))
                    continue
                block = tensor.rows(begin, end)
                if not jnp.issubdtype(block.dtype, jnp.floating):
                    raise MarsError(f"it holds {block.dtype}: quantised checkpoints are not supported.")
            except MarsError as error:
                raise MarsError(f"tensor {name}: {error}") from None
            if bits == 4:
                small = quantize_4(block)
                _write_4(made, begin, (small.values, small.scale, small.offset))  # pyright: ignore[reportArgumentType]
            elif bits == 8:
                small = quantize(block)
                made[0].write(at, begin, small.values)  # pyright: ignore[reportArgumentType]
                made[1].write(at, begin, small.scale)  # pyright: ignore[reportArgumentType]
            else:
                made[0].write(at, begin, block)
    return made


def _write_4(made: Sequence[HostArray], first: int, parts: Sequence[np.ndarray]) -> None:
    """Put some rows of a matrix in 4 bits there, which are last in its parts."""
    for array, part in zip(made, parts, strict=True):
        ends = (first, first + part.shape[-1])
        array.place((*((0, n) for n in part.shape[:-1]), ends), part)


def to_params(arrays: Sequence[HostArray], dtype: Any) -> jax.Array | Quantized:
    """Move the result of `read_array` to the devices."""
    placed = [array.to_devices() for array in arrays]
    bits = BITS[len(arrays)]
    return placed[0] if bits is None else FORMS[bits](*placed, dtype=jnp.dtype(dtype))
