"""Text files into streams of tokens, and grain datasets of batches over them."""

from __future__ import annotations

import lzma
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from mars_jax.contrib.teaching import Batch
from mars_jax.core import activity
from mars_jax.core.errors import MarsError
from mars_jax.core.reading import unpacked

SEPARATOR = "<|endoftext|>"
"""Separates the documents of a text file, and is the token that starts and ends a document."""

UNREADABLE = (OSError, EOFError, lzma.LZMAError, zlib.error)
"""Exceptions of reading a file, plain or compressed; EOFError if it was cut short."""


def documents(path: str | os.PathLike[str]) -> Iterator[str]:
    """Yield the documents of a text file, plain or compressed (.xz, .gz), without blank lines around them.

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
    """Documents in sequence, each beginning with the separator."""

    tokens: np.ndarray  # u16[n] or u32[n]
    segments: np.ndarray  # i32[n]; number of the document of each token
    weight: float  # share of the training tokens, relative to other streams


def stream(texts: Iterable[str], tokenizer: Any, *, weight: float = 1.0) -> Stream:
    """Tokenize documents into one stream.

    Args:
      texts: documents. A separator inside one is the token itself, and does not end the document.
      tokenizer: of the `tokenizers` library; it puts the separator at the front of a text.
      weight: see `Stream`.

    Raises:
      MarsError: there is no text.
    """
    with activity.doing("tokenizing"):
        encoded = [e.ids for e in tokenizer.encode_batch(list(texts))]
    if not encoded:
        raise MarsError("there is no text to train on: name files with at least one document.")
    small = tokenizer.get_vocab_size() <= 1 << 16
    return Stream(
        tokens=np.fromiter((i for ids in encoded for i in ids), np.uint16 if small else np.uint32),
        segments=np.repeat(np.arange(len(encoded), dtype=np.int32), [len(ids) for ids in encoded]),
        weight=weight,
    )


class _Rows:
    """The rows of a stream. They overlap by one token, which one row predicts and the next one reads."""

    def __init__(self, stream: Stream, length: int):
        self._stream, self._length = stream, length

    def __len__(self) -> int:
        return (len(self._stream.tokens) - 1) // self._length

    def __getitem__(self, index: Any) -> Batch:
        first = index * self._length
        part = slice(first, first + self._length + 1)
        return Batch(self._stream.tokens[part].astype(np.int32), self._stream.segments[part])


def batches(streams: Sequence[Stream], *, rows: int, length: int, seed: int) -> Any:
    """Return an endless `grain.MapDataset` of batches: rows of all streams by weight, shuffled again every epoch.

    Args:
      streams: each at least `length + 1` tokens long.
      rows, length: a batch is `rows` rows of `length` tokens, and one more to predict.
      seed: of the order.

    Raises:
      MarsError: a stream is shorter than one row.

    >>> ones = Stream(np.ones(90, np.uint16), np.zeros(90, np.int32), 3.0)
    >>> twos = Stream(np.full(90, 2, np.uint16), np.zeros(90, np.int32), 1.0)
    >>> sorted(batches([ones, twos], rows=4, length=8, seed=0)[0].tokens[:, 0].tolist())
    [1, 1, 1, 2]
    """
    import grain

    datasets = []
    for number, one in enumerate(streams):
        if len(one.tokens) <= length:
            raise MarsError(
                f"a source of {len(one.tokens)} tokens is shorter than a row of {length}: give more text."
            )
        dataset = grain.MapDataset.source(_Rows(one, length)).seed(seed + number)
        datasets.append(dataset.shuffle().repeat())
    mixed = grain.MapDataset.mix(datasets, weights=[one.weight for one in streams])
    # With a remainder, batches of one row have a length above sys.maxsize, which grain cannot handle.
    return mixed.batch(rows, drop_remainder=True)


def draft_vocabulary(
    streams: Sequence[Stream], size: int, vocab_size: int, always: Sequence[int] = ()
) -> np.ndarray:
    """Return the `size` most frequent tokens of a text and those of `always`: i32[size], ascending.

    Args:
      streams: the text; each counts by its weight.
      size: W.
      vocab_size: V of the target.
      always: stop tokens, which a drafter should be able to draft.

    Raises:
      MarsError: size is not in 1..vocab_size.

    >>> text = Stream(np.asarray([3, 3, 1, 5, 5, 5], np.uint16), np.zeros(6, np.int32), 1.0)
    >>> draft_vocabulary([text], 3, 8, always=[7]).tolist()
    [3, 5, 7]
    """
    if not 1 <= size <= vocab_size:
        raise MarsError(f"a draft vocabulary of {size}: expected 1 to {vocab_size}, the target's vocabulary.")
    share = np.zeros(vocab_size)
    for one in streams:
        counts = np.bincount(one.tokens, minlength=vocab_size)[:vocab_size]
        share += one.weight * counts / len(one.tokens)
    share[list(always)] = np.inf
    return np.sort(np.argsort(-share, kind="stable")[:size]).astype(np.int32)
