"""Atomic writes of files and directories, under a temporary name until everything is on disk."""

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
    """Raise MarsError if a path is a URL, before `Path` removes one of its slashes."""
    if "://" in os.fspath(path):
        raise MarsError(f"'{path}' is a URL: name a local directory, and copy it to the store afterwards.")


def check_place(target: str | os.PathLike[str]) -> None:
    """Create the parent directory of `target`, and check that it is writable.

    The check writes a temporary directory, since permissions are not enough: for root, /proc appears to be writable.

    Raises:
      MarsError: the parent cannot be created or is not writable.
    """
    path = Path(target)
    with writing(target):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent):
            pass


def sync(path: Path) -> None:
    """Wait until a file, or the entries of a directory, are on disk."""
    # A directory can be opened only for reading, which is enough for fsync.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_directory(directory: Path) -> None:
    """Wait until all files in a directory and its subdirectories are on disk."""
    for folder, _, files in os.walk(directory):
        for name in files:
            sync(Path(folder, name))
        sync(Path(folder))


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically, and return once it is on disk under its name.

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
    # The new name is on disk only after the directory is.
    sync(path.parent)


def staging_path(target: Path) -> Path:
    """Return the temporary name of a directory that is being written."""
    return target.parent / f".{target.name}.writing"


@contextlib.contextmanager
def staging(target: Path) -> Iterator[Path]:
    """Yield an empty directory next to `target`, on the same file system, and delete it at the end.

    Files that a killed process left in it are deleted first.
    """
    place = staging_path(target)
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)
