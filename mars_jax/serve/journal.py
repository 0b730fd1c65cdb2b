"""Files that survive being killed: lines of JSON that one process appends to, and the settings they belong to.

A row is one write of one line, followed by fsync, under a lock that dies with the process. So a file is a run of
intact rows, and at most one torn line at its end.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from mars_jax.core.errors import MarsError
from mars_jax.hub.durable import sync

Row = dict[str, Any]


class Lock:
    """A file or directory that one process has for itself, until it closes the lock or ends, however it ends."""

    def __init__(self, path: str | os.PathLike[str], *, flags: int = os.O_RDONLY):
        """
        Args:
          path: of what to lock; a file comes into being if `flags` has O_CREAT.
          flags: of `os.open`.

        Raises:
          MarsError: another process has it, or it cannot be opened.
        """
        while True:
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
                raise MarsError(
                    f"another process is writing to '{path}': wait until it ends, or choose another path."
                ) from None
            except OSError:  # a file system without locks; there is nothing to hold
                return
            if self._is_at(path):
                return
            os.close(
                self.descriptor
            )  # its owner took it away between the two calls: there is a new one, or none

    def _is_at(self, path: str | os.PathLike[str]) -> bool:
        try:
            return os.path.samestat(os.fstat(self.descriptor), os.stat(path))
        except FileNotFoundError:
            return False

    def close(self) -> None:
        """Let go of it."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __enter__(self) -> Lock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Journal:
    """Lines of JSON in a file that this process alone writes. Its content changes with the first `append`.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "rows.jsonl"
    >>> journal = Journal(path)
    >>> journal.append({"id": 1}); journal.close()
    >>> _ = path.write_bytes(path.read_bytes() + b'{"id": ')  # a row whose writer was killed
    >>> again = Journal(path)
    >>> again.lines, again.torn
    ([b'{"id": 1}'], b'{"id": ')
    >>> again.append({"id": 2}); again.close()
    >>> path.read_text()
    '{"id": 1}\\n{"id": 2}\\n'
    """

    def __init__(self, path: str | os.PathLike[str], *, again: str = "run the same command again"):
        """Lock the file, which comes into being, and read what an interrupted run left.

        Args:
          path: of the file.
          again: what to do once the disk takes rows again, for the message about a full one.

        Raises:
          MarsError: another process writes to it, or it cannot be opened.
        """
        self.path, self._again = Path(path), again
        self._made = not self.path.exists()
        self._lock = Lock(path, flags=os.O_RDWR | os.O_APPEND | os.O_CREAT)
        data = self.path.read_bytes()
        self.lines, self.torn = _split(data)
        self._intact = len(data) - len(self.torn)
        self._begun = False

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one row, in place of a torn one, and return when it is on disk. NaN and infinities become null.

        Raises:
          MarsError: the disk does not take it.
        """
        left = memoryview(to_line(row).encode("utf-8", errors="replace") + b"\n")
        try:
            if not self._begun:
                os.ftruncate(self._lock.descriptor, self._intact)
                self._begun = True
            while left:
                left = left[os.write(self._lock.descriptor, left) :]
            os.fsync(self._lock.descriptor)
        except OSError as error:
            raise MarsError(
                f"'{self.path}' cannot be written ({error.strerror}): fix that, then {self._again}."
            ) from None

    def close(self) -> None:
        """Let go of the file. One that this run made and wrote nothing to goes."""
        if self._lock.descriptor >= 0:
            if self._made and not self._begun:
                self.path.unlink(missing_ok=True)
            self._lock.close()


def _split(data: bytes) -> tuple[list[bytes], bytes]:
    """Return (whole lines, what follows the last of them).

    After a power cut a file may have its new length and not yet its new bytes, which then read as NUL. JSON has none,
    and all rows but the last were on disk before: a last line with a NUL in it is as torn as half a line.

    >>> _split(b'{"id": 1}\\n\\0\\0\\0'), _split(b'{"id": 1}\\n{"i\\0\\0: 2}\\n')
    (([b'{"id": 1}'], b'\\x00\\x00\\x00'), ([b'{"id": 1}'], b'{"i\\x00\\x00: 2}\\n'))
    """
    *lines, torn = data.split(b"\n")
    if lines and b"\0" in lines[-1] and not torn.strip(b"\0"):
        torn = lines.pop() + b"\n" + torn
    return lines, torn


def could_begin(torn: bytes, head: bytes) -> bool:
    """Tell whether a torn line is one that begins with `head`, as far as its bytes reached the disk.

    >>> could_begin(b'{"pro', b'{"prompt": '), could_begin(b'\\0\\0\\0', b'{"id'), could_begin(b"notes", b'{"id')
    (True, True, False)
    """
    return all(ours in (0, theirs) for ours, theirs in zip(torn, head, strict=False))


def parse(line: bytes) -> Row | None:
    """Return the object in a line, or None where it holds none."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def to_line(row: Mapping[str, Any]) -> str:
    """Return one line of JSON. Numbers that JSON cannot write become null.

    >>> to_line({"tau": float("nan"), "tokens": [1]})
    '{"tau": null, "tokens": [1]}'
    """
    try:
        return json.dumps(row, ensure_ascii=False, allow_nan=False)
    except ValueError:  # rare, so the check costs the others nothing
        return json.dumps(_finite(row), ensure_ascii=False, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if abs(value) < float("inf") else None
    if isinstance(value, Mapping):
        return {name: _finite(part) for name, part in value.items()}
    return [_finite(part) for part in value] if isinstance(value, list | tuple) else value


def write_whole(path: Path, text: str) -> None:
    """Write a whole file or nothing, and return when it is on disk under its name.

    Raises:
      OSError: the disk does not take it.
    """
    staged = path.with_name(f"{path.name}.partial")
    try:
        with staged.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        staged.unlink(missing_ok=True)
        raise
    staged.replace(path)
    sync(path.parent)


def plain(value: Any) -> Any:
    """Return a setting as JSON gives it back: tuples are lists, named ones and dataclasses objects, the rest its text.

    >>> plain({"tree": (4, 2), "path": Path("a")}), plain(float("inf"))
    ({'tree': [4, 2], 'path': 'a'}, 'inf')
    """
    if isinstance(value, bool | int | str | None):
        return value
    if isinstance(value, float):
        return value if abs(value) < float("inf") else str(value)
    if isinstance(value, Mapping):
        return {str(name): plain(part) for name, part in value.items()}
    if hasattr(value, "_asdict"):
        return plain(value._asdict())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return plain(dataclasses.asdict(value))
    return [plain(part) for part in value] if isinstance(value, list | tuple) else str(value)


def difference(there: Mapping[str, Any], ours: Mapping[str, Any]) -> str | None:
    """Return the first setting in which a run on disk and this one differ, in words; None where none does.

    A setting that is absent is None, so that files of before a setting existed go on.

    >>> difference({"seed": 0, "dtype": None}, {"seed": 1})
    'other seed (0 and not 1)'
    """
    for name in (*ours, *there):
        was, now = there.get(name), plain(ours.get(name))
        if was != now:
            return f"other {name.replace('_', ' ')} ({_brief(was)} and not {_brief(now)})"
    return None


def _brief(value: Any) -> str:
    text = "the default" if value is None else json.dumps(value, ensure_ascii=False)
    return text if len(text) < 60 else f"{text[:57]}..."
