"""Features of a text by a frozen target, kept on disk: epochs of a head's training then cost the head alone.

A dump is a folder of shards, and a shard a folder of arrays: R rows of L tokens, E the target's hidden size, K layers.
Shards are complete or not there at all, so a dump can grow while a training reads it. Oracle: the objective on the
target's own forward (tests/lab/training/test_features.py).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import Array

from mars_jax.core.errors import MarsError
from mars_jax.core.types import LanguageModel, PyTree
from mars_jax.lab.training.objectives import read

TOP = 64
"""Likeliest tokens of each place whose log-probabilities are kept."""

PADDING = -1
"""Segment of what fills up a row."""


class Recorded(NamedTuple):
    """Rows of a text and what the target says of every token."""

    tokens: Any  # i32[R, L]
    segments: Any  # i32[R, L]; a token sees the tokens of its own document only; PADDING at a row's end
    features: Any  # bf16[R, L, K * E]; outputs of the layers, joined
    top: Any  # i32[R, L, TOP]; the likeliest tokens that follow, likeliest first
    log_probs: Any  # f16[R, L, TOP]; of those, in nats, over the whole vocabulary


def pack(documents: Iterable[Sequence[int]], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Whole documents into rows: tokens i32[R, L] and segments i32[R, L].

    Each goes into the first row that has room, the longest first; what is longer than a row is cut at its end.

    >>> tokens, segments = pack([[5, 6], [1, 2, 3], [7, 8, 9, 9, 9]], 4)
    >>> tokens.tolist(), segments.tolist()
    ([[7, 8, 9, 9], [1, 2, 3, 0], [5, 6, 0, 0]], [[0, 0, 0, 0], [0, 0, 0, -1], [0, 0, -1, -1]])
    """
    rows: list[list[Sequence[int]]] = []
    room: list[int] = []
    for ids in sorted((list(d)[:length] for d in documents), key=len, reverse=True):
        row = next((i for i, left in enumerate(room) if left >= len(ids)), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(length)
        rows[row].append(ids)
        room[row] -= len(ids)
    tokens = np.zeros((len(rows), length), np.int32)
    segments = np.full((len(rows), length), PADDING, np.int32)
    for row, together in enumerate(rows):
        place = 0
        for number, ids in enumerate(together):
            tokens[row, place : place + len(ids)] = ids
            segments[row, place : place + len(ids)] = number
            place += len(ids)
    return tokens, segments


def reader(target: LanguageModel) -> Callable[[PyTree, Array, Array], Recorded]:
    """(params, tokens, segments) -> `Recorded`, jitted.

    Args:
      target: a model that returns the features wanted; see `LanguageModel.with_features`.
    """

    @jax.jit
    def record(params: PyTree, tokens: Array, segments: Array) -> Recorded:
        output = read(target, params, tokens, segments)

        # Row by row: the logits of one are a hundred megabytes.
        def likeliest(hidden: Array) -> tuple[Array, Array]:
            logits = target.unembed(params, hidden[None])[0]
            found, ids = jax.lax.top_k(logits, min(TOP, target.vocab_size))
            return ids, (found - jax.nn.logsumexp(logits, axis=-1, keepdims=True)).astype(jnp.float16)

        top, log_probs = jax.lax.map(likeliest, output.hidden)
        features = jnp.concatenate(output.features, axis=-1).astype(jnp.bfloat16)
        return Recorded(tokens, segments, features, top, log_probs)

    return record


def write_shard(folder: Path, recorded: Recorded) -> None:
    """Write a shard, complete or not at all."""
    staging = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    for name, value in recorded._asdict().items():
        value = np.asarray(value)
        # numpy's files know no bfloat16.
        np.save(staging / f"{name}.npy", value.view(np.uint16) if name == "features" else value)
        _sync(staging / f"{name}.npy")
    _sync(staging)
    staging.replace(folder)
    _sync(folder.parent)


def _sync(path: Path) -> None:
    """Return when a file, or the names in a directory, are on disk: a name must not be there before what it names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_shard(folder: Path) -> Recorded:
    """A shard, mapped and not read.

    Raises:
      MarsError: it is damaged.
    """
    try:
        arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in Recorded._fields}
    except (OSError, ValueError, EOFError) as error:
        raise MarsError(
            f"'{folder}' is no shard of features ({error}): remove it, or write it again."
        ) from None
    return Recorded(**arrays)._replace(features=arrays["features"].view(ml_dtypes.bfloat16))


def shards(dump: str | os.PathLike[str]) -> list[Path]:
    """The shards that a dump has now, in their order."""
    return sorted(p for p in Path(dump).glob("[0-9]*") if p.is_dir())


class Feed:
    """Batches from dumps that may still grow: an epoch takes the shards that are there when it begins, in a new order.

    Which ones those were is recorded, so a training that was killed sees again what it saw. A batch is rows of one
    shard. The first shard of every dump is held out.

    Attributes:
      step_tokens: of a batch, padding too; the mean, where dumps have rows of several lengths.
    """

    def __init__(self, dumps: Sequence[Path], *, step_tokens: int, seed: int, record: Path):
        """
        Args:
          dumps: folders of shards.
          step_tokens: of a batch, about: whole rows.
          seed: of the orders.
          record: file of the epochs.

        Raises:
          MarsError: no dump has two shards, or one is damaged.
        """
        self._dumps, self._tokens, self._seed, self._record = tuple(dumps), step_tokens, seed, record
        self._recorded = record.read_text().splitlines() if record.exists() else []
        self._groups: list[tuple[Path, np.ndarray]] = []
        self._first, self._epoch = 0, -1
        self._read: dict[Path, Recorded] = {}
        self._begin()
        # Of the first epoch, which is on record: a run that goes on counts as it did.
        self.step_tokens = round(np.mean([rows.size * self._length(shard) for shard, rows in self._groups]))

    def held_out(self, count: int = 4) -> list[Recorded]:
        """Batches that are never trained on, `count` of each dump."""
        first = [shards(dump)[0] for dump in self._dumps if shards(dump)]
        return [self._rows(shard, rows) for shard in first for rows in self._divide(shard, None)[:count]]

    def batch(self, step: int) -> Recorded:
        """The rows of a step. Steps are asked for in rising order."""
        while step >= self._first + len(self._groups):
            self._first += len(self._groups)
            self._begin()
        return self._rows(*self._groups[step - self._first])

    def _begin(self) -> None:
        self._epoch += 1
        if self._epoch < len(self._recorded):
            chosen = [Path(name) for name in json.loads(self._recorded[self._epoch])]
        else:
            chosen = [shard for dump in self._dumps for shard in shards(dump)[1:]]
        order = np.random.default_rng((self._seed, self._epoch))
        groups = [(shard, rows) for shard in chosen for rows in self._divide(shard, order)]
        if not groups:
            names = ", ".join(f"'{dump}'" for dump in self._dumps)
            raise MarsError(
                f"{names} have too few features to train on: two shards are the least, one of which is held out."
            )
        if self._epoch >= len(self._recorded):
            with self._record.open("a") as file:
                file.write(json.dumps([str(shard) for shard in chosen]) + "\n")
        self._groups = [groups[i] for i in order.permutation(len(groups))]

    def _divide(self, shard: Path, order: np.random.Generator | None) -> list[np.ndarray]:
        """The rows of a shard in groups of one step; what is left over waits for another epoch's order."""
        count = len(self._open(shard).tokens)
        size = max(1, self._tokens // self._length(shard))
        every = np.arange(count) if order is None else order.permutation(count)
        return [np.sort(every[i : i + size]) for i in range(0, count - size + 1, size)]

    def _length(self, shard: Path) -> int:
        return self._open(shard).tokens.shape[1]

    def _rows(self, shard: Path, rows: np.ndarray) -> Recorded:
        return Recorded(*(np.asarray(x[rows]) for x in self._open(shard)))

    def _open(self, shard: Path) -> Recorded:
        if shard not in self._read:
            self._read[shard] = read_shard(shard)
        return self._read[shard]
