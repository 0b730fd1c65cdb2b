"""config.json of an EAGLE head <-> EagleConfig. V vocabulary, W draft vocabulary.

The files of SafeAILab/EAGLE, SpecForge and NVIDIA differ in what they write down, and copy fields of the target's
config that mean nothing in a head. So what the tensors show is read off them. Oracle: tests/hub/test_heads.py.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from typing import Any

from mars_jax.core.errors import MarsError
from mars_jax.hub.config_json import FAMILIES, from_json, to_json
from mars_jax.hub.values import given
from mars_jax.models.config import ModelConfig
from mars_jax.models.eagle_head import EagleConfig

_LAYERS = "eagle_aux_hidden_state_layer_ids"
LAYOUTS = ("eagle", "speculators")
"""Of config.json: that of SafeAILab, SpecForge and SGLang, or that of the speculators library, which vLLM reads."""
_OTHER = "use the head that was trained for this target"


def canonical(name: str) -> str:
    """A tensor's name without what the exports differ in: the `model.` prefix and `midlayer`.

    >>> canonical("model.midlayer.hidden_norm.weight")
    'layers.0.hidden_norm.weight'
    """
    return re.sub(r"^midlayer\.", "layers.0.", name.removeprefix("model."))


def from_head_json(
    data: dict[str, Any], shapes: dict[str, tuple[int, ...]], target: ModelConfig
) -> EagleConfig:
    """An EagleConfig from the contents of config.json and the shapes of the tensors by canonical name.

    Raises:
      MarsError: they contradict each other or the target, or are not supported.
    """
    try:
        return _from_head_json(data, shapes, target)
    except (TypeError, AttributeError, LookupError, ValueError, ArithmeticError) as error:
        raise MarsError(f"config.json holds a value of the wrong kind ({error}): correct it.") from None


def _from_head_json(data: dict[str, Any], shapes: dict[str, tuple[int, ...]], target: ModelConfig):
    if "speculators_model_type" in data or "transformer_layer_config" in data:
        data = flatten(data, target)
    version, layer = _version(data, shapes), layer_config(data, shapes)
    if layer.vocab_size != target.vocab_size:
        raise MarsError(
            f"the EAGLE head is for a vocabulary of {layer.vocab_size} tokens and the target has "
            f"{target.vocab_size}: {_OTHER}."
        )
    width = given(data, "target_hidden_size", target.hidden_size)
    if width != target.hidden_size:
        raise MarsError(
            f"the EAGLE head is for a target {width} wide and this one is {target.hidden_size}: {_OTHER}."
        )
    rows = next(iter(shapes.get("lm_head.weight", ())), None)
    drafted = target.vocab_size
    if version == 3:
        drafted = given(data, "draft_vocab_size", rows or drafted)
    if rows is not None and rows != drafted:
        raise MarsError(
            f"lm_head.weight has {rows} rows and the draft vocabulary {drafted} tokens: use the config the weights "
            "came with."
        )
    config = EagleConfig(
        version=version,
        layer=layer,
        target_hidden_size=target.hidden_size,
        draft_vocab_size=drafted,
        feature_layers=_feature_layers(data, target.num_layers) if version == 3 else (),
        fc_bias="fc.bias" in shapes,
        fc_norm=version == 3 and ("fc_norm.0.weight" in shapes or bool(_said(data, "fc_norm"))),
        input_norm=version == 3 and ("input_norm.weight" in shapes or bool(_said(data, "norm_before_fc"))),
        norm_before_residual=version == 3 and bool(_said(data, "norm_before_residual")),
        norm_output=version == 3 and bool(_said(data, "norm_output")),
        own_embed="embed_tokens.weight" in shapes,
        own_unembed="lm_head.weight" in shapes,
    )
    if drafted != target.vocab_size and "d2t" not in shapes:
        raise MarsError(
            f"the EAGLE head drafts from {drafted} of {target.vocab_size} tokens and has no d2t that says which: "
            "download it again."
        )
    expected = next(row.shape[1] for row in config.weights() if row.name == "fc.weight")
    found = next(reversed(shapes.get("fc.weight", ())), expected)
    if found != expected:
        parts = f"{len(config.feature_layers)} features" if version == 3 else "an embedding and a feature"
        raise MarsError(
            f"fc.weight reads {found} numbers, and {parts} of a target {target.hidden_size} wide are {expected}: "
            f"{_OTHER}."
        )
    return config


def flatten(data: dict[str, Any], target: ModelConfig) -> dict[str, Any]:
    """config.json of a head in the layout of the speculators library, as EAGLE's own layout says it.

    The library numbers a target's hidden states, of which number i is what layer i reads; EAGLE's own files number the
    layers whose output is meant, one less (vllm-project/speculators, `Eagle3SpeculatorConfig` and
    `resolve_target_layer_ids`; vLLM, `aux_hidden_state_layers`).

    Raises:
      MarsError: another kind of drafter, or one that is described by half.

    >>> layer = ModelConfig(vocab_size=9, hidden_size=8, intermediate_size=8, num_layers=32, num_heads=1)
    >>> found = flatten({"transformer_layer_config": {"hidden_size": 8}, "norm_before_residual": True}, layer)
    >>> found["hidden_size"], found[_LAYERS]
    (8, [1, 15, 28])
    """
    kind = data.get("speculators_model_type", "eagle3")
    if kind != "eagle3":
        raise MarsError(f"speculators_model_type is {kind!r}: this layout is read for 'eagle3' alone.")
    layer = data.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise MarsError("config.json has no transformer_layer_config: use the config the weights came with.")
    if not isinstance(data.get("norm_before_residual"), bool):
        raise MarsError(
            "config.json does not say norm_before_residual, of which readers of this layout have different defaults: "
            "add it, true or false, as the head was trained."
        )
    count = target.num_layers
    states = data.get(_LAYERS) or [2, count // 2, count - 3]
    if isinstance(states, list) and all(type(i) is int for i in states):
        if 0 in states:
            raise MarsError(
                "the EAGLE head reads hidden state 0, the target's embedding, which is not supported: use a head that "
                "reads the outputs of layers."
            )
        states = [i - 1 for i in states]
    own = {key: value for key, value in data.items() if key not in ("transformer_layer_config", "model_type")}
    named = {"architectures": ["Eagle3Speculator"], _LAYERS: states}
    return layer | {key: value for key, value in own.items() if value is not None} | named


def _said(data: dict[str, Any], key: str) -> Any:
    """What config.json says about a key of EAGLE, itself or in its `eagle_config`."""
    return given(data, key, (data.get("eagle_config") or {}).get(key))


def _version(data: dict[str, Any], shapes: Iterable[str]) -> int:
    """1 or 3, which config.json and the weights must agree about; a config without any mark agrees with either."""
    named = str(data.get("architectures") or "").lower()
    marked = any(data.get(key) is not None for key in ("draft_vocab_size", "eagle_config", _LAYERS))
    held = 3 if "layers.0.hidden_norm.weight" in shapes else 1
    said = 3 if marked or re.search(r"eagle-?3", named) else 1 if "eagle" in named else held
    if said != held:
        raise MarsError(
            f"config.json describes an EAGLE-{said} head and the weights are those of EAGLE-{held} "
            f"({'with' if held == 3 else 'without'} a hidden_norm): use the config the weights came with."
        )
    return held


def layer_config(data: dict[str, Any], shapes: Iterable[str]) -> ModelConfig:
    """The config of a head's layer from config.json and the canonical names of the tensors.

    Raises:
      MarsError: other layers than the weights have, a sliding window, or what `hub.config.from_json` does not support.
    """
    named = data.get("architectures") or [""]
    named = named if isinstance(named, str) else named[0]
    # LlamaForCausalLMEagle3 and Eagle3LlamaForCausalLM are Llama; where only EAGLE is named, model_type tells.
    plain = re.sub(r"eagle-?\d?", "", named, flags=re.IGNORECASE)
    data = data | {"architectures": [plain] if plain.endswith("ForCausalLM") else None}
    layers = {int(found[1]) for name in shapes if (found := re.match(r"layers\.(\d{1,9})\.", name))}
    said = given(data, "num_hidden_layers", 1)
    if layers and layers != set(range(said)):
        raise MarsError(
            f"config.json says that the EAGLE head has {said} layers and the weights are of layers "
            f"{', '.join(map(str, sorted(layers)))}: use the config the weights came with."
        )
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


def _feature_layers(data: dict[str, Any], count: int) -> tuple[int, ...]:
    """The layers whose outputs the head reads, of a target that has `count`."""
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
    if not isinstance(layers, list) or any(type(i) is not int for i in layers):
        raise MarsError(f"{_LAYERS} is {layers!r}: give a list of whole numbers.")
    if wrong := [i for i in layers if not 0 <= i < count]:
        raise MarsError(
            f"the EAGLE head reads layer {wrong[0]} and the target has layers 0 to {count - 1}: {_OTHER}."
        )
    return tuple(layers)


def to_head_json(
    config: EagleConfig, *, dtype: str, layout: str = "eagle", verifier: str | None = None
) -> dict[str, Any]:
    """The contents of config.json: in the layout "eagle" as SGLang reads it, in that of speculators as vLLM does.

    Args:
      config, dtype: of the head.
      layout: of `LAYOUTS`.
      verifier: name of the target, which the layout of speculators has room for.

    Raises:
      MarsError: the layout is not known or has no EAGLE-1, or the layer's family cannot express the layer.
    """
    if layout not in LAYOUTS:
        raise MarsError(f"layout {layout!r} is not known: expected one of {', '.join(LAYOUTS)}.")
    if layout == "speculators" and config.version != 3:
        raise MarsError(
            "the layout of speculators is written for EAGLE-3 heads alone: choose the layout 'eagle'."
        )
    data = to_json(config.layer, dtype=dtype) | {"bias": config.fc_bias}
    if config.version == 3:
        data |= {
            "architectures": [f"{FAMILIES[config.layer.family].architecture}Eagle3"],
            "draft_vocab_size": config.draft_vocab_size,
            "target_hidden_size": config.target_hidden_size,
            # Here SGLang looks. Of the same name without the nesting vLLM counts from 1.
            "eagle_config": {_LAYERS: list(config.feature_layers), "use_aux_hidden_state": True},
            "fc_norm": config.fc_norm,
            "norm_before_fc": config.input_norm,
            "norm_before_residual": config.norm_before_residual,
            "norm_output": config.norm_output,
        }
    if layer_config(data, {canonical(row.name) for row in config.weights()}) != config.layer:
        raise MarsError(
            f"config.json of the family '{config.layer.family}' cannot express the head's layer: choose another family."
        )
    return _nest(data, config, verifier) if layout == "speculators" else data


_HEADS_OWN = (
    "draft_vocab_size",
    "target_hidden_size",
    "fc_norm",
    "norm_before_fc",
    "norm_before_residual",
    "norm_output",
)


def _nest(data: dict[str, Any], config: EagleConfig, verifier: str | None) -> dict[str, Any]:
    """`flatten` undone: config.json in the layout of speculators."""
    own = {key: data[key] for key in _HEADS_OWN}
    named = FAMILIES[config.layer.family].architecture
    layer = {k: v for k, v in data.items() if k not in (*_HEADS_OWN, "eagle_config", "architectures", "bias")}
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": 5,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return own | {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        _LAYERS: [i + 1 for i in config.feature_layers],
        "transformer_layer_config": layer | {"architectures": [named]},
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": verifier, "architectures": [named]},
        },
        "dtype": data.get("dtype") or data.get("torch_dtype"),
    }
