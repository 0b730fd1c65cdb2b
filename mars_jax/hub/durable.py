"""Directories that are written whole: where they may be, and what of them has reached the disk."""

from __future__ import annotations

import contextlib
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
