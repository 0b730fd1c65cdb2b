"""Hostile checkpoints: contradictions, paths out of the directory and non-numeric values get a one-sentence error."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mars_jax import hub
from mars_jax.contrib.drafters.medusa_files import load_medusa, save_medusa
from mars_jax.contrib.models import medusa_layers
from mars_jax.contrib.models.medusa_layers import MedusaConfig
from mars_jax.models import ModelConfig, Rope, init_params
from mars_jax.utils.errors import MarsError
from tests.helpers.checkpoint_files import edit_weights, message, shard

CONFIG = ModelConfig(vocab_size=17, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=2)


@pytest.fixture
def saved(tmp_path):
    return hub.save(tmp_path / "model", CONFIG, init_params(CONFIG, jax.random.key(0)))


# Files that lead out of their directory.


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
@pytest.mark.parametrize("where", ["../{}", "{parent}/{}", "sub/../../{}", "..", "", ".", "a\0b"])
def test_an_index_that_leads_out_of_its_directory_is_refused_by_its_entry(saved, kind, where):
    file = shard(saved, kind)[1]
    index = next(saved.glob("*.index.json"))
    entry = where.format(file, parent=saved.parent)
    (saved / file).rename(saved.parent / file)  # without the check it would load
    (saved / "sub").mkdir()
    data = json.loads(index.read_text())
    data["weight_map"] = {name: entry if f == file else f for name, f in data["weight_map"].items()}
    index.write_text(json.dumps(data))
    text = message(hub.load, saved)
    assert f"names {entry!r} for tensor " in text and "no file within its directory" in text
    assert next(name for name, f in data["weight_map"].items() if f == entry) in text


def test_links_out_of_the_directory_are_followed_as_the_hubs_cache_needs(saved):
    file = shard(saved, "safetensors")[0]
    (saved / file).rename(saved.parent / "blob")
    (saved / file).symlink_to("../blob")
    assert hub.load(saved).config == CONFIG


# Tensors that contradict each other.


def test_a_tensor_under_two_names_is_refused(saved):
    edit_weights(saved, lambda tensors: tensors.update({"norm.weight": 2 * tensors["model.norm.weight"]}))
    twice = r"1 are there twice.*(model\.norm\.weight and norm\.weight|norm\.weight and model\.norm\.weight)"
    for call in (hub.load, lambda path: hub.convert(path, path.parent / "converted")):
        with pytest.raises(MarsError, match=twice):
            call(saved)


def test_medusa_heads_under_two_names_are_refused(tmp_path):
    config = MedusaConfig(num_heads=1, num_layers=1, hidden_size=16, vocab_size=17)
    path = save_medusa(tmp_path / "heads", config, medusa_layers.init_params(config, jax.random.key(0)))
    tensors = load_file(path / "medusa_lm_head.safetensors")
    tensors["medusa_head.0.1.weight"] = 2 * tensors["0.1.weight"]
    save_file(tensors, path / "medusa_lm_head.safetensors")
    assert "holds both 0.1.weight and medusa_head.0.1.weight" in message(load_medusa, path, CONFIG)


# PyTorch files.


STATES = {
    "sparse": (
        lambda torch: {"lm_head.weight": torch.eye(17, 16).to_sparse()},
        "not a table of dense tensors",
    ),
    "nowhere": (lambda torch: {"lm_head.weight": torch.empty(17, 16, device="meta")}, "not a table of dense"),
    "quantized": (
        lambda torch: {"lm_head.weight": torch.quantize_per_tensor(torch.eye(17, 16), 0.1, 0, torch.qint8)},
        "lm_head.weight .*quantised checkpoints are not supported|unsafe",
    ),
    "numbers for names": (lambda torch: {3: torch.ones(2)}, "not a table of dense tensors"),
}


@pytest.mark.parametrize("name", STATES)
@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning", "ignore:.*:UserWarning")
def test_what_a_bin_file_can_hold_beside_arrays_is_refused_by_name(saved, name):
    torch = pytest.importorskip("torch")
    change, expected = STATES[name]
    tensors = {k: torch.from_numpy(v) for k, v in load_file(saved / "model.safetensors").items()}
    (saved / "model.safetensors").unlink()
    torch.save(tensors | change(torch), saved / "pytorch_model.bin")
    with pytest.raises(MarsError, match=expected):
        hub.load(saved)


# Configs made in Python.


def test_a_config_that_python_code_builds_is_checked():
    with pytest.raises(MarsError, match=r"num_kv_heads is 1\.0: expected a whole number"):
        dataclasses.replace(CONFIG, num_kv_heads=1.0)
    assert dataclasses.replace(CONFIG, num_kv_heads=np.int64(1)).num_kv_heads == 1
    with pytest.raises(MarsError, match="rope beta_slow is inf"):
        Rope(kind="yarn", original_max_positions=8, beta_slow=float("inf"))
