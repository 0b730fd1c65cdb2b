"""Readers and writers of the config.json fields that only some Hugging Face architectures have.

Oracle: the config classes of transformers 5.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from mars_jax.hub.rope_config import read_rope, write_scaling
from mars_jax.hub.values import count, value_or_default
from mars_jax.models.config import Delta, Latent, ModelConfig
from mars_jax.utils.errors import MarsError
from mars_jax.utils.types import JsonObject

Fields = dict[str, Any]
"""Fields of ModelConfig by name."""

_SLIDING, _FULL, _LINEAR = "sliding_attention", "full_attention", "linear_attention"
"""Layer types: attention with and without a window, and a recurrent layer."""


class Family(NamedTuple):
    """Readers and writers of the fields that are specific to one architecture."""

    architecture: str
    read: Callable[[JsonObject], Fields]  # reads config.json
    write: Callable[[ModelConfig], JsonObject]  # the inverse
    defaults: JsonObject  # values of keys that config.json omits
    activation: str = "hidden_act"  # key of the activation


def _windows(kinds: Sequence[str], window: int | None) -> tuple[int | None, ...]:
    if unknown := sorted(set(kinds) - {_SLIDING, _FULL}):
        raise MarsError(f"layer type '{unknown[0]}' is not supported: expected one of {_FULL}, {_SLIDING}.")
    if window is None and _SLIDING in kinds:
        raise MarsError(f"layer_types name {_SLIDING} and sliding_window is null: set its size.")
    return tuple(window if kind == _SLIDING else None for kind in kinds)


def _types(has_window: Iterable[bool]) -> list[str]:
    """Return the type of each layer."""
    return [_SLIDING if flag else _FULL for flag in has_window]


def _window(config: ModelConfig) -> int | None:
    """Return the largest window; None if no layer has one.

    config.json can store only one size. `hub.save` refuses configs with several, which would not survive a round trip.
    """
    return max((window for window in config.windows if window is not None), default=None)


def _biases(data: JsonObject) -> Fields:
    bias = bool(data.get("attention_bias"))
    return {"qkv_bias": bias, "o_bias": bias}


def _read_llama(data: JsonObject) -> Fields:
    return _biases(data) | {"mlp_bias": bool(data.get("mlp_bias"))}


def _read_mistral(data: JsonObject) -> Fields:
    window = data.get("sliding_window", 4096)  # the first Mistral has no such key; null means no window
    return {
        "windows": (window,) * data["num_hidden_layers"],
        # The default of MistralConfig. `from_json` reads an absent key as one per query head.
        "num_kv_heads": count(data, "num_key_value_heads", 8),
    }


def _write_mistral(config: ModelConfig) -> JsonObject:
    return {"sliding_window": _window(config)}


def _one_window(data: JsonObject) -> Fields:
    return {"windows": (data.get("sliding_window"),) * data["num_hidden_layers"]}


def _write_types(config: ModelConfig) -> JsonObject:
    return _write_mistral(config) | {"layer_types": _types(window is not None for window in config.windows)}


def _optional_windows(data: JsonObject, has_window: Iterable[bool]) -> tuple[int | None, ...]:
    """Return windows by `layer_types`, or by default in some layers; none unless `use_sliding_window`."""
    window = data.get("sliding_window")
    if not data.get("use_sliding_window") or window is None:
        return (None,) * data["num_hidden_layers"]
    return _windows(data.get("layer_types") or _types(has_window), window)


def _qwen_windows(data: JsonObject) -> tuple[int | None, ...]:
    # As in transformers: without `layer_types`, layers from `max_window_layers` on have a window.
    first = data.get("max_window_layers", 28)
    return _optional_windows(data, (i >= first for i in range(data["num_hidden_layers"])))


def _read_qwen2(data: JsonObject) -> Fields:
    return {"qkv_bias": True, "windows": _qwen_windows(data)}


def _read_qwen3(data: JsonObject) -> Fields:
    fields = {"qk_norm": True, "windows": _qwen_windows(data), "head_dim": count(data, "head_dim", 128)}
    return _biases(data) | fields


def _write_qwen(config: ModelConfig) -> JsonObject:
    return _write_types(config) | {"use_sliding_window": _window(config) is not None}


def _read_mixtral(data: JsonObject) -> Fields:
    experts = {"num_experts": data["num_local_experts"], "experts_per_token": data["num_experts_per_tok"]}
    return _one_window(data) | experts


def _write_mixtral(config: ModelConfig) -> JsonObject:
    experts = {"num_local_experts": config.num_experts, "num_experts_per_tok": config.experts_per_token}
    return _write_mistral(config) | experts


def _read_qwen2_moe(data: JsonObject) -> Fields:
    # As in transformers: without `layer_types`, every second layer before `max_window_layers` has a window.
    first, layers = data.get("max_window_layers", 28), range(data["num_hidden_layers"])
    windows = _optional_windows(data, (i % 2 == 0 and i < first for i in layers))
    shared = {"shared_expert_size": data["shared_expert_intermediate_size"], "windows": windows}
    return _read_experts(data) | shared | {"qkv_bias": bool(data.get("qkv_bias", True))}


def _write_qwen2_moe(config: ModelConfig) -> JsonObject:
    shared = {"qkv_bias": config.qkv_bias, "shared_expert_intermediate_size": config.shared_expert_size}
    return _write_qwen3_moe(config) | _write_qwen(config) | shared


def _read_qwen3_moe(data: JsonObject) -> Fields:
    window = None
    if data.get("use_sliding_window"):
        window = data.get("sliding_window")
    windows = (window,) * data["num_hidden_layers"]
    return _biases(data) | _read_experts(data) | {"qk_norm": True, "windows": windows}


def _read_experts(data: JsonObject) -> Fields:
    """Read the experts of Qwen. Both `decoder_sparse_step` and `mlp_only_layers` select layers without experts."""
    layers = data["num_hidden_layers"]
    step, mlp_only = count(data, "decoder_sparse_step", 1), data.get("mlp_only_layers") or ()
    return {
        "num_experts": data.get("num_local_experts", data["num_experts"]),  # transformers 5, else 4
        "experts_per_token": data["num_experts_per_tok"],
        "expert_size": data["moe_intermediate_size"],
        "normalize_experts": bool(data.get("norm_topk_prob")),
        # Layers count from 1 in `decoder_sparse_step` and from 0 in `mlp_only_layers`.
        "dense_layers": tuple(i for i in range(layers) if (i + 1) % step or i in mlp_only),
    }


def _write_qwen3_moe(config: ModelConfig) -> JsonObject:
    window = _window(config)
    return {
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
        "moe_intermediate_size": config.expert_size or config.intermediate_size,
        "norm_topk_prob": config.normalize_experts,
        # A step of 1 excludes no layer, because `mlp_only_layers` already lists all dense ones.
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(config.dense_layers),
    }


def _read_delta(data: JsonObject) -> Fields:
    """Read the fields that Qwen3-Next and Qwen3.5 share. By default, three of four layers are gated DeltaNet."""
    layers, every = range(data["num_hidden_layers"]), count(data, "full_attention_interval", 4)
    kinds = data.get("layer_types") or [_FULL if (i + 1) % every == 0 else _LINEAR for i in layers]
    if unknown := sorted(set(kinds) - {_FULL, _LINEAR}):
        raise MarsError(f"layer type '{unknown[0]}' is not supported: expected {_FULL} or {_LINEAR}.")
    if len(kinds) != len(layers):
        raise MarsError(f"layer_types has {len(kinds)} entries for {len(layers)} layers: give one for each.")
    sizes = {field: count(data, key, default) for field, (key, default) in _DELTA_SIZES.items()}
    linear = tuple(i for i in layers if kinds[i] == _LINEAR)
    return _biases(data) | {
        "rope": read_rope(data, fraction=0.25),
        "head_dim": count(data, "head_dim", 256),
        "qk_norm": True,
        "norm_plus_one": True,
        "attention_gate": True,
        "delta": Delta(layers=linear, **sizes) if linear else None,
    }


def _write_delta(config: ModelConfig) -> JsonObject:
    delta = config.delta
    linear, sizes = (), {}
    if delta is not None:
        linear = delta.layers
        sizes = {key: getattr(delta, field) for field, (key, _) in _DELTA_SIZES.items()}
    kinds = [_LINEAR if i in linear else _FULL for i in range(config.num_layers)]
    return sizes | {"layer_types": kinds, "partial_rotary_factor": config.rope.fraction}


def _read_qwen3_next(data: JsonObject) -> Fields:
    shared = {"shared_expert_size": data["shared_expert_intermediate_size"]}
    return _read_experts(data) | shared | _read_delta(data)


def _write_qwen3_next(config: ModelConfig) -> JsonObject:
    shared = {"shared_expert_intermediate_size": config.shared_expert_size}
    return _write_qwen3_moe(config) | shared | _write_delta(config)


def _read_gemma(data: JsonObject, every: int) -> Fields:
    """Read the fields that Gemma 2 and 3 share. All layers except every `every`-th one have a window."""
    if data.get("use_bidirectional_attention"):
        raise MarsError("use_bidirectional_attention is not supported: only models that read forwards are.")
    layers, scalar = range(data["num_hidden_layers"]), float(data["query_pre_attn_scalar"])
    kinds = data.get("layer_types") or _types((i + 1) % every != 0 for i in layers)
    if not 0 < scalar < math.inf:  # in a ModelConfig, 0 means the width of a head
        raise MarsError(f"query_pre_attn_scalar is {scalar}: it must be positive.")
    return _biases(data) | {
        "windows": _windows(kinds, data.get("sliding_window")),
        "embedding_multiplier": data["hidden_size"] ** 0.5,
        "norm_plus_one": True,
        "post_norms": True,
        "query_scalar": scalar,
        "logit_cap": _cap(data, "final_logit_softcapping"),
    }


def _cap(data: JsonObject, key: str) -> float | None:
    cap = data.get(key)
    return None if cap is None else float(cap)


def _read_gemma2(data: JsonObject) -> Fields:
    return _read_gemma(data, 2) | {"attention_cap": _cap(data, "attn_logit_softcapping")}


def _read_gemma3(data: JsonObject) -> Fields:
    """Read Gemma 3's fields. Rope is set per layer type (transformers 5) or by `rope_local_base_freq` (4)."""
    if data.get("attn_logit_softcapping") is not None:
        raise MarsError("attn_logit_softcapping means nothing in Gemma 3: set it to null.")
    full, sliding = _by_layer_type(data)
    pattern = count(data, "sliding_window_pattern", count(data, "_sliding_window_pattern", 6))
    return _read_gemma(data, pattern) | {
        "qk_norm": True,
        "rope": read_rope(full, theta=1e6),
        "local_rope": read_rope(sliding, base="rope_local_base_freq", theta=1e4),
    }


def _by_layer_type(data: JsonObject) -> tuple[JsonObject, JsonObject]:
    """Return `data` with the rope settings of full layers, and with those of layers with a window."""
    nested = data.get("rope_parameters") or {}
    unexpected = [key for key, value in nested.items() if value is not None and key not in (_SLIDING, _FULL)]
    if unexpected:
        raise MarsError(f"rope_parameters has {unexpected[0]}: expected one entry per layer type.")
    # In the layout of transformers 4, rope_scaling applies only to layers with full attention.
    full = data | {"rope_parameters": nested.get(_FULL)}
    return full, data | {"rope_parameters": nested.get(_SLIDING), "rope_scaling": None}


def _write_gemma2(config: ModelConfig) -> JsonObject:
    scalar = config.query_scalar
    return _write_types(config) | {
        # The config class of transformers accepts only whole numbers.
        "query_pre_attn_scalar": int(scalar) if scalar == int(scalar) else scalar,
        "attn_logit_softcapping": config.attention_cap,
        "final_logit_softcapping": config.logit_cap,
    }


def _write_gemma3(config: ModelConfig) -> JsonObject:
    local = config.local_rope or config.rope
    return _write_gemma2(config) | {"rope_local_base_freq": local.theta}


def _read_ministral3(data: JsonObject) -> Fields:
    """Read Ministral 3's fields: YaRN, with queries that grow with the length of the text."""
    rope = read_rope(data, theta=1e6)
    growth = (data.get("rope_parameters") or data.get("rope_scaling") or {}).get("llama_4_scaling_beta")
    if growth is None:
        raise MarsError("rope_parameters has no llama_4_scaling_beta: use the original config.")
    if growth != rope.query_growth:
        raise MarsError(
            f"llama_4_scaling_beta is {growth} and the rope is not yarn: use the original config."
        )
    return _one_window(data) | {"rope": rope}


def _read_phi3(data: JsonObject) -> Fields:
    return _one_window(data) | {"rope": read_rope(data, fraction=1.0)}


def _write_phi3(config: ModelConfig) -> JsonObject:
    # The trained length is outside of rope_scaling.
    trained = config.rope.original_max_positions or config.max_positions
    return _write_mistral(config) | _write_glm(config) | {"original_max_position_embeddings": trained}


def _read_glm(data: JsonObject) -> Fields:
    """Read the fields of GLM-4 of 2024: neighbours are rotated, in half of each head."""
    rope = dataclasses.replace(read_rope(data, fraction=0.5), interleaved=True)
    return {"qkv_bias": bool(data["attention_bias"]), "rope": rope}


def _read_glm4(data: JsonObject) -> Fields:
    return _read_glm(data) | {"post_norms": True}


def _read_glm4_moe(data: JsonObject) -> Fields:
    """Read the fields of GLM-4.5 and later: half of each head is rotated, and the router is DeepSeek-V3's."""
    fields = {"rope": read_rope(data, fraction=0.5), "qkv_bias": bool(data["attention_bias"])}
    return _read_sigmoid_router(data) | fields | {"qk_norm": bool(data.get("use_qk_norm"))}


def _read_sigmoid_router(data: JsonObject) -> Fields:
    """Read the fields of DeepSeek-V3's experts (arXiv 2412.19437). The first layers have no experts."""
    size = count(data, "moe_intermediate_size", 0)
    return {
        "num_experts": data["n_routed_experts"],
        "experts_per_token": data["num_experts_per_tok"],
        "expert_size": size,
        "shared_expert_size": size * count(data, "n_shared_experts", 0),
        "sigmoid_router": True,
        "expert_groups": data["n_group"],
        "groups_per_token": data["topk_group"],
        "expert_multiplier": float(data["routed_scaling_factor"]),
        "normalize_experts": bool(data["norm_topk_prob"]),
        "dense_layers": tuple(range(min(data["first_k_dense_replace"], data["num_hidden_layers"]))),
    }


def _write_sigmoid_router(config: ModelConfig) -> JsonObject:
    size = config.expert_size or config.intermediate_size
    return _NO_PADDING | {
        "n_routed_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
        "moe_intermediate_size": size,
        "n_shared_experts": config.shared_expert_size // size,
        "n_group": config.expert_groups,
        "topk_group": config.groups_per_token,
        "routed_scaling_factor": config.expert_multiplier,
        "norm_topk_prob": config.normalize_experts,
        "first_k_dense_replace": len(config.dense_layers),
        "num_nextn_predict_layers": 0,  # an MTP module is not part of the model
    }


def _read_deepseek_v3(data: JsonObject) -> Fields:
    """Read the fields of DeepSeek-V3: latent attention and a sigmoid router."""
    if data["attention_bias"]:
        raise MarsError("attention_bias is true: latent attention with biases is not supported.")
    latent = Latent(
        rank=data["kv_lora_rank"],
        query_rank=data["q_lora_rank"] or 0,
        plain=data["qk_nope_head_dim"],
        rotary=data["qk_rope_head_dim"],
        value=data["v_head_dim"],
    )
    rope = dataclasses.replace(read_rope(data), interleaved=bool(data["rope_interleave"]))
    scaling = data.get("rope_parameters") or data.get("rope_scaling") or {}
    # YaRN multiplies the scores by the square of 0.1 * mscale_all_dim * log(factor) + 1.
    growth = 1 + 0.1 * (scaling.get("mscale_all_dim") or 0) * math.log(max(rope.factor, 1))
    return _read_sigmoid_router(data) | {
        "latent": latent,
        "rope": rope,
        "num_kv_heads": 1,
        "head_dim": latent.rank + latent.rotary,
        "query_scalar": (latent.plain + latent.rotary) / growth**4,
    }


def _write_deepseek_v3(config: ModelConfig) -> JsonObject:
    latent, scaling = config.latent, write_scaling(config.rope)
    if latent is None:
        raise MarsError("the family 'deepseek_v3' needs ModelConfig.latent: choose another family.")
    growth = ((latent.plain + latent.rotary) / (config.query_scalar or config.head_dim)) ** 0.25
    if scaling is not None and growth != 1 and config.rope.factor > 1:
        # Rounding to 12 digits recovers the setting that was read, without floating-point error.
        weight = (growth - 1) / (0.1 * math.log(config.rope.factor))
        scaling = scaling | {"mscale_all_dim": float(f"{weight:.12g}")}
    return _write_sigmoid_router(config) | {
        "kv_lora_rank": latent.rank,
        "q_lora_rank": latent.query_rank or None,
        "qk_nope_head_dim": latent.plain,
        "qk_rope_head_dim": latent.rotary,
        "v_head_dim": latent.value,
        "head_dim": latent.rotary,
        "num_key_value_heads": config.num_heads,
        "rope_interleave": config.rope.interleaved,
        "rope_scaling": scaling,
    }


def _write_glm4_moe(config: ModelConfig) -> JsonObject:
    return _write_glm(config) | _write_sigmoid_router(config) | {"use_qk_norm": config.qk_norm}


def _write_glm(config: ModelConfig) -> JsonObject:
    return _NO_PADDING | {"partial_rotary_factor": config.rope.fraction}


def _read_smollm3(data: JsonObject) -> Fields:
    """Read SmolLM3's fields: every fourth layer has no rotary embedding (arXiv 2501.18795)."""
    layers, interval = range(data["num_hidden_layers"]), count(data, "no_rope_layer_interval", 4)
    # A list has 0 for the layers without rotary embedding.
    rope_flags = data.get("no_rope_layers") or [(i + 1) % interval != 0 for i in layers]
    nope_layers = tuple(i for i in layers if not rope_flags[i])
    windows = _optional_windows(data, (i in nope_layers for i in layers))
    return _read_llama(data) | {"nope_layers": nope_layers, "windows": windows}


def _write_smollm3(config: ModelConfig) -> JsonObject:
    rope_flags = [int(i not in config.nope_layers) for i in range(config.num_layers)]
    return _NO_PADDING | _write_qwen(config) | {"no_rope_layers": rope_flags}


def _read_granite(data: JsonObject) -> Fields:
    """Read Granite's fields: the multipliers of muP (arXiv 2203.03466)."""
    fields = {field: float(value_or_default(data, key, 1.0)) for field, key in _MULTIPLIERS.items()}
    fields["query_scalar"] = value_or_default(data, "attention_multiplier", 1.0) ** -2
    return _read_llama(data) | fields


def _write_granite(config: ModelConfig) -> JsonObject:
    # 15 digits: the square root returns the multiplier that was read, without its rounding error.
    scale = float(f"{(config.query_scalar or config.head_dim) ** -0.5:.15g}")
    multipliers = {key: getattr(config, field) for field, key in _MULTIPLIERS.items()}
    return multipliers | {"attention_multiplier": scale}


def _read_olmo2(data: JsonObject) -> Fields:
    """Read OLMo 2's fields: norms only after attention and MLP, and over all heads of queries and keys."""
    return _biases(data) | {"pre_norms": False, "post_norms": True, "whole_qk_norm": True}


def _read_olmo3(data: JsonObject) -> Fields:
    """Read OLMo 3's fields: OLMo 2 with windows in three of four layers, whose rope is not scaled."""
    kinds = data.get("layer_types") or _types((i + 1) % 4 != 0 for i in range(data["num_hidden_layers"]))
    full, sliding = _by_layer_type(data)
    ropes = {"rope": read_rope(full, theta=5e5), "local_rope": read_rope(sliding, theta=5e5)}
    return _read_olmo2(data) | ropes | {"windows": _windows(kinds, data.get("sliding_window", 4096))}


def _write_olmo3(config: ModelConfig) -> JsonObject:
    full, local = config.rope, config.local_rope or config.rope
    # Without settings by layer type, transformers 5 ignores rope_theta in layers with a window.
    ropes = {
        _FULL: {"rope_type": "default", "rope_theta": full.theta} | (write_scaling(full) or {}),
        _SLIDING: {"rope_type": "default", "rope_theta": local.theta},
    }
    return _write_types(config) | {"rope_parameters": ropes}


def _read_gpt_oss(data: JsonObject) -> Fields:
    """Read gpt-oss's fields: sinks, a window in every second layer, and clamped experts."""
    if not (data.get("rope_parameters") or data.get("rope_scaling")):
        data = data | {"rope_scaling": _GPT_OSS_YARN}
    kinds = data.get("layer_types") or _types(i % 2 == 0 for i in range(data["num_hidden_layers"]))
    return _biases(data) | {
        "rope": read_rope(data, theta=150000.0),
        "attention_sinks": True,
        "windows": _windows(kinds, data["sliding_window"]),
        "num_experts": data["num_local_experts"],
        "experts_per_token": data["num_experts_per_tok"],
        "swiglu": (float(data["swiglu_alpha"]), float(data["swiglu_limit"])),
    }


def _write_gpt_oss(config: ModelConfig) -> JsonObject:
    alpha, limit = config.swiglu or (_GPT_OSS["swiglu_alpha"], _GPT_OSS["swiglu_limit"])
    return _write_types(config) | _write_mixtral(config) | {"swiglu_alpha": alpha, "swiglu_limit": limit}


# Defaults of transformers' config classes. The text_config of Gemma 3 with images omits most of them.
_GEMMA = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
_GEMMA_2 = {"max_position_embeddings": 8192, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
_GEMMA_3 = {"max_position_embeddings": 131072, "vocab_size": 262208, "num_attention_heads": 8}
_MIXTRAL = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
_QWEN2_MOE = {"num_key_value_heads": 16, "max_position_embeddings": 32768, "num_experts": 60}
_QWEN2_MOE |= {"num_experts_per_tok": 4, "moe_intermediate_size": 1408}
_QWEN2_MOE |= {"shared_expert_intermediate_size": 5632}
_QWEN3_MOE = {
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}
_QWEN3_NEXT = {"num_key_value_heads": 2, "max_position_embeddings": 32768, "num_experts": 512}
_QWEN3_NEXT |= {"num_experts_per_tok": 10, "moe_intermediate_size": 512, "norm_topk_prob": True}
_QWEN3_NEXT |= {"shared_expert_intermediate_size": 512}
_QWEN3_5_MOE = _QWEN3_NEXT | {"num_experts": 256, "num_experts_per_tok": 8, "intermediate_size": 512}
_QWEN3_5 = {"num_key_value_heads": 4, "max_position_embeddings": 32768}
_DELTA_SIZES = {
    "key_heads": ("linear_num_key_heads", 16),
    "value_heads": ("linear_num_value_heads", 32),
    "key_dim": ("linear_key_head_dim", 128),
    "value_dim": ("linear_value_head_dim", 128),
    "taps": ("linear_conv_kernel_dim", 4),
}
"""Key in config.json and default of each size in `Delta`."""
_MINISTRAL_3 = {"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5}
_MINISTRAL_3 |= {"max_position_embeddings": 262144}
_PHI_3 = {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 32000}
_GLM = {"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1.5625e-7, "attention_bias": True}
_GLM |= {"max_position_embeddings": 131072, "eos_token_id": [151329, 151336, 151338]}
_SIGMOID_ROUTER = {"num_experts_per_tok": 8, "n_shared_experts": 1, "norm_topk_prob": True}
_GLM_4_MOE = _SIGMOID_ROUTER | {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "attention_bias": False}
_GLM_4_MOE |= {"max_position_embeddings": 131072, "n_routed_experts": 128, "moe_intermediate_size": 1408}
_GLM_4_MOE |= {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "first_k_dense_replace": 1}
_DEEPSEEK_3 = _SIGMOID_ROUTER | {"max_position_embeddings": 4096, "bos_token_id": 0, "eos_token_id": 1}
_DEEPSEEK_3 |= {"n_routed_experts": 256, "moe_intermediate_size": 2048, "n_group": 8, "topk_group": 4}
_DEEPSEEK_3 |= {"routed_scaling_factor": 2.5, "first_k_dense_replace": 3, "rope_interleave": True}
_DEEPSEEK_3 |= {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
_DEEPSEEK_3 |= {"v_head_dim": 128, "attention_bias": False}
_SMOLLM_3 = {"num_key_value_heads": 4, "max_position_embeddings": 32768, "rope_theta": 2e6}
_SMOLLM_3 |= {"tie_word_embeddings": True, "bos_token_id": 128000, "eos_token_id": 128001}
_OLMO = {"rms_norm_eps": 1e-5}
_GPT_OSS = {"num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5, "attention_bias": True}
_GPT_OSS |= {"max_position_embeddings": 131072, "sliding_window": 128, "num_local_experts": 128}
_GPT_OSS |= {"num_experts_per_tok": 4, "swiglu_alpha": 1.702, "swiglu_limit": 7.0}
_GPT_OSS_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_NO_PADDING: JsonObject = {"pad_token_id": None}
"""The default is a token of the published vocabulary, which a smaller one lacks."""
_MULTIPLIERS = {"embedding_multiplier": "embedding_multiplier", "residual_multiplier": "residual_multiplier"}
_MULTIPLIERS |= {"logit_divisor": "logits_scaling"}
"""Keys of Granite's multipliers by their fields."""

FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", _read_llama, lambda config: {}, {}),
    "mistral": Family("MistralForCausalLM", _read_mistral, _write_mistral, {}),
    "qwen2": Family("Qwen2ForCausalLM", _read_qwen2, _write_qwen, {}),
    "mimo": Family("MiMoForCausalLM", _read_qwen2, _write_qwen, {}),
    "qwen3": Family("Qwen3ForCausalLM", _read_qwen3, _write_qwen, {}),
    "mixtral": Family("MixtralForCausalLM", _read_mixtral, _write_mixtral, _MIXTRAL),
    "qwen2_moe": Family("Qwen2MoeForCausalLM", _read_qwen2_moe, _write_qwen2_moe, _QWEN2_MOE),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", _read_qwen3_moe, _write_qwen3_moe, _QWEN3_MOE),
    "qwen3_next": Family("Qwen3NextForCausalLM", _read_qwen3_next, _write_qwen3_next, _QWEN3_NEXT),
    "qwen3_5_text": Family("Qwen3_5ForCausalLM", _read_delta, _write_delta, _QWEN3_5),
    "qwen3_5_moe_text": Family("Qwen3_5MoeForCausalLM", _read_qwen3_next, _write_qwen3_next, _QWEN3_5_MOE),
    "ministral3": Family("Ministral3ForCausalLM", _read_ministral3, _write_mistral, _MINISTRAL_3),
    "phi3": Family("Phi3ForCausalLM", _read_phi3, _write_phi3, _PHI_3),
    "glm": Family("GlmForCausalLM", _read_glm, _write_glm, _GLM),
    "glm4": Family("Glm4ForCausalLM", _read_glm4, _write_glm, _GLM),
    "glm4_moe": Family("Glm4MoeForCausalLM", _read_glm4_moe, _write_glm4_moe, _GLM_4_MOE),
    "deepseek_v3": Family("DeepseekV3ForCausalLM", _read_deepseek_v3, _write_deepseek_v3, _DEEPSEEK_3),
    "smollm3": Family("SmolLM3ForCausalLM", _read_smollm3, _write_smollm3, _SMOLLM_3),
    "granite": Family("GraniteForCausalLM", _read_granite, _write_granite, {}),
    "olmo2": Family("Olmo2ForCausalLM", _read_olmo2, lambda config: {}, _OLMO),
    "olmo3": Family("Olmo3ForCausalLM", _read_olmo3, _write_olmo3, _OLMO),
    "gpt_oss": Family("GptOssForCausalLM", _read_gpt_oss, _write_gpt_oss, _GPT_OSS),
    "gemma2": Family(
        "Gemma2ForCausalLM", _read_gemma2, _write_gemma2, _GEMMA | _GEMMA_2, activation="hidden_activation"
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM", _read_gemma3, _write_gemma3, _GEMMA | _GEMMA_3, activation="hidden_activation"
    ),
}
"""Supported families by their `model_type`."""


_TEXT_MODELS = {"gemma3": "gemma3_text", "mistral3": "mistral", "qwen3_5": "qwen3_5_text"}
_TEXT_MODELS |= {"qwen3_5_moe": "qwen3_5_moe_text"}
WITH_IMAGES = ("gemma3_text", "ministral3", "mistral", "qwen3_5_text", "qwen3_5_moe_text")
"""Families of text models whose checkpoints may also have a vision model."""


def text_part(data: JsonObject) -> Fields:
    """Return the config of a checkpoint's text model: `text_config` of a model with images, otherwise all of `data`.

    >>> text_part({"model_type": "gemma3", "eos_token_id": [1, 106], "text_config": {"eos_token_id": 1}})
    {'eos_token_id': [1, 106], 'model_type': 'gemma3_text', 'architectures': None}
    """
    text_model, text = _TEXT_MODELS.get(data.get("model_type", "")), data.get("text_config")
    if text_model is None or not isinstance(text, dict):
        return data
    outer = {key: value for key, value in data.items() if key != "text_config"}
    family = text.get("model_type", text_model)
    # The outer stop tokens belong to the model; those in text_config are only defaults of its config class.
    # transformers writes the outer `tie_word_embeddings` even where only the text model's own value counts.
    tied = {key: text[key] for key in ("tie_word_embeddings",) if key in text}
    # Without `architectures`, which name the whole model, the text model's type decides.
    return text | outer | tied | {"model_type": family, "architectures": None}
