"""Conversion of the metadata of a GGUF file into the config.json of the same model on the Hugging Face hub.

Keys: ggml-org/ggml, docs/gguf.md. Tested against transformers reading the same files (tests/hub/test_gguf.py).
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from mars_jax.hub.config_json import from_json
from mars_jax.hub.gguf_file import GGUFFile
from mars_jax.hub.rope_config import read_rope, yarn_attention_factor
from mars_jax.hub.values import of_its_kind
from mars_jax.models.config import ModelConfig
from mars_jax.models.rope import frequencies
from mars_jax.utils.errors import MarsError, prefixed
from mars_jax.utils.types import JsonObject

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",  # also Mistral, with the same metadata, and Mixtral, which has experts
    "qwen2": "Qwen2ForCausalLM",  # also MiMo, without its MTP module
    "qwen2moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "mistral3": "Ministral3ForCausalLM",
    "phi3": "Phi3ForCausalLM",  # also Phi-4
    "chatglm": "GlmForCausalLM",  # the original GLM-4
    "glm4": "Glm4ForCausalLM",
    "glm4moe": "Glm4MoeForCausalLM",
    "qwen35": "Qwen3_5ForCausalLM",
    "qwen35moe": "Qwen3_5MoeForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "olmo2": "Olmo2ForCausalLM",  # also OLMo 3, which has windows
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
}
_STOPS = ("eos", "eot", "eom")
"""Metadata names of the tokens that end a text, a turn and a message."""
_27B = {"gemma2": 46, "gemma3": 62}
"""Number of layers of the 27B models, by architecture. In these models, `query_pre_attn_scalar` is hidden size / heads,
which no metadata key records."""
_WINDOW_PERIOD = {"gemma2": 2, "gemma3": 6, "gpt-oss": 2, "olmo2": 4}
"""Period of the layers without a sliding window, as in llama.cpp and `hub.families`."""
_GATING = {"glm4moe": 2, "gpt-oss": 3}
"""llama.cpp's gating functions: 2 is sigmoid, 3 is softmax over the chosen experts. Default: 1, softmax over all
experts."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "rope.dimension_sections": (0,),  # rotary sections for positions in images
    "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_beta_fast": (32,),
    "rope.scaling.yarn_beta_slow": (1,),
    "rope.scaling.yarn_ext_factor": (1, -1),
    "rope.scaling.yarn_log_multiplier": (0,),
}
"""Values of metadata keys that leave the forward pass unchanged. Other values of these keys are not supported.

`_neutral` adds keys whose neutral values depend on the model. Source: `llama_model::load_hparams` of llama.cpp.
llama.cpp reads other keys, such as Granite's `residual_scale`, only for some architectures; `_FAMILIES` converts those.
"""


def read_gguf_config(file: GGUFFile) -> tuple[ModelConfig, str | None]:
    """Read a GGUF file's config, and the dtype of its matrices: None if they are quantised or have several dtypes.

    Raises:
      MarsError: the architecture is not supported, or metadata is absent or inconsistent.
    """
    if file.architecture not in ARCHITECTURES:
        supported = ", ".join(ARCHITECTURES)
        raise MarsError(
            f"'{file.path}' has architecture '{file.architecture}': expected one of {supported}. Load other families "
            "in the Hugging Face layout."
        )
    with prefixed(f"'{file.path}'"), of_its_kind("it holds metadata", "download it again"):
        config = from_json(gguf_to_json(file))
        _check_forward(file, config)
    kinds = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}
    if packs_experts(file):
        return config, "bfloat16"  # the dtype of gpt-oss on the hub
    # llama.cpp keeps vectors, routers, convolutions and the biases of experts in float32 in files of any type.
    matrices = {
        tensor.kind.name
        for name, tensor in file.tensors.items()
        if len(tensor.shape) > 1
        and not name.endswith((".ffn_gate_inp.weight", ".ssm_conv1d.weight", ".bias"))
    }
    if len(matrices) != 1:
        return config, None
    return config, kinds.get(matrices.pop())


def packs_experts(file: GGUFFile) -> bool:
    """Return whether a file has experts in MXFP4 that can be loaded as `models.quantize.Mxfp4`."""
    return file.architecture == "gpt-oss" and any(t.kind.name == "MXFP4" for t in file.tensors.values())


def gguf_to_json(file: GGUFFile) -> JsonObject:
    """Return the contents of config.json that can be derived from a GGUF file."""
    embed = file.tensors.get("token_embd.weight")
    if embed is None:
        raise MarsError("it has no tensor token_embd.weight: download it again.")
    hidden, heads = _number(file, "embedding_length"), _number(file, "attention.head_count")
    head_dim = _number(file, "attention.key_length")
    # As in llama.cpp, derive the head size if a file has no `attention.key_length`.
    if head_dim is None and hidden and heads:
        head_dim = hidden // heads
    # `block_count` includes the blocks of MTP modules.
    layers = _number(file, "block_count")
    if layers is not None:
        layers -= file.of_model("nextn_predict_layers", 0)
    stops = [file.get(f"tokenizer.ggml.{name}_token_id") for name in _STOPS]
    config_json = {
        "architectures": [ARCHITECTURES[file.architecture]],
        "vocab_size": embed.shape[0],
        "hidden_size": hidden,
        "intermediate_size": _number(file, "feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": _number(file, "attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": file.of_model("context_length"),
        "rms_norm_eps": _decimal(file.of_model("attention.layer_norm_rms_epsilon")),
        "rope_theta": _decimal(file.of_model("rope.freq_base")),
        "rope_scaling": _scaling(file),
        # The metadata does not record whether embeddings are tied or layers have biases, so look for the tensors.
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": not file.tensors.keys().isdisjoint(("blk.0.attn_q.bias", "blk.0.attn_qkv.bias")),
        "bos_token_id": file.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": list(dict.fromkeys(stop for stop in stops if stop is not None)),
    }
    if experts := file.of_model("expert_count"):
        config_json |= {
            # The number of experts has one key in Qwen, another in Mixtral and gpt-oss, and a third in GLM-4.5.
            **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), experts),
            "num_experts_per_tok": file.of_model("expert_used_count"),
            "moe_intermediate_size": file.of_model("expert_feed_forward_length"),
        }
    if file.architecture in _FAMILIES:
        config_json |= _FAMILIES[file.architecture](file, config_json)
    return {key: value for key, value in config_json.items() if value is not None}


def _check_forward(file: GGUFFile, config: ModelConfig) -> None:
    """Raise MarsError if the metadata describes a forward pass that differs from the config's."""
    for key, neutral in _neutral(file, config).items():
        value = file.of_model(key)
        if value is not None and not _is_neutral(value, neutral):
            raise MarsError(
                f"{file.architecture}.{key} is {reprlib.repr(value)}, and only {neutral[0]!r} is supported in GGUF "
                "files: load the checkpoint in the Hugging Face layout if its architecture is supported."
            )


def _neutral(file: GGUFFile, config: ModelConfig) -> dict[str, tuple[Any, ...]]:
    """Return, for each key, the values that leave the config's forward pass unchanged."""
    width, rotated = (config.head_dim,), (int(config.head_dim * config.rope.fraction),)
    window = next(filter(None, config.windows), 0)
    neutral = _NEUTRAL | {
        "expert_count": (config.num_experts,),
        "expert_used_count": (config.experts_per_token,),
        "attention.key_length_swa": width,
        # 0 selects llama.cpp's default.
        "attention.scale": ((config.query_scalar or config.head_dim) ** -0.5, 0),
        # A window at least as long as the context has no effect.
        "attention.sliding_window": (
            window,
            max(config.max_positions, _number(file, "attention.sliding_window") or 0),
        ),
        "attention.value_length": width,
        "attention.value_length_swa": width,
        "attn_logit_softcapping": (config.attention_cap or 0,),
        "final_logit_softcapping": (config.logit_cap or 0,),
        "rope.dimension_count": rotated,
        "rope.dimension_count_swa": rotated,
    }
    if config.num_experts:
        # 0 selects the architecture's own gating function.
        neutral["expert_gating_func"] = (_GATING.get(file.architecture, 1), 0)
        neutral["expert_group_count"] = (config.expert_groups, 0)
        neutral["expert_group_used_count"] = (config.groups_per_token, 0)
        neutral["expert_weights_norm"] = (config.normalize_experts,)
        neutral["expert_weights_scale"] = (config.expert_multiplier, 0)
    if config.delta is not None:
        is_recurrent = [i in config.delta.layers for i in range(config.num_layers)]
        neutral["attention.recurrent_layers"] = (is_recurrent,)
        del neutral["rope.dimension_sections"]  # text tokens have the same position in every section
    if config.rope.query_growth:
        # Ministral 3's mscale equals its mscale_all_dim, so its YaRN does not scale cos and sin.
        neutral["rope.scaling.yarn_log_multiplier"] = (1,)
    # With YaRN, the factor is part of the config (see `_scaling`).
    if config.rope.kind != "yarn":
        neutral["rope.scaling.attn_factor"] = (config.rope.attention_factor,)
    if window:
        layers = [size is not None for size in config.windows]
        # The pattern is either a period, or a list with one bool per layer.
        neutral["attention.sliding_window_pattern"] = (_WINDOW_PERIOD.get(file.architecture, 1), layers)
        neutral["rope.freq_base_swa"] = ((config.local_rope or config.rope).theta,)
    return neutral


def _is_neutral(value: Any, neutral: Sequence[Any]) -> bool:
    """Return whether a value, or every value in a per-layer list, is neutral up to float32 rounding."""
    if value in neutral:
        return True
    numbers = [number for number in neutral if not isinstance(number, list)]
    values = value
    if not isinstance(value, list):
        values = [value]
    return all(any(math.isclose(x, number, rel_tol=1e-6) for number in numbers) for x in values)


def _gemma(file: GGUFFile, data: JsonObject) -> JsonObject:
    query_scalar = data["head_dim"]
    if data["num_hidden_layers"] == _27B[file.architecture]:
        query_scalar = data["hidden_size"] / data["num_attention_heads"]
    return {
        "query_pre_attn_scalar": query_scalar,
        "sliding_window": file.of_model("attention.sliding_window"),
        "attn_logit_softcapping": _decimal(file.of_model("attn_logit_softcapping") or None),
        "final_logit_softcapping": _decimal(file.of_model("final_logit_softcapping") or None),
        "rope_local_base_freq": _decimal(file.of_model("rope.freq_base_swa")),
    }


def _ministral(file: GGUFFile, data: JsonObject) -> JsonObject:
    growth = _decimal(file.of_model("attention.temperature_scale") or None)
    if growth is None:
        return {"architectures": ["LlamaForCausalLM"]}  # has the same forward pass, but no window
    scaling = data["rope_scaling"] or {}
    return {"rope_scaling": scaling | {"attention_factor": 1.0, "llama_4_scaling_beta": growth}}


def _partial(file: GGUFFile, data: JsonObject) -> JsonObject:
    fraction = file.of_model("rope.dimension_count", data["head_dim"]) / data["head_dim"]
    window = file.of_model("attention.sliding_window") or None
    return {"partial_rotary_factor": fraction, "sliding_window": window}


def _llama(file: GGUFFile, data: JsonObject) -> JsonObject:
    if "num_experts" not in data:
        return {}
    return {"architectures": ["MixtralForCausalLM"]}


def _qwen_moe(file: GGUFFile, data: JsonObject) -> JsonObject:
    return {
        "qkv_bias": data["attention_bias"],
        "shared_expert_intermediate_size": file.of_model("expert_shared_feed_forward_length"),
        # No key records this setting, which llama.cpp chooses by architecture.
        "norm_topk_prob": file.architecture == "qwen3moe",
    }


def _delta(file: GGUFFile, data: JsonObject) -> JsonObject:
    names = {"linear_conv_kernel_dim": "conv_kernel", "linear_key_head_dim": "state_size"}
    names |= {"linear_num_key_heads": "group_count", "linear_num_value_heads": "time_step_rank"}
    fields = {key: file.of_model(f"ssm.{name}") for key, name in names.items()}
    fields["linear_value_head_dim"] = file.of_model("ssm.inner_size") // fields["linear_num_value_heads"]
    fields["full_attention_interval"] = file.of_model("full_attention_interval")
    fields["shared_expert_intermediate_size"] = file.of_model("expert_shared_feed_forward_length")
    return _partial(file, data) | fields


def _glm_moe(file: GGUFFile, data: JsonObject) -> JsonObject:
    return _partial(file, data) | {
        "use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors,
        "n_shared_experts": file.of_model("expert_shared_count"),
        "first_k_dense_replace": file.of_model("leading_dense_block_count", 0),
        "n_group": file.of_model("expert_group_count") or 1,
        "topk_group": file.of_model("expert_group_used_count") or 1,
        "routed_scaling_factor": _decimal(file.of_model("expert_weights_scale") or 1.0),
        "norm_topk_prob": file.of_model("expert_weights_norm", False),
    }


def _gpt_oss(file: GGUFFile, data: JsonObject) -> JsonObject:
    tokens = file.get("tokenizer.ggml.tokens") or []
    # The metadata has no key for these stop tokens, which the model's generation_config.json lists. Look them up by
    # name, as llama.cpp does.
    stops = [tokens.index(token) for token in ("<|return|>", "<|endoftext|>", "<|call|>") if token in tokens]
    # llama.cpp rounds YaRN's range to whole dimensions; the model was trained without rounding.
    scaling = (data["rope_scaling"] or {"rope_type": "default"}) | {"truncate": False}
    return {
        "eos_token_id": list(dict.fromkeys([*data["eos_token_id"], *stops])),
        "rope_scaling": scaling,
        "sliding_window": file.of_model("attention.sliding_window"),
    }


def _granite(file: GGUFFile, data: JsonObject) -> JsonObject:
    names = {"embedding_multiplier": "embedding_scale", "residual_multiplier": "residual_scale"}
    names |= {"logits_scaling": "logit_scale"}
    multipliers = {key: _decimal(file.of_model(name) or None) for key, name in names.items()}
    # If the file has no attention scale, llama.cpp divides scores by sqrt(head_dim).
    scale = _decimal(file.of_model("attention.scale") or data["head_dim"] ** -0.5)
    return multipliers | {"attention_multiplier": scale, "mlp_bias": "blk.0.ffn_up.bias" in file.tensors}


def _olmo(file: GGUFFile, data: JsonObject) -> JsonObject:
    if window := file.of_model("attention.sliding_window"):
        fields: JsonObject = {"architectures": ["Olmo3ForCausalLM"], "sliding_window": window}
        # For this architecture only, llama.cpp's converter copies the attention_factor of config.json unchanged.
        attention_factor = _decimal(file.of_model("rope.scaling.attn_factor"))
        if data["rope_scaling"] and attention_factor is not None:
            fields["rope_scaling"] = data["rope_scaling"] | {"attention_factor": attention_factor}
        return fields
    return {}


_FAMILIES = {"gemma2": _gemma, "gemma3": _gemma, "granite": _granite, "mistral3": _ministral, "olmo2": _olmo}
_FAMILIES |= {"chatglm": _partial, "glm4": _partial, "phi3": _partial}
_FAMILIES |= {"glm4moe": _glm_moe, "gpt-oss": _gpt_oss, "llama": _llama}
_FAMILIES |= {"qwen2moe": _qwen_moe, "qwen3moe": _qwen_moe, "qwen35": _delta, "qwen35moe": _delta}
"""Readers of the config.json fields that only some architectures have."""


def _number(file: GGUFFile, key: str, default: int | None = None) -> int | None:
    """Return a size from the metadata. If the file lists a size for each layer, all sizes must be the same."""
    value = file.of_model(key, default)
    if isinstance(value, list):
        if len(set(value)) != 1:
            raise MarsError(f"{file.architecture}.{key} differs from layer to layer, which is not supported.")
        return value[0]
    return value


def _decimal(value: float | None) -> float | None:
    """Return the shortest decimal number that rounds to `value` in float32.

    >>> _decimal(9.999999747378752e-06)
    1e-05
    """
    if value is None:
        return None
    return float(str(np.float32(value)))


def _scaling(file: GGUFFile) -> JsonObject | None:
    kind = file.of_model("rope.scaling.type", "linear")  # llama.cpp's default
    factor = _decimal(file.of_model("rope.scaling.factor", file.of_model("rope.scale_linear")))
    is_unscaled = kind == "none" or (kind == "linear" and factor in (None, 0, 1))
    if "rope_freqs.weight" in file.tensors:
        if not is_unscaled:
            raise MarsError(f"it has rope_freqs.weight and rope.scaling.type {kind!r}: expected only one.")
        return _llama3(file)
    trained = file.of_model("rope.scaling.original_context_length")
    if "rope_factors_long.weight" in file.tensors:
        factors = {
            f"{kind}_factor": _vector(file, f"rope_factors_{kind}.weight") for kind in ("short", "long")
        }
        return factors | {"rope_type": "longrope", "original_max_position_embeddings": trained}
    if is_unscaled:
        return None
    scaling = {
        "rope_type": kind,
        "factor": factor,
        "original_max_position_embeddings": trained,
    }
    attn_factor = _decimal(file.of_model("rope.scaling.attn_factor"))
    if kind == "yarn" and attn_factor is not None and factor is not None:
        # llama.cpp multiplies YaRN's 0.1 ln(factor) + 1 by attn_factor (`yarn_attn_factor *= hparams.rope_attn_factor`
        # in src/llama-context.cpp, `mscale` of `rope_yarn` in ggml/src/ggml-cpu/ops.cpp). In config.json,
        # attention_factor replaces the product (`_compute_yarn_parameters` of transformers).
        scaling["attention_factor"] = attn_factor * yarn_attention_factor({}, factor)
    return {key: value for key, value in scaling.items() if value is not None}


def _vector(file: GGUFFile, name: str) -> list[float]:
    return file.rows(name, 0, math.prod(file.tensors[name].shape)).tolist()


def _llama3(file: GGUFFile) -> JsonObject:
    """Infer the parameters of Llama 3's rope scaling from `rope_freqs.weight`, the divisor of each frequency.

    The factor is the largest divisor. The other parameters have the values of Llama 3.1, as in all published models.

    Raises:
      MarsError: these parameters do not reproduce the divisors in the file.
    """
    name = "rope_freqs.weight"
    divisors = _vector(file, name)
    scaling = {
        "rope_type": "llama3",
        "factor": max(divisors),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    theta = float(file.of_model("rope.freq_base", 10000.0))
    rope = read_rope({"rope_theta": theta, "rope_scaling": scaling})
    scaled = np.asarray(frequencies(rope, 2 * len(divisors)))
    # The frequencies before scaling: theta^(-2 i / head_dim) for pair i of dimensions. The file has a divisor for each
    # pair.
    unscaled = theta ** -(np.arange(len(divisors)) / len(divisors))
    if not np.allclose(unscaled / scaled, divisors, rtol=1e-3):
        raise MarsError("rope_freqs.weight is not Llama 3's scaling, and no other is supported.")
    return scaling
