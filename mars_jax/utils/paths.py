"""Paths and files given by users: validity, `~`, folders kept between runs, and reading of regular files.

A pipe or a device is rejected, since reading it may never end.
"""

from __future__ import annotations

import errno
import gzip
import lzma
import os
import stat
from pathlib import Path
from typing import IO

from mars_jax.utils.errors import MarsError, shortened
from mars_jax.utils.limits import FILE_BYTES, NAME_BYTES, PATH_BYTES


def check_path(path: str | os.PathLike[str], shown: str = "the path") -> None:
    """Raise MarsError for an invalid path, before a system call fails with a bare OSError.

    Args:
      path: the path to check.
      shown: name of the argument in the message.

    >>> check_path("runs/a\\0b", "--output")
    Traceback (most recent call last):
    mars_jax.utils.errors.MarsError: --output 'runs/a\\x00b' holds a NUL character, which no path can: remove it.
    """
    text = os.fspath(path)
    quoted_path = f"{shown} '{shortened(text, 80)}'"
    try:
        path_bytes = os.fsencode(text)
    except UnicodeEncodeError:
        raise MarsError(f"{quoted_path} is not valid Unicode: rename the file.") from None
    if b"\0" in path_bytes:
        raise MarsError(f"{quoted_path} holds a NUL character, which no path can: remove it.")
    if len(path_bytes) > PATH_BYTES or max(map(len, path_bytes.split(b"/"))) > NAME_BYTES:
        raise MarsError(
            f"{quoted_path} is too long: expected at most {PATH_BYTES:,} bytes, and {NAME_BYTES} for each name in it."
        )


def expanded(path: str | os.PathLike[str]) -> Path:
    """Expand a leading `~` or `~user` of a path to the home folder.

    Raises:
      MarsError: there is no such user, its home is not known, or `check_path` rejects the path.

    >>> expanded("a/~b").parts
    ('a', '~b')
    """
    check_path(path)
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise MarsError(
            f"'{os.fspath(path)}' begins with {Path(path).parts[0]}, and no home folder is known for that: give the "
            "whole path."
        ) from None


def kept(variable: str, *usual: str) -> Path | None:
    """Return the folder in an environment variable, or else the default folder below the user's home.

    Return None if the home is unknown, for example in a container whose user has no name and no HOME.

    >>> kept("HOME", ".cache") == Path.home()
    True
    """
    if configured_folder := os.environ.get(variable):
        return Path(configured_folder)
    try:
        return Path.home().joinpath(*usual)
    except RuntimeError:
        return None


def open_file(path: str | os.PathLike[str], max_bytes: int = FILE_BYTES) -> IO[bytes]:
    """Open a regular file, or a link to one.

    Args:
      path: path of the file.
      max_bytes: maximum size.

    Raises:
      MarsError: the path is invalid.
      OSError: there is no such file, it cannot be read, it is too large, or it is a directory, a pipe or a device;
        `strerror` describes the reason.
    """
    check_path(path)
    # Without O_NONBLOCK, opening a pipe would wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    status, error_args = os.fstat(descriptor), None
    if stat.S_ISDIR(status.st_mode):
        error_args = errno.EISDIR, "it is a directory"
    elif not stat.S_ISREG(status.st_mode):
        error_args = errno.EINVAL, "it is a pipe or a device, not a regular file"
    elif status.st_size > max_bytes:
        error_args = errno.EFBIG, f"it has {status.st_size:,} bytes, and at most {max_bytes:,} are read"
    if error_args is not None:
        os.close(descriptor)
        raise OSError(*error_args)
    return os.fdopen(descriptor, "rb")


def read_bytes(path: str | os.PathLike[str], max_bytes: int = FILE_BYTES) -> bytes:
    """Read a regular file; arguments and errors are those of `open_file`."""
    with open_file(path, max_bytes) as file:
        return file.read()


def read_text(path: str | os.PathLike[str], max_bytes: int = FILE_BYTES) -> str:
    """Read a regular file as text; arguments and errors are those of `open_file`.

    Raises:
      UnicodeDecodeError: the file is not UTF-8.
    """
    return read_bytes(path, max_bytes).decode("utf-8")


def unpacked(path: str | os.PathLike[str]) -> bytes:
    """Read a regular file, decompressing it if its name ends in .xz or .gz.

    Raises:
      OSError: see `open_file`; or the decompressed data exceeds `FILE_BYTES`.
      EOFError, lzma.LZMAError, zlib.error: a compressed file is damaged or truncated.
    """
    decompress = {".xz": lzma.open, ".gz": gzip.open}.get(Path(path).suffix)
    if decompress is None:
        return read_bytes(path)
    with open_file(path) as packed_file, decompress(packed_file, "rb") as file:
        # One byte past the limit shows that the data is too large. A small archive may expand to any size.
        content = file.read(FILE_BYTES + 1)
    if len(content) > FILE_BYTES:
        raise OSError(errno.EFBIG, f"it holds more than {FILE_BYTES:,} bytes")
    return content
