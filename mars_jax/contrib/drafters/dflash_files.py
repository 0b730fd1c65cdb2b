"""Readers and writers of DFlash and DSpark heads in the formats published on the Hugging Face hub.

In the layouts of z-lab and DeepSeek, layer outputs are numbered from 0. The layout of the speculators library numbers
hidden states, including the embedding, so its numbers are higher by one. V vocabulary, W draft vocabulary.

Tested against heads written with PyTorch (tests/contrib/test_dflash_files.py).
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from mars_jax.contrib.models.dflash_head import DFlashConfig
from mars_jax.core.types import PyTree
from mars_jax.hub.config_json import FAMILIES, from_json, to_json
from mars_jax.hub.heads.layered_files import (
    Shapes,
    checked,
    load_head,
    nested_layer,
    read_layers,
    save_head,
    shared_fields,
    speculators,
)
from mars_jax.hub.values import value_or_default
from mars_jax.models.config import ModelConfig
from mars_jax.utils.errors import MarsError
from mars_jax.utils.types import JsonObject

LAYOUTS = ("dflash", "speculators")
"""Layouts of config.json. "dflash" is z-lab's or, if each position predicts the next token, DeepSeek's.
"speculators" is the layout of the speculators library."""
_STATES = "aux_hidden_state_layer_ids"
_SUPPORTED = {
    "projector_type": ("dflash", "dspark"),
    "markov_head_type": ("vanilla",),  # a correction that depends only on the previous token
    "input_embedding_scale": (1.0,),
    "output_multiplier": (1.0,),
    "final_logit_softcapping": (0.0,),
}
"""Supported values of settings that some heads have. null is always supported."""


def load_dflash(
    name_or_path: str | os.PathLike[str],
    target_config: ModelConfig,
    target_params: PyTree,
    *,
    dtype: str | None = None,
    head_embed: str = "own",
) -> tuple[DFlashConfig, PyTree]:
    """Load a DFlash or DSpark head of a target, one tensor at a time.

    If the head's embedding or unembedding equals the target's, the target's array is shared.

    Args:
      name_or_path, target_config, target_params, dtype, head_embed: as for `load_eagle`.

    Returns:
      The config, and the weights for `Params.draft`. If the draft vocabulary is smaller than V, the weights include
      `ids` i32[W], the target token id of each draft token.

    Raises:
      MarsError: the checkpoint is missing, damaged, unsupported, or for a different target.

    >>> target = load("Qwen/Qwen3-8B")  # doctest: +SKIP
    >>> config, head = load_dflash("z-lab/Qwen3-8B-DFlash-b16", target.config, target.params)  # doctest: +SKIP
    """
    load_arguments = name_or_path, target_config, target_params, dtype
    return load_head(*load_arguments, from_dflash_json, lambda config: True, head_embed=head_embed)


def save_dflash(
    path: str | os.PathLike[str],
    config: DFlashConfig,
    params: PyTree,
    *,
    overwrite: bool = False,
    layout: str = "dflash",
    verifier: str | None = None,
) -> Path:
    """Write a head in a published layout. For the other arguments, the return value and the errors, see `hub.save`.

    Args:
      layout: "dflash" for the layout of z-lab and DeepSeek, or "speculators".
      verifier: name of the target, written only if the layout is "speculators".

    >>> import tempfile
    >>> import jax
    >>> from mars_jax.contrib.models import dflash_head
    >>> layer = ModelConfig(family="qwen3", qk_norm=True, vocab_size=32, hidden_size=16, intermediate_size=24,
    ...                     num_layers=1, num_heads=2)
    >>> config = DFlashConfig(layer=layer, target_hidden_size=16, feature_layers=(0,), block_size=4, mask_token=0,
    ...                       draft_vocab_size=32)
    >>> with tempfile.TemporaryDirectory() as path:
    ...     _ = save_dflash(path, config, dflash_head.init_params(config, jax.random.key(0)))
    ...     sorted(os.listdir(path))
    ['config.json', 'model.safetensors']
    """
    return save_head(
        path, config, params, to_dflash_json, LAYOUTS, layout, overwrite=overwrite, verifier=verifier
    )


@checked
def from_dflash_json(data: JsonObject, shapes: Shapes, target: ModelConfig) -> DFlashConfig:
    """Build a DFlashConfig from the contents of config.json and the tensors' shapes, keyed by canonical name.

    Raises:
      MarsError: the contents contradict the shapes or the target, or describe an unsupported head.
    """
    _check_kind(data, shapes)
    has_dspark = "markov_head.markov_w1.weight" in shapes or "confidence_head.proj.weight" in shapes
    class_names = str(data.get("architectures") or "").lower() + str(data.get("speculators_model_type") or "")
    nested_json = nested_layer(data)
    layer_json, settings, vocab_settings = data if nested_json is None else nested_json, data, data
    if nested_json is None:
        settings = data | (data.get("dflash_config") or {})
        # z-lab's code reads the block size from the top level of config.json, and other settings from dflash_config.
        settings["block_size"] = value_or_default(data, "block_size", settings.get("block_size"))
        # Only the number of rows of lm_head determines the size of the draft vocabulary.
        vocab_settings = settings | {"draft_vocab_size": None}
    layer_config = _layer(layer_json, shapes, target)
    feature_layers = _feature_layers(settings, shapes, target, nested_json is not None)
    for key in ("block_size", "mask_token_id"):
        if type(settings.get(key)) is not int:
            raise MarsError(f"config.json gives no number for {key}: use the config the weights came with.")
    layer_types = layer_json.get("layer_types") or ["full_attention"] * layer_config.num_layers
    if settings.get("is_causal") is not None:
        causal_layers = (bool(settings["is_causal"]),) * len(layer_types)
    else:
        windows_are_causal = not settings.get("sliding_window_non_causal", False)
        causal_layers = tuple(kind == "sliding_attention" and windows_are_causal for kind in layer_types)
    return DFlashConfig(
        **shared_fields(DFlashConfig.title, vocab_settings, shapes, target, layer_config),
        feature_layers=feature_layers,
        block_size=settings["block_size"],
        mask_token=settings["mask_token_id"],
        # DeepSeek's DFlash heads have the same class name as its DSpark heads. Both predict the next token at each
        # position.
        from_anchor=bool(value_or_default(data, "sample_from_anchor", has_dspark or "dspark" in class_names)),
        causal=causal_layers,
        markov_rank=shapes.get("markov_head.markov_w1.weight", (0, 0))[1],
        confidence="confidence_head.proj.weight" in shapes,
        confidence_bias="confidence_head.proj.bias" in shapes,
        confidence_markov=shapes.get("confidence_head.proj.weight", (1, 0))[1] > layer_config.hidden_size,
    )


def _check_kind(data: JsonObject, shapes: Shapes) -> None:
    """Raise MarsError for related kinds of heads that are not supported."""
    kind = data.get("speculators_model_type", "dflash")
    if kind not in ("dflash", "dspark"):
        raise MarsError(
            f"speculators_model_type is {kind!r}: as a DFlash head only 'dflash' and 'dspark' are read."
        )
    settings = data | (data.get("dflash_config") or {})
    has_selector = any(name.startswith("candidate_selector.") for name in shapes)
    if has_selector or "DFlash2" in str(data.get("architectures")):
        raise MarsError(
            "the head is a DFlash-2, whose convolutions and candidate selector are not supported: use a DFlash head."
        )
    for key, supported in _SUPPORTED.items():
        if settings.get(key) not in (None, *supported):
            expected = " or ".join(map(repr, supported))
            raise MarsError(f"{key} is {settings[key]!r}: only {expected} is supported, so use another head.")


def _layer(data: JsonObject, shapes: Shapes, target: ModelConfig) -> ModelConfig:
    """Return the config of the layers: a Qwen3 config with only those norms and biases for which there are tensors."""
    norm_shape = shapes.get("layers.0.self_attn.q_norm.weight")
    fields = {"vocab_size": target.vocab_size} | {k: v for k, v in data.items() if v is not None}
    if "head_dim" not in fields:
        fields["head_dim"] = (norm_shape or [fields["hidden_size"] // fields["num_attention_heads"]])[0]
    config = from_json(fields | {"architectures": None, "model_type": "qwen3"})

    def has_tensor(name: str) -> bool:
        return f"layers.0.self_attn.{name}" in shapes

    return dataclasses.replace(
        config,
        family="qwen3" if norm_shape else "llama",
        qk_norm=norm_shape is not None,
        qkv_bias=has_tensor("q_proj.bias"),
        o_bias=has_tensor("o_proj.bias"),
        tie_embeddings=False,
    )


def _feature_layers(data: JsonObject, shapes: Shapes, target: ModelConfig, nested: bool) -> tuple[int, ...]:
    """Return the target layers whose outputs the head reads."""
    key = _STATES if nested else "target_layer_ids"
    layers, num_layers = data.get(key), target.num_layers
    if layers is None and nested:
        raise MarsError(
            f"config.json does not say {key}: add the hidden states that the head was trained on."
        )
    if layers is None:
        # By default, the layers are evenly spaced, starting with layer 1 (z-lab/dflash, `build_target_layer_ids`).
        num_features = shapes.get("fc.weight", (0,))[-1] // target.hidden_size
        layers = [num_layers // 2]
        if num_features != 1:
            layers = [round(1 + i * (num_layers - 4) / max(num_features - 1, 1)) for i in range(num_features)]
    return read_layers(DFlashConfig.title, key, layers, num_layers, states=nested)


def to_dflash_json(config: DFlashConfig, *, dtype: str, layout: str, verifier: str | None) -> JsonObject:
    """Return the contents of config.json.

    Args:
      config, dtype: config and dtype of the head.
      layout: one of `LAYOUTS`.
      verifier: name of the target, written only if the layout is "speculators".

    Raises:
      MarsError: the layout is unknown or cannot express the head.
    """
    layer_config = config.layer
    has_two_windows = len(set(layer_config.windows) - {None}) > 1
    if layer_config.local_rope is not None or has_two_windows or layer_config.num_experts:
        raise MarsError(
            "config.json of a DFlash head has one rope, one window and no experts: change the layers."
        )
    layer = to_json(dataclasses.replace(layer_config, family="qwen3"), dtype=dtype) | {"architectures": None}
    # The values of `causal` that occur in the layers with a window, and in those with full attention.
    windows_and_causal = list(zip(layer_config.windows, config.causal, strict=True))
    windowed_causal = {causal for window, causal in windows_and_causal if window is not None}
    full_causal = {causal for window, causal in windows_and_causal if window is None}
    settings: JsonObject = {
        "block_size": config.block_size,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "sample_from_anchor": config.from_anchor,
        "mask_token_id": config.mask_token,
    }
    if config.markov_rank or config.confidence:
        settings |= {
            "markov_rank": config.markov_rank,
            "markov_head_type": "vanilla",
            "enable_confidence_head": config.confidence,
            "confidence_head_with_markov": config.confidence_markov,
        }
    if True in full_causal or len(windowed_causal) > 1:
        if len(windowed_causal | full_causal) > 1 or layout == "speculators":
            raise MarsError("this layout cannot express which layers of the head are causal: choose another.")
        settings["is_causal"] = True
    elif layout == "speculators":
        settings["sliding_window_non_causal"] = windowed_causal == {False}
    elif windowed_causal == {False}:
        settings["is_causal"] = False
    if layout == "dflash":
        nested = {"target_layer_ids": list(config.feature_layers), "mask_token_id": config.mask_token}
        architecture = "Qwen3DSparkModel" if config.from_anchor else "DFlashDraftModel"
        return layer | settings | nested | {"dflash_config": nested, "architectures": [architecture]}
    speculators_type, architecture = "dflash", "DFlashSpeculator"
    if config.markov_rank or config.confidence:
        speculators_type, architecture = "dspark", "DSparkSpeculator"
    settings |= speculators(speculators_type, config.drafts, verifier, None)
    settings |= {
        "architectures": [architecture],
        _STATES: [i + 1 for i in config.feature_layers],
        "transformer_layer_config": layer | {"architectures": [FAMILIES["qwen3"].architecture]},
        "dtype": dtype,
    }
    return settings
