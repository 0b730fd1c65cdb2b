"""Versions of files, to invalidate caches and to detect files that change while they are read."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from mars_jax.utils.errors import MarsError

Result = TypeVar("Result")

Version = tuple[int, ...] | None
"""Device, inode, size, and times of the last change to data and inode; None if the file cannot be read."""


def version_of(path: Path) -> Version:
    """Return the version of a file, which changes if the file is rewritten or replaced."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def check_version(path: Path, expected: Version) -> None:
    """Raise MarsError if a file's version differs from `expected`. Call this after reading the file."""
    if version_of(path) != expected:
        raise MarsError(f"'{path}' changed while it was being read: load it again.")


def cached_by_version(
    files: Callable[[Path], Iterable[Path]],
) -> Callable[[Callable[[Path], Result]], Callable[[Path], Result]]:
    """Decorate a function of a path, so that its result is cached until one of `files(path)` changes."""

    def decorate(read: Callable[[Path], Result]) -> Callable[[Path], Result]:
        # The function ignores `versions`, which serves only as part of the cache's key.
        cached = functools.lru_cache(maxsize=4)(lambda path, versions: read(path))

        @functools.wraps(read)
        def read_cached(path: Path) -> Result:
            versions = tuple((file, version_of(file)) for file in files(path))
            return cached(path, versions)

        return read_cached

    return decorate
