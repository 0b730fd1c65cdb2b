"""GGUF files split by llama.cpp's gguf-split. Oracle: one file with the same weights, from the package gguf."""

import re
import shutil

import jax
import numpy as np
import pytest

import mars_jax as mj
from mars_jax import hub
from mars_jax.utils.errors import MarsError
from tests.helpers.gguf_files import write


def part(folder, number, count=3):
    return folder / f"model-{number:05}-of-{count:05}.gguf"


def write_parts(folder, **options):
    """Write three parts of 8, 8 and 5 tensors."""
    write(folder / "model.gguf", "llama", split_max_tensors=8, **options)
    assert sorted(file.name for file in folder.iterdir()) == [part(folder, i).name for i in (1, 2, 3)]


@pytest.mark.parametrize("number", [1, 2, 3])
def test_any_part_loads_the_whole_model(tmp_path, number):
    (tmp_path / "parts").mkdir()
    write_parts(tmp_path / "parts")
    single = mj.load(str(write(tmp_path / "whole.gguf", "llama")))
    joined = mj.load(str(part(tmp_path / "parts", number)))
    assert joined.config == single.config and not joined.config.tie_embeddings
    jax.tree.map(np.testing.assert_array_equal, joined.params, single.params)
    assert joined.encode("abcd") == single.encode("abcd")


@pytest.mark.parametrize("count", [0, 1])
def test_a_joined_file_is_whole(tmp_path, count):
    """`llama-gguf-split --merge` leaves a count of 0."""
    path = write(tmp_path / "model.gguf", "llama", values={"split.count": count})
    assert mj.load(str(path)).config.num_layers == 2


def lose(folder):
    part(folder, 2).unlink()


def rename(folder):
    return part(folder, 1).rename(folder / "model.gguf")


def swap(folder):
    part(folder, 2).rename(folder / "other")
    part(folder, 3).rename(part(folder, 2))
    (folder / "other").rename(part(folder, 3))


def mix(folder):
    """Replace the second part with one of a different split, which repeats tensors of the first part."""
    (folder / "others").mkdir()
    write(folder / "others" / "model.gguf", "llama", split_max_tensors=10)
    shutil.copy(part(folder / "others", 2), part(folder, 2))


REFUSED = {
    lose: "one of 3 parts of a split file, and model-00002-of-00003.gguf is missing",
    rename: "(split.no and split.count are [(0, 3)], 8 of 8 tensors)",
    swap: "(split.no and split.count are [(0, 3), (2, 3), (1, 3)], 21 of 21 tensors)",
    mix: "(split.no and split.count are [(0, 3), (1, 3), (2, 3)], 23 of 21 tensors)",
}


@pytest.mark.parametrize("damage", REFUSED)
def test_parts_that_do_not_fit_are_refused(tmp_path, damage):
    write_parts(tmp_path)
    path = damage(tmp_path) or part(tmp_path, 1)
    with pytest.raises(MarsError, match=re.escape(REFUSED[damage])):
        hub.read_config(str(path))
