"""`mars-jax distill features`: write a target's features on documents, or on its own answers, to disk."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from mars_jax import hub
from mars_jax.cli.progress import busy
from mars_jax.hub.pretrained import Pretrained
from mars_jax.lab.folder import check_folder, claim
from mars_jax.lab.training import data, features
from mars_jax.models.transformer import language_model
from mars_jax.serve.generation import generate
from mars_jax.serve.rows import digest, fingerprint
from mars_jax.utils.errors import MarsError, say

SHARD = 128
"""Documents per shard."""
FORWARD = 2048
"""Tokens per forward pass of the target."""


def write_features(args: argparse.Namespace) -> None:
    """Write the shards that are missing from `args.output`.

    The documents are texts, or with --chat questions that the target answers.

    Raises:
      MarsError: a file cannot be read, the output belongs to a different run, or every document is too long for an
        answer.
    """
    documents = [text for path in args.data for text in data.documents(path)]
    check_folder(args.output)
    # Reject invalid layers before loading the weights.
    outline = hub.outline(args.target)
    layers = features.layers_of(args.feature_layers) or features.default_layers(outline.config)
    read_features = features.reader(language_model(outline.config, dtype="bfloat16", feature_layers=layers))
    with busy("loading"):
        target = hub.load(args.target, dtype="bfloat16")
    settings = {
        "chat": args.chat,
        "length": args.length,
        "seed": args.seed,
        "shard": SHARD,
        "layers": list(layers),
        "data": digest("\0".join(documents).encode()),
        "weights": fingerprint((target.params,), target.path),
    }
    with claim(args.output, settings):
        for shard_number, first_index in enumerate(range(0, len(documents), SHARD)):
            folder = args.output / f"{shard_number:05d}"
            if folder.exists():
                continue
            start_time = time.perf_counter()
            # Write no shard if none of its documents leaves room for an answer.
            token_lists = _texts(target, documents[first_index : first_index + SHARD], args, first_index)
            if not token_lists:
                continue
            packed_rows = features.pack_documents(token_lists, args.length)
            _write(folder, read_features, target, packed_rows)
            say(
                f"{folder}: {len(token_lists)} texts, {sum(map(len, token_lists)):,} tokens "
                f"in {len(packed_rows[0])} rows of {args.length}; {time.perf_counter() - start_time:.0f} s"
            )
    if not features.shards(args.output):
        raise MarsError(
            f"no document leaves room for an answer in --length {args.length}: give shorter ones, or more."
        )


def _texts(
    target: Pretrained, documents: Sequence[str], args: argparse.Namespace, first: int
) -> list[list[int]]:
    """Return the tokens of documents, or of chats in which the target answers at temperatures 0 and 1 in turn."""
    if not args.chat:
        return target.encode_many(documents)
    # An answer gets at least a quarter of the row.
    prompts = [ids for ids in target.encode_many(documents, chat=True) if len(ids) <= args.length * 3 // 4]
    if not prompts:
        return []
    answers = generate(
        target,
        "none",
        prompts,
        chat=True,
        temperature=[float(i % 2) for i in range(len(prompts))],
        seed=[(args.seed + first + i) % 2**32 for i in range(len(prompts))],
        max_new_tokens=[args.length - len(ids) for ids in prompts],
        batch_size=64,
    )
    return [[*prompt, *ids] for prompt, ids in zip(prompts, answers.tokens, strict=True)]


def _write(
    folder: Path, record: Callable[..., features.Recorded], target: Pretrained, rows: Sequence[np.ndarray]
) -> None:
    """Compute the features of rows, one padded batch at a time, and write them as a shard."""
    tokens = rows[0]
    rows_per_batch = max(1, FORWARD // tokens.shape[1])
    batch_outputs = []
    for first in range(0, len(tokens), rows_per_batch):
        batch = [x[first : first + rows_per_batch] for x in rows]
        num_rows = len(batch[0])
        # Pad the last batch, so that all batches share one compiled program.
        padded_batch = [jnp.asarray(np.pad(x, ((0, rows_per_batch - num_rows), (0, 0)))) for x in batch]
        batch_outputs.append([np.asarray(x)[:num_rows] for x in record(target.params, *padded_batch)])
    outputs = [np.concatenate(columns) for columns in zip(*batch_outputs, strict=True)]
    features.write_shard(folder, features.Recorded(*outputs))
