"""The folder of one evaluation: claimed by its settings, so that a run goes on with its own rows and no others."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mars_jax.core.errors import MarsError

SETTINGS = "settings.json"


def claim(folder: Path, settings: Mapping[str, Any]) -> None:
    """Make a folder that of one run: write the settings, or compare them with those that are there.

    Raises:
      MarsError: the folder holds a run with other settings, or something else altogether.
    """
    check_folder(folder)
    path = folder / SETTINGS
    if not path.exists():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_json(path, settings)
        except OSError as error:
            raise MarsError(
                f"--output '{folder}' cannot be written ({error.strerror}): check its permissions."
            ) from None
        return
    try:
        there = json.loads(path.read_text())
        differing = [
            k for k in (*settings, *there) if json.loads(json.dumps(settings.get(k))) != there.get(k)
        ]
    except (ValueError, AttributeError, TypeError, RecursionError):
        raise MarsError(f"'{path}' is damaged: choose another --output.") from None
    if differing:
        name = differing[0]
        raise MarsError(
            f"--output '{folder}' holds a run with other {name.replace('_', ' ')} ({_brief(there.get(name))} and not "
            f"{_brief(settings.get(name))}): choose another --output, or the settings of that run."
        )


def check_folder(folder: Path) -> None:
    """What can be known before any model is loaded.

    Raises:
      MarsError: the folder is none, or holds anything but a run.
    """
    if folder.exists() and not folder.is_dir():
        raise MarsError(f"--output '{folder}' is a file: name a folder.")
    if folder.exists() and not (folder / SETTINGS).exists() and any(folder.iterdir()):
        raise MarsError(f"--output '{folder}' holds other files: choose a new or an empty folder.")


def _brief(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) < 60 else f"{text[:57]}..."


def write_json(path: Path, value: Any) -> None:
    """Write a whole file or nothing."""
    staged = path.with_suffix(".partial")
    staged.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    staged.replace(path)


def fingerprint(params: Any) -> str:
    """A name for weights: a hash over the name, shape and type of each, and its first row.

    >>> fingerprint({"w": np.zeros((2, 3))}) == fingerprint({"w": np.ones((2, 3))})
    False
    """
    parts = []
    for path, weight in jax.tree_util.tree_leaves_with_path(params):
        parts.append(f"{jax.tree_util.keystr(path)} {weight.shape} {weight.dtype}".encode())
        parts.append(np.asarray(weight[(0,) * max(0, weight.ndim - 1)]).tobytes())
    return digest(b"".join(parts))


def digest(data: bytes) -> str:
    """A short name for bytes."""
    return hashlib.sha256(data).hexdigest()[:16]
