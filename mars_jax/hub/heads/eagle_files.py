"""EAGLE heads as published on the Hugging Face hub <-> (EagleConfig, params).

Layouts: those of SafeAILab/EAGLE, SpecForge and NVIDIA, `midlayer.*` or `layers.0.*`, and of speculators. They differ
in what config.json writes down, and copy fields of the target's that mean nothing in a head. So what the tensors show
is read off them. Oracle: heads that PyTorch writes (tests/hub/test_heads.py). V vocabulary, W draft vocabulary.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mars_jax.core.errors import MarsError
from mars_jax.core.types import PyTree
from mars_jax.hub.config_json import from_json, to_json
from mars_jax.hub.heads.layered_files import (
    Shapes,
    canonical,
    checked,
    load_head,
    nested_layer,
    read_layers,
    save_head,
    shared_fields,
    speculators,
)
from mars_jax.hub.values import given
from mars_jax.models.config import ModelConfig
from mars_jax.models.eagle_head import EagleConfig

_LAYERS = "eagle_aux_hidden_state_layer_ids"
LAYOUTS = ("eagle", "speculators")
"""Layouts of config.json: that of SafeAILab, SpecForge and SGLang, or the speculators library's, which vLLM reads."""


def load_eagle(
    name_or_path: str | os.PathLike[str],
    target_config: ModelConfig,
    target_params: PyTree,
    *,
    dtype: str | None = None,
    head_embed: str = "own",
) -> tuple[EagleConfig, PyTree]:
    """Load an EAGLE-1, -2 or -3 head of a target, tensor by tensor.

    A head that repeats the target's embedding (EAGLE-1: or unembedding) shares it instead. Issue a MarsWarning if the
    head's embedding differs from the target's.

    Args:
      name_or_path: directory, or `owner/name` on the Hugging Face hub.
      target_config: of the model that the head was trained for.
      target_params: its params.
      dtype: "float32" or "bfloat16"; None is the head's own (float16 becomes bfloat16). "int8" keeps its matrices in
        8 bits per weight, and the rest in its own.
      head_embed: "own" to read the head's embedding, if its checkpoint has one, or "target" to share the target's.

    Returns:
      The config, and what `Params.draft` is to be. In it `ids` i32[W] are the target's tokens that a draft
      vocabulary smaller than V consists of.

    Raises:
      MarsError: with one sentence that names what is wrong and the cure.

    >>> name, target = "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", load("meta-llama/...")  # doctest: +SKIP
    >>> config, head = load_eagle(name, target.config, target.params)  # doctest: +SKIP
    """
    head = name_or_path, target_config, target_params, dtype
    return load_head(*head, from_head_json, lambda config: config.version == 1, head_embed=head_embed)


def save_eagle(
    path: str | os.PathLike[str],
    config: EagleConfig,
    params: PyTree,
    *,
    overwrite: bool = False,
    layout: str = "eagle",
    verifier: str | None = None,
) -> Path:
    """Write a head in a published layout; other arguments, result and errors are those of `hub.save`.

    Args:
      layout: "eagle", that of SafeAILab, SpecForge and SGLang, or "speculators".
      verifier: name of the target, for the layout of speculators.

    >>> import tempfile
    >>> import jax
    >>> from mars_jax.models import eagle_head
    >>> layer = ModelConfig(vocab_size=32, hidden_size=16, intermediate_size=24, num_layers=1, num_heads=2)
    >>> config = EagleConfig(version=1, layer=layer, target_hidden_size=16, draft_vocab_size=32, own_unembed=False)
    >>> with tempfile.TemporaryDirectory() as path:
    ...     _ = save_eagle(path, config, eagle_head.init_params(config, jax.random.key(0)))
    ...     sorted(os.listdir(path))
    ['config.json', 'model.safetensors']
    """
    own = path, config, params, to_head_json, LAYOUTS, layout
    return save_head(*own, overwrite=overwrite, verifier=verifier)


@checked
def from_head_json(data: dict[str, Any], shapes: Shapes, target: ModelConfig) -> EagleConfig:
    """Make an EagleConfig from the contents of config.json and the shapes of the tensors by canonical name.

    Raises:
      MarsError: they contradict each other or the target, or are not supported.
    """
    nested = nested_layer(data)
    data = data if nested is None else flatten(data, nested)
    version = 3 if "layers.0.hidden_norm.weight" in shapes else 1
    layer = layer_config(data, shapes)
    said = data if version == 3 else data | {"draft_vocab_size": target.vocab_size}
    fields = shared_fields(EagleConfig.title, said, shapes, target, layer)
    fields["fc_bias"] = "fc.bias" in shapes
    if version == 1:
        return EagleConfig(version=1, **fields)
    return EagleConfig(
        version=3,
        feature_layers=_feature_layers(data, target.num_layers, states=nested is not None),
        fc_norm="fc_norm.0.weight" in shapes or bool(_said(data, "fc_norm")),
        input_norm="input_norm.weight" in shapes or bool(_said(data, "norm_before_fc")),
        norm_before_residual=bool(_said(data, "norm_before_residual")),
        norm_output=bool(_said(data, "norm_output")),
        **fields,
    )


def flatten(data: dict[str, Any], layer: dict[str, Any]) -> dict[str, Any]:
    """Rewrite config.json of a head in the layout of the speculators library as EAGLE's own layout says it.

    The library numbers a target's hidden states, of which number i is what layer i reads; EAGLE's own files number the
    layers whose output is meant, one less (vllm-project/speculators, `Eagle3SpeculatorConfig` and
    `resolve_target_layer_ids`; vLLM, `aux_hidden_state_layers`).

    Raises:
      MarsError: another kind of drafter, or one that is described by half.
    """
    kind = data.get("speculators_model_type", "eagle3")
    if kind != "eagle3":
        raise MarsError(f"speculators_model_type is {kind!r}: this layout is read for 'eagle3' alone.")
    if not isinstance(data.get("norm_before_residual"), bool):
        raise MarsError(
            "config.json does not say norm_before_residual, of which readers of this layout have different defaults: "
            "add it, true or false, as the head was trained."
        )
    own = {key: value for key, value in data.items() if key not in ("transformer_layer_config", "model_type")}
    said = {key: value for key, value in own.items() if value is not None}
    return layer | said | {"architectures": ["Eagle3Speculator"]}


def _said(data: dict[str, Any], key: str) -> Any:
    """Return the value of a key of EAGLE, from config.json itself or its `eagle_config`."""
    return given(data, key, (data.get("eagle_config") or {}).get(key))


def layer_config(data: dict[str, Any], shapes: Iterable[str]) -> ModelConfig:
    """Return the config of a head's layer from config.json and the canonical names of the tensors.

    Raises:
      MarsError: other layers than the weights have, a sliding window, or what `hub.config.from_json` does not support.
    """
    named = data.get("architectures") or [""]
    named = named if isinstance(named, str) else named[0]
    # LlamaForCausalLMEagle3 and Eagle3LlamaForCausalLM are Llama; where only EAGLE is named, model_type tells.
    plain = re.sub(r"eagle-?\d?", "", named, flags=re.IGNORECASE)
    data = data | {"architectures": [plain] if plain.endswith("ForCausalLM") else None}
    layer = from_json(data)
    if window := max((w for w in layer.windows if w is not None), default=None):
        raise MarsError(
            f"the EAGLE head has a sliding window of {window}, which is not supported: if it was trained without one, "
            "set sliding_window to null."
        )

    def held(name: str) -> bool:
        return f"layers.0.{name}" in shapes

    # Heads copy the target's flags and are trained without biases.
    return dataclasses.replace(
        layer,
        qkv_bias=held("self_attn.q_proj.bias"),
        o_bias=held("self_attn.o_proj.bias"),
        mlp_bias=held("mlp.gate_proj.bias"),
        qk_norm=held("self_attn.q_norm.weight"),
    )


def _feature_layers(data: dict[str, Any], count: int, *, states: bool) -> tuple[int, ...]:
    """Return the layers whose outputs the head reads, of a target that has `count`."""
    if _said(data, "use_aux_hidden_state") is False:
        raise MarsError(
            "the EAGLE-3 head reads its target's last hidden state alone (use_aux_hidden_state is false), which is not "
            "supported: use a head that reads several layers."
        )
    layers = _said(data, _LAYERS)
    if not layers:
        if count < 5:
            raise MarsError(
                f"the EAGLE head names no layers to read, and the usual ones are those of a target of at least 5, not "
                f"of {count}: add {_LAYERS} to config.json."
            )
        return 1, count // 2 - 1, count - 4
    return read_layers(EagleConfig.title, _LAYERS, layers, count, states=states)


def to_head_json(
    config: EagleConfig, *, dtype: str, layout: str = "eagle", verifier: str | None = None
) -> dict[str, Any]:
    """Return the contents of config.json: in the layout "eagle" for SGLang, in that of speculators for vLLM.

    Args:
      config, dtype: of the head.
      layout: of `LAYOUTS`.
      verifier: name of the target, which the layout of speculators has room for.

    Raises:
      MarsError: the layout is not known or has no EAGLE-1, or the layer's family cannot express the layer.
    """
    if layout == "speculators" and config.version != 3:
        raise MarsError(
            "the layout of speculators is written for EAGLE-3 heads alone: choose the layout 'eagle'."
        )
    layer = to_json(config.layer, dtype=dtype)
    if layer_config(layer, {canonical(row.name) for row in config.weights()}) != config.layer:
        raise MarsError(
            f"config.json of the family '{config.layer.family}' cannot express the head's layer: choose another family."
        )
    if config.version == 1:
        return layer | {"bias": config.fc_bias}
    [named] = layer["architectures"]
    own = {
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "fc_norm": config.fc_norm,
        "norm_before_fc": config.input_norm,
        "norm_before_residual": config.norm_before_residual,
        "norm_output": config.norm_output,
    }
    if layout == "speculators":
        own |= speculators("eagle3", 5, verifier, named)
        own |= {"architectures": ["Eagle3Speculator"], "transformer_layer_config": layer, "dtype": dtype}
        return own | {_LAYERS: [i + 1 for i in config.feature_layers]}
    own |= {"architectures": [f"{named}Eagle3"], "bias": config.fc_bias}
    # SGLang looks here. vLLM reads the same name without the nesting, and counts from 1.
    return (
        layer | own | {"eagle_config": {_LAYERS: list(config.feature_layers), "use_aux_hidden_state": True}}
    )
