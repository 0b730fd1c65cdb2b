"""Checkpoints: every layout loads alike, and a malformed checkpoint gets a one-sentence error."""

import json
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from mars_jax import hub
from mars_jax.hub.config_json import from_json
from mars_jax.models import ModelConfig, Rope, init_params
from tests.helpers.checkpoint_files import (
    GEMMA_2,
    GEMMA_3,
    QWEN_3_MOE,
    edit_config,
    edit_weights,
    message,
    shard,
    write,
)
from tests.helpers.small_models import SIZES

CONFIG = ModelConfig(
    family="qwen2", num_layers=2, qkv_bias=True, tie_embeddings=True, eos_token_ids=(2,), **SIZES
)


@pytest.fixture
def params():
    return init_params(CONFIG, jax.random.key(0))


@pytest.fixture
def saved(tmp_path, params):
    return hub.save(tmp_path / "model", CONFIG, params)


def assert_equal(actual, expected) -> None:
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def test_a_saved_model_loads_as_it_was(saved, params):
    checkpoint = hub.load(saved)
    assert checkpoint.config == CONFIG == hub.read_config(saved)
    assert_equal(checkpoint.params, params)


def test_dtype_none_is_the_checkpoints_own(saved, tmp_path, params):
    assert hub.load(saved).params["norm"].dtype == jnp.float32
    assert hub.load(saved, dtype="bfloat16").params["norm"].dtype == jnp.bfloat16
    low = jax.tree.map(lambda a: a.astype(jnp.bfloat16), params)
    checkpoint = hub.load(hub.save(tmp_path / "low", CONFIG, low))
    assert_equal(checkpoint.params, low)
    # The suite runs on CPU, where caches are always float32.
    assert checkpoint.model.init_cache(1, 4).k[0].dtype == jnp.float32


def test_float16_becomes_bfloat16(saved, params):
    edit_weights(saved, lambda tensors: tensors.update({k: v.astype(np.float16) for k, v in tensors.items()}))
    edit_config(saved, torch_dtype="float16")
    loaded = hub.load(saved).params
    assert loaded["embed"].dtype == jnp.bfloat16
    # Two roundings: to 11 bits, and to 8.
    np.testing.assert_allclose(loaded["embed"].astype(jnp.float32), params["embed"], rtol=2**-8 + 2**-11)


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_sharded_weights_load_as_whole_ones(saved, params, kind):
    shard(saved, kind)
    assert_equal(hub.load(saved).params, params)


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_of_two_copies_of_a_tensor_the_one_in_the_index_is_read(saved, params, kind):
    tensors = load_file(saved / "model.safetensors")
    files = shard(saved, kind)
    index = next(saved.glob("*.index.json"))
    weight_map = json.loads(index.read_text())["weight_map"]
    for file in files:
        copies = {name: tensor + (weight_map[name] != file) for name, tensor in tensors.items()}
        write(saved / file, {name: copy.astype(np.float32) for name, copy in copies.items()}, kind)
    assert_equal(hub.load(saved).params, params)
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": files[0], "other": files[1]}}))
    text = message(hub.load, saved)
    assert "are there twice" in text and "in two files" in text


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_a_whole_file_takes_precedence_over_shards(saved, params, kind):
    tensors = load_file(saved / "model.safetensors")
    shard(saved, kind)
    file = "model.safetensors" if kind == "safetensors" else "pytorch_model.bin"
    write(saved / file, {name: tensor + np.float32(1) for name, tensor in tensors.items()}, kind)
    assert_equal(hub.load(saved).params, jax.tree.map(lambda a: a + 1, params))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bin_weights_load_as_safetensors(saved, params, dtype):
    write(saved / "pytorch_model.bin", load_file(saved / "model.safetensors"), "bin", dtype)
    (saved / "model.safetensors").unlink()
    assert_equal(hub.load(saved, dtype=dtype).params, jax.tree.map(lambda a: a.astype(dtype), params))


def test_bin_files_of_the_old_format_load(saved, params):
    torch = pytest.importorskip("torch")
    tensors = {k: torch.from_numpy(v) for k, v in load_file(saved / "model.safetensors").items()}
    torch.save(tensors, saved / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    (saved / "model.safetensors").unlink()
    assert_equal(hub.load(saved).params, params)


def test_a_bin_file_that_would_run_code_is_refused(saved):
    torch = pytest.importorskip("torch")
    torch.save({"weights": os.system}, saved / "pytorch_model.bin")
    (saved / "model.safetensors").unlink()
    assert "damaged or unsafe" in message(hub.load, saved)


def test_without_torch_a_bin_file_names_the_extra(saved, monkeypatch):
    (saved / "model.safetensors").rename(saved / "pytorch_model.bin")
    monkeypatch.setitem(sys.modules, "torch", None)
    assert "pip install torch" in message(hub.load, saved)


def test_extra_tensors_known_to_be_harmless_are_ignored(saved, params):
    def change(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)

    edit_weights(saved, change)
    assert_equal(hub.load(saved).params, params)


def test_names_without_the_model_prefix_load(saved, params):
    def change(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    edit_weights(saved, change)
    assert_equal(hub.load(saved).params, params)


def test_stop_tokens_of_both_configs_are_merged(saved):
    edit_config(saved, eos_token_id=[2, 5])
    (saved / "generation_config.json").write_text('{"eos_token_id": [7, 5]}')
    assert hub.read_config(saved).eos_token_ids == (2, 5, 7)
    (saved / "generation_config.json").write_text('{"eos_token_id": 9}')
    assert hub.read_config(saved).eos_token_ids == (2, 5, 9)


def test_published_configs_mean_what_they_leave_out():
    gemma3, gemma2, qwen = (from_json(data) for data in (GEMMA_3, GEMMA_2, QWEN_3_MOE))
    assert gemma3.family == "gemma3_text" and gemma3.eos_token_ids == (1, 106) and gemma3.tie_embeddings
    assert (gemma3.vocab_size, gemma3.num_heads, gemma3.num_kv_heads, gemma3.head_dim) == (262208, 8, 4, 256)
    assert gemma3.windows == (1024,) * 5 + (None, 1024)
    assert gemma3.rope == Rope(theta=1e6, kind="linear", factor=8.0) and gemma3.local_rope == Rope(theta=1e4)
    assert gemma2.windows == (4096, None, 4096) and (gemma2.attention_cap, gemma2.logit_cap) == (50.0, 30.0)
    assert gemma2.tie_embeddings and gemma2.activation == "gelu_tanh" and gemma2.local_rope is None
    assert (qwen.num_experts, qwen.experts_per_token, qwen.expert_size) == (128, 8, 768)
    assert qwen.normalize_experts and qwen.dense_layers == () and qwen.windows == (None, None)


@pytest.mark.parametrize(
    "data, fields, expected",
    [
        (GEMMA_2, {"use_bidirectional_attention": True}, "use_bidirectional_attention is not supported"),
        (GEMMA_2, {"sliding_window": None}, "sliding_window is null: set its size"),
        (GEMMA_3, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping has no effect in Gemma 3"),
        (GEMMA_3, {"layer_types": ["linear_attention"] * 7}, "layer type 'linear_attention' is not supp"),
        (QWEN_3_MOE, {"num_experts_per_tok": 129}, "experts_per_token is 129"),
        # A zero is not replaced by the family's default.
        (GEMMA_2, {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0.0: it must be positive"),
        (GEMMA_2, {"attn_logit_softcapping": float("nan")}, "a soft cap is nan"),
        (GEMMA_3, {"rope_local_base_freq": 0}, "rope theta (0.0)"),
        (GEMMA_3, {"sliding_window_pattern": 0}, "sliding_window_pattern is 0"),
        (QWEN_3_MOE, {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        (QWEN_3_MOE, {"moe_intermediate_size": 7.5}, "expert_size is 7.5: expected a whole number"),
    ],
)
def test_a_value_that_a_family_cannot_express_is_named(tmp_path, data, fields, expected):
    (tmp_path / "config.json").write_text(json.dumps(data | fields))
    assert expected in message(hub.read_config, tmp_path)


# Bad input.


def test_a_missing_path_and_a_file_are_named(tmp_path, saved):
    assert "there is no directory" in message(hub.load, tmp_path / "absent")
    assert "there is no directory './absent'" in message(hub.load, "./absent")
    assert "is a file" in message(hub.load, saved / "config.json")


def test_no_config_and_invalid_json_are_named(saved):
    (saved / "config.json").write_text('{"model_type": ')
    assert "is not valid JSON" in message(hub.load, saved)
    (saved / "config.json").write_text("[]")
    assert "not an object" in message(hub.load, saved)
    (saved / "config.json").unlink()
    assert "no readable config.json" in message(hub.load, saved)


@pytest.mark.parametrize(
    "fields, expected",
    [
        ({"architectures": ["BloomForCausalLM"]}, "BloomForCausalLM is not supported: choose a checkpoint"),
        ({"architectures": None, "model_type": "t5"}, "architecture t5 is not supported"),
        ({"hidden_act": "mish"}, "hidden_act 'mish' is not supported: expected one of silu"),
        ({"rope_scaling": {"type": "axial", "factor": 2.0}}, "rope type 'axial' is not supported"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope type 'linear' needs a factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "needs low_freq_factor"),
        ({"partial_rotary_factor": 0.0}, "partial_rotary_factor is 0: this architecture needs 1"),
        ({"rope_theta": 0}, "rope theta (0.0)"),
        ({"rope_theta": float("nan")}, "rope theta (nan)"),
        ({"rms_norm_eps": float("nan")}, "norm_eps is nan: expected a number of at least 0"),
        ({"num_key_value_heads": 2.0}, "num_key_value_heads is 2.0"),
        ({"head_dim": 0}, "head_dim is 0"),
        ({"max_position_embeddings": 0}, "max_position_embeddings is 0"),
        ({"eos_token_id": "</s>"}, "eos_token_id of config.json is '</s>': expected a token id"),
        ({"eos_token_id": 2**40}, "eos_token_id of config.json is 1099511627776"),
    ],
)
def test_a_config_value_that_cannot_be_used_is_named(saved, fields, expected):
    edit_config(saved, **fields)
    text = message(hub.load, saved)
    assert expected in text and str(saved) in text


@pytest.mark.parametrize("value", ["</s>", [1, None]])
def test_a_bad_stop_token_of_the_generation_config_names_that_file(saved, value):
    (saved / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    text = message(hub.load, saved)
    assert f"eos_token_id of generation_config.json is {value!r}" in text and str(saved) in text


def test_a_dtype_that_is_not_supported_is_named(saved):
    text = message(hub.load, saved, dtype="int2")
    assert "dtype 'int2' is not supported: choose one of float32, bfloat16, int8, int4" in text


def test_an_attention_that_is_not_known_is_refused_before_weights_are_read(saved):
    (saved / "model.safetensors").write_bytes(b"")
    assert "attention is 'flash': expected one of auto, xla" in message(hub.load, saved, attention="flash")


@pytest.mark.parametrize("keep", [4, 200, -100])
def test_truncated_safetensors_are_named(saved, keep):
    file = saved / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    assert "model.safetensors' is truncated or corrupt" in message(hub.load, saved)


def test_no_weights_and_an_absent_shard_are_named(saved):
    files = shard(saved, "safetensors")
    (saved / files[1]).unlink()
    assert f"lacks {files[1]}, which model.safetensors.index.json names (1 of 2" in message(hub.load, saved)
    (saved / "model.safetensors.index.json").unlink()
    assert "holds no weights" in message(hub.load, saved)


def test_missing_extra_and_misshaped_tensors_are_named(saved):
    def change(tensors):
        for layer in (0, 1):
            for kind in ("gate", "up"):
                del tensors[f"model.layers.{layer}.mlp.{kind}_proj.weight"]
        tensors["model.norm.weight"] = np.ones(3, np.float32)
        tensors["model.surprise.weight"] = np.ones(3, np.float32)

    edit_weights(saved, change)
    text = message(hub.load, saved)
    assert "4 tensors are missing (model.layers.0.mlp.gate_proj.weight, " in text and "and 1 more)" in text
    assert "1 have the wrong shape (model.norm.weight is [3] and not [32])" in text
    assert "1 are not part of the architecture (model.surprise.weight)" in text


def test_quantised_weights_are_refused(saved):
    edit_weights(saved, lambda tensors: tensors.update({"model.norm.weight": np.ones(32, np.int8)}))
    assert "tensor model.norm.weight: it holds int8" in message(hub.load, saved)
