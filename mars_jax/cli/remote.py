"""Reading files from object stores by URL: gs://, s3://, hf:// and all other protocols of fsspec."""

from __future__ import annotations

import os
import re

from mars_jax.utils.errors import MarsError, first_line


def is_url(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a URL.

    >>> is_url("gs://bucket/in.jsonl"), is_url("runs/in.jsonl")
    (True, False)
    """
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", os.fspath(path)) is not None


def refuse(path: str | os.PathLike[str], flag: str) -> None:
    """Raise MarsError if a path that must be local is a URL, possibly with a slash removed by `Path`.

    >>> refuse("runs/evidence", "--output")
    """
    if re.match(r"\w[\w+.-]+:/", os.fspath(path)):
        url = re.sub(":/+", "://", os.fspath(path), count=1)
        raise MarsError(
            f"{flag} '{url}' is a URL: name a local path, and copy the result to the store afterwards, for example "
            "with gcloud storage cp -r or aws s3 cp --recursive."
        )


def read_remote(url: str) -> bytes:
    """Return the contents of a remote file.

    Raises:
      FileNotFoundError: there is no such file.
      MarsError: the store denies access, or the package for its protocol is missing.
    """
    import fsspec  # a dependency of huggingface_hub

    try:
        with fsspec.open(url, "rb") as file:
            return file.read()  # type: ignore[union-attr]
    except FileNotFoundError:
        raise
    except ImportError as error:
        raise MarsError(f"'{url}' needs a package ({first_line(error)}): install it with pip.") from None
    except Exception as error:
        # The libraries that access the stores have no common base class for their errors.
        raise MarsError(f"'{url}' cannot be read ({first_line(error)}): check URL and permissions.") from None
