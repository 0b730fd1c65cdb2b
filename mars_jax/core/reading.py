"""Files that users name, read whole: regular files alone, since a pipe or a device may never end."""

from __future__ import annotations

import errno
import gzip
import lzma
import os
import stat
from pathlib import Path
from typing import IO, Any

MOST = 1 << 34
"""Bytes of a file, and of what a compressed one holds: 16 GiB, above every text to train on and below what a sparse
file or a damaged one may claim."""


def open_file(path: str | os.PathLike[str]) -> IO[bytes]:
    """Open a regular file, or a link to one.

    Raises:
      OSError: there is none, it cannot be read, it is too large, or it is a directory, a pipe or a device; `strerror`
        says which.
    """
    # Without O_NONBLOCK the opening of a pipe waits for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    found, wrong = os.fstat(descriptor), None
    if stat.S_ISDIR(found.st_mode):
        wrong = errno.EISDIR, "it is a directory"
    elif not stat.S_ISREG(found.st_mode):
        wrong = errno.EINVAL, "it is a pipe or a device, and no file"
    elif found.st_size > MOST:
        wrong = errno.EFBIG, f"it has {found.st_size:,} bytes, and at most {MOST:,} are read"
    if wrong is not None:
        os.close(descriptor)
        raise OSError(*wrong)
    return os.fdopen(descriptor, "rb")


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """The contents of a regular file.

    Raises:
      OSError: as `open_file`.
    """
    with open_file(path) as file:
        return file.read()


def read_text(path: str | os.PathLike[str]) -> str:
    """The contents of a regular file as text.

    Raises:
      OSError: as `open_file`.
      UnicodeDecodeError: it is no UTF-8.
    """
    return read_bytes(path).decode("utf-8")


def unpacked(path: str | os.PathLike[str]) -> bytes:
    """The contents of a regular file, decompressed where its name ends in .xz or .gz.

    Raises:
      OSError: as `open_file`, or it holds more than `MOST`.
      EOFError, lzma.LZMAError, zlib.error: a compressed one is damaged, or was cut short.
    """
    opener: Any = {".xz": lzma.open, ".gz": gzip.open}.get(Path(path).suffix)
    if opener is None:
        return read_bytes(path)
    with open_file(path) as packed, opener(packed, "rb") as file:
        data = file.read(MOST + 1)
    if len(data) > MOST:
        raise OSError(errno.EFBIG, f"it holds more than {MOST:,} bytes")
    return data
