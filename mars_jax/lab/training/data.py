"""Text files into blocks of tokens, mixed by weight; the batch of a step is a pure function of its number.

So a run that is killed and restarted sees the data that it would have seen.
"""

from __future__ import annotations

import functools
import lzma
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mars_jax.core import activity
from mars_jax.core.errors import MarsError
from mars_jax.core.reading import unpacked

SEPARATOR = "<|endoftext|>"
"""Stands alone between the documents of a text file, and is the token that starts and ends a document."""

UNREADABLE = (OSError, EOFError, lzma.LZMAError, zlib.error)
"""Exceptions of reading a file, plain or compressed; EOFError where it was cut short."""


def documents(path: str | os.PathLike[str]) -> Iterator[str]:
    """The documents of a text file, plain or compressed (.xz, .gz), stripped of blank lines around them.

    Raises:
      MarsError: the file cannot be read as text.

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
    ...     _ = file.write("One.\\n<|endoftext|>\\nTwo.\\n"); file.flush()
    ...     list(documents(file.name))
    ['One.', 'Two.']
    """
    try:
        text = unpacked(path).decode("utf-8")
    except (*UNREADABLE, UnicodeDecodeError) as error:
        raise MarsError(f"'{path}' cannot be read as text ({error}): name a UTF-8 text file.") from error
    for document in text.replace("\r\n", "\n").replace("\r", "\n").split(SEPARATOR):
        if document.strip():
            yield document.strip("\n")


class Stream(NamedTuple):
    """Documents one after another, each begun by the separator."""

    tokens: np.ndarray  # u16[n] or u32[n]
    segments: np.ndarray  # i32[n]; the document of each token
    weight: float  # share of the training tokens


def stream(texts: Iterable[str], tokenizer: Any, *, weight: float = 1.0) -> Stream:
    """Tokenize documents into one stream.

    Args:
      texts: documents. A separator inside one is the token itself, and does not end the document.
      tokenizer: of the `tokenizers` library; it puts the separator at the front of a text.
      weight: share of the training tokens, relative to the other streams.

    Raises:
      MarsError: there is no text.
    """
    with activity.doing("tokenizing"):
        encoded = [e.ids for e in tokenizer.encode_batch(list(texts))]
    if not encoded:
        raise MarsError("there is no text to train on: name files with at least one document.")
    lengths = [len(ids) for ids in encoded]
    return Stream(
        tokens=np.fromiter(
            (i for ids in encoded for i in ids), np.uint16 if _small(tokenizer) else np.uint32
        ),
        segments=np.repeat(np.arange(len(encoded), dtype=np.int32), lengths),
        weight=weight,
    )


def _small(tokenizer: Any) -> bool:
    return tokenizer.get_vocab_size() <= 1 << 16


class Batch(NamedTuple):
    """Rows of consecutive tokens; position j predicts position j + 1."""

    tokens: Any  # i32[B, L + 1], on the host or on a device
    segments: Any  # i32[B, L + 1]; a token sees the tokens of its own document only


class Mixture:
    """Batches from several streams, each in a new order every epoch.

    Args:
      streams: each at least `length + 1` tokens long.
      rows, length: a batch is `rows` rows of `length` tokens (and one more to predict).
      seed: of the order.

    Raises:
      MarsError: a stream is shorter than one row.

    >>> ones = Stream(np.ones(90, np.uint16), np.zeros(90, np.int32), 3.0)
    >>> twos = Stream(np.full(90, 2, np.uint16), np.zeros(90, np.int32), 1.0)
    >>> Mixture([ones, twos], rows=4, length=8, seed=0).batch(0).tokens[:, 0].tolist()
    [1, 1, 2, 1]
    """

    def __init__(self, streams: Sequence[Stream], *, rows: int, length: int, seed: int):
        for s in streams:
            if len(s.tokens) <= length:
                raise MarsError(
                    f"a source of {len(s.tokens)} tokens is shorter than a row of {length}: give more text."
                )
        self._streams, self._rows, self._length, self._seed = tuple(streams), rows, length, seed
        self._weights = np.array([s.weight for s in streams]) / sum(s.weight for s in streams)
        self._sources: list[tuple[int, int]] = []
        self._taken = np.zeros(len(streams), np.int64)

    def batch(self, step: int) -> Batch:
        """The rows of one step; the same for the same arguments, in any order of calls."""
        blocks = [self._block(k) for k in range(step * self._rows, (step + 1) * self._rows)]
        tokens, segments = zip(*blocks, strict=True)
        return Batch(np.stack(tokens).astype(np.int32), np.stack(segments))

    def _block(self, k: int) -> tuple[np.ndarray, np.ndarray]:
        which, used = self._source(k)
        chosen = self._streams[which]
        # One token of overlap: the last of a block is predicted in it, and read in the next.
        count = (len(chosen.tokens) - 1) // self._length
        first = int(_order(self._seed, which, used // count, count)[used % count]) * self._length
        part = slice(first, first + self._length + 1)
        return chosen.tokens[part], chosen.segments[part]

    def _source(self, k: int) -> tuple[int, int]:
        """(stream of block k, blocks taken from it before): the stream furthest below its weight is next."""
        while len(self._sources) <= k:
            lag = self._weights * (len(self._sources) + 1) - self._taken
            which = int(np.argmax(lag))
            self._sources.append((which, int(self._taken[which])))
            self._taken[which] += 1
        return self._sources[k]


@functools.lru_cache(maxsize=16)
def _order(seed: int, which: int, epoch: int, count: int) -> np.ndarray:
    return np.random.default_rng((seed, which, epoch)).permutation(count)


def batches(
    streams: Sequence[Stream], *, steps: int, tokens: int, lengths: Mapping[int, float], seed: int
) -> Callable[[int], Batch]:
    """Step number -> batch of about `tokens` tokens, in rows whose length changes as training goes on.

    Args:
      streams: see `Mixture`.
      steps: of the whole training.
      tokens: of a step.
      lengths: row length -> share of the steps, in this order; short rows are cheap, long ones belong to the end.
      seed: of the order.

    >>> stream = Stream(np.arange(99, dtype=np.uint16), np.zeros(99, np.int32), 1.0)
    >>> batch = batches([stream], steps=10, tokens=16, lengths={8: 0.9, 16: 0.1}, seed=0)
    >>> batch(8).tokens.shape, batch(9).tokens.shape
    ((2, 9), (1, 17))
    """
    until, mixtures = 0.0, []
    for length, share in lengths.items():
        until += share
        mixture = Mixture(streams, rows=max(1, tokens // length), length=length, seed=seed)
        mixtures.append((round(steps * until), mixture))

    def batch(step: int) -> Batch:
        return next((m for end, m in mixtures if step < end), mixtures[-1][1]).batch(step)

    return batch
