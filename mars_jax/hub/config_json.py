"""Conversion between the config.json of a Hugging Face checkpoint and a ModelConfig.

Tested against the config classes of transformers 5.
"""

from __future__ import annotations

import json
from pathlib import Path

from mars_jax.hub.families import FAMILIES, Fields, text_part
from mars_jax.hub.rope_config import read_rope, write_scaling
from mars_jax.hub.values import config_token_ids, count, of_its_kind, value_or_default
from mars_jax.models.config import ModelConfig, check_parts
from mars_jax.utils.errors import MarsError, prefixed
from mars_jax.utils.limits import JSON_BYTES
from mars_jax.utils.paths import read_text
from mars_jax.utils.types import JsonObject

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu": "relu",
}


def first_architecture(data: JsonObject) -> str | None:
    """Return the first entry of `architectures`, which is a string instead of a list in some files."""
    architectures = data.get("architectures") or None
    if isinstance(architectures, list):
        return architectures[0]
    return architectures


def _family(data: JsonObject) -> str:
    architecture, model_type = first_architecture(data), data.get("model_type")
    # Use `model_type` only if no architecture is listed, because a classifier has the `model_type` of its base model.
    for name, family in FAMILIES.items():
        if architecture == family.architecture or (architecture is None and model_type == name):
            return name
    unsupported = architecture or model_type or "none named in config.json"
    raise MarsError(
        f"architecture {unsupported} is not supported: choose a checkpoint of a family that mars-jax models "
        "lists; pass draft heads to --draft."
    )


def from_json(data: JsonObject, generation: JsonObject | None = None) -> ModelConfig:
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
    # Do not merge this default into `data`, where it could contradict rope_parameters.
    theta = defaults.get("rope_theta", 10000.0)
    data = {key: value for key, value in defaults.items() if key != "rope_theta"} | data
    required = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    missing = [key for key in required if type(data.get(key)) is not int]
    if missing:
        raise MarsError(f"config.json has no number for {', '.join(missing)}: use the original config.")
    check_parts(data["num_hidden_layers"])  # check before creating lists of this length
    key = FAMILIES[family].activation
    activation = value_or_default(data, key, defaults.get(key, "silu"))
    if activation not in _ACTIVATIONS:
        raise MarsError(f"{key} '{activation}' is not supported: expected one of {', '.join(_ACTIVATIONS)}.")
    eos = (
        *config_token_ids(data, "eos_token_id", "config.json"),
        *config_token_ids(generation or {}, "eos_token_id", "generation_config.json"),
    )
    bos = config_token_ids(data, "bos_token_id", "config.json")
    fields: Fields = {
        "family": family,
        "vocab_size": data["vocab_size"],
        "hidden_size": data["hidden_size"],
        "intermediate_size": data["intermediate_size"],
        "num_layers": data["num_hidden_layers"],
        "num_heads": data["num_attention_heads"],
        "num_kv_heads": count(data, "num_key_value_heads", data["num_attention_heads"]),
        "head_dim": count(data, "head_dim", 0),
        "max_positions": count(data, "max_position_embeddings", 2048),
        "norm_eps": float(value_or_default(data, "rms_norm_eps", 1e-6)),
        "tie_embeddings": bool(data.get("tie_word_embeddings")),
        "activation": _ACTIVATIONS[activation],
        "bos_token_id": next(iter(bos), None),
        "eos_token_ids": tuple(dict.fromkeys(eos)),
    }
    # The family's fields replace the general ones. For families with two ropes, `read` returns both.
    fields |= FAMILIES[family].read(data)
    if "rope" not in fields:
        fields["rope"] = read_rope(data, theta=theta)
    return ModelConfig(**fields)


def read_json(path: Path, max_bytes: int = JSON_BYTES) -> JsonObject:
    """Read the JSON object in a file of at most `max_bytes` bytes.

    Raises:
      MarsError: the file is absent, unreadable, or not a JSON object.
    """
    try:
        data = json.loads(read_text(path, max_bytes))
    except OSError as error:
        raise MarsError(
            f"there is no readable {path.name} in '{path.parent}' ({error.strerror}): give a checkpoint's directory."
        ) from None
    except (ValueError, RecursionError) as error:  # RecursionError: lists nested 100,000 levels deep
        raise MarsError(f"'{path}' is not valid JSON ({error}): download the checkpoint again.") from None
    if not isinstance(data, dict):
        raise MarsError(f"'{path}' holds {type(data).__name__}, not an object: download it again.")
    return data


def write_json(path: Path, data: JsonObject) -> None:
    """Write an object as an indented JSON file."""
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def read_directory(directory: Path) -> tuple[ModelConfig, str | None]:
    """Read the config of a checkpoint directory and its dtype ("float16", "bfloat16", ... or None if not listed)."""
    data = read_json(directory / "config.json")
    generation_path, generation = directory / "generation_config.json", None
    with prefixed(f"'{directory}'"), of_its_kind("config.json holds a value", "correct it"):
        if generation_path.exists():
            generation = read_json(generation_path)
        return from_json(data, generation), dtype_of(data)


def dtype_of(data: JsonObject) -> str | None:
    """Return the dtype listed in a config.json, under the key of transformers 5 (`dtype`) or 4 (`torch_dtype`)."""
    dtype = data.get("dtype") or data.get("torch_dtype")
    # The config.json of gpt-oss lists no dtype; transformers loads the model in bfloat16.
    if dtype is None and is_mxfp4(data):
        return "bfloat16"
    return str(dtype).removeprefix("torch.") if dtype else None


def is_mxfp4(data: JsonObject) -> bool:
    """Return whether a config.json describes a checkpoint with experts in MXFP4."""
    quantization = data.get("quantization_config")
    return isinstance(quantization, dict) and quantization.get("quant_method") == "mxfp4"


def to_json(config: ModelConfig, *, dtype: str) -> JsonObject:
    """Return the contents of config.json for transformers 4 and 5."""
    family = FAMILIES[config.family]
    activation = next(name for name, value in _ACTIVATIONS.items() if value == config.activation)
    eos: int | list[int] | None = list(config.eos_token_ids) or None
    if len(config.eos_token_ids) == 1:
        [eos] = config.eos_token_ids
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
        "eos_token_id": eos,
        "torch_dtype": dtype,
        "use_cache": True,
    }
    return data | family.write(config)
