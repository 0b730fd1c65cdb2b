"""The folder of one run: claimed by its settings, so that a run goes on with its own rows and no others."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import jax

from mars_jax.cli import remote
from mars_jax.cli.host_flags import joined
from mars_jax.core.errors import MarsError, say
from mars_jax.placement import hosts
from mars_jax.serve.journal import Lock, difference, plain, write_whole

SETTINGS = "settings.json"


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
    """Check what can be known before any model is loaded.

    Raises:
      MarsError: the folder is none, holds anything but a run, or cannot be made or written to.
    """
    remote.refuse(folder, flag)
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


@contextlib.contextmanager
def studying(
    args: argparse.Namespace, folder: Path, out: IO[str], *, without: str | None = None
) -> Iterator[tuple[IO[str], Path]]:
    """`joined`, of a command that keeps rows in a folder; gives the folder too.

    The first process has the named one. The others have copies of it of their own, so that all know the same rows and
    one writes; every process makes every row. What is in it under the name `without` is not copied.

    Raises:
      MarsError: as `joined`.
    """
    with joined(args, (), out) as place:
        if args.mesh is None or jax.process_count() == 1:
            yield place, folder
            return
        files = hosts.broadcast_bytes(_packed(folder, without) if hosts.is_first() else b"")
        if hosts.is_first():
            yield place, folder
            return
        with tempfile.TemporaryDirectory() as own:
            copy = Path(own) / folder.name
            with tarfile.open(fileobj=io.BytesIO(files)) as archive:
                archive.extractall(own, filter="data")
            yield place, copy


def _packed(folder: Path, without: str | None) -> bytes:
    """The files of a folder, as an archive."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as archive:
        if folder.is_dir():
            left = f"{folder.name}/{without}"
            archive.add(folder, arcname=folder.name, filter=lambda file: None if file.name == left else file)
    return made.getvalue()
