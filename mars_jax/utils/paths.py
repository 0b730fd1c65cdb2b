"""Functions that check and expand paths from users, locate cache folders, and read regular files.

Pipes and devices are rejected, because reading them may never end.
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
    """Raise MarsError if a path is invalid. Without this check, a system call would fail with a less helpful OSError.

    Args:
      path: path to check.
      shown: name of the argument, used in the message.

    >>> check_path("runs/a\\0b", "--output")
    Traceback (most recent call last):
    mars_jax.utils.errors.MarsError: --output 'runs/a\\x00b' contains a NUL character, which no path can: remove it.
    """
    text = os.fspath(path)
    quoted_path = f"{shown} '{shortened(text, 80)}'"
    try:
        path_bytes = os.fsencode(text)
    except UnicodeEncodeError:
        raise MarsError(f"{quoted_path} is not valid Unicode: rename the file.") from None
    if b"\0" in path_bytes:
        raise MarsError(f"{quoted_path} contains a NUL character, which no path can: remove it.")
    if len(path_bytes) > PATH_BYTES or max(map(len, path_bytes.split(b"/"))) > NAME_BYTES:
        raise MarsError(
            f"{quoted_path} is too long: expected at most {PATH_BYTES:,} bytes, and {NAME_BYTES} for each name in it."
        )


def expanded(path: str | os.PathLike[str]) -> Path:
    """Replace a leading `~` or `~user` in a path with the home folder.

    Raises:
      MarsError: the user does not exist, the home folder is unknown, or the path is invalid (see `check_path`).

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
    """Return the folder that an environment variable names, or else a default folder in the user's home folder.

    Return None if the home folder is unknown, for example in a container whose user has no name and no HOME variable.

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
    """Open a regular file, or a link to a regular file, for reading in binary mode.

    Args:
      path: path of the file.
      max_bytes: maximum size of the file in bytes.

    Raises:
      MarsError: the path is invalid.
      OSError: the file does not exist, cannot be read, is too large, or is a directory, a pipe or a device. The error's
        `strerror` states the reason.
    """
    check_path(path)
    # Without O_NONBLOCK, opening a pipe would block until another process writes to it.
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
    """Read the bytes of a regular file. The arguments and errors are those of `open_file`."""
    with open_file(path, max_bytes) as file:
        return file.read()


def read_text(path: str | os.PathLike[str], max_bytes: int = FILE_BYTES) -> str:
    """Read a regular file as UTF-8 text. The arguments and errors are those of `open_file`.

    Raises:
      UnicodeDecodeError: the file is not UTF-8.
    """
    return read_bytes(path, max_bytes).decode("utf-8")


def unpacked(path: str | os.PathLike[str]) -> bytes:
    """Read a regular file, and decompress it if its name ends in .xz or .gz.

    Raises:
      OSError: the file cannot be read (see `open_file`), or the decompressed data has more than `FILE_BYTES` bytes.
      EOFError, lzma.LZMAError, zlib.error: a compressed file is damaged or truncated.
    """
    decompress = {".xz": lzma.open, ".gz": gzip.open}.get(Path(path).suffix)
    if decompress is None:
        return read_bytes(path)
    with open_file(path) as packed_file, decompress(packed_file, "rb") as file:
        # A small archive may expand to any size. Try to read one byte more than the limit, to detect data that is too
        # large.
        content = file.read(FILE_BYTES + 1)
    if len(content) > FILE_BYTES:
        raise OSError(errno.EFBIG, f"it holds more than {FILE_BYTES:,} bytes")
    return content
