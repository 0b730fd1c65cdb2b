"""Saved models: transformers loads them, and saving is all or nothing."""

import dataclasses
import itertools
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from mars_jax import hub
from mars_jax.hub import durable
from mars_jax.models import ModelConfig, Rope, init_params
from mars_jax.utils.errors import MarsError
from tests.helpers.checkpoint_files import message
from tests.helpers.small_models import SIZES

BASE = ModelConfig(num_layers=2, max_positions=128, bos_token_id=1, eos_token_ids=(2, 3), **SIZES)


def test_a_directory_in_use_is_left_alone_unless_told(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    params = init_params(BASE, jax.random.key(0))
    text = message(hub.save, tmp_path, BASE, params)
    assert "not an empty directory: choose another path, or pass overwrite=True" in text
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]
    hub.save(tmp_path, BASE, params, overwrite=True)
    assert (tmp_path / "notes.txt").read_text() == "mine" and hub.load(tmp_path).config == BASE


def test_params_of_another_config_are_refused(tmp_path):
    params = init_params(BASE, jax.random.key(0))
    text = message(hub.save, tmp_path / "model", dataclasses.replace(BASE, qkv_bias=True), params)
    assert "params lack layers.0.q_bias" in text
    params["norm"] = jnp.ones((3,))
    text = message(hub.save, tmp_path / "model", BASE, params)
    assert "params norm has shape [3], but the config needs [32]" in text


def test_a_config_that_the_family_cannot_express_is_refused(tmp_path):
    config = dataclasses.replace(BASE, windows=(4, 4))
    text = message(hub.save, tmp_path / "model", config, init_params(config, jax.random.key(0)))
    assert "'llama' cannot express this config" in text


# The same shapes as BASE, so that mixed files would load.
OTHER = dataclasses.replace(BASE, rope=Rope(theta=500.0))


class Killed(BaseException):
    """An exception that simulates the death of the process."""


def test_a_killed_overwrite_never_mixes_old_weights_and_a_new_config(tmp_path, monkeypatch):
    old, new = (init_params(BASE, jax.random.key(seed)) for seed in (0, 1))
    directory = hub.save(tmp_path / "model", BASE, old)
    (directory / "notes.txt").write_text("mine")
    calls, replace = itertools.count(), os.replace

    def replace_until_killed(source, target):
        if next(calls) == 1:
            raise Killed
        replace(source, target)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(os, "replace", replace_until_killed)
        hub.save(directory, OTHER, new, overwrite=True)
    with pytest.raises(MarsError, match=r"no readable config\.json"):
        hub.load(directory)
    hub.save(directory, OTHER, new, overwrite=True)
    assert hub.load(directory).config == OTHER and (directory / "notes.txt").read_text() == "mine"
    assert os.listdir(tmp_path) == ["model"]


def test_files_are_on_disk_before_they_get_their_names(tmp_path, monkeypatch):
    synced = set()
    fsync, replace = os.fsync, os.replace

    def recorded(descriptor):
        synced.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def checked(source, target):
        assert {os.stat(path).st_ino for path in (Path(source), *Path(source).glob("*"))} <= synced
        replace(source, target)

    monkeypatch.setattr(os, "fsync", recorded)
    monkeypatch.setattr(os, "replace", checked)
    hub.save(tmp_path / "model", BASE, init_params(BASE, jax.random.key(0)))
    durable.write_whole(tmp_path / "table.md", "text")
    assert len(synced) >= 5


def test_a_path_that_cannot_be_written_is_refused_before_the_source_is_read(tmp_path):
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file" / "x", Path("/proc/x")):
        refused = rf"'{path}' cannot be written \(.*\): choose another path"
        with pytest.raises(MarsError, match=refused):
            hub.save(path, BASE, init_params(BASE, jax.random.key(0)))
        with pytest.raises(MarsError, match=refused):
            hub.convert("/nowhere", path)


FULL = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
import jax
from mars_jax import hub
from mars_jax.utils.errors import MarsError
checkpoint = hub.load(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
sys.dont_write_bytecode = True  # a truncated file would break later imports
out = sys.argv[2]
state = {"cache": jax.random.normal(jax.random.key(0), (40, 40))}
for call in (
    lambda: hub.convert(sys.argv[1], out + "/converted"),
    lambda: hub.save(out + "/saved", checkpoint.config, checkpoint.params),
    lambda: hub.save_state(out + "/state", state),
):
    try:
        call()
    except MarsError as error:
        print(error)
"""


def test_a_full_disk_gets_one_sentence_and_nothing_is_left(tmp_path):
    source = hub.save(tmp_path / "model", BASE, init_params(BASE, jax.random.key(0)))
    (tmp_path / "to").mkdir()
    arguments = [sys.executable, "-c", FULL, str(source), str(tmp_path / "to")]
    run = subprocess.run(arguments, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    ending = "File too large; make room, or choose another path."
    names = ("converted", "saved", "state")
    assert run.stdout.splitlines() == [f"cannot write to '{tmp_path}/to/{name}': {ending}" for name in names]
    assert os.listdir(tmp_path / "to") == []
