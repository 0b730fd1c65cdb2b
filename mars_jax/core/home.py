"""The home folder of the user: `~` in a path, and where things are kept between runs."""

from __future__ import annotations

import os
from pathlib import Path

from mars_jax.core.errors import MarsError


def expanded(path: str | os.PathLike[str]) -> Path:
    """A path whose leading `~` or `~user` is the home folder that it stands for.

    Raises:
      MarsError: there is no such user, or its home is not known.

    >>> expanded("a/~b").parts
    ('a', '~b')
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise MarsError(
            f"'{os.fspath(path)}' begins with {Path(path).parts[0]}, and no home folder is known for that: give the "
            "whole path."
        ) from None


def kept(variable: str, *usual: str) -> Path | None:
    """The folder that an environment variable names, else the usual one below the user's home; None where that is
    unknown, as in a container whose user has no name and no HOME.

    >>> kept("HOME", ".cache") == Path.home()
    True
    """
    if named := os.environ.get(variable):
        return Path(named)
    try:
        return Path.home().joinpath(*usual)
    except RuntimeError:
        return None
