"""Reading the arrays of an Orbax checkpoint, the checksums of blocks compared while others are on their way.

TensorStore stores no checksums of weights, so a changed bit would load as another number. And where one array cannot
be read, Orbax's own handler leaves the others running. Oracle: `orbax.checkpoint.StandardCheckpointer`
(tests/hub/test_convert.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from mars_jax.core.errors import MarsError
from mars_jax.hub.digests import Digest, checksum, grid, size
from mars_jax.hub.stream import Box, HostArray

_HELD = 1 << 30
"""Bytes of arrays that are filled at a time, where the largest has no more."""
_READ = 512 << 20
"""Bytes of blocks that are on their way at a time, where the largest has no more."""


async def open_store(info: Any) -> ts.TensorStore:
    """The TensorStore of an array, by what Orbax says about it."""
    spec = {
        "driver": "zarr3" if info.use_zarr3 else "zarr",
        "kvstore": {
            "driver": "ocdbt",
            "base": {"driver": "file", "path": f"{info.parent_dir}/"},
            "path": f"{info.name}/",
        },
        "fill_missing_data_reads": False,  # what is not there is no zero
    }
    return await ts.open(spec, open=True, context=info.ts_context)


def block_shape(store: ts.TensorStore) -> tuple[int, ...]:
    """The shape of what is stored together."""
    shape: Any = store.chunk_layout.read_chunk.shape
    return tuple(shape)


class CheckedArrays(ocp.type_handlers.ArrayHandler):
    """Orbax's handler of `jax.Array`s, which restores none whose stored bytes have changed."""

    def __init__(self, digests: Mapping[str, Digest] | None):
        """Take the checksums by Orbax's names of the arrays; None compares nothing."""
        super().__init__()
        self._digests = digests

    async def deserialize(self, infos: Any, args: Any = None) -> list[jax.Array]:
        """The arrays on their devices.

        Raises:
          MarsError: what was read is not what was written.
        """
        stores = await _together([open_store(info) for info in infos])
        each = zip(infos, stores, args, strict=True)
        reads = [_Read(info, store, arg, self._digests) for info, store, arg in each]
        with ThreadPoolExecutor() as threads:
            shared = _Shared(
                held=_Budget(max([_HELD, *(read.held for read in reads)])),
                under_way=_Budget(max([_READ, *(read.largest for read in reads)])),
                threads=threads,
            )
            return await _together([read.run(shared) for read in reads])


async def _together(works: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """The results of all; where one fails, its error, after the others have ended.

    None is cancelled: TensorStore reports also what was cancelled, to a loop that is closed by then.
    """
    results = await asyncio.gather(*works, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


class _Shared:
    """What the reads of one checkpoint have in common."""

    def __init__(self, *, held: _Budget, under_way: _Budget, threads: Executor):
        self.held, self.under_way, self.threads = held, under_way, threads
        self.failed = False  # no further block is read then

    async def in_thread(self, work: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self.threads, work, *args)


class _Read:
    """One array: its store, the blocks of which this process needs a part, and their checksums."""

    def __init__(self, info: Any, store: ts.TensorStore, arg: Any, digests: Mapping[str, Digest] | None):
        self._name, self._store, self._path = info.name, store, info.parent_dir
        self._shape, self._dtype, self._sharding = tuple(arg.global_shape), arg.dtype, arg.sharding
        if tuple(store.shape) != self._shape:
            raise MarsError(
                f"'{self._path}' holds {self._name} as {list(store.shape)} and config.json asks for "
                f"{list(self._shape)}: convert the checkpoint again."
            )
        try:
            if digests is None:
                boxes = grid(self._shape, block_shape(store))
                self._blocks = [(box, None) for box in boxes]
            else:
                self._blocks = list(digests[self._name].parts(self._shape))
        except (KeyError, ValueError):
            raise MarsError(
                f"the conversion's checksums do not fit {self._name} in '{self._path}': convert the checkpoint again."
            ) from None
        itemsize = store.dtype.numpy_dtype.itemsize
        self._bytes = {box: size(box) * itemsize for box, _ in self._blocks}
        self.largest = max(self._bytes.values())
        here = len(self._sharding.addressable_devices)
        held = min(here * math.prod(self._sharding.shard_shape(self._shape)), math.prod(self._shape))
        self.held = held * self._dtype.itemsize

    async def run(self, shared: _Shared) -> jax.Array | None:
        """The array; None where another has failed."""
        async with shared.held.of(self.held):
            if shared.failed:
                return None
            array = HostArray(self._shape, self._dtype, self._sharding)
            wanted = [(box, crc) for box, crc in self._blocks if array.overlaps(box)]
            await _together([self._fill(array, box, crc, shared) for box, crc in wanted])
            # Until it has arrived the host has it too.
            return await shared.in_thread(lambda: jax.block_until_ready(array.to_devices()))

    async def _fill(self, array: HostArray, box: Box, crc: int | None, shared: _Shared) -> None:
        async with shared.under_way.of(self._bytes[box]):
            if shared.failed:
                return
            try:
                block = np.asarray(await self._store[tuple(slice(*ends) for ends in box)].read())
                await shared.in_thread(self._place, array, box, block, crc)
            except BaseException:
                shared.failed = True
                raise

    def _place(self, array: HostArray, box: Box, block: np.ndarray, crc: int | None) -> None:
        if crc is not None and checksum(block) != crc:
            raise MarsError(
                f"{self._name} in '{self._path}' is not what was written (at {_corner(box)} its checksum differs): "
                "check the disk, and convert or copy the checkpoint again."
            )
        array.place(box, block)


def _corner(box: Box) -> list[int]:
    return [first for first, _ in box]


class _Budget:
    """Bytes that are shared out; who asks for more than are left waits."""

    def __init__(self, total: int):
        self._left, self._changed = total, asyncio.Condition()

    @contextlib.asynccontextmanager
    async def of(self, count: int) -> AsyncIterator[None]:
        async with self._changed:
            await self._changed.wait_for(lambda: self._left >= count)
            self._left -= count
        try:
            yield
        finally:
            async with self._changed:
                self._left += count
                self._changed.notify_all()
