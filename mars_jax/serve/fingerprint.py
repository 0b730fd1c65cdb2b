"""Fingerprints of weights, which let a resumed run check that it has the same weights."""

from __future__ import annotations

import hashlib
import json
import math
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from mars_jax.hub import gguf_config
from mars_jax.hub.gguf_file import is_gguf, read_gguf
from mars_jax.mesh.hosts import fetch

ROWS = 16
"""Rows of each weight that a fingerprint hashes. Training changes nearly all rows, so a few are enough."""


def fingerprint(params: Any, *checkpoints: str | os.PathLike[str]) -> str:
    """Return a hash of the name, shape, dtype and `ROWS` rows of each weight, including the first and last row.

    The hash does not depend on the mesh. In a run of several processes, all of them must call this function.

    Args:
      params: arrays.
      checkpoints: directories or GGUF files whose configs are hashed too.

    >>> fingerprint({"w": np.zeros((2, 3))}) == fingerprint({"w": np.ones((2, 3))})
    False
    """
    parts = [_config(Path(checkpoint)) for checkpoint in checkpoints]
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        weight = leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)
        parts.append(f"{jax.tree_util.keystr(path)} {weight.shape} {weight.dtype}".encode())
        parts.append(fetch(_some_rows(weight)).tobytes())
    return digest(b"".join(parts))


def _config(checkpoint: Path) -> bytes:
    if is_gguf(checkpoint):
        return json.dumps(gguf_config.to_json(read_gguf(checkpoint)), sort_keys=True).encode()
    return (checkpoint / "config.json").read_bytes()


def _some_rows(weight: Any) -> Any:
    """Return rows that are evenly spaced over all axes but the last, including axes such as that of experts."""
    if weight.ndim < 2 or not weight.size:
        return weight
    outer = weight.shape[:-1]
    places = np.unique(np.linspace(0, math.prod(outer) - 1, ROWS).round().astype(np.int64))
    index = tuple(axis.astype(np.int32) for axis in np.unravel_index(places, outer))
    if isinstance(weight, jax.Array) and (mesh := jax.typeof(weight).sharding.mesh).explicit_axes:
        # Explicit axes need the sharding of the result.
        return weight.at[index].get(out_sharding=NamedSharding(mesh, PartitionSpec()))
    return weight[index]


def digest(data: bytes) -> str:
    """Return a short hash of bytes."""
    return hashlib.sha256(data).hexdigest()[:16]
