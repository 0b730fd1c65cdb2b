"""config.json of a DFlash or DSpark head <-> DFlashConfig. V vocabulary, W draft vocabulary.

Layouts: z-lab's and DeepSeek's, whose layer ids count outputs from 0, and that of speculators, whose ids are those of
hidden states, one more. Oracle: tests/hub/test_dflash_files.py.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from mars_jax.core.errors import MarsError
from mars_jax.hub.config_json import FAMILIES, from_json, to_json
from mars_jax.hub.values import given
from mars_jax.models.config import ModelConfig
from mars_jax.models.dflash_head import DFlashConfig

LAYOUTS = ("dflash", "speculators")
"""Of config.json: z-lab's, or DeepSeek's where places say the next token; or that of the speculators library."""
_STATES = "aux_hidden_state_layer_ids"
_SLIDING = "sliding_attention"
_OTHER = "use the head that was trained for this target"
_UNSUPPORTED = {"input_embedding_scale": 1.0, "output_multiplier": 1.0, "final_logit_softcapping": 0.0}
"""Factors that some heads have, and what each is where it changes nothing."""


def from_dflash_json(
    data: dict[str, Any], shapes: dict[str, tuple[int, ...]], target: ModelConfig
) -> DFlashConfig:
    """A DFlashConfig from the contents of config.json and the shapes of the tensors by canonical name.

    Raises:
      MarsError: they contradict each other or the target, or are not supported.
    """
    try:
        return _from_dflash_json(data, shapes, target)
    except (TypeError, AttributeError, LookupError, ValueError, ArithmeticError) as error:
        raise MarsError(f"config.json holds a value of the wrong kind ({error}): correct it.") from None


def _from_dflash_json(
    data: dict[str, Any], shapes: dict[str, tuple[int, ...]], target: ModelConfig
) -> DFlashConfig:
    _check_kind(data, shapes)
    nested = "speculators_model_type" in data or "transformer_layer_config" in data
    dspark = "markov_head.markov_w1.weight" in shapes or "confidence_head.proj.weight" in shapes
    named = str(data.get("architectures") or "").lower() + str(data.get("speculators_model_type") or "")
    # DeepSeek's DFlash heads name the class of their DSpark heads, and their places say the next token as well.
    anchored = bool(given(data, "sample_from_anchor", dspark or "dspark" in named))
    own, layer = data, data
    if nested:
        layer = data.get("transformer_layer_config")
        if not isinstance(layer, dict):
            raise MarsError(
                "config.json has no transformer_layer_config: use the config the weights came with."
            )
    else:
        own = data | (data.get("dflash_config") or {})
    config = _layer(layer, shapes, target)
    if config.vocab_size != target.vocab_size:
        raise MarsError(
            f"the DFlash head is for a vocabulary of {config.vocab_size} tokens and the target has "
            f"{target.vocab_size}: {_OTHER}."
        )
    width = given(own, "target_hidden_size", target.hidden_size)
    if width != target.hidden_size:
        raise MarsError(
            f"the DFlash head is for a target {width} wide and this one is {target.hidden_size}: {_OTHER}."
        )
    layers = _feature_layers(own, nested, shapes, target)
    for key in ("block_size", "mask_token_id"):
        if type(own.get(key)) is not int:
            raise MarsError(f"config.json gives no number for {key}: use the config the weights came with.")
    kinds = layer.get("layer_types") or ["full_attention"] * config.num_layers
    sliding = not own.get("sliding_window_non_causal", False)
    everywhere = own.get("is_causal")
    rows = next(iter(shapes.get("lm_head.weight", ())), None)
    drafted = (
        given(own, "draft_vocab_size", rows or target.vocab_size) if nested else rows or target.vocab_size
    )
    if rows is not None and rows != drafted:
        raise MarsError(
            f"lm_head.weight has {rows} rows and the draft vocabulary {drafted} tokens: use the config the weights "
            "came with."
        )
    if drafted != target.vocab_size and "d2t" not in shapes:
        raise MarsError(
            f"the DFlash head drafts from {drafted} of {target.vocab_size} tokens and has no d2t that says which: "
            "download it again."
        )
    found = shapes.get("confidence_head.proj.weight", (1, 0))
    return DFlashConfig(
        layer=config,
        target_hidden_size=target.hidden_size,
        feature_layers=layers,
        block_size=own["block_size"],
        mask_token=own["mask_token_id"],
        draft_vocab_size=drafted,
        from_anchor=anchored,
        causal=tuple(
            bool(everywhere) if everywhere is not None else kind == _SLIDING and sliding for kind in kinds
        ),
        own_embed="embed_tokens.weight" in shapes,
        own_unembed="lm_head.weight" in shapes,
        markov_rank=shapes.get("markov_head.markov_w1.weight", (0, 0))[1],
        confidence="confidence_head.proj.weight" in shapes,
        confidence_bias="confidence_head.proj.bias" in shapes,
        confidence_markov=found[1] > config.hidden_size,
    )


def _check_kind(data: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> None:
    """Raise MarsError for relatives that draft otherwise."""
    kind = data.get("speculators_model_type", "dflash")
    if kind not in ("dflash", "dspark"):
        raise MarsError(
            f"speculators_model_type is {kind!r}: as a DFlash head only 'dflash' and 'dspark' are read."
        )
    own = data | (data.get("dflash_config") or {})
    if own.get("projector_type") not in (None, "dflash", "dspark"):
        raise MarsError(f"projector_type is {own['projector_type']!r}: only dflash and dspark are supported.")
    if any(name.startswith("candidate_selector.") for name in shapes) or "DFlash2" in str(
        data.get("architectures")
    ):
        raise MarsError(
            "the head is a DFlash-2, whose convolutions and candidate selector are not supported: use a DFlash head."
        )
    if own.get("markov_head_type") not in (None, "vanilla"):
        raise MarsError(
            f"markov_head_type is {own['markov_head_type']!r}: only 'vanilla' is supported, whose correction depends "
            "on the token before alone."
        )
    for key, nothing in _UNSUPPORTED.items():
        if own.get(key) not in (None, nothing):
            raise MarsError(f"{key} is {own[key]}, which is not supported: only heads without one are.")


def _layer(data: dict[str, Any], shapes: dict[str, tuple[int, ...]], target: ModelConfig) -> ModelConfig:
    """The config of the layers: Qwen3's, whose norms and biases the tensors tell."""
    norm = shapes.get("layers.0.self_attn.q_norm.weight")
    known = {"vocab_size": target.vocab_size} | {k: v for k, v in data.items() if v is not None}
    if "head_dim" not in known:
        known["head_dim"] = norm[0] if norm else known["hidden_size"] // known["num_attention_heads"]
    made = from_json(known | {"architectures": None, "model_type": "qwen3"})

    def held(name: str) -> bool:
        return f"layers.0.self_attn.{name}" in shapes

    return dataclasses.replace(
        made,
        family="qwen3" if norm else "llama",
        qk_norm=norm is not None,
        qkv_bias=held("q_proj.bias"),
        o_bias=held("o_proj.bias"),
        tie_embeddings=False,
    )


def _feature_layers(
    data: dict[str, Any], nested: bool, shapes: dict[str, tuple[int, ...]], target: ModelConfig
) -> tuple[int, ...]:
    """The layers whose outputs the head reads."""
    key = _STATES if nested else "target_layer_ids"
    layers, count = data.get(key), target.num_layers
    read = next(reversed(shapes.get("fc.weight", (0,))))
    if layers is None and nested:
        raise MarsError(
            f"config.json does not say {key}: add the hidden states that the head was trained on."
        )
    if layers is None:
        # As published: spread evenly from layer 1 on (z-lab/dflash, `build_target_layer_ids`).
        many = read // target.hidden_size
        spread = [round(1 + i * (count - 4) / max(many - 1, 1)) for i in range(many)]
        layers = [count // 2] if many == 1 else spread
    if not isinstance(layers, list) or any(type(i) is not int for i in layers):
        raise MarsError(f"{key} is {layers!r}: give a list of whole numbers.")
    if nested and 0 in layers:
        raise MarsError(
            "the DFlash head reads hidden state 0, the target's embedding, which is not supported: use a head that "
            "reads the outputs of layers."
        )
    layers = [i - 1 for i in layers] if nested else layers
    if wrong := [i for i in layers if not 0 <= i < count]:
        raise MarsError(
            f"the DFlash head reads layer {wrong[0]} and the target has layers 0 to {count - 1}: {_OTHER}."
        )
    if read != len(layers) * target.hidden_size:
        raise MarsError(
            f"fc.weight reads {read} numbers, and {len(layers)} features of a target {target.hidden_size} wide are "
            f"{len(layers) * target.hidden_size}: {_OTHER}."
        )
    return tuple(layers)


def to_dflash_json(
    config: DFlashConfig, *, dtype: str, layout: str = "dflash", verifier: str | None = None
) -> dict[str, Any]:
    """The contents of config.json.

    Args:
      config, dtype: of the head.
      layout: of `LAYOUTS`.
      verifier: name of the target, which the layout of speculators has room for.

    Raises:
      MarsError: the layout is not known, or cannot express the head.
    """
    if layout not in LAYOUTS:
        raise MarsError(f"layout {layout!r} is not known: expected one of {', '.join(LAYOUTS)}.")
    c = config.layer
    if c.local_rope is not None or len({w for w in c.windows if w is not None}) > 1 or c.num_experts:
        raise MarsError(
            "config.json of a DFlash head has one rope, one window and no experts: change the layers."
        )
    layer = to_json(dataclasses.replace(c, family="qwen3"), dtype=dtype) | {"architectures": None}
    windowed = {causal for window, causal in zip(c.windows, config.causal, strict=True) if window is not None}
    full = {causal for window, causal in zip(c.windows, config.causal, strict=True) if window is None}
    own: dict[str, Any] = {"block_size": config.block_size, "draft_vocab_size": config.draft_vocab_size}
    own |= {"target_hidden_size": config.target_hidden_size, "sample_from_anchor": config.from_anchor}
    if config.markov_rank or config.confidence:
        own |= {
            "markov_rank": config.markov_rank,
            "markov_head_type": "vanilla",
            "enable_confidence_head": config.confidence,
            "confidence_head_with_markov": config.confidence_markov,
        }
    if True in full or len(windowed) > 1:
        if len(windowed | full) > 1 or layout == "speculators":
            raise MarsError(
                "which layers of the head are causal cannot be said in this layout: choose another."
            )
        own["is_causal"] = True
    elif layout == "speculators":
        own["sliding_window_non_causal"] = windowed == {False}
    elif windowed == {False}:
        own["is_causal"] = False
    read, mask = list(config.feature_layers), config.mask_token
    if layout == "dflash":
        named = "Qwen3DSparkModel" if config.from_anchor else "DFlashDraftModel"
        said = {"target_layer_ids": read, "mask_token_id": mask}
        return layer | own | said | {"dflash_config": said, "architectures": [named]}
    kind = "dspark" if config.markov_rank or config.confidence else "dflash"
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": config.drafts,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return own | {
        "architectures": ["DSparkSpeculator" if kind == "dspark" else "DFlashSpeculator"],
        "speculators_model_type": kind,
        _STATES: [i + 1 for i in read],
        "mask_token_id": mask,
        "transformer_layer_config": layer | {"architectures": [FAMILIES["qwen3"].architecture]},
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": verifier, "architectures": [None]},
        },
        "dtype": dtype,
    }
