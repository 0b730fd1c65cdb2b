"""Streams of tokens from text files, and grain datasets of batches drawn from these streams."""

from __future__ import annotations

import lzma
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mars_jax.contrib.teaching import Batch
from mars_jax.utils import activity
from mars_jax.utils.errors import MarsError
from mars_jax.utils.paths import unpacked

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SEPARATOR = "<|endoftext|>"
"""Separator of the documents in a text file, which is also the token that starts and ends a document."""

UNREADABLE = (OSError, EOFError, lzma.LZMAError, zlib.error)
"""Exceptions raised when reading a plain or compressed file; EOFError if the file is truncated."""


def documents(path: str | os.PathLike[str]) -> Iterator[str]:
    """Yield the documents of a text file, plain or compressed (.xz, .gz), without leading and trailing blank lines.

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
    segments: np.ndarray  # i32[n]; document number of each token
    weight: float  # weight of this stream when rows are drawn from all streams


def make_stream(texts: Iterable[str], tokenizer: Tokenizer, *, weight: float = 1.0) -> Stream:
    """Tokenize documents into one stream.

    Args:
      texts: documents. A separator inside a document becomes the separator token, but does not end the document.
      tokenizer: from the `tokenizers` library; it prepends the separator to each document.
      weight: see `Stream`.

    Raises:
      MarsError: there are no documents.
    """
    with activity.doing("tokenizing"):
        token_lists = [e.ids for e in tokenizer.encode_batch(list(texts))]
    if not token_lists:
        raise MarsError("there is no text to train on: name files with at least one document.")
    dtype = np.result_type(np.uint16, np.min_scalar_type(tokenizer.get_vocab_size() - 1))
    return Stream(
        tokens=np.fromiter((i for ids in token_lists for i in ids), dtype),
        segments=np.repeat(np.arange(len(token_lists), dtype=np.int32), [len(ids) for ids in token_lists]),
        weight=weight,
    )


class _StreamRows:
    """The rows of a stream. Consecutive rows share a token: the last label of a row is the first input of the next."""

    def __init__(self, stream: Stream, length: int):
        self._stream, self._length = stream, length

    def __len__(self) -> int:
        return (len(self._stream.tokens) - 1) // self._length

    def __getitem__(self, index: int) -> Batch:
        row_start = index * self._length
        row_slice = slice(row_start, row_start + self._length + 1)
        return Batch(self._stream.tokens[row_slice].astype(np.int32), self._stream.segments[row_slice])


def batches(streams: Sequence[Stream], *, rows: int, length: int, seed: int) -> Any:
    """Return an endless `grain.MapDataset` of batches: rows drawn from all streams by weight, reshuffled every epoch.

    Args:
      streams: streams of at least `length + 1` tokens.
      rows, length: a batch has `rows` rows of `length` tokens, plus one more token per row to predict.
      seed: seed for shuffling.

    Raises:
      MarsError: a stream is shorter than one row.

    >>> ones = Stream(np.ones(90, np.uint16), np.zeros(90, np.int32), 3.0)
    >>> twos = Stream(np.full(90, 2, np.uint16), np.zeros(90, np.int32), 1.0)
    >>> sorted(batches([ones, twos], rows=4, length=8, seed=0)[0].tokens[:, 0].tolist())
    [1, 1, 1, 2]
    """
    import grain

    datasets = []
    for number, source in enumerate(streams):
        if len(source.tokens) <= length:
            num_tokens = len(source.tokens)
            raise MarsError(f"a source of {num_tokens} tokens is shorter than a row of {length}: add text.")
        dataset = grain.MapDataset.source(_StreamRows(source, length)).seed(seed + number)
        datasets.append(dataset.shuffle().repeat())
    mixed_dataset = grain.MapDataset.mix(datasets, weights=[source.weight for source in streams])
    # Without `drop_remainder`, the length of a dataset with one-row batches would exceed sys.maxsize, which grain
    # cannot handle.
    return mixed_dataset.batch(rows, drop_remainder=True)


def draft_vocabulary(
    streams: Sequence[Stream], size: int, vocab_size: int, always: Sequence[int] = ()
) -> np.ndarray:
    """Return the tokens in `always` and the most frequent tokens of the streams: i32[size], ascending.

    Args:
      streams: token streams, each counted in proportion to its weight.
      size: number of tokens to return, W.
      vocab_size: V, the size of the target's vocabulary.
      always: tokens to include, such as stop tokens, which a drafter should be able to draft.

    Raises:
      MarsError: size is not in 1..vocab_size.

    >>> text = Stream(np.asarray([3, 3, 1, 5, 5, 5], np.uint16), np.zeros(6, np.int32), 1.0)
    >>> draft_vocabulary([text], 3, 8, always=[7]).tolist()
    [3, 5, 7]
    """
    if not 1 <= size <= vocab_size:
        raise MarsError(f"a draft vocabulary of {size}: expected 1 to {vocab_size}, the target's vocabulary.")
    # Relative frequency of each token, weighted over the streams.
    token_share = np.zeros(vocab_size)
    for source in streams:
        counts = np.bincount(source.tokens, minlength=vocab_size)[:vocab_size]
        token_share += source.weight * counts / len(source.tokens)
    # Rank required tokens first. The stable sort breaks ties by token id.
    token_share[list(always)] = np.inf
    return np.sort(np.argsort(-token_share, kind="stable")[:size]).astype(np.int32)
