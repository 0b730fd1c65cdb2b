"""Features of a frozen target, stored on disk so that training a head needs no forward pass of the target.

A dump is a folder of shards, and a shard is a folder of arrays. R rows of L tokens, E hidden size of the target, K
layers that are read. Tested against the loss on the target's own forward pass (tests/lab/training/test_features.py).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import Array

from mars_jax.contrib.teaching import forward_packed
from mars_jax.core.types import LanguageModel, PyTree
from mars_jax.hub.durable import staging, sync, sync_directory
from mars_jax.lab.folder import SETTINGS
from mars_jax.models.config import ModelConfig
from mars_jax.models.eagle_head import EagleConfig
from mars_jax.serve.rows import digest
from mars_jax.utils.errors import MarsError
from mars_jax.utils.types import JsonObject

TOP = 64
"""Number of most likely tokens per position whose log-probabilities are stored."""
PADDING = -1
"""Segment number of padding."""


class Recorded(NamedTuple):
    """Rows of tokens and the target's output for every token."""

    tokens: Any  # i32[R, L]
    segments: Any  # i32[R, L]; document number of each token; PADDING at the end of a row
    features: Any  # bf16[R, L, K * E]; concatenated outputs of the layers
    top: Any  # i32[R, L, TOP]; the most likely next tokens, in descending order
    log_probs: Any  # f16[R, L, TOP]; their log-probabilities in nats, over the whole vocabulary


def pack_documents(documents: Iterable[Sequence[int]], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Pack whole documents into rows: tokens i32[R, L] and segments i32[R, L].

    Documents are placed, longest first, into the first row with enough room. Documents longer than a row are truncated.

    >>> tokens, segments = pack_documents([[5, 6], [1, 2, 3], [7, 8, 9, 9, 9]], 4)
    >>> tokens.tolist(), segments.tolist()
    ([[7, 8, 9, 9], [1, 2, 3, 0], [5, 6, 0, 0]], [[0, 0, 0, 0], [0, 0, 0, -1], [0, 0, -1, -1]])
    """
    # The tokens and segments of each row, and the number of positions that are in use.
    tokens, segments, used = [], [], []
    for ids in sorted((list(d)[:length] for d in documents), key=len, reverse=True):
        row = next((i for i, count in enumerate(used) if count + len(ids) <= length), len(used))
        if row == len(used):
            tokens.append(np.zeros(length, np.int32))
            segments.append(np.full(length, PADDING, np.int32))
            used.append(0)
        place = slice(used[row], used[row] + len(ids))
        tokens[row][place] = ids
        # Documents are numbered from 0 in each row; padding has the number -1.
        segments[row][place] = segments[row].max() + 1
        used[row] = place.stop
    return np.stack(tokens), np.stack(segments)


def reader(target: LanguageModel) -> Callable[[PyTree, Array, Array], Recorded]:
    """Return a jitted function `(params, tokens, segments) -> Recorded` for a model with features (`with_features`)."""

    @jax.jit
    def record(params: PyTree, tokens: Array, segments: Array) -> Recorded:
        output = forward_packed(target, params, tokens, segments)

        # The logits of one row take about 100 MB, so process one row at a time.
        def likeliest(hidden: Array) -> tuple[Array, Array]:
            logits = target.unembed(params, hidden[None])[0]
            top_logits, ids = jax.lax.top_k(logits, min(TOP, target.vocab_size))
            return ids, (top_logits - jax.nn.logsumexp(logits, axis=-1, keepdims=True)).astype(jnp.float16)

        top_ids, log_probs = jax.lax.map(likeliest, output.hidden)
        features = jnp.concatenate(output.features, axis=-1).astype(jnp.bfloat16)
        return Recorded(tokens, segments, features, top_ids, log_probs)

    return record


def write_shard(folder: Path, recorded: Recorded) -> None:
    """Write a shard atomically."""
    # The .npy format has no bfloat16, so store the bits.
    stored_arrays = recorded._replace(features=np.asarray(recorded.features).view(np.uint16))
    with staging(folder) as staged:
        for name, array in stored_arrays._asdict().items():
            np.save(staged / f"{name}.npy", array)
        sync_directory(staged)
        staged.replace(folder)
    sync(folder.parent)


def read_shard(folder: Path) -> Recorded:
    """Map a shard into memory.

    Raises:
      MarsError: the shard is damaged.
    """
    try:
        arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in Recorded._fields}
    except (OSError, ValueError, EOFError) as error:
        raise MarsError(f"'{folder}' is no shard ({error}): remove it, or write it again.") from None
    return Recorded(**arrays)._replace(features=arrays["features"].view(ml_dtypes.bfloat16))


def shards(dump: str | os.PathLike[str]) -> list[Path]:
    """Return the shards of a dump in order."""
    return sorted(p for p in Path(dump).glob("[0-9]*") if p.is_dir())


class _ShardRows:
    """The rows of a shard."""

    def __init__(self, folder: Path):
        self._shard = read_shard(folder)

    def __len__(self) -> int:
        return len(self._shard.tokens)

    def __getitem__(self, index: int) -> Recorded:
        return Recorded(*(np.asarray(x[index]) for x in self._shard))


def dump_batches(dumps: Sequence[Path], *, step_tokens: int, seed: int) -> tuple[Any, list[Recorded], int]:
    """Return the training batches, the held-out batches, and the mean number of tokens per batch, including padding.

    The training batches form an endless `grain.MapDataset`. A batch holds whole rows of one dump, about `step_tokens`
    tokens in total. The first shard of every dump is held out.

    Raises:
      MarsError: a dump has fewer than two shards, or one is damaged.
    """
    import grain

    datasets, batch_counts, batch_tokens, held_out = [], [], [], []
    for number, dump in enumerate(dumps):
        shard_folders = shards(dump)
        if len(shard_folders) < 2:
            raise MarsError(
                f"'{dump}' has too few features to train on: give it two shards at least, one of which is held out."
            )
        shard_rows = [grain.MapDataset.source(_ShardRows(folder)) for folder in shard_folders[1:]]
        dump_rows = grain.MapDataset.concatenate(shard_rows)
        held_out_shard = read_shard(shard_folders[0])
        length = held_out_shard.tokens.shape[-1]
        batch_rows = max(1, step_tokens // length)
        dataset = dump_rows.seed(seed + number).shuffle().repeat()
        # For one-row batches, keeping the remainder makes the dataset longer than sys.maxsize, which grain cannot
        # handle.
        datasets.append(dataset.batch(batch_rows, drop_remainder=True))
        batch_counts.append(len(dump_rows) / batch_rows)
        batch_tokens.append(batch_rows * length)
        for start in range(0, min(len(held_out_shard.tokens), 4 * batch_rows), batch_rows):
            held_out.append(Recorded(*(np.asarray(x[start : start + batch_rows]) for x in held_out_shard)))
    mean_tokens = round(np.average(batch_tokens, weights=batch_counts))
    return grain.MapDataset.mix(datasets, weights=batch_counts), held_out, mean_tokens


def default_layers(target: ModelConfig) -> tuple[int, ...]:
    """Return the target layers that an EAGLE-3 head reads.

    They are the published layers or, if the target has fewer than 12 layers, the last layer of each third.

    >>> default_layers(ModelConfig(vocab_size=9, hidden_size=8, intermediate_size=8, num_layers=32, num_heads=1))
    (1, 15, 28)
    """
    num_layers = target.num_layers
    if num_layers >= 12:
        return EagleConfig.outline(target).feature_layers
    return tuple(sorted({max(num_layers * i // 3 - 1, 0) for i in (1, 2, 3)}))


def dump_settings(dump: Path) -> JsonObject:
    """Return the settings with which a folder of features was written.

    Raises:
      MarsError: the folder does not contain features.
    """
    try:
        return json.loads((dump / SETTINGS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise MarsError(f"'{dump}' has no features: write them with `mars-jax distill features`.") from None


def check_dump(dump: Path, layers: Sequence[int], weights: str) -> str:
    """Check that a dump matches a target and its layers, and return a digest of the dump's settings and shards.

    Raises:
      MarsError: the features are from different layers or a different target.
    """
    settings = dump_settings(dump)
    if settings.get("layers") != list(layers):
        raise MarsError(
            f"the features in '{dump}' are of the layers {settings.get('layers')} and not {list(layers)}: give their "
            "--feature-layers."
        )
    if settings.get("weights") != weights:
        raise MarsError(f"the features in '{dump}' are of another target: write new ones, or name that one.")
    shard_names = [shard.name for shard in shards(dump)]
    return digest(json.dumps([settings, shard_names], sort_keys=True).encode())


def layers_of(names: str | None) -> tuple[int, ...] | None:
    """Parse `--feature-layers`.

    >>> layers_of("1,14,26")
    (1, 14, 26)
    """
    if names is None:
        return None
    try:
        return tuple(int(part) for part in names.split(","))
    except ValueError:
        raise MarsError(f"--feature-layers is {names}: expected layer numbers such as 1,15,28.") from None
