"""Reading of whole files named by users. Only regular files: a pipe or a device may never end."""

from __future__ import annotations

import errno
import gzip
import lzma
import os
import stat
from pathlib import Path
from typing import IO, Any

from mars_jax.core.home import check_path
from mars_jax.core.limits import FILE_BYTES


def open_file(path: str | os.PathLike[str], most: int = FILE_BYTES) -> IO[bytes]:
    """Open a regular file, or a link to one.

    Args:
      path: of the file.
      most: maximum size in bytes.

    Raises:
      MarsError: the path is invalid.
      OSError: there is no such file, it cannot be read, it is too large, or it is a directory, a pipe or a device;
        `strerror` describes the reason.
    """
    check_path(path)
    # Without O_NONBLOCK, opening a pipe would wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    status, error = os.fstat(descriptor), None
    if stat.S_ISDIR(status.st_mode):
        error = errno.EISDIR, "it is a directory"
    elif not stat.S_ISREG(status.st_mode):
        error = errno.EINVAL, "it is a pipe or a device, not a regular file"
    elif status.st_size > most:
        error = errno.EFBIG, f"it has {status.st_size:,} bytes, and at most {most:,} are read"
    if error is not None:
        os.close(descriptor)
        raise OSError(*error)
    return os.fdopen(descriptor, "rb")


def read_bytes(path: str | os.PathLike[str], most: int = FILE_BYTES) -> bytes:
    """Read a regular file; arguments and errors are those of `open_file`."""
    with open_file(path, most) as file:
        return file.read()


def read_text(path: str | os.PathLike[str], most: int = FILE_BYTES) -> str:
    """Read a regular file as text; arguments and errors are those of `open_file`.

    Raises:
      UnicodeDecodeError: the file is not UTF-8.
    """
    return read_bytes(path, most).decode("utf-8")


def unpacked(path: str | os.PathLike[str]) -> bytes:
    """Read a regular file, decompressing it if its name ends in .xz or .gz.

    Raises:
      OSError: see `open_file`; or the decompressed data exceeds `FILE_BYTES`.
      EOFError, lzma.LZMAError, zlib.error: a compressed file is damaged or truncated.
    """
    opener: Any = {".xz": lzma.open, ".gz": gzip.open}.get(Path(path).suffix)
    if opener is None:
        return read_bytes(path)
    with open_file(path) as packed, opener(packed, "rb") as file:
        data = file.read(FILE_BYTES + 1)
    if len(data) > FILE_BYTES:
        raise OSError(errno.EFBIG, f"it holds more than {FILE_BYTES:,} bytes")
    return data
