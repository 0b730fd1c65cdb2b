"""Loading and saving of EAGLE heads in the layouts that are in use on the Hugging Face hub.

Layouts: SafeAILab/EAGLE, SpecForge and NVIDIA (`midlayer.*` or `layers.0.*`), and speculators. Their config.json files
use different fields, and copy fields of the target that have no meaning in a head. The config is therefore inferred
from the tensors where possible. Tested against heads written by PyTorch (tests/hub/test_heads.py).
V vocabulary, W draft vocabulary.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mars_jax.core.types import PyTree
from mars_jax.hub.config_json import first_architecture, from_json, to_json
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
from mars_jax.hub.values import value_or_default
from mars_jax.models.config import ModelConfig
from mars_jax.models.eagle_head import EagleConfig
from mars_jax.utils.errors import MarsError
from mars_jax.utils.types import JsonObject

_LAYERS = "eagle_aux_hidden_state_layer_ids"
LAYOUTS = ("eagle", "speculators")
"""Layouts of config.json: "eagle" for SafeAILab, SpecForge and SGLang; "speculators" for the speculators library and
vLLM."""


def load_eagle(
    name_or_path: str | os.PathLike[str],
    target_config: ModelConfig,
    target_params: PyTree,
    *,
    dtype: str | None = None,
    head_embed: str = "own",
) -> tuple[EagleConfig, PyTree]:
    """Load an EAGLE-1, -2 or -3 head of a target, tensor by tensor.

    If the head's embedding is a copy of the target's, the two models share one array; the same holds for the
    unembedding of an EAGLE-1 head. If the head's embedding differs from the target's, a MarsWarning is issued.

    Args:
      name_or_path: directory, or `owner/name` on the Hugging Face hub.
      target_config: config of the model that the head was trained for.
      target_params: params of the target.
      dtype: "float32" or "bfloat16"; None keeps the head's dtype (float16 becomes bfloat16). "int8" rounds matrices to
        8 bits per weight and keeps everything else in the head's dtype.
      head_embed: "own" to read the head's embedding, if its checkpoint has one, or "target" to share the target's.

    Returns:
      The config, and the value for `Params.draft`. If the draft vocabulary is smaller than V, the entry `ids` i32[W] of
      this value contains the target token id for each draft token.

    Raises:
      MarsError: the head cannot be read or does not fit the target. The message names the problem and the fix.

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
    """Write a head in a published layout. All other arguments, the result and the errors are as for `hub.save`.

    Args:
      layout: "eagle" (SafeAILab, SpecForge and SGLang) or "speculators".
      verifier: name of the target, for the layout "speculators".

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
    arguments = path, config, params, to_head_json, LAYOUTS, layout
    return save_head(*arguments, overwrite=overwrite, verifier=verifier)


@checked
def from_head_json(data: JsonObject, shapes: Shapes, target: ModelConfig) -> EagleConfig:
    """Make an EagleConfig from the contents of config.json and the tensor shapes, keyed by canonical name.

    Raises:
      MarsError: the config, the tensors and the target contradict each other, or the head is not supported.
    """
    nested = nested_layer(data)
    if nested is not None:
        data = flatten(data, nested)
    # Only EAGLE-3 heads normalise the target's features.
    version = 3 if "layers.0.hidden_norm.weight" in shapes else 1
    layer = layer_config(data, shapes)
    if version == 1:  # these heads draft from the target's whole vocabulary
        data = data | {"draft_vocab_size": target.vocab_size}
    fields = shared_fields(EagleConfig.title, data, shapes, target, layer)
    fields["fc_bias"] = "fc.bias" in shapes
    if version == 1:
        return EagleConfig(version=1, **fields)
    return EagleConfig(
        version=3,
        feature_layers=_feature_layers(data, target.num_layers, states=nested is not None),
        fc_norm="fc_norm.0.weight" in shapes or bool(_eagle_setting(data, "fc_norm")),
        input_norm="input_norm.weight" in shapes or bool(_eagle_setting(data, "norm_before_fc")),
        norm_before_residual=bool(_eagle_setting(data, "norm_before_residual")),
        norm_output=bool(_eagle_setting(data, "norm_output")),
        **fields,
    )


def flatten(data: JsonObject, layer: JsonObject) -> JsonObject:
    """Convert config.json from the layout of the speculators library to EAGLE's layout.

    Layer numbers are copied unchanged; `read_layers` converts them. speculators numbers the target's hidden states, and
    state i is the input of layer i. EAGLE's layout numbers layers by their outputs, so its numbers are lower by one
    (vllm-project/speculators, `Eagle3SpeculatorConfig` and `resolve_target_layer_ids`; vLLM,
    `aux_hidden_state_layers`).

    Raises:
      MarsError: the config is for a different kind of drafter, or is incomplete.
    """
    kind = data.get("speculators_model_type", "eagle3")
    if kind != "eagle3":
        raise MarsError(f"speculators_model_type is {kind!r}: only 'eagle3' is supported in this layout.")
    if not isinstance(data.get("norm_before_residual"), bool):
        raise MarsError(
            "config.json has no norm_before_residual, whose default differs between readers of this layout: add it, "
            "true or false, as the head was trained."
        )
    nested = ("transformer_layer_config", "model_type")
    fields = {key: value for key, value in data.items() if value is not None and key not in nested}
    return layer | fields | {"architectures": ["Eagle3Speculator"]}


def _eagle_setting(data: JsonObject, key: str) -> Any:
    """Return the value of an EAGLE key at the top level of config.json or in its `eagle_config`."""
    return value_or_default(data, key, (data.get("eagle_config") or {}).get(key))


def layer_config(data: JsonObject, shapes: Iterable[str]) -> ModelConfig:
    """Return the config of a head's layer from config.json and the canonical names of the tensors.

    Raises:
      MarsError: the layer has a sliding window, or `hub.config.from_json` does not support it.
    """
    # LlamaForCausalLMEagle3 and Eagle3LlamaForCausalLM both mean LlamaForCausalLM. If the name contains no other
    # architecture, model_type decides.
    architecture = re.sub(r"eagle-?\d?", "", first_architecture(data) or "", flags=re.IGNORECASE)
    if not architecture.endswith("ForCausalLM"):
        architecture = None
    layer = from_json(data | {"architectures": architecture})
    if window := max((w for w in layer.windows if w is not None), default=None):
        raise MarsError(
            f"the EAGLE head has a sliding window of {window}, which is not supported: if it was trained without one, "
            "set sliding_window to null."
        )

    def has(name: str) -> bool:
        return f"layers.0.{name}" in shapes

    # Trust the tensors, not the flags: the configs of heads copy the target's flags, but heads are trained without
    # biases.
    return dataclasses.replace(
        layer,
        qkv_bias=has("self_attn.q_proj.bias"),
        o_bias=has("self_attn.o_proj.bias"),
        mlp_bias=has("mlp.gate_proj.bias"),
        qk_norm=has("self_attn.q_norm.weight"),
        attention_sinks=has("self_attn.sinks"),
    )


def _feature_layers(data: JsonObject, count: int, *, states: bool) -> tuple[int, ...]:
    """Return the layers whose outputs the head reads, in a target with `count` layers."""
    if _eagle_setting(data, "use_aux_hidden_state") is False:
        raise MarsError(
            "the EAGLE-3 head reads only its target's last hidden state (use_aux_hidden_state is false), which is not "
            "supported: use a head that reads several layers."
        )
    layers = _eagle_setting(data, _LAYERS)
    if not layers:
        if count < 5:
            raise MarsError(
                f"the EAGLE head lists no layers to read, and the default needs a target of at least 5 layers, not of "
                f"{count}: add {_LAYERS} to config.json."
            )
        # SGLang's default is the inputs of layers 2, count // 2 and count - 3, which are the outputs of the layers
        # before them.
        return 1, count // 2 - 1, count - 4
    return read_layers(EagleConfig.title, _LAYERS, layers, count, states=states)


def to_head_json(
    config: EagleConfig, *, dtype: str, layout: str = "eagle", verifier: str | None = None
) -> JsonObject:
    """Return the contents of config.json: layout "eagle" for SGLang, "speculators" for vLLM.

    Args:
      config, dtype: config and dtype of the head.
      layout: one of `LAYOUTS`.
      verifier: name of the target, for the layout "speculators".

    Raises:
      MarsError: the layout does not support EAGLE-1, or a config of the layer's family cannot describe the layer.
    """
    if layout == "speculators" and config.version != 3:
        raise MarsError("the layout of speculators is for EAGLE-3 heads only: choose the layout 'eagle'.")
    layer = to_json(config.layer, dtype=dtype)
    # Check that a reader would derive the same layer from this config and the tensor names.
    if layer_config(layer, {canonical(row.name) for row in config.weights()}) != config.layer:
        raise MarsError(f"the family '{config.layer.family}' cannot express the head's layer: use another.")
    if config.version == 1:
        return layer | {"bias": config.fc_bias}
    [named] = layer["architectures"]
    fields = {
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "fc_norm": config.fc_norm,
        "norm_before_fc": config.input_norm,
        "norm_before_residual": config.norm_before_residual,
        "norm_output": config.norm_output,
    }
    if layout == "speculators":
        fields |= speculators("eagle3", 5, verifier, named)
        fields |= {"architectures": ["Eagle3Speculator"], "transformer_layer_config": layer, "dtype": dtype}
        return fields | {_LAYERS: [i + 1 for i in config.feature_layers]}
    fields |= {"architectures": [f"{named}Eagle3"], "bias": config.fc_bias}
    # SGLang reads this nested key. vLLM reads the same key at the top level, with all layer numbers larger by one.
    nested = {_LAYERS: list(config.feature_layers), "use_aux_hidden_state": True}
    return layer | fields | {"eagle_config": nested}
