"""8-bit checkpoints with separate scales. Oracle: the weights as PyTorch dequantises them."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

import mars_jax as mj
from mars_jax.hub.save import save
from mars_jax.utils.errors import MarsError
from tests.helpers.checkpoint_files import message
from tests.helpers.scaled_files import CONFIG, HOW, torch, torch_file, write


@pytest.mark.parametrize("layout", HOW)
def test_a_scaled_checkpoint_is_the_model_of_its_weights(layout, tmp_path):
    expected = write(tmp_path / "scaled", layout)
    target = mj.load(tmp_path / "scaled", dtype="float32")
    save(tmp_path / "read", CONFIG, target.params)
    for name, w in load_file(tmp_path / "read" / "model.safetensors").items():
        np.testing.assert_array_equal(w, expected[name].numpy(), err_msg=name)


def changed(folder, **config):
    data = json.loads((folder / "config.json").read_text())
    data["quantization_config"] |= config
    (folder / "config.json").write_text(json.dumps(data))
    return folder


@pytest.mark.parametrize(
    "config",
    [{"weight_block_size": size} for size in (None, [64, 64], "128", [0, 24], [10**30, 24])]
    + [{"weight_block_size": None, "config_groups": groups} for groups in ([1], {"g": {"weights": "x"}})],
)
def test_scales_that_do_not_fit_are_refused(config, tmp_path):
    write(tmp_path / "scaled", "blocks")
    text = message(mj.load, changed(tmp_path / "scaled", **config))
    assert "scales [2, 4] of model.layers.0.mlp.down_proj.weight, [64, 96], are neither" in text


def test_a_block_far_larger_than_its_matrix_takes_no_memory(tmp_path):
    expected = write(tmp_path / "scaled", "whole")
    file = tmp_path / "scaled" / "model-00002-of-00002.safetensors"
    torch_file.save_file({name: w.reshape(1, 1) for name, w in torch_file.load_file(file).items()}, file)
    target = mj.load(changed(tmp_path / "scaled", weight_block_size=[10**11, 10**11]), dtype="float32")
    gate = np.asarray(expected["model.layers.0.mlp.gate_proj.weight"])
    np.testing.assert_array_equal(target.params["layers"][0]["gate"], gate)


@pytest.mark.parametrize("module", ["mlp.up_proj", "input_layernorm"])
def test_scales_beside_what_is_in_no_8_bits_are_refused(module, tmp_path):
    """Refuse scales of unquantised weights: weights that are already dequantised would be scaled twice."""
    write(tmp_path / "scaled", "whole")
    name = f"model.layers.1.{module}"
    for file in (tmp_path / "scaled").glob("*.safetensors"):
        tensors = torch_file.load_file(file)
        if f"{name}.weight" in tensors:
            tensors[f"{name}.weight"] = tensors[f"{name}.weight"].float()
        else:
            tensors[f"{name}.weight_scale"] = torch.ones(())
        torch_file.save_file(tensors, file)
    with pytest.raises(MarsError, match=r"holds float32 next to scales|are neither one per matrix"):
        mj.load(tmp_path / "scaled")
