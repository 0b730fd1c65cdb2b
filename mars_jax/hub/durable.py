"""Directories that are written whole: where they may be, and what of them has reached the disk."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from mars_jax.core.errors import MarsError, unwritable


@contextlib.contextmanager
def writing(target: str | os.PathLike[str]) -> Iterator[None]:
    """Turn errors of the system, and a full disk by whatever type a library raises, into a MarsError."""
    try:
        yield
    except MarsError as error:
        raise unwritable(error, target) or error from error.__cause__
    except Exception as error:
        if full := unwritable(error, target):
            raise full from error
        if not isinstance(error, OSError):
            raise
        raise MarsError(
            f"'{os.fspath(target)}' cannot be written ({error.strerror or error}): choose another path, or make room."
        ) from error


def check_place(target: str | os.PathLike[str]) -> None:
    """Make the directory that `target` is to be in, and see whether it takes one.

    Only trying tells: to root, /proc seems to take files.

    Raises:
      MarsError: it does not, or it is a URL.
    """
    path = Path(target)
    if "://" in os.fspath(target):
        raise MarsError(f"'{target}' is a URL: name a folder of this machine, and copy it when it is done.")
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
    """Do `sync` for everything in a directory, and for itself."""
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


@contextlib.contextmanager
def staging(target: Path) -> Iterator[Path]:
    """Make an empty directory beside the target that one process has for itself; at the end nothing of it stays.

    Whatever a process that was killed has left there goes first, and what it had put aside is put back.

    Raises:
      MarsError: another process is writing there.
    """
    place = beside(target, "writing")
    place.mkdir(parents=True, exist_ok=True)
    lock = os.open(place, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # it goes with the process, however that ends
        except BlockingIOError:
            raise MarsError(f"another process is writing '{target}': wait for it.") from None
        replaced = beside(target, "replaced")
        if replaced.exists() and not target.exists():  # killed between the two renames of `conversion`
            os.rename(replaced, target)
        shutil.rmtree(replaced, ignore_errors=True)
        for left in place.iterdir():
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        try:
            yield place
        finally:
            shutil.rmtree(place, ignore_errors=True)
    finally:
        os.close(lock)


def beside(target: Path, what: str) -> Path:
    """Return the hidden name of a directory beside the target."""
    return target.parent / f".{target.name}.{what}"


def move(place: Path, target: Path) -> bool:
    """Put a directory where nothing is, or an empty one, or in exchange for the one that is there.

    Returns:
      Whether it was done; see `exchange`.
    """
    if not target.exists() or not any(target.iterdir()):
        os.replace(place, target)
    elif not exchange(place, target):
        return False
    sync(target.parent)
    return True
