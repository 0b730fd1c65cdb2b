"""`mars-jax distill features`: write a target's features of texts, or of its own answers, to disk."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from mars_jax import hub
from mars_jax.cli.progress import busy
from mars_jax.core.errors import MarsError, say
from mars_jax.hub.pretrained import Pretrained
from mars_jax.lab.commands.distill_heads import feature_layers
from mars_jax.lab.commands.training_text import write_answers
from mars_jax.lab.folder import SETTINGS, check_folder, claim
from mars_jax.lab.training import data, features
from mars_jax.models.transformer import language_model
from mars_jax.serve.fingerprint import digest, fingerprint

SHARD = 128
"""Documents of a shard."""
FORWARD = 2048
"""Tokens of a forward."""


def write_features(args: argparse.Namespace) -> None:
    """Write the shards that are missing in `args.output`.

    Raises:
      MarsError: a file cannot be read, the output is of another run, or no document is short enough to be answered.
    """
    temperatures = _numbers(args.temperatures or "0,1")
    documents = [text for path in args.data for text in data.documents(path)]
    check_folder(args.output)
    sketch = hub.outline(args.target)
    layers = feature_layers(args, sketch, None)
    record = features.reader(language_model(sketch.config, dtype="bfloat16", feature_layers=layers))
    with busy("loading"):
        target = hub.load(args.target, dtype="bfloat16")
    settings = {
        "chat": args.chat,
        "length": args.length,
        "seed": args.seed,
        "temperatures": temperatures,
        "shard": SHARD,
        "layers": list(layers),
        "data": digest("\0".join(documents).encode()),
        "weights": fingerprint((target.params,), target.path),
    }
    with claim(args.output, settings):
        for number, first in enumerate(range(0, len(documents), SHARD)):
            folder = args.output / f"{number:05d}"
            if folder.exists():
                continue
            began = time.perf_counter()
            ids = _texts(target, documents[first : first + SHARD], args, temperatures, first)
            if not ids:
                continue
            rows = features.pack(ids, args.length)
            _write(folder, record, target, rows)
            say(
                f"{folder}: {len(ids)} texts, {sum(map(len, ids)):,} tokens in {len(rows[0])} rows of {args.length}; "
                f"{time.perf_counter() - began:.0f} s"
            )
    if not features.shards(args.output):
        raise MarsError(
            f"no document leaves room for an answer in --length {args.length}: give shorter ones, or more."
        )


def dump_settings(dump: Path) -> dict[str, Any]:
    """Return the settings of a folder of features.

    Raises:
      MarsError: it is no such folder.
    """
    try:
        return json.loads((dump / SETTINGS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise MarsError(
            f"'{dump}' is no folder of features: write one with `mars-jax distill features`."
        ) from None


def check_dump(dump: Path, layers: Sequence[int], weights: str) -> str:
    """Return a digest of the settings and the shards of a folder of features.

    Raises:
      MarsError: the features are of other layers or of another target.
    """
    settings = dump_settings(dump)
    if settings.get("layers") != list(layers):
        raise MarsError(
            f"the features in '{dump}' are of the layers {settings.get('layers')} and not {list(layers)}: give their "
            "--feature-layers."
        )
    if settings.get("weights") != weights:
        raise MarsError(
            f"the features in '{dump}' are of another target: write new ones, or name that target."
        )
    names = [shard.name for shard in features.shards(dump)]
    return digest(json.dumps([settings, names], sort_keys=True).encode())


def _texts(
    target: Pretrained,
    documents: Sequence[str],
    args: argparse.Namespace,
    temperatures: list[float],
    first: int,
) -> list[list[int]]:
    if not args.chat:
        return target.encode_many(documents)
    prompts = [ids for ids in target.encode_many(documents, chat=True) if len(ids) <= args.length * 3 // 4]
    if not prompts:
        return []
    return write_answers(
        target, prompts, length=args.length, temperatures=temperatures, seed=args.seed + first
    )


def _write(folder: Path, record: Any, target: Pretrained, rows: tuple[np.ndarray, np.ndarray]) -> None:
    """Compute the features of rows, a padded batch at a time, and write them as a shard."""
    tokens = rows[0]
    size = max(1, FORWARD // tokens.shape[1])
    parts = []
    for first in range(0, len(tokens), size):
        batch = [x[first : first + size] for x in rows]
        count = len(batch[0])
        padded = [jnp.asarray(np.pad(x, ((0, size - count), (0, 0)))) for x in batch]
        parts.append([np.asarray(x)[:count] for x in record(target.params, *padded)])
    joined = [np.concatenate(columns) for columns in zip(*parts, strict=True)]
    features.write_shard(folder, features.Recorded(*joined))


def _numbers(text: str) -> list[float]:
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = [-1.0]
    if not all(0 <= t < float("inf") for t in numbers):
        raise MarsError(f"--temperatures is {text}: expected numbers such as 0,1.")
    return numbers
