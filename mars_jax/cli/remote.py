"""Objects of a store, named by URL: gs://, s3://, hf:// and whatever else fsspec knows.

An object is read and written whole: stores have no append, no rename and no lock. Oracle: the file systems of fsspec
(tests/cli/test_remote.py).
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from typing import Any

from mars_jax.core.errors import MarsError, first_line

DONE = ".done"
"""End of the name of an object beside that of a run. It comes last, and holds the number of rows."""


def is_url(path: str | os.PathLike[str]) -> bool:
    """Tell whether a path is the URL of an object.

    >>> is_url("gs://bucket/in.jsonl"), is_url("runs/in.jsonl")
    (True, False)
    """
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", os.fspath(path)) is not None


def refuse(path: str | os.PathLike[str], flag: str) -> None:
    """Raise MarsError where a path that has to be one of this machine is a URL, or what `Path` makes of one.

    >>> refuse("runs/evidence", "--output")
    """
    if re.match(r"\w[\w+.-]+:/", os.fspath(path)):
        url = re.sub(":/+", "://", os.fspath(path), count=1)
        raise MarsError(
            f"{flag} '{url}' is a URL: name a path of this machine, and copy what is there to the store when it is "
            "done (gcloud storage cp -r, aws s3 cp --recursive)."
        )


def read(url: str) -> bytes:
    """Return the bytes of an object.

    Raises:
      FileNotFoundError: there is no such object.
      MarsError: the store does not give it, or the package for its protocol is missing.

    >>> write("memory://docs/a.txt", b"Hello")
    >>> read("memory://docs/a.txt"), exists("memory://docs/b.txt"), names("memory://docs/")
    (b'Hello', False, ['a.txt'])
    """
    with _opened(url, "read") as (system, path):
        return system.cat_file(path)


def write(url: str, data: bytes) -> None:
    """Write a whole object, in place of the one that is there. Readers see the old one or the new one.

    Raises:
      MarsError: as `read`, or there is no such bucket.
    """
    try:
        with _opened(url, "written") as (system, path):
            system.pipe_file(path, data)
    except FileNotFoundError:
        raise MarsError(
            f"'{url}' cannot be written, as there is no such bucket or folder: make it first."
        ) from None


def exists(url: str) -> bool:
    """Tell whether there is such an object.

    Raises:
      MarsError: as `read`.
    """
    try:
        with _opened(url, "read") as (system, path):
            system.info(
                path
            )  # `exists` of fsspec takes a store that does not answer for one without the object
    except FileNotFoundError:
        return False
    return True


def remove(url: str) -> None:
    """Remove an object, if there is one.

    Raises:
      MarsError: as `read`.
    """
    with contextlib.suppress(FileNotFoundError), _opened(url, "removed") as (system, path):
        system.rm_file(path)


def names(url: str) -> list[str]:
    """Return the names in a folder; none where there is no such folder.

    Raises:
      MarsError: as `read`.
    """
    with contextlib.suppress(FileNotFoundError), _opened(url, "read") as (system, path):
        return sorted(found.rstrip("/").rpartition("/")[2] for found in system.ls(path, detail=False))
    return []


@contextlib.contextmanager
def _opened(url: str, done: str) -> Iterator[tuple[Any, str]]:
    """Give the file system of a URL, and the path in it; turn what a store raises into a sentence."""
    import fsspec  # huggingface_hub brings it

    try:
        system, path = fsspec.core.url_to_fs(url)
        system.invalidate_cache()  # its listings do not know of other writers
        yield system, path
    except (FileNotFoundError, MarsError):
        raise
    except ImportError as error:
        raise MarsError(f"'{url}' needs a package ({first_line(error)}): install it with pip.") from None
    except Exception as error:  # the libraries of stores have no common base for theirs
        raise MarsError(
            f"'{url}' cannot be {done} ({first_line(error)}): check the URL, and your rights there."
        ) from None
