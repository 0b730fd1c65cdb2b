"""The folder of one run: claimed by its settings, so that a run goes on with its own rows and no others."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from mars_jax.core.errors import MarsError, say
from mars_jax.hub import gguf_config
from mars_jax.hub.gguf_file import is_gguf, read_gguf
from mars_jax.placement.hosts import fetch
from mars_jax.serve.journal import Lock, difference, plain, write_whole

SETTINGS = "settings.json"
ROWS = 16
"""Of a weight, that its fingerprint looks at: training changes nearly all, and one takes next to no time."""


class Claim(Lock):
    """A folder that is one run's. Left by an error, it is given back where the run has written nothing yet, so that
    the same folder can be named again with other settings."""

    def __init__(self, folder: Path, *, made: bool):
        """
        Args:
          folder: that is there.
          made: it was not there before.
        """
        super().__init__(folder)
        self._folder, self._made = folder, made
        self.fresh = False  # whether the settings in it are this run's

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            if error is not None and self.fresh and os.listdir(self._folder) == [SETTINGS]:
                (self._folder / SETTINGS).unlink()
                if self._made:
                    self._folder.rmdir()
        self.close()


def claim(
    folder: Path, settings: Mapping[str, Any], *, flag: str = "--output", unrecorded: str | None = None
) -> Claim:
    """Make a folder that of one run, whose process has it until it ends or closes the lock.

    The settings are written, or compared with those that are there.

    Args:
      folder: new, empty, or of a run.
      settings: whatever decides what the run writes; see `journal.plain`.
      flag: that names the folder, for messages.
      unrecorded: what a run of before settings were recorded has in its folder; it goes on, with a warning.

    Raises:
      MarsError: the folder holds a run with other settings, or something else altogether, or another process has it.
    """
    path = folder / SETTINGS
    old = unrecorded is not None and (folder / unrecorded).exists() and not path.exists()
    if not old:
        check_folder(folder, flag=flag)
    made = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(folder, error, flag) from None
    lock = Claim(folder, made=made)
    try:
        if old:
            say(f"note: {flag} '{folder}' has no {SETTINGS}: it is taken to be of a run with these settings.")
        elif path.exists():
            _compare(folder, settings, flag)
        else:
            lock.fresh = True
            write_json(path, {name: plain(value) for name, value in settings.items()})
    except OSError as error:
        lock.close()
        raise _unwritable(folder, error, flag) from None
    except MarsError:
        lock.close()
        raise
    return lock


def _compare(folder: Path, settings: Mapping[str, Any], flag: str) -> None:
    path = folder / SETTINGS
    try:
        found = difference(json.loads(path.read_text(encoding="utf-8")), settings)
    except (ValueError, AttributeError, TypeError, RecursionError):
        raise MarsError(f"'{path}' is damaged: choose another {flag}.") from None
    if found is not None:
        raise MarsError(
            f"{flag} '{folder}' holds a run with {found}: choose another {flag}, or the settings of that run."
        )


def check_folder(folder: Path, *, flag: str = "--output") -> None:
    """What can be known before any model is loaded.

    Raises:
      MarsError: the folder is none, holds anything but a run, or cannot be made or written to.
    """
    if folder.exists() and not folder.is_dir():
        raise MarsError(f"{flag} '{folder}' is a file: name a folder.")
    try:
        # A file that was being written when its process was killed is no content.
        found = [] if not folder.exists() else [f for f in folder.iterdir() if f.suffix != ".partial"]
    except OSError as error:
        raise _unwritable(folder, error, flag) from None
    if found and not (folder / SETTINGS).exists():
        raise MarsError(f"{flag} '{folder}' holds other files: choose a new or an empty folder.")
    check_writable(folder, flag=flag)


def check_writable(path: Path, *, flag: str = "--output") -> None:
    """Raise MarsError where a directory cannot be written to, or not be made; nothing is made."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:  # a name that is too long, say
        raise _unwritable(path, error, flag) from None
    nearest = next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())
    if not nearest.is_dir():
        raise MarsError(f"{flag} '{path}' leads through '{nearest}', which is a file: choose another path.")
    try:
        # What os.access says is no more than the permissions: /proc, say, has them and takes no file.
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        raise _unwritable(path, error, flag) from None


def _unwritable(folder: Path, error: OSError, flag: str) -> MarsError:
    return MarsError(
        f"{flag} '{folder}' cannot be written ({error.strerror}): check its permissions, or choose another path."
    )


def write_json(path: Path, value: Any) -> None:
    """Write a whole file or nothing; it is on disk when this returns."""
    write_whole(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


def fingerprint(params: Any, *checkpoints: str | os.PathLike[str]) -> str:
    """A name for weights: a hash over the name, shape and type of each and `ROWS` of its rows, first and last included.

    It does not depend on the mesh. Where there are several processes, all call it.

    Args:
      params: arrays.
      checkpoints: directories or GGUF files whose config counts too: it decides what the weights mean.

    >>> fingerprint({"w": np.zeros((2, 3))}) == fingerprint({"w": np.ones((2, 3))})
    False
    """
    parts = [_config(Path(checkpoint)) for checkpoint in checkpoints]
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        weight = leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)
        parts.append(f"{jax.tree_util.keystr(path)} {weight.shape} {weight.dtype}".encode())
        parts.append(fetch(_some_rows(weight)).tobytes())
    return digest(b"".join(parts))


def _config(checkpoint: Path) -> bytes:
    if is_gguf(checkpoint):
        return json.dumps(gguf_config.to_json(read_gguf(checkpoint)), sort_keys=True).encode()
    return (checkpoint / "config.json").read_bytes()


def _some_rows(weight: Any) -> Any:
    """Rows that are evenly spaced over all axes but the last, such as those of experts."""
    if weight.ndim < 2 or not weight.size:
        return weight
    outer = weight.shape[:-1]
    places = np.unique(np.linspace(0, math.prod(outer) - 1, ROWS).round().astype(np.int64))
    index = tuple(axis.astype(np.int32) for axis in np.unravel_index(places, outer))
    if isinstance(weight, jax.Array) and (mesh := jax.typeof(weight).sharding.mesh).explicit_axes:
        # Types say how arrays are divided, and so how these rows are to be.
        return weight.at[index].get(out_sharding=NamedSharding(mesh, PartitionSpec()))
    return weight[index]


def digest(data: bytes) -> str:
    """A short name for bytes."""
    return hashlib.sha256(data).hexdigest()[:16]
