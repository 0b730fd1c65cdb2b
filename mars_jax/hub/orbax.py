"""Trees of arrays as Orbax checkpoints: one array at a time on the way to disk, onto any mesh on the way back.

Orbax by itself saves arrays that are all in memory. A `Pending` is one that is read when its turn comes; what comes of
it is an ordinary Orbax checkpoint. Oracle: `orbax.checkpoint.StandardCheckpointer` (tests/hub/test_convert.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from mars_jax.core.errors import MarsError
from mars_jax.core.types import PyTree
from mars_jax.hub.checked import block_shape, open_store, read_arrays
from mars_jax.hub.digests import Digest, checksum, digest

_AGAIN = "convert the checkpoint again"
_CHUNK = 64 << 20
"""Bytes that are stored together: a process that needs a part of an array reads no more than that around it."""


@dataclasses.dataclass(frozen=True)
class Pending:
    """An array that is not in memory yet."""

    shape: tuple[int, ...]
    dtype: Any
    read: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


class _OneByOne(ocp.type_handlers.NumpyHandler):
    """Orbax's handler of arrays for `Pending`, which are read and written one at a time."""

    def __init__(self, done: Callable[[int], None]):
        super().__init__(deepcopy_host_arrays=False)
        self.done = done
        self.written: dict[str, int] = {}

    async def serialize(self, values, infos, args=None):
        for value, info, arg in zip(values, infos, args or [ocp.SaveArgs()] * len(values), strict=True):
            array = value.read()  # pyright: ignore[reportAttributeAccessIssue]
            for written in await super().serialize([array], [info], [arg]):
                written.result()
            self.written[info.name] = checksum(array)
            self.done(array.nbytes)
        return []


def save(
    path: str | os.PathLike[str], tree: PyTree, *, done: Callable[[int], None] = lambda size: None
) -> dict[str, int]:
    """Write a tree of `Pending` as a new Orbax checkpoint, all or nothing, reading one after the other.

    Args:
      path: of a directory that does not exist.
      tree: read in the order of its leaves.
      done: is called with the bytes of each array that is written.

    Returns:
      The CRC-32 of each array as it was read, by the name that Orbax gives it.

    Raises:
      MarsError: an array cannot be read, or the disk does not take it.

    >>> import tempfile
    >>> tree = {"a": Pending((2,), np.float32, lambda: np.ones(2, np.float32))}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     written = save(f"{folder}/new", tree)
    ...     written == {name: made.whole for name, made in digests(f"{folder}/new", tree).items()}
    True
    """
    handler = _OneByOne(done)
    registry = ocp.type_handlers.create_type_handler_registry(
        (Pending, handler), (jax.Array, ocp.type_handlers.ArrayHandler())
    )
    # To the compressor, weights are noise.
    trees = ocp.PyTreeCheckpointHandler(
        type_handler_registry=registry, use_compression=False, use_zarr3=False
    )
    arguments = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=_CHUNK), tree)
    what = ocp.args.PyTreeSave(tree, save_args=arguments)  # pyright: ignore
    cure = "choose another path, or make room"
    with _told(path, "written", cure) as place, ocp.Checkpointer(trees) as checkpointer:
        checkpointer.save(place, args=what)
    return handler.written


def digests(
    path: str | os.PathLike[str], tree: PyTree, *, done: Callable[[int], None] = lambda size: None
) -> dict[str, Digest]:
    """Return the checksums of what is on disk: the arrays of a tree of `Pending`, read back one after the other.

    Raises:
      MarsError: the checkpoint is not of such a tree, or cannot be read.
    """
    read: dict[str, Digest] = {}
    with _told(path, "read", _AGAIN) as place:
        for name in _named(tree):
            store = open_store(place, name)
            array = np.asarray(store.read().result())
            read[name] = digest(array, block_shape(store))
            done(array.nbytes)
    return read


def restore(
    path: str | os.PathLike[str], like: PyTree, *, expected: Mapping[str, Digest] | None = None
) -> PyTree:
    """Restore the arrays of a checkpoint, where `like` has them; each process reads the parts of its own devices.

    Args:
      path: the directory.
      like: a tree of `jax.ShapeDtypeStruct` that carry shardings; of another floating dtype, arrays are cast.
      expected: checksums of all arrays, to compare with what is read; None compares nothing.

    Raises:
      MarsError: the checkpoint is not of such a tree, cannot be read, or is not what was written.
    """
    with _told(path, "read", _AGAIN) as place:
        arrays = read_arrays(place, _named(like), expected)
    return jax.tree.unflatten(jax.tree.structure(like), arrays)


def _named(tree: PyTree) -> dict[str, Any]:
    """Return the leaves of a tree by the names that Orbax gives them."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


@contextlib.contextmanager
def _told(path: str | os.PathLike[str], what: str, cure: str) -> Iterator[Path]:
    """Turn what Orbax and TensorStore say about a checkpoint into a MarsError."""
    try:
        yield Path(path).absolute()
    except MarsError:
        raise
    # They raise their own, ValueError, KeyError and OSError alike.
    except Exception as error:
        raise MarsError(f"'{path}' cannot be {what} ({_reason(error)}): {cure}.") from error


def _reason(error: Exception) -> str:
    """Return the first line of what an error says, without the specification and the places that TensorStore adds."""
    line = next(iter(str(error).strip().splitlines()), "")
    line = re.split(r" \[(?:tensorstore_spec|source locations)", line)[0].rstrip(".: ")
    return f"{type(error).__name__} {line}".strip() if isinstance(error, LookupError) or not line else line
