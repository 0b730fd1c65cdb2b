"""Write small GGUF files, and compute the logits of a checkpoint."""

import math
import re

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mars_jax.core.types import Visible
from mars_jax.hub.config_json import from_json
from mars_jax.hub.files import resolve
from mars_jax.models.weights import stored_tensors, weights
from mars_jax.utils.errors import MarsError

VOCAB, LAYERS, HEADS, KV, WIDTH = 96, 2, 4, 2, 16
SIZES = {"embedding_length": 64, "feed_forward_length": 96, "block_count": LAYERS, "context_length": 128}
ATTENTION_FACTOR = (1 + math.log(16) / math.log(8)) ** 0.5
"""LongRoPE's factor for a context of 128 tokens and a trained length of 8."""
EXPERTS = {"expert_count": 4, "expert_used_count": 2}
KEY_HEADS, VALUE_HEADS, VALUE_DIM = 2, 6, 32
DELTA = {"rope.freq_base": 500.0, "rope.dimension_count": 4, "full_attention_interval": 2}
DELTA |= {"ssm.conv_kernel": 4, "ssm.state_size": 16, "ssm.group_count": KEY_HEADS}
DELTA |= {"ssm.time_step_rank": VALUE_HEADS, "ssm.inner_size": VALUE_HEADS * VALUE_DIM}
OWN = {
    "llama": {"rope.freq_base": 500.0},
    "llama3": {"rope.freq_base": 500000.0},
    "qwen2": {},
    "qwen3": {"rope.freq_base": 1e6},
    "mistral3": {
        "rope.freq_base": 500.0,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 8,
        "rope.scaling.yarn_log_multiplier": 1.0,
        "attention.temperature_scale": 0.5,
    },
    "phi3": {"rope.freq_base": 500.0, "attention.sliding_window": 8, "rope.dimension_count": 12},
    "phi4": {
        "rope.freq_base": 500.0,
        "attention.sliding_window": 0,
        "rope.dimension_count": 12,
        "rope.scaling.original_context_length": 8,
        "rope.scaling.attn_factor": ATTENTION_FACTOR,
    },
    "mixtral": EXPERTS | {"rope.freq_base": 500.0},
    "qwen2moe": EXPERTS | {"expert_feed_forward_length": 32, "expert_shared_feed_forward_length": 64},
    "qwen3moe": EXPERTS | {"expert_feed_forward_length": 32, "rope.freq_base": 1e6},
    "chatglm": {"rope.freq_base": 500.0, "rope.dimension_count": 8},
    "chatglm, joined": {"rope.freq_base": 500.0, "rope.dimension_count": 8},
    "glm4": {"rope.freq_base": 500.0, "rope.dimension_count": 8},
    "glm4moe": EXPERTS
    | {
        "rope.freq_base": 500.0,
        "rope.dimension_count": 8,
        "expert_feed_forward_length": 32,
        "expert_shared_count": 2,
        "expert_gating_func": 2,
        "expert_group_count": 2,
        "expert_group_used_count": 1,
        "expert_weights_norm": True,
        "expert_weights_scale": 1.5,
        "leading_dense_block_count": 1,
        "nextn_predict_layers": 1,
    },
    "gpt-oss": EXPERTS
    | {
        "rope.freq_base": 500.0,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 32,
        "attention.sliding_window": 8,
        "expert_feed_forward_length": 96,
    },
    "qwen35": DELTA | {"rope.dimension_sections": [1, 1, 0, 0]},
    "qwen35moe": DELTA
    | EXPERTS
    | {
        "rope.dimension_sections": [1, 1, 0, 0],
        "expert_feed_forward_length": 32,
        "expert_shared_feed_forward_length": 64,
        "nextn_predict_layers": 1,
    },
    "smollm3": {"rope.freq_base": 500.0},
    "granite": {
        "rope.freq_base": 500.0,
        "attention.scale": 0.3,
        "embedding_scale": 3.0,
        "residual_scale": 0.22,
        "logit_scale": 0.7,
    },
    "olmo2": {"rope.freq_base": 500.0},
    "olmo3": {"rope.freq_base": 500.0, "attention.sliding_window": 8},
    "gemma2": {
        "attention.sliding_window": 8,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3": {"attention.sliding_window": 8, "rope.freq_base": 1e6},
}


ARCHITECTURES = {"llama3": "llama", "mixtral": "llama", "olmo3": "olmo2", "phi4": "phi3"}
ARCHITECTURES["chatglm, joined"] = "chatglm"
"""Architectures of the cases above; default: the case."""
PERMUTED = ("granite", "llama", "mistral3", "smollm3")


def metadata(writer, case):
    architecture = ARCHITECTURES.get(case, case)
    blocks = config_of(case).num_layers + OWN[case].get("nextn_predict_layers", 0)
    sizes = SIZES | {"block_count": blocks}
    for key, value in sizes.items():
        writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_uint32(f"{architecture}.attention.head_count", HEADS)
    writer.add_uint32(f"{architecture}.attention.head_count_kv", KV)
    writer.add_uint32(f"{architecture}.attention.key_length", WIDTH)
    writer.add_uint32(f"{architecture}.attention.value_length", WIDTH)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-5)
    for key, value in OWN[case].items():
        add = {
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
            bool: writer.add_bool,
            list: writer.add_array,
        }
        add[type(value)](f"{architecture}.{key}", value)
    writer.add_string("tokenizer.ggml.model", "gpt2")
    writer.add_string("tokenizer.ggml.pre", "gpt-2")
    writer.add_array(
        "tokenizer.ggml.tokens", ["<s>", "</s>", "ab", "cd", *(chr(33 + i) for i in range(VOCAB - 4))]
    )
    writer.add_array("tokenizer.ggml.token_type", [3, 3] + [1] * (VOCAB - 2))
    writer.add_array("tokenizer.ggml.merges", ["a b", "c d"])
    writer.add_uint32("tokenizer.ggml.bos_token_id", 0)
    writer.add_uint32("tokenizer.ggml.eos_token_id", 1)


def write(
    path, case, *, quantisation=gguf.GGMLQuantizationType.F32, drop=(), change=(), values=(), seed=0, **split
):
    """Write a file of random weights in the layout of llama.cpp's converter.

    `values` extend or override the metadata; `split` holds the writer's arguments that divide the file into parts.
    """
    architecture = ARCHITECTURES.get(case, case)
    writer = gguf.GGUFWriter(path, architecture, **split)
    metadata(writer, case)
    for key, value in dict(values).items():
        kind = gguf.GGUFValueType.get_type(value)
        writer.kv_data[0][key] = gguf.GGUFValue(value=value, type=kind)
    [kind] = [number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture]
    rows, config, joined = drawn(case, seed), config_of(case), {"weight": [], "bias": []}
    names = gguf.get_tensor_name_map(kind, config.num_layers)
    for hub_name, value in joined_experts(config, rows).items():
        if config.delta is not None:
            hub_name, value = converted_delta(hub_name, value)
        name = names.get_name(hub_name, try_suffixes=(".weight", ".bias"))
        assert name is not None
        name = name.replace("ssm_a.weight", "ssm_a")
        if name.endswith("ffn_gate_inp_shexp.weight"):
            [value] = value
        if architecture in PERMUTED and (".attn_q." in name or ".attn_k." in name):
            halves = value.reshape(-1, 2, WIDTH // 2, value.shape[1])
            value = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(value.shape))
        if name in drop:
            continue
        value = dict(change).get(name, value)
        if case == "chatglm, joined" and re.search(r"attn_[qkv]\.", name):
            same_kind = joined[name.rpartition(".")[2]]
            same_kind.append(value)
            if "attn_v" in name:
                writer.add_tensor(name.replace("attn_v", "attn_qkv"), np.concatenate(same_kind[-3:]))
            continue
        is_packed = quantisation.name != "MXFP4" or name.endswith("_exps.weight")
        if len(value.shape) > 1 and value.shape[-1] % 32 == 0 and is_packed:
            writer.add_tensor(name, gguf.quantize(value, quantisation), raw_dtype=quantisation)
        else:
            writer.add_tensor(name, value)
    if OWN[case].get("nextn_predict_layers"):
        for name in ("attn_norm", "nextn.enorm"):
            writer.add_tensor(f"blk.{config.num_layers}.{name}.weight", np.ones(64, np.float32))
    if case == "phi4":
        for kind, divisors in LONGROPE.items():
            writer.add_tensor(f"rope_factors_{kind}.weight", np.asarray(divisors, np.float32))
    if case == "llama3":
        writer.add_tensor("rope_freqs.weight", dict(change).get("rope_freqs.weight", llama3_factors()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def drawn(case, seed=0):
    """Draw the weights of a case at random, in the layout of the Hugging Face hub."""
    draw = np.random.default_rng(seed)
    arrays = {}
    for row in weights(config_of(case)):
        arrays[row] = draw.standard_normal(row.shape).astype(np.float32) * (
            0.3 if len(row.shape) > 1 else 0.1
        )
        if row.name.endswith("norm.weight"):
            arrays[row] += 1
        if config_of(case).family == "gpt_oss" and len(row.shape) == 3:
            kind = gguf.GGMLQuantizationType.MXFP4
            arrays[row] = gguf.dequantize(gguf.quantize(arrays[row], kind), kind)
    return arrays


def joined_experts(config, rows):
    """Return a file's tensors by the names that llama.cpp's converter maps: one tensor for the experts of a layer."""
    arrays = {}
    for row, parts in stored_tensors(config).items():
        name = re.sub(r"(?<=experts)\.\d+", "", row.name)
        if name.endswith("_bias"):
            name = f"{name.removesuffix('_bias')}.bias"
        elif not name.endswith((".weight", ".bias")):
            name += ".weight"
        arrays.setdefault(name, []).append(np.concatenate([rows[part] for part in parts]))
    for name, values in arrays.items():
        is_stack = ".experts." in name and config.family != "gpt_oss"
        arrays[name] = np.stack(values) if is_stack else values[0]
    return arrays


def converted_delta(name, value):
    """Return a tensor of Qwen3.5 as llama.cpp's converter writes it (conversion/qwen.py): value heads are tiled."""
    keys = KEY_HEADS * DELTA["ssm.state_size"] * 2

    def tiled(x, axis, width):
        shape = (*x.shape[:axis], KEY_HEADS, VALUE_HEADS // KEY_HEADS, width, *x.shape[axis + 1 :])
        return np.ascontiguousarray(x.reshape(shape).swapaxes(axis, axis + 1).reshape(x.shape))

    module = name.rpartition("linear_attn.")[2].split(".")[0]
    if "linear_attn" not in name:
        return name, value + 1 if name.endswith("norm.weight") else value
    if module in ("in_proj_qkv", "conv1d"):
        value = value.squeeze()
        value = np.concatenate([value[:keys], tiled(value[keys:], 0, VALUE_DIM)])
    elif module == "in_proj_z":
        value = tiled(value, 0, VALUE_DIM)
    elif module in ("in_proj_a", "in_proj_b", "dt"):
        value = tiled(value, 0, 1)
    elif module == "A_log":
        value = -np.exp(tiled(value, 0, 1))
    elif module == "out_proj":
        value = tiled(value, 1, VALUE_DIM)
    return name.replace("linear_attn.dt.bias", "linear_attn.dt_proj.bias"), value


def llama3_factors():
    """Return the divisor of each frequency that llama.cpp's converter writes for Llama 3.1."""
    frequency = 1 / 500000.0 ** (np.arange(0, WIDTH, 2) / WIDTH)
    wavelength = 2 * np.pi / frequency
    smooth = (8192 / wavelength - 1) / 3
    between = 1 / ((1 - smooth) / 8 + smooth)
    return np.where(wavelength < 8192 / 4, 1, np.where(wavelength > 8192, 8, between)).astype(np.float32)


def config_of(case):
    names = {"llama3": "llama", "gemma3": "gemma3_text", "mistral3": "ministral3", "phi4": "phi3"}
    names |= {"qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe", "glm4moe": "glm4_moe", "gpt-oss": "gpt_oss"}
    names |= {"chatglm": "glm", "chatglm, joined": "glm"}
    names |= {"qwen35": "qwen3_5_text", "qwen35moe": "qwen3_5_moe_text"}
    data = {
        "model_type": names.get(case, case),
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
    }
    data |= {"num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV}
    data |= {
        "head_dim": WIDTH,
        "tie_word_embeddings": case.startswith("gemma"),
        "sliding_window": 8,
        "rms_norm_eps": 1e-5,
    }
    data |= {"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2}
    data |= {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 64}
    if case in HUB:
        data |= {"rope_theta": 500.0, "max_position_embeddings": 128} | HUB[case]
    return from_json(data)


# Fields of config.json of the cases that transformers does not read from GGUF.
LONGROPE = {"short": [1.0, 1.25, 1.5, 2.0, 2.5, 3.0], "long": [1.0, 2.0, 3.0, 4.0, 6.0, 8.0]}
_ROPE = {
    "type": "longrope",
    **{f"{kind}_factor": x for kind, x in LONGROPE.items()},
}
_YARN = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 8,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
_DELTA = {"full_attention_interval": 2, "linear_num_key_heads": KEY_HEADS, "linear_key_head_dim": 16}
_DELTA |= {"linear_num_value_heads": VALUE_HEADS, "linear_value_head_dim": VALUE_DIM}
HUB = {
    "mistral3": {"sliding_window": None, "rope_scaling": _YARN | {"llama_4_scaling_beta": 0.5}},
    "phi3": {"partial_rotary_factor": 0.75},
    "phi4": {
        "partial_rotary_factor": 0.75,
        "sliding_window": None,
        "original_max_position_embeddings": 8,
        "rope_scaling": _ROPE,
    },
    "mixtral": {"sliding_window": None},
    "chatglm": {},
    "chatglm, joined": {},
    "glm4": {"attention_bias": False},
    "glm4moe": {
        "attention_bias": True,
        "use_qk_norm": True,
        "n_shared_experts": 2,
        "n_group": 2,
        "topk_group": 1,
        "routed_scaling_factor": 1.5,
        "norm_topk_prob": True,
        "first_k_dense_replace": 1,
    },
    "gpt-oss": {
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "truncate": False,
        },
    },
    "qwen35": _DELTA,
    "qwen35moe": _DELTA,
    "smollm3": {"num_hidden_layers": 4},
    "granite": {
        "attention_multiplier": 0.3,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.22,
        "logits_scaling": 0.7,
    },
    "olmo2": {},
    "olmo3": {},
}
TOKENS = np.random.default_rng(1).integers(2, VOCAB, (2, 24))


def our_logits(target):
    visible = Visible.causal(jnp.zeros((2,), jnp.int32), TOKENS.shape[1])
    tokens = jnp.asarray(TOKENS, jnp.int32)
    cache = target.model.init_cache(2, TOKENS.shape[1])
    out = jax.jit(target.model.forward)(target.params, tokens, visible, cache)
    return np.asarray(target.model.unembed(target.params, out.hidden))


def smollm2():
    try:
        return resolve("smollm2")
    except MarsError as error:
        pytest.skip(str(error))
