"""A conversion loads as the checkpoint it was made of, onto any mesh, and is there whole or not at all."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import mars_jax as mj
from mars_jax import hub
from mars_jax.cli.convert import main
from mars_jax.core import mesh
from mars_jax.core.errors import MarsError
from mars_jax.hub import durable
from mars_jax.hub import orbax as checkpoint
from mars_jax.models import ModelConfig, init_params
from mars_jax.placement import shardings as sharding

CONFIG = ModelConfig(
    family="mixtral",
    vocab_size=24,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=4,
    num_experts=4,
    experts_per_token=2,
    norm_eps=1e-5,
)
convert = hub.convert


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    params = init_params(CONFIG, jax.random.key(0), scale=1.0)
    directory = hub.save(tmp_path_factory.mktemp("checkpoint") / "model", CONFIG, params)
    (directory / "generation_config.json").write_text('{"eos_token_id": [3, 5]}')
    (directory / "tokenizer_config.json").write_text("{}")
    (directory / "model.safetensors.index.json").write_text("{}")
    return directory


@pytest.mark.parametrize("dtype", [None, "bfloat16", "int8"])
def test_a_conversion_loads_as_its_source_and_onto_any_mesh(saved, tmp_path, dtype):
    counts = {"writing": 0, "verifying": 0}

    def progress(stage, done, total):
        counts[stage] += done
        assert counts[stage] <= total

    made = convert(saved, tmp_path / "made", dtype=dtype, progress=progress)
    names = ["config.json", "conversion.json", "generation_config.json", "orbax", "tokenizer_config.json"]
    assert sorted(os.listdir(made)) == names and sorted(os.listdir(tmp_path)) == ["made"]
    want, got = hub.load(saved, dtype=dtype), hub.load(made)
    assert got.config == want.config and got.config.eos_token_ids == (3, 5)
    assert jax.tree.structure(got.params) == jax.tree.structure(want.params)
    size = sum(x.nbytes for x in jax.tree.leaves(want.params))
    assert counts == {"writing": size, "verifying": size}
    for axes in (None, "model=4", "expert=2,data=2,model=2"):
        shardings = None if axes is None else sharding.params_shardings(CONFIG, mesh.parse_mesh(axes))
        placed = hub.load(made, shardings=shardings).params
        jax.tree.map(np.testing.assert_array_equal, placed, want.params)
        if dtype != "int8" and axes:
            jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim) or 1 / 0, placed, shardings)


def test_it_is_an_ordinary_orbax_checkpoint(saved, tmp_path):
    made = convert(saved, tmp_path / "made")
    with ocp.StandardCheckpointer() as checkpointer:
        theirs = checkpointer.restore(made / "orbax")
    params = hub.load(saved).params
    np.testing.assert_array_equal(theirs["layers"][1]["expert_up"], params["layers"][1]["expert_up"])
    assert hub.load(made, dtype="bfloat16").params["embed"].dtype == jnp.bfloat16  # cast on the way


KILLED = """
import os, signal, sys
import mars_jax as mj
calls = []
def progress(stage, done, total):
    calls.append(stage)
    if calls.count(sys.argv[3]) == 4:
        os.kill(os.getpid(), signal.SIGKILL)
mj.hub.convert(sys.argv[1], sys.argv[2], progress=progress)
"""


@pytest.mark.parametrize("stage", ["writing", "verifying"])
@pytest.mark.slow
def test_killed_it_leaves_nothing_that_looks_complete_and_starts_again(saved, tmp_path, stage):
    arguments = [sys.executable, "-c", KILLED, str(saved), str(tmp_path / "made"), stage]
    done = subprocess.run(arguments, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    [left] = os.listdir(tmp_path)
    assert left == ".made.writing" and "config.json" not in os.listdir(tmp_path / left)
    with pytest.raises(MarsError):
        hub.load(tmp_path / left)
    made = convert(saved, tmp_path / "made")
    assert os.listdir(tmp_path) == ["made"]
    jax.tree.map(np.testing.assert_array_equal, hub.load(made).params, hub.load(saved).params)


def test_what_a_disk_gives_back_otherwise_is_found(saved, tmp_path, monkeypatch):
    true = checkpoint.digests

    def corrupt(path, tree, **options):
        file = max((f for f in path.rglob("d/*") if f.is_file()), key=lambda f: f.stat().st_size)
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
        return true(path, tree, **options)

    monkeypatch.setattr(checkpoint, "digests", corrupt)
    with pytest.raises(MarsError, match=r"1 of \d+ arrays in .* read back otherwise|cannot be read"):
        convert(saved, tmp_path / "made")
    assert os.listdir(tmp_path) == []


def test_only_conversions_are_replaced_and_one_process_writes_at_a_time(saved, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("mine")
    with pytest.raises(MarsError, match="exists and is not empty"):
        convert(saved, other)
    with pytest.raises(MarsError, match="exists and is not a conversion"):
        convert(saved, other, overwrite=True)
    made = convert(saved, tmp_path / "made")
    with pytest.raises(MarsError, match="add --overwrite"):
        convert(saved, made)
    with pytest.raises(MarsError, match="is a conversion already"):
        convert(made, tmp_path / "again")
    with durable.staging(made), pytest.raises(MarsError, match="another process is writing"):
        convert(saved, made, overwrite=True)
    # Killed between its two renames, the next one puts back what was there.
    os.rename(made, tmp_path / ".made.replaced")
    with pytest.raises(MarsError, match=r"no readable config\.json"):
        convert(other, made)
    with durable.staging(made):
        assert hub.load(made).config == hub.read_config(saved)
    convert(saved, made, dtype="bfloat16", overwrite=True)
    assert hub.load(made).params["norm"].dtype == jnp.bfloat16
    assert sorted(os.listdir(tmp_path)) == ["made", "other"]


def test_a_dtype_that_a_conversion_cannot_give_is_named(saved, tmp_path):
    made = convert(saved, tmp_path / "made")
    with pytest.raises(MarsError, match=r"was converted to float32 and the dtype is int8.*--dtype int8"):
        hub.load(made, dtype="int8")
    manifest = json.loads((made / "conversion.json").read_text())
    (made / "conversion.json").write_text(json.dumps({k: v for k, v in manifest.items() if k != "int8"}))
    with pytest.raises(MarsError, match="is not a conversion's: convert the checkpoint again"):
        hub.load(made)
    (made / "conversion.json").write_text(json.dumps(manifest))
    for file in (made / "orbax").rglob("d/*"):
        file.unlink()
    with pytest.raises(MarsError, match=r"cannot be read .*: convert the checkpoint again"):
        hub.load(made)


def test_the_command_says_what_it_wrote(saved, tmp_path, capsys):
    assert main([str(saved), str(tmp_path / "made"), "--dtype", "int8"]) == 0
    printed = capsys.readouterr()
    assert "read back and equal" in printed.err and "MB/s" in printed.err and printed.out == ""
    assert mj.load(str(tmp_path / "made")).params["embed"].values.dtype == jnp.int8
    assert main([str(saved), str(tmp_path / "made")]) == 2
    assert capsys.readouterr().err.startswith("error: ")
