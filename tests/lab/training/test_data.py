"""Tests of documents in files, token streams and batches."""

import gzip
import lzma
import types

import numpy as np
import pytest

from mars_jax.lab.training.data import Stream, batches, documents, make_stream
from mars_jax.utils.errors import MarsError

TEXT = "One.\r\nStill one.\n<|endoftext|>\n\nTwo.\n<|endoftext|>\n \n<|endoftext|>\n"


@pytest.mark.parametrize(("suffix", "opener"), [("", open), (".xz", lzma.open), (".gz", gzip.open)])
def test_documents_of_plain_and_compressed_files(tmp_path, suffix, opener):
    path = tmp_path / f"text.txt{suffix}"
    with opener(path, "wt", newline="") as file:
        file.write(TEXT)
    assert list(documents(path)) == ["One.\nStill one.", "Two."]


@pytest.mark.parametrize("name", ["absent.txt", "bytes.txt", "bytes.txt.xz", "bytes.txt.gz"])
def test_a_file_that_is_no_text_is_named(tmp_path, name):
    if name.startswith("bytes"):
        (tmp_path / name).write_bytes(b"\xff\xfe\xfd")
    with pytest.raises(MarsError, match=rf"{name}' cannot be read as text .*: name a UTF-8 text file\.$"):
        list(documents(tmp_path / name))


def a_stream(first: int, tokens: int, weight: float) -> Stream:
    documents = np.arange(tokens, dtype=np.int32) // 7
    return Stream(np.arange(first, first + tokens, dtype=np.uint32), documents, weight)


def test_an_epoch_shows_every_row_once():
    dataset = batches([a_stream(0, 161, 1.0)], rows=5, length=16, seed=0)
    epochs = [np.concatenate([dataset[2 * epoch + i].tokens for i in range(2)]) for epoch in range(2)]
    for rows in epochs:
        np.testing.assert_array_equal(np.sort(rows[:, 0]), np.arange(10) * 16)
        np.testing.assert_array_equal(rows - rows[:, :1], np.tile(np.arange(17), (10, 1)))
    assert (epochs[0] != epochs[1]).any()


def test_every_prefix_keeps_the_weights():
    weights = [0.6, 0.25, 0.15]
    streams = [a_stream(1000 * i, 999, weight) for i, weight in enumerate(weights)]
    dataset = iter(batches(streams, rows=1, length=8, seed=0).to_iter_dataset())
    counts = np.zeros(3)
    for step in range(100):
        counts[next(dataset).tokens[0, 0] // 1000] += 1
        assert np.abs(counts - (step + 1) * np.array(weights)).max() <= 1.5


def test_a_short_source_and_an_empty_one_are_refused():
    with pytest.raises(MarsError, match="a source of 8 tokens is shorter than a row of 8: add text"):
        batches([a_stream(0, 8, 1.0)], rows=1, length=8, seed=0)

    with pytest.raises(MarsError, match="there is no text to train on"):
        make_stream([], types.SimpleNamespace(encode_batch=lambda texts: []))
