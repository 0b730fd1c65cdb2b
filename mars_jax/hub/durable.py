"""Directories that are written whole: where they may be, and what of them has reached the disk."""

from __future__ import annotations

import contextlib
import ctypes
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from mars_jax.core.errors import MarsError


@contextlib.contextmanager
def writing(target: str | os.PathLike[str]) -> Iterator[None]:
    """Turn what the system says against writing `target` into a MarsError."""
    try:
        yield
    except OSError as error:
        raise MarsError(
            f"'{os.fspath(target)}' cannot be written ({error.strerror or error}): choose another path, or make room."
        ) from error


def check_place(target: str | os.PathLike[str]) -> None:
    """Make the directory that `target` is to be in, and see whether it takes one.

    Only trying tells: to root, /proc seems to take files.

    Raises:
      MarsError: it does not.
    """
    path = Path(target)
    with writing(target):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent):
            pass


def sync(path: Path) -> None:
    """Return when a file, or the names in a directory, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(directory: Path) -> None:
    """`sync` for everything in a directory, and for itself."""
    for folder, _, files in os.walk(directory):
        for name in files:
            sync(Path(folder, name))
        sync(Path(folder))


def exchange(one: Path, other: Path) -> bool:
    """Give two directories each other's names in one step, which a kill or a power cut does or does not see.

    Returns:
      Whether it was done; False where the system or the file system cannot, and nothing has changed. Linux can, on the
      file systems of its own disks.
    """
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError, TypeError):  # no Linux, or a C library of before 2018
        return False
    here, swap = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of linux/fs.h
    return renameat2(here, os.fsencode(one), here, os.fsencode(other), swap) == 0
