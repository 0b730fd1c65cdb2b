"""Readers and writers of the config.json fields that only some Hugging Face architectures have.

Tested against the config classes of transformers 5.
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
"""Layer types: sliding-window attention, full attention, and gated DeltaNet (recurrent)."""


class Part(NamedTuple):
    """A pair of functions: `read` reads a few fields from config.json, and `write` returns the keys that store them."""

    read: Callable[[JsonObject], Fields] = lambda data: {}
    write: Callable[[ModelConfig], JsonObject] = lambda config: {}


class Family(NamedTuple):
    """Readers, writers and defaults of the fields that are specific to one architecture."""

    architecture: str
    parts: tuple[Part, ...]
    defaults: JsonObject  # values of keys that config.json may omit
    activation: str = "hidden_act"  # key in config.json of the activation function's name

    def read(self, data: JsonObject) -> Fields:
        """Read the fields from a config.json. If two parts read the same field, the later part takes precedence."""
        return {field: value for part in self.parts for field, value in part.read(data).items()}

    def write(self, config: ModelConfig) -> JsonObject:
        """Return the keys of config.json that store the fields of a config; the inverse of `read`."""
        return {key: value for part in self.parts for key, value in part.write(config).items()}


def _fixed(**fields: bool) -> Part:
    """Return a part whose fields are the same in all checkpoints of a family."""
    return Part(lambda data: fields)


def _keys(**keys: str) -> Part:
    """Return a part that copies each field from the given key of config.json."""
    return Part(
        lambda data: {field: _converted(field, data.get(key)) for field, key in keys.items()},
        lambda config: {key: getattr(config, field) for field, key in keys.items()},
    )


def _converted(field: str, value: Any) -> Any:
    """Convert a value of config.json to the type of a field: JSON may use 1 for 1.0, and null for false."""
    default = getattr(ModelConfig, field)
    if isinstance(default, bool):
        return bool(value)
    if isinstance(default, int) or (default is None and value is None):
        return value
    return default if value is None else float(value)


def _rope(fraction: float, *, interleaved: bool = False) -> Part:
    """Return the part for a rotary embedding that by default rotates this fraction of each head."""
    return Part(
        lambda data: {
            "rope": dataclasses.replace(read_rope(data, fraction=fraction), interleaved=interleaved)
        },
        lambda config: {"partial_rotary_factor": config.rope.fraction},
    )


def _windows(kinds: Sequence[str], window: int | None) -> tuple[int | None, ...]:
    if unknown := sorted(set(kinds) - {_SLIDING, _FULL}):
        raise MarsError(f"layer type '{unknown[0]}' is not supported: expected one of {_FULL}, {_SLIDING}.")
    if window is None and _SLIDING in kinds:
        raise MarsError(f"layer_types name {_SLIDING} and sliding_window is null: set its size.")
    return tuple(window if kind == _SLIDING else None for kind in kinds)


def _types(has_window: Iterable[bool]) -> list[str]:
    """Return the type of each layer, given whether it has a window."""
    return [_SLIDING if flag else _FULL for flag in has_window]


def _read_window(data: JsonObject) -> Fields:
    return {"windows": (data.get("sliding_window"),) * data["num_hidden_layers"]}


def _write_window(config: ModelConfig) -> JsonObject:
    """Write the largest window, or null if no layer has one.

    config.json can store only one size. `hub.save` refuses configs with several sizes, which would not survive a round
    trip.
    """
    return {"sliding_window": max((window for window in config.windows if window is not None), default=None)}


def _write_types(config: ModelConfig) -> JsonObject:
    return _write_window(config) | {"layer_types": _types(window is not None for window in config.windows)}


def _optional_windows(data: JsonObject, has_window: Iterable[bool]) -> Fields:
    """Read each layer's window if `use_sliding_window` is set. `has_window` is used if `layer_types` is absent."""
    window = data.get("sliding_window")
    if not data.get("use_sliding_window") or window is None:
        return {"windows": (None,) * data["num_hidden_layers"]}
    return {"windows": _windows(data.get("layer_types") or _types(has_window), window)}


def _read_qwen_windows(data: JsonObject) -> Fields:
    # As in transformers: without `layer_types`, layers from `max_window_layers` on have a window.
    first = data.get("max_window_layers", 28)
    return _optional_windows(data, (i >= first for i in range(data["num_hidden_layers"])))


def _read_qwen2_moe_windows(data: JsonObject) -> Fields:
    # As in transformers: without `layer_types`, every second layer before `max_window_layers` has a window.
    first, layers = data.get("max_window_layers", 28), range(data["num_hidden_layers"])
    return _optional_windows(data, (i % 2 == 0 and i < first for i in layers))


def _write_qwen_windows(config: ModelConfig) -> JsonObject:
    return _write_types(config) | {"use_sliding_window": any(config.windows)}


def _read_qwen3_moe_window(data: JsonObject) -> Fields:
    if not data.get("use_sliding_window"):
        return {}
    return _read_window(data)


def _read_qwen_experts(data: JsonObject) -> Fields:
    """Read Qwen's expert settings. Both `decoder_sparse_step` and `mlp_only_layers` select layers without experts."""
    step, mlp_only = count(data, "decoder_sparse_step", 1), data.get("mlp_only_layers") or ()
    # `decoder_sparse_step` counts layers from 1, `mlp_only_layers` from 0.
    dense = tuple(i for i in range(data["num_hidden_layers"]) if (i + 1) % step or i in mlp_only)
    experts = data.get("num_local_experts", data["num_experts"])  # transformers 5, or else 4
    return {"num_experts": experts, "expert_size": data["moe_intermediate_size"], "dense_layers": dense}


def _write_qwen_experts(config: ModelConfig) -> JsonObject:
    return _write_window(config) | {
        "use_sliding_window": any(config.windows),
        "num_experts": config.num_experts,
        "moe_intermediate_size": config.expert_size or config.intermediate_size,
        # Write a step of 1, which excludes no layer, because `mlp_only_layers` already lists all dense layers.
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(config.dense_layers),
    }


def _read_delta(data: JsonObject) -> Fields:
    """Read the fields that Qwen3-Next and Qwen3.5 share. By default, three of every four layers use gated DeltaNet."""
    layers, every = range(data["num_hidden_layers"]), count(data, "full_attention_interval", 4)
    kinds = data.get("layer_types") or [_FULL if (i + 1) % every == 0 else _LINEAR for i in layers]
    if unknown := sorted(set(kinds) - {_FULL, _LINEAR}):
        raise MarsError(f"layer type '{unknown[0]}' is not supported: expected {_FULL} or {_LINEAR}.")
    if len(kinds) != len(layers):
        raise MarsError(f"layer_types has {len(kinds)} entries for {len(layers)} layers: give one for each.")
    sizes = {field: count(data, key, default) for field, (key, default) in _DELTA_SIZES.items()}
    linear = tuple(i for i in layers if kinds[i] == _LINEAR)
    delta = Delta(layers=linear, **sizes) if linear else None
    return {"head_dim": count(data, "head_dim", 256), "delta": delta}


def _write_delta(config: ModelConfig) -> JsonObject:
    delta = config.delta
    linear, sizes = (), {}
    if delta is not None:
        linear = delta.layers
        sizes = {key: getattr(delta, field) for field, (key, _) in _DELTA_SIZES.items()}
    return sizes | {"layer_types": [_LINEAR if i in linear else _FULL for i in range(config.num_layers)]}


def _read_gemma(data: JsonObject, every: int) -> Fields:
    """Read the fields that Gemma 2 and 3 share. Every `every`-th layer has full attention; all others have a window."""
    if data.get("use_bidirectional_attention"):
        raise MarsError("use_bidirectional_attention is not supported: only causal models are.")
    layers, scalar = range(data["num_hidden_layers"]), float(data["query_pre_attn_scalar"])
    kinds = data.get("layer_types") or _types((i + 1) % every != 0 for i in layers)
    if not 0 < scalar < math.inf:  # in a ModelConfig, 0 stands for the head size
        raise MarsError(f"query_pre_attn_scalar is {scalar}: it must be positive.")
    windows, multiplier = _windows(kinds, data.get("sliding_window")), data["hidden_size"] ** 0.5
    return {"windows": windows, "embedding_multiplier": multiplier, "query_scalar": scalar}


def _write_gemma(config: ModelConfig) -> JsonObject:
    scalar = config.query_scalar
    if scalar == int(scalar):
        scalar = int(scalar)  # the config class of transformers accepts only whole numbers
    return _write_types(config) | {"query_pre_attn_scalar": scalar}


def _read_gemma3(data: JsonObject) -> Fields:
    """Read Gemma 3's fields.

    transformers 5 writes the RoPE settings of each layer type; transformers 4 writes `rope_local_base_freq`.
    """
    if data.get("attn_logit_softcapping") is not None:
        raise MarsError("attn_logit_softcapping has no effect in Gemma 3: set it to null.")
    full, sliding = _by_layer_type(data)
    pattern = count(data, "sliding_window_pattern", count(data, "_sliding_window_pattern", 6))
    return _read_gemma(data, pattern) | {
        "rope": read_rope(full, theta=1e6),
        "local_rope": read_rope(sliding, base="rope_local_base_freq", theta=1e4),
    }


def _write_gemma3(config: ModelConfig) -> JsonObject:
    local = config.local_rope or config.rope
    return _write_gemma(config) | {"rope_local_base_freq": local.theta}


def _by_layer_type(data: JsonObject) -> tuple[JsonObject, JsonObject]:
    """Return `data` twice: with the rope settings of full-attention layers, and with those of sliding-window layers."""
    nested = data.get("rope_parameters") or {}
    unexpected = [key for key, value in nested.items() if value is not None and key not in (_SLIDING, _FULL)]
    if unexpected:
        raise MarsError(f"rope_parameters has {unexpected[0]}: expected one entry per layer type.")
    # In the layout of transformers 4, rope_scaling applies only to layers with full attention.
    full = data | {"rope_parameters": nested.get(_FULL)}
    return full, data | {"rope_parameters": nested.get(_SLIDING), "rope_scaling": None}


def _read_growing_queries(data: JsonObject) -> Fields:
    """Read Ministral 3's rope: YaRN, with queries that are scaled up at later positions."""
    rope = read_rope(data, theta=1e6)
    growth = (data.get("rope_parameters") or data.get("rope_scaling") or {}).get("llama_4_scaling_beta")
    if growth is None:
        raise MarsError("rope_parameters has no llama_4_scaling_beta: use the original config.")
    if growth != rope.query_growth:
        raise MarsError(
            f"llama_4_scaling_beta is {growth} and the rope is not yarn: use the original config."
        )
    return {"rope": rope}


def _write_trained_length(config: ModelConfig) -> JsonObject:
    # Phi-3 stores the original context length outside rope_scaling.
    return {"original_max_position_embeddings": config.rope.original_max_positions or config.max_positions}


def _read_shared_experts(data: JsonObject) -> Fields:
    """Read the sizes of DeepSeek-V3's experts. The first `first_k_dense_replace` layers have no experts."""
    size = count(data, "moe_intermediate_size", 0)
    return {
        "expert_size": size,
        "shared_expert_size": size * count(data, "n_shared_experts", 0),
        "dense_layers": tuple(range(min(data["first_k_dense_replace"], data["num_hidden_layers"]))),
    }


def _write_shared_experts(config: ModelConfig) -> JsonObject:
    size = config.expert_size or config.intermediate_size
    return {
        "moe_intermediate_size": size,
        "n_shared_experts": config.shared_expert_size // size,
        "first_k_dense_replace": len(config.dense_layers),
        "num_nextn_predict_layers": 0,  # an MTP module is not saved with the model
    }


def _read_latent(data: JsonObject) -> Fields:
    """Read the fields of DeepSeek-V3's latent attention."""
    if data["attention_bias"]:
        raise MarsError("attention_bias is true: latent attention with biases is not supported.")
    sizes = {field: data[key] for field, key in _LATENT_SIZES.items()}
    latent = Latent(query_rank=data["q_lora_rank"] or 0, **sizes)
    rope = dataclasses.replace(read_rope(data), interleaved=bool(data["rope_interleave"]))
    scaling = data.get("rope_parameters") or data.get("rope_scaling") or {}
    # DeepSeek's YaRN multiplies the scores by (0.1 * mscale_all_dim * log(factor) + 1) ** 2.
    growth = 1 + 0.1 * (scaling.get("mscale_all_dim") or 0) * math.log(max(rope.factor, 1))
    return {
        "latent": latent,
        "rope": rope,
        "num_kv_heads": 1,
        "head_dim": latent.rank + latent.rotary,
        "query_scalar": (latent.plain + latent.rotary) / growth**4,
    }


def _write_latent(config: ModelConfig) -> JsonObject:
    latent, scaling = config.latent, write_scaling(config.rope)
    if latent is None:
        raise MarsError("the family 'deepseek_v3' needs ModelConfig.latent: choose another family.")
    growth = ((latent.plain + latent.rotary) / (config.query_scalar or config.head_dim)) ** 0.25
    if scaling is not None and growth != 1 and config.rope.factor > 1:
        # Rounding to 12 digits recovers the setting that was read, without floating-point error.
        weight = (growth - 1) / (0.1 * math.log(config.rope.factor))
        scaling = scaling | {"mscale_all_dim": float(f"{weight:.12g}")}
    return {key: getattr(latent, field) for field, key in _LATENT_SIZES.items()} | {
        "q_lora_rank": latent.query_rank or None,
        "head_dim": latent.rotary,
        "num_key_value_heads": config.num_heads,
        "rope_interleave": config.rope.interleaved,
        "rope_scaling": scaling,
    }


def _read_nope_layers(data: JsonObject) -> Fields:
    """Read the fields of SmolLM3, in which every fourth layer has no rotary embedding by default (arXiv 2501.18795)."""
    layers, interval = range(data["num_hidden_layers"]), count(data, "no_rope_layer_interval", 4)
    # `no_rope_layers` has a 0 for each layer without rotary embedding.
    rope_flags = data.get("no_rope_layers") or [(i + 1) % interval != 0 for i in layers]
    nope_layers = tuple(i for i in layers if not rope_flags[i])
    return {"nope_layers": nope_layers} | _optional_windows(data, (i in nope_layers for i in layers))


def _write_nope_layers(config: ModelConfig) -> JsonObject:
    rope_flags = [int(i not in config.nope_layers) for i in range(config.num_layers)]
    return _write_qwen_windows(config) | {"no_rope_layers": rope_flags}


def _read_attention_multiplier(data: JsonObject) -> Fields:
    return {"query_scalar": value_or_default(data, "attention_multiplier", 1.0) ** -2}


def _write_attention_multiplier(config: ModelConfig) -> JsonObject:
    # Rounding to 15 digits removes the error of the square root and so recovers the multiplier that was read.
    return {"attention_multiplier": float(f"{(config.query_scalar or config.head_dim) ** -0.5:.15g}")}


def _read_olmo3(data: JsonObject) -> Fields:
    """Read the fields of OLMo 3, which is OLMo 2 with a window and an unscaled rope in three of every four layers."""
    kinds = data.get("layer_types") or _types((i + 1) % 4 != 0 for i in range(data["num_hidden_layers"]))
    full, sliding = _by_layer_type(data)
    ropes = {"rope": read_rope(full, theta=5e5), "local_rope": read_rope(sliding, theta=5e5)}
    return ropes | {"windows": _windows(kinds, data.get("sliding_window", 4096))}


def _write_olmo3(config: ModelConfig) -> JsonObject:
    full, local = config.rope, config.local_rope or config.rope
    # Write separate settings for each layer type. Otherwise, transformers 5 ignores rope_theta in sliding-window
    # layers.
    ropes = {
        _FULL: {"rope_type": "default", "rope_theta": full.theta} | (write_scaling(full) or {}),
        _SLIDING: {"rope_type": "default", "rope_theta": local.theta},
    }
    return _write_types(config) | {"rope_parameters": ropes}


def _read_gpt_oss(data: JsonObject) -> Fields:
    """Read the fields of gpt-oss, which has a window in every second layer, and experts with clamped activations."""
    if not (data.get("rope_parameters") or data.get("rope_scaling")):
        data = data | {"rope_scaling": _GPT_OSS_YARN}
    kinds = data.get("layer_types") or _types(i % 2 == 0 for i in range(data["num_hidden_layers"]))
    return {
        "rope": read_rope(data, theta=150000.0),
        "windows": _windows(kinds, data["sliding_window"]),
        "swiglu": (float(data["swiglu_alpha"]), float(data["swiglu_limit"])),
    }


def _write_gpt_oss(config: ModelConfig) -> JsonObject:
    alpha, limit = config.swiglu or (_GPT_OSS["swiglu_alpha"], _GPT_OSS["swiglu_limit"])
    return _write_types(config) | {"swiglu_alpha": alpha, "swiglu_limit": limit}


# Defaults of transformers' config classes. The text_config of Gemma 3 with images omits most of them.
_GEMMA = {"num_key_value_heads": 4, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh"}
_GEMMA |= {"tie_word_embeddings": True, "query_pre_attn_scalar": 256, "sliding_window": 4096}
_GEMMA |= {"bos_token_id": 2, "eos_token_id": 1}
_MISTRAL = {"num_key_value_heads": 8, "sliding_window": 4096}
_GEMMA_2 = {"max_position_embeddings": 8192, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
_GEMMA_3 = {"max_position_embeddings": 131072, "vocab_size": 262208, "num_attention_heads": 8}
_MIXTRAL = {"num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5}
_MIXTRAL |= {"rope_theta": 1e6, "num_local_experts": 8, "num_experts_per_tok": 2}
_QWEN2_MOE = {"num_key_value_heads": 16, "max_position_embeddings": 32768, "num_experts": 60}
_QWEN2_MOE |= {"num_experts_per_tok": 4, "moe_intermediate_size": 1408}
_QWEN2_MOE |= {"shared_expert_intermediate_size": 5632, "qkv_bias": True}
_QWEN3_MOE = {"num_key_value_heads": 4, "max_position_embeddings": 32768, "num_experts": 128}
_QWEN3_MOE |= {"num_experts_per_tok": 8, "moe_intermediate_size": 768}
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
"""config.json key and default value of each size in `Delta`."""
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
_LATENT_SIZES = {"rank": "kv_lora_rank", "plain": "qk_nope_head_dim", "rotary": "qk_rope_head_dim"}
_LATENT_SIZES |= {"value": "v_head_dim"}
"""config.json key of each size in `Latent` except `query_rank`."""
_SMOLLM_3 = {"num_key_value_heads": 4, "max_position_embeddings": 32768, "rope_theta": 2e6}
_SMOLLM_3 |= {"tie_word_embeddings": True, "bos_token_id": 128000, "eos_token_id": 128001}
_GRANITE = {"embedding_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0}
_GRANITE |= {"attention_multiplier": 1.0}
_OLMO = {"rms_norm_eps": 1e-5}
_GPT_OSS = {"num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5, "attention_bias": True}
_GPT_OSS |= {"max_position_embeddings": 131072, "sliding_window": 128, "num_local_experts": 128}
_GPT_OSS |= {"num_experts_per_tok": 4, "swiglu_alpha": 1.702, "swiglu_limit": 7.0}
_GPT_OSS_YARN = {"rope_type": "yarn", "factor": 32.0, "truncate": False}
_GPT_OSS_YARN |= {"original_max_position_embeddings": 4096}

_BIASES = _keys(o_bias="attention_bias", qkv_bias="attention_bias")
_QKV_BIAS = _keys(qkv_bias="attention_bias")
_WINDOW = Part(_read_window, _write_window)
_QWEN_WINDOWS = Part(_read_qwen_windows, _write_qwen_windows)
_QWEN2_MOE_WINDOWS = Part(_read_qwen2_moe_windows, _write_qwen_windows)
_ROUTED = _keys(experts_per_token="num_experts_per_tok", normalize_experts="norm_topk_prob")
_LOCAL_EXPERTS = _keys(num_experts="num_local_experts", experts_per_token="num_experts_per_tok")
_SHARED_EXPERT = _keys(shared_expert_size="shared_expert_intermediate_size")
_NO_PADDING = Part(write=lambda config: {"pad_token_id": None})
"""Part that writes no padding token, because transformers' default id does not exist in smaller vocabularies."""
# The multipliers of muP (arXiv 2203.03466).
_MULTIPLIERS = _keys(embedding_multiplier="embedding_multiplier", residual_multiplier="residual_multiplier")
_LOGIT_DIVISOR = _keys(logit_divisor="logits_scaling")
_ATTENTION_MULTIPLIER = Part(_read_attention_multiplier, _write_attention_multiplier)
_CAPS = _keys(attention_cap="attn_logit_softcapping", logit_cap="final_logit_softcapping")

_LLAMA_PARTS = (_BIASES, _keys(mlp_bias="mlp_bias"))
_QWEN2_PARTS = (_fixed(qkv_bias=True), _QWEN_WINDOWS)
_QWEN3_PARTS = (_BIASES, _fixed(qk_norm=True))
_QWEN3_WIDTH = Part(lambda data: {"head_dim": count(data, "head_dim", 128)})
_QWEN_EXPERTS = (_ROUTED, Part(_read_qwen_experts, _write_qwen_experts))
_QWEN2_MOE_PARTS = (_keys(qkv_bias="qkv_bias"), *_QWEN_EXPERTS, _SHARED_EXPERT, _QWEN2_MOE_WINDOWS)
_QWEN3_MOE_PARTS = (*_QWEN3_PARTS, *_QWEN_EXPERTS, Part(_read_qwen3_moe_window))
_GATED = _fixed(norm_plus_one=True, attention_gate=True)
_DELTA_PARTS = (*_QWEN3_PARTS, _GATED, _rope(0.25), Part(_read_delta, _write_delta))
_DELTA_MOE_PARTS = (*_QWEN_EXPERTS, _SHARED_EXPERT, *_DELTA_PARTS)
_PHI_PARTS = (_WINDOW, _rope(1.0), Part(write=_write_trained_length), _NO_PADDING)
# GLM-4 rotates pairs of adjacent dimensions, in half of each head.
_GLM_PARTS = (_QKV_BIAS, _rope(0.5, interleaved=True), _NO_PADDING)
# DeepSeek-V3's experts and router (arXiv 2412.19437).
_SIGMOID_ROUTED = (
    _fixed(sigmoid_router=True),
    _ROUTED,
    _keys(num_experts="n_routed_experts", expert_multiplier="routed_scaling_factor"),
    _keys(expert_groups="n_group", groups_per_token="topk_group"),
    Part(_read_shared_experts, _write_shared_experts),
    _NO_PADDING,
)
_GLM_MOE_PARTS = (*_SIGMOID_ROUTED, _QKV_BIAS, _keys(qk_norm="use_qk_norm"), _rope(0.5))
_DEEPSEEK_PARTS = (*_SIGMOID_ROUTED, Part(_read_latent, _write_latent))
_SMOLLM_PARTS = (*_LLAMA_PARTS, Part(_read_nope_layers, _write_nope_layers), _NO_PADDING)
_GRANITE_PARTS = (*_LLAMA_PARTS, _MULTIPLIERS, _LOGIT_DIVISOR, _ATTENTION_MULTIPLIER)
# OLMo 2 has norms only after attention and MLP, and its query and key norms span all heads.
_OLMO_PARTS = (_BIASES, _fixed(pre_norms=False, post_norms=True, whole_qk_norm=True))
_SINKS = _fixed(attention_sinks=True)
_GPT_OSS_PARTS = (_BIASES, _SINKS, _LOCAL_EXPERTS, Part(_read_gpt_oss, _write_gpt_oss))
_GEMMA_PARTS = (_BIASES, _fixed(norm_plus_one=True, post_norms=True), _CAPS)
_GEMMA_2_PARTS = (*_GEMMA_PARTS, Part(lambda data: _read_gemma(data, 2), _write_gemma))
_GEMMA_3_PARTS = (*_GEMMA_PARTS, _fixed(qk_norm=True), Part(_read_gemma3, _write_gemma3))

FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", _LLAMA_PARTS, {}),
    "mistral": Family("MistralForCausalLM", (_WINDOW,), _MISTRAL),
    "qwen2": Family("Qwen2ForCausalLM", _QWEN2_PARTS, {}),
    "mimo": Family("MiMoForCausalLM", _QWEN2_PARTS, {}),
    "qwen3": Family("Qwen3ForCausalLM", (*_QWEN3_PARTS, _QWEN_WINDOWS, _QWEN3_WIDTH), {}),
    "mixtral": Family("MixtralForCausalLM", (_WINDOW, _LOCAL_EXPERTS), _MIXTRAL),
    "qwen2_moe": Family("Qwen2MoeForCausalLM", _QWEN2_MOE_PARTS, _QWEN2_MOE),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", _QWEN3_MOE_PARTS, _QWEN3_MOE),
    "qwen3_next": Family("Qwen3NextForCausalLM", _DELTA_MOE_PARTS, _QWEN3_NEXT),
    "qwen3_5_text": Family("Qwen3_5ForCausalLM", _DELTA_PARTS, _QWEN3_5),
    "qwen3_5_moe_text": Family("Qwen3_5MoeForCausalLM", _DELTA_MOE_PARTS, _QWEN3_5_MOE),
    "ministral3": Family("Ministral3ForCausalLM", (_WINDOW, Part(_read_growing_queries)), _MINISTRAL_3),
    "phi3": Family("Phi3ForCausalLM", _PHI_PARTS, _PHI_3),
    "glm": Family("GlmForCausalLM", _GLM_PARTS, _GLM),
    "glm4": Family("Glm4ForCausalLM", (*_GLM_PARTS, _fixed(post_norms=True)), _GLM),
    "glm4_moe": Family("Glm4MoeForCausalLM", _GLM_MOE_PARTS, _GLM_4_MOE),
    "deepseek_v3": Family("DeepseekV3ForCausalLM", _DEEPSEEK_PARTS, _DEEPSEEK_3),
    "smollm3": Family("SmolLM3ForCausalLM", _SMOLLM_PARTS, _SMOLLM_3),
    "granite": Family("GraniteForCausalLM", _GRANITE_PARTS, _GRANITE),
    "olmo2": Family("Olmo2ForCausalLM", _OLMO_PARTS, _OLMO),
    "olmo3": Family("Olmo3ForCausalLM", (*_OLMO_PARTS, Part(_read_olmo3, _write_olmo3)), _OLMO),
    "gpt_oss": Family("GptOssForCausalLM", _GPT_OSS_PARTS, _GPT_OSS),
    "gemma2": Family("Gemma2ForCausalLM", _GEMMA_2_PARTS, _GEMMA | _GEMMA_2, "hidden_activation"),
    "gemma3_text": Family("Gemma3ForCausalLM", _GEMMA_3_PARTS, _GEMMA | _GEMMA_3, "hidden_activation"),
}
"""Supported families by their `model_type`."""


_TEXT_MODELS = {"gemma3": "gemma3_text", "mistral3": "mistral", "qwen3_5": "qwen3_5_text"}
_TEXT_MODELS |= {"qwen3_5_moe": "qwen3_5_moe_text"}
WITH_IMAGES = ("gemma3_text", "ministral3", "mistral", "qwen3_5_text", "qwen3_5_moe_text")
"""Families of text models whose checkpoints may also contain a vision model."""


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
    # The stop tokens at the top level belong to the model; those in text_config are only defaults of the text model's
    # config class. transformers writes a top-level `tie_word_embeddings` even if only the text model's value counts.
    tied = {key: text[key] for key in ("tie_word_embeddings",) if key in text}
    # Drop `architectures`, which describes the whole model, so that the text model's type selects the family.
    return text | outer | tied | {"model_type": family, "architectures": None}
