"""Reading the arrays of an Orbax checkpoint block by block, the checksums of blocks compared on the way.

TensorStore stores no checksums of weights, so a changed bit would load as another number. Oracle:
`orbax.checkpoint.StandardCheckpointer` (tests/hub/test_convert.py).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tensorstore as ts

from mars_jax.core.errors import MarsError
from mars_jax.hub.digests import Digest, checksum, grid
from mars_jax.hub.stream import Box, HostArray

_HELD = 1 << 30
"""Bytes of arrays that are filled at a time, where the largest has no more."""
_THREADS = 8
"""Arrays that are read at a time, a block of each."""


def open_store(path: Path, name: str) -> ts.TensorStore:
    """Open the TensorStore of an array of a checkpoint, by Orbax's name of it."""
    spec = {
        "driver": "zarr",
        "kvstore": {
            "driver": "ocdbt",
            "base": {"driver": "file", "path": f"{path}/"},
            "path": f"{name}/",
        },
        "fill_missing_data_reads": False,  # what is not there is no zero
    }
    return ts.open(spec, open=True).result()


def block_shape(store: ts.TensorStore) -> tuple[int, ...]:
    """Return the shape of what is stored together."""
    shape: Any = store.chunk_layout.read_chunk.shape
    return tuple(shape)


def read_arrays(
    path: Path, wanted: Mapping[str, Any], digests: Mapping[str, Digest] | None
) -> list[jax.Array]:
    """Read the arrays of a checkpoint on their devices; each process reads the blocks that its devices need.

    Args:
      path: of the checkpoint.
      wanted: shapes, dtypes and shardings, by Orbax's names.
      digests: checksums by the same names; None compares nothing.

    Raises:
      MarsError: an array has another shape, or is not what was written.
    """
    held = _Budget(max([_HELD, *(one.size * one.dtype.itemsize for one in wanted.values())]))

    def read(name: str, one: Any) -> jax.Array:
        store = open_store(path, name)
        blocks = _blocks(path, name, store, one.shape, digests)
        array = HostArray(one.shape, one.dtype, one.sharding)  # takes no memory until it is filled
        with held.of(sum(part.nbytes for part in array.parts.values())):
            for box, crc in blocks:
                if array.overlaps(box):
                    block = np.asarray(store[tuple(slice(*ends) for ends in box)].read().result())
                    if crc is not None and checksum(block) != crc:
                        raise MarsError(
                            f"{name} in '{path}' is not what was written (at {[first for first, _ in box]} its "
                            "checksum differs): check the disk, and convert or copy the checkpoint again."
                        )
                    array.place(box, block)
            return jax.block_until_ready(array.to_devices())  # until it has arrived the host has it too

    with ThreadPoolExecutor(_THREADS) as threads:
        reads = [threads.submit(read, name, one) for name, one in wanted.items()]
        try:
            return [one.result() for one in reads]
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            raise


def _blocks(
    path: Path,
    name: str,
    store: ts.TensorStore,
    shape: tuple[int, ...],
    digests: Mapping[str, Digest] | None,
) -> Sequence[tuple[Box, int | None]]:
    """Every block of an array, and its checksum."""
    if tuple(store.shape) != shape:
        raise MarsError(
            f"'{path}' holds {name} as {list(store.shape)} and config.json asks for {list(shape)}: convert the "
            "checkpoint again."
        )
    if digests is None:
        return [(box, None) for box in grid(shape, block_shape(store))]
    try:
        return list(digests[name].parts(shape))
    except (KeyError, ValueError):
        raise MarsError(
            f"the conversion's checksums do not fit {name} in '{path}': convert the checkpoint again."
        ) from None


class _Budget:
    """Bytes that are shared out; who asks for more than are left waits."""

    def __init__(self, total: int):
        self._left, self._changed = total, threading.Condition()

    @contextlib.contextmanager
    def of(self, count: int) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: self._left >= count)
            self._left -= count
        try:
            yield
        finally:
            with self._changed:
                self._left += count
                self._changed.notify_all()
