"""Token tables on disk, by constraint and vocabulary, so that a table is built once. Oracle: tests/constraints."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from mars_jax.constraints.token_table import TokenTable
from mars_jax.core.home import kept

FORM = 2
"""Version of the files and of what constraints mean; files of another one are not read."""
MOST_FILES = 512
"""Files that are kept; the oldest go."""


def folder() -> Path | None:
    """Return the folder of tables: `$MARS_JAX_CONSTRAINTS`, else `mars-jax/constraints` in the user's cache.

    It is None if the variable is empty, or the user has no home.
    """
    named = os.environ.get("MARS_JAX_CONSTRAINTS")
    if named is not None:
        return Path(named) if named else None
    cache = kept("XDG_CACHE_HOME", ".cache")
    return cache and cache / "mars-jax" / "constraints"


def stored(key: tuple[str, ...], build: Callable[[], TokenTable]) -> TokenTable:
    """Return the table of a key, from disk where it is there, else built and kept.

    A folder that cannot be written or a file that cannot be read costs the time of building and nothing else.
    """
    place = folder()
    if place is None:
        return build()
    name = hashlib.sha256("\0".join((str(FORM), *key)).encode()).hexdigest()
    path = place / f"{name}.npz"
    try:
        with path.open("rb") as data, np.load(data, allow_pickle=False) as file:
            return TokenTable(**{field: file[field] for field in TokenTable._fields})
    except Exception:  # not there, cut short, or written by something else: np.load raises what it likes
        made = build()
    try:
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=place, suffix=".part", delete=False) as file:
            np.savez_compressed(file, **made._asdict())
        os.replace(file.name, path)  # no reader sees half of it
        _forget(place)
    except OSError:
        pass
    return made


def _forget(place: Path) -> None:
    files = sorted(place.glob("*.npz"), key=lambda path: path.stat().st_mtime)
    for path in files[: max(0, len(files) - MOST_FILES)]:
        path.unlink(missing_ok=True)
