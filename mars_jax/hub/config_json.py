"""Conversion between config.json of a Hugging Face checkpoint and ModelConfig.

Oracle: the config classes of transformers 5.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mars_jax.hub.families import FAMILIES, text_part
from mars_jax.hub.rope_config import read_rope, write_scaling
from mars_jax.hub.values import config_token_ids, count, of_its_kind, value_or_default
from mars_jax.models.config import ModelConfig, check_parts
from mars_jax.utils.errors import MarsError
from mars_jax.utils.limits import JSON_BYTES
from mars_jax.utils.paths import read_text

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu": "relu",
}


def _family(data: dict[str, Any]) -> str:
    listed = data.get("architectures") or [None]
    named = listed if isinstance(listed, str) else listed[0]
    for name, family in FAMILIES.items():
        if named == family.architecture or (named is None and data.get("model_type") == name):
            return name
    architecture = named or data.get("model_type") or "none named in config.json"
    supported = ", ".join(family.architecture for family in FAMILIES.values())
    raise MarsError(f"architecture {architecture} is not supported: choose a checkpoint of {supported}.")


def from_json(data: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelConfig:
    """Make a ModelConfig from the contents of config.json and, if it exists, generation_config.json.

    The stop tokens of both files are merged, with those of config.json first.

    Raises:
      MarsError: the architecture, rope type, activation or combination of sizes is not supported.

    >>> sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24}
    >>> sizes |= {"num_hidden_layers": 1, "num_attention_heads": 2}
    >>> from_json({"model_type": "qwen2", **sizes}).qkv_bias
    True
    """
    data = text_part(data)
    family = _family(data)
    defaults = FAMILIES[family].defaults
    theta = defaults.get(
        "rope_theta", 10000.0
    )  # not merged into `data`, where it could contradict rope_parameters
    data = {key: value for key, value in defaults.items() if key != "rope_theta"} | data
    required = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    missing = [key for key in required if type(data.get(key)) is not int]
    if missing:
        raise MarsError(
            f"config.json gives no number for {', '.join(missing)}: use the config the checkpoint came with."
        )
    check_parts(data["num_hidden_layers"])  # before lists of this length are created
    key = FAMILIES[family].activation
    activation = value_or_default(data, key, defaults.get(key, "silu"))
    if activation not in _ACTIVATIONS:
        raise MarsError(
            f"{key} '{activation}' is not supported: the supported ones are {', '.join(_ACTIVATIONS)}."
        )
    eos = (
        *config_token_ids(data, "eos_token_id", "config.json"),
        *config_token_ids(generation or {}, "eos_token_id", "generation_config.json"),
    )
    bos = config_token_ids(data, "bos_token_id", "config.json")
    heads = data["num_attention_heads"]
    fields: dict[str, Any] = {
        "family": family,
        "vocab_size": data["vocab_size"],
        "hidden_size": data["hidden_size"],
        "intermediate_size": data["intermediate_size"],
        "num_layers": data["num_hidden_layers"],
        "num_heads": heads,
        "num_kv_heads": count(data, "num_key_value_heads", heads) if heads > 0 else 0,
        "head_dim": 0 if data.get("head_dim") is None else count(data, "head_dim", 0),
        "max_positions": count(data, "max_position_embeddings", 2048),
        "norm_eps": float(value_or_default(data, "rms_norm_eps", 1e-6)),
        "tie_embeddings": bool(data.get("tie_word_embeddings", False)),
        "activation": _ACTIVATIONS[activation],
        "bos_token_id": bos[0] if bos else None,
        "eos_token_ids": tuple(dict.fromkeys(eos)),
    }
    fields |= FAMILIES[family].read(data)
    if "rope" not in fields:
        fields["rope"] = read_rope(data, theta=theta)
    return ModelConfig(**fields)


def read_json(path: Path, most: int = JSON_BYTES) -> dict[str, Any]:
    """Read the JSON object in a file of at most `most` bytes.

    Raises:
      MarsError: the file is absent, unreadable, or not a JSON object.
    """
    try:
        data = json.loads(read_text(path, most))
    except OSError as error:
        reason = "" if isinstance(error, FileNotFoundError) else f" ({error.strerror})"
        raise MarsError(
            f"there is no readable {path.name} in '{path.parent}'{reason}: give a checkpoint's directory."
        ) from None
    except (ValueError, RecursionError) as error:  # RecursionError: lists nested 100,000 deep
        raise MarsError(f"'{path}' is not valid JSON ({error}): download the checkpoint again.") from None
    if not isinstance(data, dict):
        raise MarsError(
            f"'{path}' holds {type(data).__name__}, not an object: download the checkpoint again."
        )
    return data


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Write an object as an indented JSON file."""
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def read_directory(directory: Path) -> tuple[ModelConfig, str | None]:
    """Read the config of a checkpoint directory and its dtype ("float16", "bfloat16", ... or None if not listed)."""
    data = read_json(directory / "config.json")
    generation = directory / "generation_config.json"
    try:
        with of_its_kind("config.json holds a value", "correct it"):
            config = from_json(data, read_json(generation) if generation.exists() else None)
    except MarsError as error:
        raise MarsError(f"'{directory}': {error}") from None
    return config, dtype_of(data)


def dtype_of(data: dict[str, Any]) -> str | None:
    """Return the dtype listed in a config.json, under the key of transformers 5 (`dtype`) or 4 (`torch_dtype`)."""
    dtype = data.get("dtype") or data.get("torch_dtype")
    return str(dtype).removeprefix("torch.") if dtype else None


def to_json(config: ModelConfig, *, dtype: str) -> dict[str, Any]:
    """Return the contents of config.json for transformers 4 and 5."""
    family = FAMILIES[config.family]
    activation = next(
        json_name for json_name, config_name in _ACTIVATIONS.items() if config_name == config.activation
    )
    eos = config.eos_token_ids
    data = {
        "architectures": [family.architecture],
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
        "rope_theta": config.rope.theta,
        "rope_scaling": write_scaling(config.rope),
        family.activation: activation,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else list(eos) or None,
        "torch_dtype": dtype,
        "use_cache": True,
    }
    return data | family.write(config)
