"""Conversions: they load like their source onto any mesh, appear complete or not at all, and are refused if damaged."""

import json
import os
import shutil
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mars_jax as mj
from mars_jax import hub
from mars_jax.cli.convert import main
from mars_jax.core import axes as mesh
from mars_jax.models import init_params
from mars_jax.models import shardings as sharding
from mars_jax.utils.errors import MarsError
from tests.helpers.checkpoint_files import MIXTRAL as CONFIG

convert = hub.convert


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    params = init_params(CONFIG, jax.random.key(0), scale=1.0)
    directory = hub.save(tmp_path_factory.mktemp("checkpoint") / "model", CONFIG, params)
    (directory / "generation_config.json").write_text('{"eos_token_id": [3, 5]}')
    (directory / "tokenizer_config.json").write_text("{}")
    (directory / "model.safetensors.index.json").write_text("{}")
    return directory


@pytest.fixture
def converted(saved, tmp_path):
    return convert(saved, tmp_path / "made")


def assert_same(actual, expected):
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


@pytest.mark.parametrize("dtype", [None, "bfloat16", "int8", "int4"])
def test_a_conversion_loads_as_its_source_and_onto_any_mesh(saved, tmp_path, dtype):
    sizes = []
    converted = convert(saved, tmp_path / "made", dtype=dtype, progress=sizes.append)
    names = ["config.json", "conversion.json", "generation_config.json", "tokenizer_config.json", "weights"]
    assert sorted(os.listdir(converted)) == names and sorted(os.listdir(tmp_path)) == ["made"]
    assert sum(sizes) == sum(file.stat().st_size for file in (converted / "weights").iterdir())
    source, loaded = hub.load(saved, dtype=dtype), hub.load(converted)
    assert loaded.config == source.config and loaded.config.eos_token_ids == (3, 5)
    assert jax.tree.structure(loaded.params) == jax.tree.structure(source.params)
    for axes in (None, "model=4", "expert=2,data=2,model=2"):
        shardings = None if axes is None else sharding.params_shardings(CONFIG, mesh.parse_mesh(axes))
        placed = hub.load(converted, shardings=shardings).params
        assert_same(placed, source.params)
        if axes:
            expected = hub.load(saved, dtype=dtype, shardings=shardings).params
            for a, b in zip(jax.tree.leaves(placed), jax.tree.leaves(expected), strict=True):
                assert a.sharding.is_equivalent_to(b.sharding, a.ndim)


KILLED = """
import os, signal, sys
import mars_jax as mj
sizes = []
def progress(size):
    sizes.append(size)
    if len(sizes) == 4:
        os.kill(os.getpid(), signal.SIGKILL)
mj.hub.convert(sys.argv[1], sys.argv[2], progress=progress)
"""


@pytest.mark.slow
def test_a_killed_conversion_leaves_nothing_that_looks_complete_and_starts_again(saved, tmp_path):
    arguments = [sys.executable, "-c", KILLED, str(saved), str(tmp_path / "made")]
    process = subprocess.run(arguments, capture_output=True, text=True)
    assert process.returncode == -signal.SIGKILL, process.stderr
    assert os.listdir(tmp_path) == [".made.writing"]
    with pytest.raises(MarsError):
        hub.load(tmp_path / ".made.writing" / "new")
    converted = convert(saved, tmp_path / "made")
    assert os.listdir(tmp_path) == ["made"]
    assert_same(hub.load(converted).params, hub.load(saved).params)


def test_only_conversions_are_replaced(saved, converted, tmp_path):
    occupied = tmp_path / "other"
    occupied.mkdir()
    (occupied / "thesis.txt").write_text("mine")
    with pytest.raises(MarsError, match="exists and is not empty"):
        convert(saved, occupied)
    with pytest.raises(MarsError, match="exists and is not a conversion"):
        convert(saved, occupied, overwrite=True)
    with pytest.raises(MarsError, match="add --overwrite"):
        convert(saved, converted)
    with pytest.raises(MarsError, match="is a conversion already"):
        convert(converted, tmp_path / "again")
    assert hub.load(converted, dtype="bfloat16").params["norm"].dtype == jnp.bfloat16  # cast when loaded
    convert(saved, converted, dtype="bfloat16", overwrite=True)
    assert hub.load(converted).params["norm"].dtype == jnp.bfloat16
    assert sorted(os.listdir(tmp_path)) == ["made", "other"]


def test_a_url_is_refused_before_anything_is_written(saved, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MarsError, match="'gs://bucket/made' is a URL: name a local directory"):
        convert(saved, "gs://bucket/made")
    assert not list(tmp_path.iterdir())


def test_a_dtype_that_a_conversion_cannot_give_is_named(saved, converted, tmp_path):
    with pytest.raises(MarsError, match=r"was converted to float32 and the dtype is int8.*--dtype int8"):
        hub.load(converted, dtype="int8")
    small = convert(saved, tmp_path / "small", dtype="int8")
    with pytest.raises(MarsError, match=r"was converted to int8 and the dtype is bfloat16"):
        hub.load(small, dtype="bfloat16")


@pytest.mark.parametrize("axes", [None, "data=2,model=4"])
def test_a_flipped_bit_is_refused_by_file_unless_checksums_are_skipped(converted, axes):
    shardings = None if axes is None else sharding.params_shardings(CONFIG, mesh.parse_mesh(axes))
    intact = hub.load(converted).params
    file = converted / "weights" / "layers.1.expert_down.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    damaged = r"layers\.1\.expert_down\.safetensors' is damaged, its checksum differs"
    with pytest.raises(MarsError, match=damaged):
        hub.load(converted, shardings=shardings)
    loaded = hub.load(converted, shardings=shardings, check=False).params
    assert not np.array_equal(loaded["layers"][1]["expert_down"], intact["layers"][1]["expert_down"])
    assert_same(loaded["layers"][0], intact["layers"][0])


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("damage", ["absent", "cut", "swapped"])
def test_a_file_that_cannot_be_read_gets_one_sentence(converted, check, damage):
    file = converted / "weights" / "norm.safetensors"
    if damage == "absent":
        file.unlink()
    elif damage == "cut":
        file.write_bytes(file.read_bytes()[:-4])
    else:
        shutil.copy(converted / "weights" / "embed.safetensors", file)
    with pytest.raises(MarsError, match=r"^[^\n]*norm\.safetensors' [^\n]*: convert it again\.$"):
        hub.load(converted, check=check)


@pytest.mark.parametrize(
    "change, expected",
    [({"checksums": {}}, "do not fit its config.json"), ({"bits": "no"}, "json' is damaged")],
)
def test_a_manifest_that_does_not_fit_is_refused(converted, change, expected):
    manifest = json.loads((converted / "conversion.json").read_text())
    (converted / "conversion.json").write_text(json.dumps(manifest | change))
    with pytest.raises(MarsError, match=expected):
        hub.load(converted)


def test_the_command_reports_what_it_wrote(saved, tmp_path, capsys):
    assert main([str(saved), str(tmp_path / "made"), "--dtype", "int8"]) == 0
    printed = capsys.readouterr()
    assert "GB written" in printed.err and "MB/s" in printed.err and printed.out == ""
    assert mj.load(str(tmp_path / "made")).params["embed"].values.dtype == jnp.int8
    assert main([str(saved), str(tmp_path / "made")]) == 2
    assert capsys.readouterr().err.startswith("error: ")
