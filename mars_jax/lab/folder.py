"""The output folder of a run, which records the settings, so that a run with different ones cannot continue it."""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

from mars_jax.cli import remote
from mars_jax.cli.open_target import joined_processes
from mars_jax.hub.durable import write_whole
from mars_jax.serve.rows import Lock, RowFile, compare_settings, plain
from mars_jax.utils import hosts
from mars_jax.utils.errors import MarsError
from mars_jax.utils.types import JsonObject
from mars_jax.utils.version import __version__

SETTINGS, ROWS = "settings.json", "rows.jsonl"


def open_rows(folder: Path, settings: Mapping[str, object]) -> RowFile:
    """Open the rows file in a run's folder and record the run's settings. Create the folder if necessary.

    Raises:
      MarsError: the folder holds a run with different settings, or another process is writing to it.
    """
    if hosts.is_first():
        with _writing(folder, "--output"):
            folder.mkdir(parents=True, exist_ok=True)
    row_file = RowFile(folder / ROWS, settings, settings_path=folder / SETTINGS)
    row_file.start()
    row_file.begin()
    return row_file


@contextlib.contextmanager
def claim(folder: Path, settings: Mapping[str, object], *, flag: str = "--output") -> Iterator[None]:
    """Lock a folder for one run, and record the run's settings or compare them with the recorded ones.

    Args:
      folder: a new or empty folder, or the folder of an interrupted run with the same settings.
      settings: all settings that determine the output of the run.
      flag: the flag that names the folder, for error messages.

    Raises:
      MarsError: the folder holds a run with different settings or other files, or another process is writing to it.
    """
    check_folder(folder, flag=flag)
    settings = {"version": __version__, **plain(settings)}
    creates_folder = not folder.exists()
    with _writing(folder, flag):
        folder.mkdir(parents=True, exist_ok=True)
        lock = Lock(folder)
    with contextlib.closing(lock):
        is_new = not compare_settings(folder / SETTINGS, settings, folder, flag)
        if is_new:
            with _writing(folder, flag):
                write_shared_json(folder / SETTINGS, settings)
        try:
            yield
        except BaseException:
            # If the run wrote no output, remove the folder, so that it can be reused with different settings.
            if is_new and [file.name for file in folder.iterdir()] == [SETTINGS]:
                (folder / SETTINGS).unlink()
                if creates_folder:
                    folder.rmdir()
            raise


def check_folder(folder: Path, *, flag: str = "--output") -> None:
    """Check that a run can write its output to a folder. Commands call this before they load any model.

    Raises:
      MarsError: `folder` is a file, holds files other than those of a run, or cannot be created or written to.
    """
    remote.refuse(folder, flag)
    if folder.exists() and not folder.is_dir():
        raise MarsError(f"{flag} '{folder}' is a file: name a folder.")
    file_names = set()
    if folder.exists():
        with _writing(folder, flag):
            # Ignore .partial files, which a killed process may leave behind.
            file_names = {file.name for file in folder.iterdir() if file.suffix != ".partial"}
    if file_names and not file_names & {SETTINGS, ROWS}:
        raise MarsError(f"{flag} '{folder}' holds other files: choose a new or an empty folder.")
    check_writable(folder, flag=flag)


def check_writable(path: Path, *, flag: str = "--output") -> None:
    """Raise MarsError if a file or folder cannot be created at `path`, without creating it."""
    # `lstat` fails, for example, if the name is too long.
    with _writing(path, flag), contextlib.suppress(FileNotFoundError, NotADirectoryError):
        path.lstat()
    # Find the path itself, or the nearest existing parent, in which a new file or folder would be created.
    existing = next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())
    if not existing.is_dir():
        raise MarsError(f"{flag} '{path}' leads through '{existing}', which is a file: choose another path.")
    # Create a temporary file, because `os.access` checks only permissions: it reports that root can write to /proc.
    with _writing(path, flag), tempfile.TemporaryFile(dir=existing):
        pass


@contextlib.contextmanager
def _writing(path: Path, flag: str) -> Iterator[None]:
    """Convert an OSError that is raised in the block to a MarsError."""
    try:
        yield
    except OSError as error:
        raise MarsError(
            f"{flag} '{path}' cannot be written ({error.strerror}): check its permissions, or choose another path."
        ) from None


def write_shared(path: Path, text: str) -> None:
    """Write a file atomically in the first process of a mesh, and wait there until it is on disk."""
    if hosts.is_first():
        write_whole(path, text)


def write_shared_json(path: Path, value: object) -> None:
    """Write a JSON file atomically in the first process of a mesh."""
    write_shared(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


def read_shared_json(path: Path) -> JsonObject | None:
    """Read a JSON file in the first process, and return its value in every process. Return None if there is no file."""
    file_bytes = b""
    if hosts.is_first() and path.exists():
        file_bytes = path.read_bytes()
    return json.loads(hosts.broadcast_bytes(file_bytes) or "null")


@contextlib.contextmanager
def joined_with_folder(args: argparse.Namespace, folder: Path, out: IO[str]) -> Iterator[Path]:
    """Join the other processes of a run that stores files in a folder, and yield the folder of this process.

    The first process gets `folder`. The other processes get temporary folders, so that only the files of the first
    process persist. Each temporary folder contains a copy of the recorded settings, so that every process refuses to
    continue a run with different settings.

    Raises:
      MarsError: see `joined_processes`.
    """
    with joined_processes(args, (), out):
        recorded_settings = b""
        if hosts.is_first() and (folder / SETTINGS).is_file():
            recorded_settings = (folder / SETTINGS).read_bytes()
        recorded_settings = hosts.broadcast_bytes(recorded_settings)
        if hosts.is_first():
            yield folder
            return
        with tempfile.TemporaryDirectory() as temp_folder:
            if recorded_settings:
                (Path(temp_folder) / SETTINGS).write_bytes(recorded_settings)
            yield Path(temp_folder)
