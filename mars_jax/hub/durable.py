"""Atomic writes of files and directories, which have a temporary name until all of their data is on disk."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from mars_jax.utils.errors import MarsError, unwritable


@contextlib.contextmanager
def writing(target: str | os.PathLike[str]) -> Iterator[None]:
    """Convert operating-system errors, and any library's error about a full disk, into a MarsError."""
    try:
        yield
    except MarsError as error:
        # A MarsError may wrap another library's error about a full disk.
        raise unwritable(error, target) or error from error.__cause__
    except Exception as error:
        if full := unwritable(error, target):
            raise full from error
        if not isinstance(error, OSError):
            raise
        raise MarsError(
            f"'{os.fspath(target)}' cannot be written ({error.strerror or error}): choose another path, or make room."
        ) from error


def refuse_url(path: str | os.PathLike[str]) -> None:
    """Raise MarsError if a path is a URL. Call this before `Path(path)`, which would drop one of the slashes."""
    if "://" in os.fspath(path):
        raise MarsError(f"'{path}' is a URL: name a local directory, and copy it to the store afterwards.")


def check_place(target: str | os.PathLike[str]) -> None:
    """Create the parent directory of `target`, and check that it is writable.

    The check creates a temporary directory, because permission bits are not enough: to root, /proc appears writable.

    Raises:
      MarsError: the parent cannot be created or is not writable.
    """
    path = Path(target)
    with writing(target):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent):
            pass


def sync(path: Path) -> None:
    """Flush a file, or the entries of a directory, to disk."""
    # A directory can be opened only for reading, which is enough for fsync.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_directory(directory: Path) -> None:
    """Flush all files in a directory and its subdirectories to disk."""
    for folder, _, files in os.walk(directory):
        for name in files:
            sync(Path(folder, name))
        sync(Path(folder))


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically, and return once it is on disk under its final name.

    Raises:
      OSError: the file cannot be written.
    """
    staged = path.with_name(f"{path.name}.partial")
    try:
        staged.write_text(text, encoding="utf-8")
        sync(staged)
    except OSError:
        staged.unlink(missing_ok=True)
        raise
    # The text is on disk before the rename, so a crash leaves either the old file or the new one.
    staged.replace(path)
    # The rename is on disk only after the directory has been flushed too.
    sync(path.parent)


def staging_path(target: Path) -> Path:
    """Return the temporary path under which a directory is written."""
    return target.parent / f".{target.name}.writing"


@contextlib.contextmanager
def staging(target: Path) -> Iterator[Path]:
    """Yield an empty directory next to `target`, on the same file system, and delete it at the end.

    Files that a killed process left there are deleted first.
    """
    place = staging_path(target)
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)
