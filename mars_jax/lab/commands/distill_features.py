"""`mars-jax distill features`: what a target says about texts, or about answers of its own, put on disk."""

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
from mars_jax.lab.commands.distill_heads import HEADS, Head, chosen_vocabulary, feature_layers
from mars_jax.lab.commands.training_text import write_answers
from mars_jax.lab.folder import SETTINGS, check_folder, claim
from mars_jax.lab.training import data, distillation, features
from mars_jax.models.transformer import language_model
from mars_jax.serve.fingerprint import digest, fingerprint
from mars_jax.serve.rows import plain, write_whole

SHARD = 128
FORWARD = 2048  # tokens of a forward


def write_features(args: argparse.Namespace) -> None:
    """Write what shards are missing in `args.output`.

    Raises:
      MarsError: a file cannot be read, the output is of another run, or no document is short enough to be answered.
    """
    temperatures = _numbers(args.temperatures or "0,1")
    documents = [text for path in args.data for text in data.documents(path)]
    size = args.shard or SHARD
    shards = range(0, len(documents), size)
    output = args.output
    check_folder(output)
    sketch = hub.outline(args.target)
    layers = feature_layers(args, sketch, None)
    record = features.reader(language_model(sketch.config, dtype="bfloat16", feature_layers=layers))
    with busy("loading"):
        target = hub.load(args.target, dtype="bfloat16")
    settings = {
        name: plain(value) for name, value in vars(args).items() if name in ("chat", "length", "seed")
    }
    settings |= {
        "temperatures": temperatures,
        "shard": size,
        "layers": list(layers),
        "data": digest("\0".join(documents).encode()),
        "weights": fingerprint((target.params,), target.path),
    }
    with claim(output, settings):
        for number, first in enumerate(shards):
            folder = output / f"{number:05d}"
            if folder.exists():
                continue
            began = time.perf_counter()
            ids = _texts(target, documents[first : first + size], args, temperatures, first)
            written = time.perf_counter()
            if not ids:
                continue
            rows = features.pack(ids, args.length)
            _write(folder, record, target, rows)
            count = sum(map(len, ids))
            say(
                f"{folder}: {len(ids)} texts, {count:,} tokens in {len(rows[0])} rows of {args.length}; "
                f"{written - began:.0f} s to write, {time.perf_counter() - written:.0f} s to read"
            )
    if not features.shards(output):
        raise MarsError(
            f"no document leaves room for an answer in --length {args.length}: give shorter ones, or more."
        )


def train_on_features(
    args: argparse.Namespace,
    target: Pretrained,
    head: Head | None,
    documents: Sequence[str],
    work: Path,
) -> tuple[Any, Any]:
    """The apprentice of `eagle3 --features`, `head` or a new one, and its trained params.

    Raises:
      MarsError: there are too few features.
    """
    # First, since it knows whether there is enough: a draft vocabulary of too little would stay.
    feed = features.Feed(
        args.features, step_tokens=args.step_tokens, seed=args.seed, record=work / "epochs.jsonl"
    )
    ids = None
    if args.draft_vocab not in (None, target.config.vocab_size):
        ids = _draft_vocabulary(args, target, documents, work / "draft_vocab.json")
    begun = HEADS["eagle3"].begin(args, target, head, ids)
    params = distillation.train_on_features(
        begun,
        target.params,
        feed,
        work,
        tokens=args.tokens,
        learning_rate=args.learning_rate,
    )
    return begun, params


def check_dumps(args: argparse.Namespace, target: Pretrained, layers: Sequence[int]) -> list[str]:
    """The digests of the dumps' settings, which decide what a training on them is.

    Raises:
      MarsError: features are not those of the target and of the layers that are read.
    """
    weights = fingerprint((target.params,), target.path)
    return [_check_dump(dump, layers, weights) for dump in args.features]


def dump_settings(dump: Path) -> dict[str, Any]:
    """The settings that a folder of features was written with.

    Raises:
      MarsError: it is no such folder.
    """
    try:
        return json.loads((dump / SETTINGS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise MarsError(
            f"'{dump}' is no folder of features: write one with `mars-jax distill features`."
        ) from None


def _check_dump(dump: Path, layers: Sequence[int], weights: str) -> str:
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
    return digest(json.dumps(settings, sort_keys=True).encode())


def _draft_vocabulary(
    args: argparse.Namespace, target: Pretrained, documents: Sequence[str], path: Path
) -> np.ndarray:
    """The most frequent tokens of what there is when a training begins; every dump and the documents count alike."""
    if not path.exists():
        texts = [data.stream(documents, target.tokenizer.backend_tokenizer)] if documents else []
        for dump in args.features:
            found = [features.read_shard(shard) for shard in features.shards(dump)]
            if found:
                tokens = np.concatenate([x.tokens[x.segments != features.PADDING] for x in found])
                texts.append(data.Stream(tokens, np.zeros_like(tokens), 1.0))
        ids = chosen_vocabulary(args, target, texts)
        assert ids is not None
        write_whole(path, json.dumps(ids.tolist()))
    return np.asarray(json.loads(path.read_text()), np.int32)


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


def _write(folder: Path, record, target: Pretrained, rows: tuple[np.ndarray, np.ndarray]) -> None:
    """Read the rows some at a time, the last ones padded, and write them as a shard."""
    tokens = rows[0]
    size = max(1, FORWARD // tokens.shape[1])
    made = []
    for first in range(0, len(tokens), size):
        some = [x[first : first + size] for x in rows]
        count = len(some[0])
        full = [np.pad(x, ((0, size - count), (0, 0))) for x in some]
        found = record(target.params, *(jnp.asarray(x) for x in full))
        made.append([np.asarray(x)[:count] for x in found])
    joined = [np.concatenate(parts) for parts in zip(*made, strict=True)]
    features.write_shard(folder, features.Recorded(*joined))


def _numbers(given: str) -> list[float]:
    try:
        found = [float(part) for part in given.split(",")]
    except ValueError:
        found = [-1.0]
    if not all(0 <= t < float("inf") for t in found):
        raise MarsError(f"--temperatures is {given}: expected numbers such as 0,1.")
    return found
