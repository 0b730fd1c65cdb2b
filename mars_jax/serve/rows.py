"""Rows of a run on disk: JSON lines that one process appends, and the settings that determine those lines.

`FILE.settings.json` records the settings and the fingerprints of the weights. Each row contains a digest of both, so
that a row from a different run is refused, even in a file that combines rows from several machines.

A row is one line, written under a lock that is released when the process ends, and followed by fsync. A killed process
therefore leaves whole lines and at most one torn line at the end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import math
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from mars_jax.core.types import PyTree
from mars_jax.hub import gguf_config
from mars_jax.hub.durable import write_whole
from mars_jax.hub.gguf_file import is_gguf, read_gguf
from mars_jax.utils import hosts
from mars_jax.utils.errors import MarsError, shortened
from mars_jax.utils.hosts import fetch
from mars_jax.utils.types import JsonObject
from mars_jax.utils.version import __version__

Row = JsonObject


class RowFile:
    """The rows of one run.

    If several processes decode on one mesh, all of them hold the rows and only the first one writes.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "rows.jsonl"
    >>> file = RowFile(path, {"seed": 0}); file.start(); file.append({"id": 1}); file.close()
    >>> _ = path.write_bytes(path.read_bytes() + b'{"id": ')  # a row whose writer was killed
    >>> file = RowFile(path, {"seed": 0}); file.start()
    >>> [row["id"] for row in file.rows]
    [1]
    >>> file.close()
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        settings: Mapping[str, object],
        *,
        flag: str = "--output",
        settings_path: Path | None = None,
        resume: bool = True,
    ):
        """Lock the file. If it has rows, compare its settings with those of this run, before any model is loaded.

        Args:
          path: path of the file, which need not exist.
          settings: everything that determines the rows, except for the fingerprints passed to `start`.
          flag: the flag that names the file, for messages.
          settings_path: path of the recorded settings; default: `FILE.settings.json`.
          resume: whether the file may already have rows.

        Raises:
          MarsError: another process writes to the file, it cannot be opened, or it belongs to a different run.
        """
        self.path, self.fingerprint = Path(path), ""
        self.rows: list[Row] = []
        self._flag, self._settings = flag, {"version": __version__, **plain(settings)}
        self._settings_path = settings_path or Path(f"{path}.settings.json")
        self._by_key: dict[tuple[object, ...], Row] = {}
        self._writing = threading.Lock()
        self._lock: Lock | None = None
        self._data = b""
        self._begun = False
        if not hosts.is_first():
            return
        if self.path.exists() and not self.path.is_file():
            raise MarsError(f"{flag} '{path}' is not a regular file: choose another path.")
        self._created = not self.path.exists()
        self._lock = Lock(self.path, flags=os.O_RDWR | os.O_APPEND | os.O_CREAT)
        try:
            self._data = self.path.read_bytes()
            if self._data and not resume:
                raise MarsError(f"{flag} '{path}' exists: add --resume to continue it, or choose another.")
            if self._data:
                compare_settings(self._settings_path, self._settings, self.path, flag, but="fingerprints")
        except (MarsError, OSError):
            self.close()
            raise

    def start(self, fingerprints: Mapping[str, str] | None = None) -> None:
        """Compare the fingerprints, and read the existing rows.

        Args:
          fingerprints: fingerprints of the weights, by component.

        Raises:
          MarsError: the file belongs to a run with different weights, or is not a file of rows. It is then closed.
        """
        with contextlib.ExitStack() as on_error:
            on_error.callback(self.close)
            self._settings["fingerprints"] = dict(fingerprints or {})
            self.fingerprint = digest(json.dumps(self._settings, sort_keys=True).encode())
            has_record = self._data and compare_settings(
                self._settings_path, self._settings, self.path, self._flag
            )
            # Each whole line ends in a newline, so the part after the last newline is empty or torn.
            *lines, torn_line = hosts.broadcast_bytes(self._data).split(b"\n")
            if lines and b"\0" in lines[-1]:
                # After a power cut, a file may have its new length and NUL bytes in place of its last line.
                lines.pop()
            if torn_line and self._lock is not None and not (lines or has_record):
                raise MarsError(f"{self._flag} '{self.path}' is not a file of rows: choose another path.")
            for number, line in enumerate(lines, start=1):
                row = parse_line(line)
                if row is None or row.get("fingerprint") != self.fingerprint:
                    raise MarsError(
                        f"line {number} of '{self.path}' is not a row of this run: choose another {self._flag}, or the "
                        "settings, weights and prompts of the run that wrote it."
                    )
                self.rows.append(row)
            # Size in bytes of the whole lines. `begin` truncates the file to this size.
            self._intact = sum(len(line) + 1 for line in lines)
            on_error.pop_all()

    def begin(self) -> None:
        """Record the settings, and cut off a torn line. The first `append` does this as well."""
        self._begun = True
        if self._lock is None:
            return
        try:
            os.ftruncate(self._lock.descriptor, self._intact)
            write_whole(self._settings_path, json.dumps(self._settings, indent=1) + "\n")
        except OSError as error:
            self.close()
            raise self._unwritable(error) from None

    def append(self, row: Mapping[str, object]) -> None:
        """Write one row, and return when it is on disk. NaN and infinities become null.

        Raises:
          MarsError: the file cannot be written.
        """
        line = to_line({**row, "fingerprint": self.fingerprint})
        with self._writing:
            if not self._begun:
                self.begin()
            try:
                if self._lock is not None:
                    self._lock.write(line.encode("utf-8", errors="replace") + b"\n")
            except OSError as error:
                raise self._unwritable(error) from None
            # Keep the row as a later run will read it: with lists in place of tuples, and null for NaN.
            self.rows.append(json.loads(line))

    def _unwritable(self, error: OSError) -> MarsError:
        return MarsError(
            f"'{self.path}' cannot be written ({error.strerror}): fix that, then resume the run."
        )

    def batch(self, keys: Sequence[Mapping[str, object]], make: Callable[[], Sequence[Row]]) -> list[Row]:
        """Return the rows for some keys. If the file lacks any of them, make all, and append the missing ones.

        Args:
          keys: fields that identify a row, the same fields in every call.
          make: returns the rows in the order of `keys`.
        """
        key_fields = tuple(keys[0])
        if not self._by_key:
            self._by_key = {tuple(row.get(name) for name in key_fields): row for row in self.rows}
        key_values = [tuple(key.values()) for key in keys]
        # The rows of a batch are decoded together, so a missing one is made with the others.
        if not self._by_key.keys() >= set(key_values):
            for key, row in zip(key_values, make(), strict=True):
                if key not in self._by_key:
                    self.append(row)
                    self._by_key[key] = self.rows[-1]
        return [self._by_key[key] for key in key_values]

    def stop(self) -> int:
        """Close the file when a signal ends the process, so that no more rows are written. Return the row count."""
        # Never release this lock: an `append` in the main thread must not write to the closed file.
        self._writing.acquire()
        self.close()
        return len(self.rows)

    def close(self) -> None:
        """Close the file. Delete it if this run created it and wrote no rows."""
        if self._lock is not None:
            if self._created and not self._begun:
                self.path.unlink(missing_ok=True)
            self._lock.close()
            self._lock = None


class Lock:
    """A file or directory that no other process may write to, until `close` or the end of the process."""

    def __init__(self, path: str | os.PathLike[str], *, flags: int = os.O_RDONLY):
        """
        Args:
          path: path of the file or directory.
          flags: flags for `os.open`.

        Raises:
          MarsError: another process has locked it, or it cannot be opened.
        """
        busy_error = MarsError(
            f"another process is writing to '{path}': wait until it ends, or choose another path."
        )
        try:
            self.descriptor = os.open(path, flags, 0o666)
        except OSError as error:
            raise MarsError(
                f"'{path}' cannot be opened ({error.strerror}): check the path and its permissions."
            ) from None
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self.descriptor)
            raise busy_error from None
        except OSError:
            # The file system has no locks.
            return
        if not os.path.exists(path) or not os.path.samestat(os.fstat(self.descriptor), os.stat(path)):
            # The previous owner deleted the file before this process locked it.
            os.close(self.descriptor)
            raise busy_error

    def write(self, data: bytes) -> None:
        """Write all bytes, and return once they are on disk."""
        remaining_bytes = memoryview(data)
        while remaining_bytes:
            remaining_bytes = remaining_bytes[os.write(self.descriptor, remaining_bytes) :]
        os.fsync(self.descriptor)

    def close(self) -> None:
        """Release the lock."""
        os.close(self.descriptor)


def compare_settings(
    path: Path, settings: Mapping[str, object], owner: Path, flag: str, *, but: str | None = None
) -> bool:
    """Compare settings with the recorded ones. Return whether a record exists.

    Args:
      path: path of the recorded settings.
      settings: settings of this run, as JSON values.
      owner: file or directory of the run, for messages.
      flag: the flag that names the owner.
      but: a setting to skip, because its value is not known yet.

    Raises:
      MarsError: a setting differs, or the file is damaged.
    """
    if not path.exists():
        return False
    recorded_settings = parse_line(path.read_bytes())
    if recorded_settings is None:
        raise MarsError(f"'{path}' is damaged: choose another {flag}.")
    recorded_version = recorded_settings.get("version", "0.1")
    if recorded_version != settings["version"]:
        raise MarsError(
            f"{flag} '{owner}' was begun by mars-jax {recorded_version}, and this is {settings['version']}: finish it "
            f"with that version, or choose another {flag}."
        )
    # Include names from both sides, because a setting at its default may be left out.
    for name in [*settings, *recorded_settings]:
        if name != but and (change := difference(name, recorded_settings.get(name), settings.get(name))):
            raise MarsError(
                f"{flag} '{owner}' was begun with {change}: choose another {flag}, or the settings of that run."
            )
    return True


def difference(name: str, recorded: object, current: object) -> str | None:
    """Describe the difference if a setting differs, otherwise return None.

    >>> difference("seed", 0, 1), difference("theta", None, 0.9), difference("seed", 1, 1)
    ('seed 0, not 1', 'theta at its default, not 0.9', None)
    >>> difference("fingerprints", {"draft": "a"}, {"draft": "b"})
    'other weights of the draft'
    >>> difference("fingerprints", None, {"target": "a"})  # a damaged settings file
    'other weights of the target'
    """
    if recorded == current:
        return None
    if name == "fingerprints" and isinstance(current, dict):
        if not isinstance(recorded, dict):
            recorded = {}  # a damaged settings file
        changed = (part for part in sorted(current | recorded) if recorded.get(part) != current.get(part))
        return next((f"other weights of the {part}" for part in changed), None)
    name = name.replace("_", " ")
    # These are digests, whose values mean nothing to the user.
    if all(isinstance(value, str) and re.fullmatch("[0-9a-f]{16}", value) for value in (recorded, current)):
        return f"other {name}"
    return f"{name} {_brief(recorded)}, not {_brief(current)}"


def _brief(value: object) -> str:
    if value is None:
        return "at its default"
    return shortened(json.dumps(value, ensure_ascii=False), 60)


def parse_line(line: bytes) -> Row | None:
    """Return the JSON object of a line, or None."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict):
        return None
    return row


def to_line(row: Mapping[str, object]) -> str:
    """Return one line of JSON. NaN and infinities become null.

    >>> to_line({"tau": float("nan"), "tokens": [1]})
    '{"tau": null, "tokens": [1]}'
    """
    return json.dumps(_finite(row), ensure_ascii=False, allow_nan=False)


def _finite(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return value


def plain(value: Any) -> Any:
    """Return a setting as a JSON value: tuples become lists, dataclasses objects, and other types strings.

    >>> plain({"tree": (4, 2), "path": Path("a")}), plain(float("inf"))
    ({'tree': [4, 2], 'path': 'a'}, 'inf')
    """
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, bool | int | float | str | None):
        return value
    if isinstance(value, Mapping):
        return {str(name): plain(part) for name, part in value.items()}
    if hasattr(value, "_asdict"):
        return plain(value._asdict())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return plain(dataclasses.asdict(value))
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    return str(value)


ROWS = 16
"""Number of rows of each weight that a fingerprint hashes. Training changes nearly all rows, so a few are enough."""


def fingerprint(params: PyTree, *checkpoints: str | os.PathLike[str]) -> str:
    """Hash the name, shape, dtype and `ROWS` rows of each weight, including the first and last row.

    The hash does not depend on the mesh. In a run of several processes, all of them must call this function.

    Args:
      params: arrays.
      checkpoints: directories or GGUF files whose configs are hashed too.

    >>> fingerprint({"w": np.zeros((2, 3))}) == fingerprint({"w": np.ones((2, 3))})
    False
    """
    hashed_parts = []
    for checkpoint in map(Path, checkpoints):
        if is_gguf(checkpoint):
            config = gguf_config.gguf_to_json(read_gguf(checkpoint))
            hashed_parts.append(json.dumps(config, sort_keys=True).encode())
        else:
            hashed_parts.append((checkpoint / "config.json").read_bytes())
    for path, param in jax.tree_util.tree_leaves_with_path(params):
        weight = param if isinstance(param, jax.Array) else np.asarray(param)
        hashed_parts.append(f"{jax.tree_util.keystr(path)} {weight.shape} {weight.dtype}".encode())
        hashed_parts.append(fetch(_some_rows(weight)).tobytes())
    return digest(b"".join(hashed_parts))


def _some_rows(weight: Array | np.ndarray) -> Array | np.ndarray:
    """Return rows that are evenly spaced over all axes but the last, including a leading axis of experts."""
    if weight.ndim < 2 or not weight.size:
        return weight
    outer_shape = weight.shape[:-1]
    # If the weight has fewer than `ROWS` rows, some numbers occur twice.
    row_numbers = np.unique(np.linspace(0, math.prod(outer_shape) - 1, ROWS).round().astype(np.int64))
    row_indices = tuple(axis.astype(np.int32) for axis in np.unravel_index(row_numbers, outer_shape))
    if isinstance(weight, jax.Array) and (mesh := jax.typeof(weight).sharding.mesh).explicit_axes:
        # Indexing an array with explicit axes requires the sharding of the result.
        return weight.at[row_indices].get(out_sharding=NamedSharding(mesh, PartitionSpec()))
    return weight[row_indices]


def digest(data: bytes) -> str:
    """Return a short hash of bytes."""
    return hashlib.sha256(data).hexdigest()[:16]
