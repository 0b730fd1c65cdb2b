"""config.json of a Hugging Face checkpoint <-> ModelConfig. Oracle: the config classes of transformers 5."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from mars_jax.errors import MarsError
from mars_jax.models.config import ModelConfig, Rope

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


class Family(NamedTuple):
    """How one Hugging Face architecture fills the fields that the others leave alone."""

    architecture: str
    extra: Callable[[dict[str, Any]], dict[str, Any]]  # config.json -> fields of ModelConfig


def _layer_windows(data: dict[str, Any]) -> tuple[int | None, ...]:
    """Qwen's windows: off unless `use_sliding_window`, then per layer type or from `max_window_layers` on."""
    layers, window = data["num_hidden_layers"], data.get("sliding_window")
    if not data.get("use_sliding_window") or window is None:
        return (None,) * layers
    first = data.get("max_window_layers", 28)
    default = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    kinds = data.get("layer_types") or default
    unknown = sorted(set(kinds) - {"sliding_attention", "full_attention"})
    if unknown:
        raise MarsError(
            f"layer type '{unknown[0]}' is not supported: only full_attention and sliding_attention are."
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _llama(data: dict[str, Any]) -> dict[str, Any]:
    bias = bool(data.get("attention_bias", False))
    return {"qkv_bias": bias, "o_bias": bias, "mlp_bias": bool(data.get("mlp_bias", False))}


def _mistral(data: dict[str, Any]) -> dict[str, Any]:
    window = data.get("sliding_window", 4096)  # an absent key means the first Mistral; null means none
    return {
        "windows": (window,) * data["num_hidden_layers"],
        "num_kv_heads": data.get("num_key_value_heads") or 8,
    }


def _qwen2(data: dict[str, Any]) -> dict[str, Any]:
    return {"qkv_bias": True, "windows": _layer_windows(data)}


def _qwen3(data: dict[str, Any]) -> dict[str, Any]:
    bias = bool(data.get("attention_bias", False))
    return {
        "qk_norm": True,
        "qkv_bias": bias,
        "o_bias": bias,
        "windows": _layer_windows(data),
        "head_dim": data.get("head_dim") or 128,
    }


FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", _llama),
    "mistral": Family("MistralForCausalLM", _mistral),
    "qwen2": Family("Qwen2ForCausalLM", _qwen2),
    "qwen3": Family("Qwen3ForCausalLM", _qwen3),
}
"""Supported families by their `model_type`."""


def _family(data: dict[str, Any]) -> str:
    listed = data.get("architectures") or [None]
    named = listed if isinstance(listed, str) else listed[0]
    for name, family in FAMILIES.items():
        if named == family.architecture or (named is None and data.get("model_type") == name):
            return name
    shown = named or data.get("model_type") or "none named in config.json"
    supported = ", ".join(family.architecture for family in FAMILIES.values())
    raise MarsError(f"architecture {shown} is not supported: choose a checkpoint of {supported}.")


def _yarn_attention_factor(scaling: dict[str, Any], factor: float) -> float:
    """How YaRN scales cos and sin (arXiv 2309.00071, equation 15), as transformers resolves it."""

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return mscale(scaling["mscale"]) / mscale(scaling["mscale_all_dim"])
    return mscale(1.0)


def _rope(data: dict[str, Any]) -> Rope:
    """Read `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (before it)."""
    scaling = data.get("rope_scaling") or data.get("rope_parameters") or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    theta = float(scaling.get("rope_theta") or data.get("rope_theta") or 10000.0)
    if (scaling.get("partial_rotary_factor") or data.get("partial_rotary_factor") or 1.0) != 1.0:
        raise MarsError("partial_rotary_factor is not supported: only heads that are rotated whole are.")
    if kind == "default":
        return Rope(theta=theta)
    if kind not in ("linear", "llama3", "yarn"):
        raise MarsError(
            f"rope type '{kind}' is not supported: the supported ones are default, linear, llama3, yarn."
        )
    trained = data.get("original_max_position_embeddings") or scaling.get("original_max_position_embeddings")
    trained = int(trained or data.get("max_position_embeddings", 2048))
    factor = scaling.get("factor")
    if factor is None and kind == "yarn":
        factor = data.get("max_position_embeddings", 2048) / trained
    if factor is None:
        raise MarsError(
            f"rope type '{kind}' needs a factor, and config.json gives none: add it to rope_scaling."
        )
    if kind == "linear":
        return Rope(theta=theta, kind=kind, factor=float(factor))
    if kind == "llama3":
        missing = [key for key in ("low_freq_factor", "high_freq_factor") if scaling.get(key) is None]
        if missing:
            raise MarsError(f"rope type 'llama3' needs {missing[0]}, and config.json gives none: add it.")
        return Rope(
            theta=theta,
            kind=kind,
            factor=float(factor),
            original_max_positions=trained,
            low_freq_factor=float(scaling["low_freq_factor"]),
            high_freq_factor=float(scaling["high_freq_factor"]),
        )
    return Rope(
        theta=theta,
        kind=kind,
        factor=float(factor),
        original_max_positions=trained,
        beta_fast=float(scaling.get("beta_fast") or 32),
        beta_slow=float(scaling.get("beta_slow") or 1),
        attention_factor=_yarn_attention_factor(scaling, float(factor)),
        truncate=bool(scaling.get("truncate", True)),
    )


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    return () if value is None else tuple(value) if isinstance(value, list) else (value,)


def from_json(data: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelConfig:
    """A ModelConfig from the contents of config.json and, if there is one, of generation_config.json.

    The stop tokens of both files are merged, config.json's first.

    Raises:
      MarsError: an architecture, rope type, activation or combination of sizes that is not supported.

    >>> sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24}
    >>> sizes |= {"num_hidden_layers": 1, "num_attention_heads": 2}
    >>> from_json({"model_type": "qwen2", **sizes}).qkv_bias
    True
    """
    family = _family(data)
    required = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    missing = [key for key in required if not isinstance(data.get(key), int)]
    if missing:
        raise MarsError(
            f"config.json gives no number for {', '.join(missing)}: use the config the checkpoint came with."
        )
    activation = data.get("hidden_act") or "silu"
    if activation not in _ACTIVATIONS:
        raise MarsError(
            f"hidden_act '{activation}' is not supported: the supported ones are {', '.join(_ACTIVATIONS)}."
        )
    eos = (*_ids(data.get("eos_token_id")), *_ids((generation or {}).get("eos_token_id")))
    bos = _ids(data.get("bos_token_id"))
    fields: dict[str, Any] = {
        "family": family,
        "vocab_size": data["vocab_size"],
        "hidden_size": data["hidden_size"],
        "intermediate_size": data["intermediate_size"],
        "num_layers": data["num_hidden_layers"],
        "num_heads": data["num_attention_heads"],
        "num_kv_heads": data.get("num_key_value_heads") or 0,
        "head_dim": data.get("head_dim") or 0,
        "max_positions": data.get("max_position_embeddings") or 2048,
        "norm_eps": float(data.get("rms_norm_eps", 1e-6)),
        "rope": _rope(data),
        "tie_embeddings": bool(data.get("tie_word_embeddings", False)),
        "activation": _ACTIVATIONS[activation],
        "bos_token_id": bos[0] if bos else None,
        "eos_token_ids": tuple(dict.fromkeys(eos)),
    }
    return ModelConfig(**(fields | FAMILIES[family].extra(data)))


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
      MarsError: the file is not there, or is not a JSON object.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise MarsError(
            f"there is no readable {path.name} in '{path.parent}': give a checkpoint's directory."
        ) from None
    except ValueError as error:
        raise MarsError(f"'{path}' is not valid JSON ({error}): download the checkpoint again.") from None
    if not isinstance(data, dict):
        raise MarsError(
            f"'{path}' holds {type(data).__name__}, not an object: download the checkpoint again."
        )
    return data


def read_directory(directory: Path) -> tuple[ModelConfig, str | None]:
    """The config of a checkpoint directory, and the dtype it names ("float16", "bfloat16", ... or None)."""
    data = read_json(directory / "config.json")
    generation = directory / "generation_config.json"
    try:
        config = from_json(data, read_json(generation) if generation.exists() else None)
    except MarsError as error:
        raise MarsError(f"'{directory}': {error}") from None
    except (TypeError, AttributeError, KeyError, ValueError) as error:
        raise MarsError(
            f"'{directory / 'config.json'}' holds a value of the wrong kind ({error}): correct it."
        ) from None
    dtype = data.get("dtype") or data.get("torch_dtype")
    return config, str(dtype).removeprefix("torch.") if dtype else None


def to_json(config: ModelConfig, *, dtype: str) -> dict[str, Any]:
    """The contents of config.json, as transformers 4 and 5 read it."""
    rope = config.rope
    scaling: dict[str, Any] | None = None
    if rope.kind != "none":
        scaling = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind in ("llama3", "yarn"):
        assert scaling is not None
        names = {"original_max_position_embeddings": rope.original_max_positions}
        if rope.kind == "llama3":
            names |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
        else:
            names |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
            names |= {"attention_factor": rope.attention_factor}
        scaling |= names
    windows = {w for w in config.windows if w is not None}
    activation = next(theirs for theirs, ours in _ACTIVATIONS.items() if ours == config.activation)
    eos = config.eos_token_ids
    data = {
        "architectures": [FAMILIES[config.family].architecture],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": rope.theta,
        "rope_scaling": scaling,
        "hidden_act": activation,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else list(eos) or None,
        "torch_dtype": dtype,
        "use_cache": True,
    }
    if config.family == "mistral":
        data["sliding_window"] = next(iter(windows), None)
    if config.family in ("qwen2", "qwen3"):
        data["use_sliding_window"] = bool(windows)
        data["sliding_window"] = next(iter(windows), None)
        data["layer_types"] = ["full_attention" if w is None else "sliding_attention" for w in config.windows]
    return data
