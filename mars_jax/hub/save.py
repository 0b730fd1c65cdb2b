"""Save a model as a directory that transformers loads."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mars_jax.core.errors import MarsError
from mars_jax.core.types import PyTree
from mars_jax.hub.config import from_json, to_json
from mars_jax.models.config import ModelConfig
from mars_jax.models.quantize import Int8
from mars_jax.models.weights import Weight, get, weights


def named_arrays(rows: Iterable[Weight], params: PyTree) -> dict[str, np.ndarray]:
    """Checkpoint name -> array, checked against a table of weights.

    Raises:
      MarsError: params lack a row of the table, or have it in another shape.
    """
    arrays: dict[str, np.ndarray] = {}
    for row in rows:
        try:
            value = get(params, row.path)
            if isinstance(value, Int8):
                raise MarsError("int8 weights are not saved in this layout: save those they were made of.")
            value = np.asarray(jax.device_get(value))
        except (KeyError, IndexError, TypeError):
            raise MarsError(
                f"params lack {'.'.join(map(str, row.path))}: they belong to another config."
            ) from None
        if value.shape != row.shape:
            raise MarsError(
                f"params {'.'.join(map(str, row.path))} is {list(value.shape)} and the config says "
                f"{list(row.shape)}: they belong to another config."
            )
        arrays[row.name] = np.ascontiguousarray(value)
    return arrays


def free_directory(path: str | os.PathLike[str], *, overwrite: bool) -> Path:
    """The path of a directory to write.

    Raises:
      MarsError: it is in use, and `overwrite` does not allow that.
    """
    target = Path(path)
    if target.exists() and (not target.is_dir() or (any(target.iterdir()) and not overwrite)):
        raise MarsError(
            f"'{target}' exists and is not an empty directory: choose another path, or pass overwrite=True."
        )
    return target


def save(
    path: str | os.PathLike[str], config: ModelConfig, params: PyTree, *, overwrite: bool = False
) -> Path:
    """Write config.json and model.safetensors to a new directory, all or nothing.

    Args:
      path: the directory. Its parents are made.
      config: the model's config.
      params: its params, in the dtype to save.
      overwrite: replace the two files in a directory that already holds something; other files stay.

    Returns:
      The directory.

    Raises:
      MarsError: the directory is not empty, params do not fit config, or the family cannot express config.

    >>> save("distilled", config, params)  # doctest: +SKIP
    PosixPath('distilled')
    """
    target = free_directory(path, overwrite=overwrite)
    arrays = named_arrays(weights(config), params)
    data = to_json(config, dtype=arrays["model.embed_tokens.weight"].dtype.name)
    if from_json(data) != config:
        raise MarsError(
            f"config.json of the family '{config.family}' cannot express this config: choose another family."
        )
    return write_directory(target, arrays, data)


def write_directory(
    target: Path, arrays: dict[str, np.ndarray], data: dict[str, Any], *, file: str = "model.safetensors"
) -> Path:
    """Write the weights into `file`, and config.json, all or nothing; other files of the directory stay."""
    from safetensors.numpy import save_file

    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        save_file(arrays, staging / file, metadata={"format": "pt"})
        # safetensors makes the file private, and a checkpoint need not be.
        (staging / file).chmod(0o666 & ~_umask())
        (staging / "config.json").write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
        if not target.exists() or not any(target.iterdir()):
            staging.chmod(0o777 & ~_umask())
            os.replace(staging, target)
        else:
            for name in (file, "config.json"):
                os.replace(staging / name, target / name)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return target


def _umask() -> int:
    """The process's umask, which mkdtemp leaves aside: it makes directories private."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
