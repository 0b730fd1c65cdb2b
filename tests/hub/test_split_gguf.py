"""GGUF files that llama.cpp's gguf-split divided. Oracle: the whole file of the same weights, from the package gguf."""

import re
import shutil

import jax
import numpy as np
import pytest

import mars_jax as mj
from mars_jax import hub
from mars_jax.core.errors import MarsError
from tests.helpers.gguf_files import write


def part(folder, number, count=3):
    return folder / f"model-{number:05}-of-{count:05}.gguf"


def write_parts(folder, **options):
    """Three parts of 8, 8 and 5 tensors."""
    write(folder / "model.gguf", "llama", split_max_tensors=8, **options)
    assert sorted(file.name for file in folder.iterdir()) == [part(folder, i).name for i in (1, 2, 3)]


@pytest.mark.parametrize("number", [1, 2, 3])
def test_any_part_loads_the_whole_model(tmp_path, number):
    (tmp_path / "parts").mkdir()
    write_parts(tmp_path / "parts")
    whole = mj.load(str(write(tmp_path / "whole.gguf", "llama")))
    joined = mj.load(str(part(tmp_path / "parts", number)))
    assert joined.config == whole.config and not joined.config.tie_embeddings
    jax.tree.map(np.testing.assert_array_equal, joined.params, whole.params)
    assert joined.encode("abcd") == whole.encode("abcd")
    assert hub.outline(str(part(tmp_path / "parts", number))).encode("abcd") == whole.encode("abcd")


def test_a_first_part_without_tensors_is_read(tmp_path):
    write(tmp_path / "model.gguf", "llama", split_max_tensors=12, small_first_shard=True)
    joined = mj.load(str(part(tmp_path, 1)))
    whole = mj.load(str(write(tmp_path / "whole.gguf", "llama")))
    jax.tree.map(np.testing.assert_array_equal, joined.params, whole.params)


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


def recount(folder):
    for number in (1, 2):
        part(folder, number).rename(part(folder, number, 2))
    return part(folder, 2, 2)


def copy_whole(folder):
    for number in (1, 2, 3):
        write(folder / "whole.gguf", "llama").replace(part(folder, number))


def mix(folder):
    """The second part of another division, which repeats tensors of the first."""
    (folder / "others").mkdir()
    write(folder / "others" / "model.gguf", "llama", split_max_tensors=10)
    shutil.copy(part(folder / "others", 2), part(folder, 2))


def mix_models(folder):
    """The last part of a model with fewer tensors."""
    (folder / "others").mkdir()
    write(folder / "others" / "model.gguf", "llama", split_max_tensors=8, drop=["output.weight"])
    shutil.copy(part(folder / "others", 3), part(folder, 3))


REFUSED = {
    lose: "one of 3 parts of a split file, and model-00002-of-00003.gguf is missing",
    rename: "model.gguf' is a whole file by its name, but its header has split.no 0 and split.count 3",
    swap: "model-00002-of-00003.gguf' is part 2 of 3 by its name, but its header has split.no 2 and split.count 3",
    recount: "model-00001-of-00002.gguf' is part 1 of 2 by its name, but its header has split.no 0 and split.count 3",
    copy_whole: "part 1 of 3 by its name, but its header has split.no None and split.count None",
    mix: "hold 23 tensors with 19 names, and their split.tensors.count is 21",
    mix_models: "hold 20 tensors with 20 names, and their split.tensors.count is 21",
}


@pytest.mark.parametrize("damage", REFUSED)
@pytest.mark.parametrize("read", [hub.read_config, mj.load])
def test_parts_that_do_not_fit_are_refused_by_name(tmp_path, damage, read):
    write_parts(tmp_path)
    path = damage(tmp_path) or part(tmp_path, 1)
    with pytest.raises(MarsError, match=re.escape(REFUSED[damage])):
        read(str(path))
