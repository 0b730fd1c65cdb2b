"""What XLA compiles for tests, kept between runs in the user's cache folder and bounded in size."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import sys
from pathlib import Path

LARGEST = 2 * 2**30
"""Bytes that all folders together may hold when a run begins. The fast tests write 0.3 GB."""


def folder() -> str:
    """The folder of this version of jax under these flags; first all folders are bounded in size."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mars_jax" / "tests"
    key = f"{importlib.metadata.version('jaxlib')} {os.environ.get('XLA_FLAGS', '')}"
    bound(home, LARGEST)
    return str(home / hashlib.sha256(key.encode()).hexdigest()[:12])


def bytecode(folder: Path) -> str:
    """The folder, in which this process keeps what Python compiles from now on."""
    sys.dont_write_bytecode, sys.pycache_prefix = False, str(folder)
    return str(folder)


def bound(home: Path, largest: int) -> None:
    """Drop files that were not used for longest until the others have `largest` bytes at most."""
    found = []
    for path in home.rglob("*"):
        with contextlib.suppress(OSError):  # another run drops files too
            if path.is_file():
                told = path.stat()
                found.append((max(told.st_atime, told.st_mtime), told.st_size, path))
    left = sum(size for _, size, _ in found)
    for _, size, path in sorted(found):
        if left <= largest:
            break
        path.unlink(missing_ok=True)
        left -= size
