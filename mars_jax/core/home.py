"""Paths that users name: validity, `~` for the home folder, and folders for files kept between runs."""

from __future__ import annotations

import os
from pathlib import Path

from mars_jax.core.errors import MarsError
from mars_jax.core.limits import NAME_BYTES, PATH_BYTES


def check_path(path: str | os.PathLike[str], shown: str = "the path") -> None:
    """Raise MarsError for an invalid path, before a system call fails with a bare OSError.

    Args:
      path: the path to check.
      shown: name of the argument in the message.

    >>> check_path("runs/a\\0b", "--output")
    Traceback (most recent call last):
    mars_jax.core.errors.MarsError: --output 'runs/a\\x00b' holds a NUL character, which no path can: remove it.
    """
    text = os.fspath(path)
    quoted = f"{shown} '{text if len(text) <= 80 else text[:32] + '...'}'"
    try:
        encoded = os.fsencode(text)
    except UnicodeEncodeError:
        raise MarsError(f"{quoted} is not valid Unicode: rename the file.") from None
    if b"\0" in encoded:
        raise MarsError(f"{quoted} holds a NUL character, which no path can: remove it.")
    if len(encoded) > PATH_BYTES:
        raise MarsError(
            f"{quoted} has {len(encoded):,} bytes: expected at most {PATH_BYTES:,}; shorten the path."
        )
    if (longest := max(map(len, encoded.split(b"/")))) > NAME_BYTES:
        raise MarsError(
            f"{quoted} holds a name of {longest:,} bytes: expected at most {NAME_BYTES}; shorten the name."
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
    """Return the folder in an environment variable, or else the usual one below the user's home.

    It is None if the home is unknown, as in a container whose user has no name and no HOME.

    >>> kept("HOME", ".cache") == Path.home()
    True
    """
    if named := os.environ.get(variable):
        return Path(named)
    try:
        return Path.home().joinpath(*usual)
    except RuntimeError:
        return None
