"""Files of JSON rows, to which one process appends the results of a run, and files that record a run's settings.

`FILE.settings.json` records the settings and the fingerprints of the weights. Each row contains a hash of both, so that
rows from a different run are detected, even in a file that combines rows from several machines.

Each row is one line. Every write is followed by fsync. The writing process locks the file, and the lock is released
when the process ends. If the process is killed, the file contains only complete lines, except possibly the last one.
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
    """The file of a run's rows.

    If several processes decode on one mesh, all of them have the rows in memory, but only the first one writes them.

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
        """Lock the file. If it has rows, compare its recorded settings with those of this run. No model is loaded yet.

        Args:
          path: path of the file, which need not exist yet.
          settings: all settings that determine the rows, except the fingerprints, which are passed to `start`.
          flag: command-line flag that names the file, for error messages.
          settings_path: file with the recorded settings; default: `FILE.settings.json`.
          resume: whether the file may already contain rows.

        Raises:
          MarsError: another process is writing to the file, the file cannot be opened, or it belongs to a different
            run.
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
        """Compare the fingerprints with the recorded ones, and read the existing rows.

        Args:
          fingerprints: fingerprints of the weights, keyed by component.

        Raises:
          MarsError: the file belongs to a run with different weights, or is not a file of rows. The file is then
            closed.
        """
        with contextlib.ExitStack() as on_error:
            on_error.callback(self.close)
            self._settings["fingerprints"] = dict(fingerprints or {})
            self.fingerprint = digest(json.dumps(self._settings, sort_keys=True).encode())
            has_record = self._data and compare_settings(
                self._settings_path, self._settings, self.path, self._flag
            )
            # Each complete line ends in a newline, so the part after the last newline is either empty or an incomplete
            # line.
            *lines, torn_line = hosts.broadcast_bytes(self._data).split(b"\n")
            if lines and b"\0" in lines[-1]:
                # After a power failure, a file may already have its new length but contain NUL bytes in place of its
                # last line.
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
            # Total size in bytes of the complete lines. `begin` truncates the file to this size.
            self._intact = sum(len(line) + 1 for line in lines)
            on_error.pop_all()

    def begin(self) -> None:
        """Record the settings, and remove an incomplete last line.

        If this was not called before the first `append`, `append` calls it.
        """
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
        """Append one row, and return once it is on disk. NaN and infinities become null.

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
            # Store the row as a later run will read it, with lists instead of tuples and null instead of NaN.
            self.rows.append(json.loads(line))

    def _unwritable(self, error: OSError) -> MarsError:
        return MarsError(
            f"'{self.path}' cannot be written ({error.strerror}): fix that, then resume the run."
        )

    def batch(self, keys: Sequence[Mapping[str, object]], make: Callable[[], Sequence[Row]]) -> list[Row]:
        """Return the rows with the given keys. If any are missing, make all of them and append the missing ones.

        Args:
          keys: for each row, the fields that identify it. Every call must use the same fields.
          make: function that makes all rows, in the order of `keys`.
        """
        key_fields = tuple(keys[0])
        if not self._by_key:
            self._by_key = {tuple(row.get(name) for name in key_fields): row for row in self.rows}
        key_values = [tuple(key.values()) for key in keys]
        # The rows of a batch are decoded together, so if one is missing, decode the whole batch again.
        if not self._by_key.keys() >= set(key_values):
            for key, row in zip(key_values, make(), strict=True):
                if key not in self._by_key:
                    self.append(row)
                    self._by_key[key] = self.rows[-1]
        return [self._by_key[key] for key in key_values]

    def stop(self) -> int:
        """Close the file before a signal ends the process, to prevent further writes. Return the number of rows."""
        # Never release this lock, because an `append` in the main thread must not write to the closed file.
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
    """A lock that prevents other processes from writing to a file or directory, until `close` or process exit."""

    def __init__(self, path: str | os.PathLike[str], *, flags: int = os.O_RDONLY):
        """
        Args:
          path: path of the file or directory.
          flags: flags for `os.open`.

        Raises:
          MarsError: another process holds the lock, or the path cannot be opened.
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
            # The file system does not support locks.
            return
        if not os.path.exists(path) or not os.path.samestat(os.fstat(self.descriptor), os.stat(path)):
            # Another process deleted the file before this process locked it.
            os.close(self.descriptor)
            raise busy_error

    def write(self, data: bytes) -> None:
        """Write all of `data`, and return once it is on disk."""
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
    """Compare settings with the recorded ones. Return whether recorded settings exist.

    Args:
      path: file with the recorded settings.
      settings: settings of this run, as JSON values.
      owner: file or directory of the run, for error messages.
      flag: command-line flag that names the owner, for error messages.
      but: name of a setting to skip because its value is not known yet.

    Raises:
      MarsError: a setting differs, or the file of recorded settings is damaged.
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
    # Compare every name that occurs in at least one of the dictionaries, because either may omit settings that have
    # their default values.
    for name in [*settings, *recorded_settings]:
        if name != but and (change := difference(name, recorded_settings.get(name), settings.get(name))):
            raise MarsError(
                f"{flag} '{owner}' was begun with {change}: choose another {flag}, or the settings of that run."
            )
    return True


def difference(name: str, recorded: object, current: object) -> str | None:
    """Describe how a setting differs from its recorded value; return None if it does not.

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
    # These values are hashes, which mean nothing to the user.
    if all(isinstance(value, str) and re.fullmatch("[0-9a-f]{16}", value) for value in (recorded, current)):
        return f"other {name}"
    return f"{name} {_brief(recorded)}, not {_brief(current)}"


def _brief(value: object) -> str:
    if value is None:
        return "at its default"
    return shortened(json.dumps(value, ensure_ascii=False), 60)


def parse_line(line: bytes) -> Row | None:
    """Parse a line as a JSON object. Return None if it is not one."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict):
        return None
    return row


def to_line(row: Mapping[str, object]) -> str:
    """Convert a row to one line of JSON. NaN and infinities become null.

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
    """Convert a setting to a JSON value.

    Tuples become lists, dataclasses become objects, and values of other types become strings.

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
"""Number of rows of each weight that are hashed for a fingerprint. Training changes nearly all rows, so a few are
enough."""


def fingerprint(params: PyTree, *checkpoints: str | os.PathLike[str]) -> str:
    """Hash the name, shape and dtype of each weight, and `ROWS` of its rows, including the first and the last.

    The hash does not depend on the mesh. In a run of several processes, all of them must call this function.

    Args:
      params: weights to hash.
      checkpoints: directories or GGUF files whose configs are hashed as well.

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
    """Return `ROWS` rows of a weight, evenly spaced over all axes but the last, including a leading axis of experts."""
    if weight.ndim < 2 or not weight.size:
        return weight
    outer_shape = weight.shape[:-1]
    # `unique` removes repeated indices, which occur if the weight has fewer than `ROWS` rows.
    row_numbers = np.unique(np.linspace(0, math.prod(outer_shape) - 1, ROWS).round().astype(np.int64))
    row_indices = tuple(axis.astype(np.int32) for axis in np.unravel_index(row_numbers, outer_shape))
    if isinstance(weight, jax.Array) and (mesh := jax.typeof(weight).sharding.mesh).explicit_axes:
        # An array that is sharded over explicit axes can only be indexed with an explicit `out_sharding`.
        return weight.at[row_indices].get(out_sharding=NamedSharding(mesh, PartitionSpec()))
    return weight[row_indices]


def digest(data: bytes) -> str:
    """Return a short hash of `data`, 16 hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()[:16]
