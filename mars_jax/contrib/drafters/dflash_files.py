"""DFlash and DSpark heads as published on the Hugging Face hub <-> (DFlashConfig, params).

Layouts: z-lab's and DeepSeek's, whose layer ids count outputs from 0, and that of speculators, whose ids are those of
hidden states, one more. Oracle: heads that PyTorch writes (tests/contrib/test_dflash_files.py). V vocabulary, W draft
vocabulary.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

from mars_jax.contrib.models.dflash_head import DFlashConfig
from mars_jax.core.errors import MarsError
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
from mars_jax.hub.values import given
from mars_jax.models.config import ModelConfig

LAYOUTS = ("dflash", "speculators")
"""Layouts of config.json: z-lab's, or DeepSeek's if places say the next token; or that of the speculators library."""
_STATES = "aux_hidden_state_layer_ids"
_SLIDING = "sliding_attention"
_UNSUPPORTED = {"input_embedding_scale": 1.0, "output_multiplier": 1.0, "final_logit_softcapping": 0.0}
"""Factors that some heads have, and what each is where it changes nothing."""


def load_dflash(
    name_or_path: str | os.PathLike[str],
    target_config: ModelConfig,
    target_params: PyTree,
    *,
    dtype: str | None = None,
    head_embed: str = "own",
) -> tuple[DFlashConfig, PyTree]:
    """Load a DFlash or DSpark head of a target, tensor by tensor.

    A head that repeats the target's embedding or unembedding shares it instead.

    Args:
      name_or_path, target_config, target_params, dtype, head_embed: as for `load_eagle`.

    Returns:
      The config, and what `Params.draft` is to be. In it `ids` i32[W] are the target's tokens that a draft
      vocabulary smaller than V consists of.

    Raises:
      MarsError: with one sentence that names what is wrong and the cure.

    >>> target = load("Qwen/Qwen3-8B")  # doctest: +SKIP
    >>> config, head = load_dflash("z-lab/Qwen3-8B-DFlash-b16", target.config, target.params)  # doctest: +SKIP
    """
    head = name_or_path, target_config, target_params, dtype
    return load_head(*head, from_dflash_json, lambda config: True, head_embed=head_embed)


def save_dflash(
    path: str | os.PathLike[str],
    config: DFlashConfig,
    params: PyTree,
    *,
    overwrite: bool = False,
    layout: str = "dflash",
    verifier: str | None = None,
) -> Path:
    """Write a head in a published layout; other arguments, result and errors are those of `hub.save`.

    Args:
      layout: "dflash", that of z-lab and DeepSeek, or "speculators".
      verifier: name of the target, for the layout of speculators.

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
    own = path, config, params, to_dflash_json, LAYOUTS, layout
    return save_head(*own, overwrite=overwrite, verifier=verifier)


@checked
def from_dflash_json(data: dict[str, Any], shapes: Shapes, target: ModelConfig) -> DFlashConfig:
    """Make a DFlashConfig from the contents of config.json and the shapes of the tensors by canonical name.

    Raises:
      MarsError: they contradict each other or the target, or are not supported.
    """
    _check_kind(data, shapes)
    dspark = "markov_head.markov_w1.weight" in shapes or "confidence_head.proj.weight" in shapes
    named = str(data.get("architectures") or "").lower() + str(data.get("speculators_model_type") or "")
    nested = nested_layer(data)
    own = data | (data.get("dflash_config") or {}) if nested is None else data
    # z-lab's class reads the block size at the top of config.json and the rest in dflash_config.
    own = own | {"block_size": given(data, "block_size", own.get("block_size"))}
    layer = data if nested is None else nested
    config = _layer(layer, shapes, target)
    layers = _feature_layers(own, shapes, target, nested is not None)
    for key in ("block_size", "mask_token_id"):
        if type(own.get(key)) is not int:
            raise MarsError(f"config.json gives no number for {key}: use the config the weights came with.")
    kinds = layer.get("layer_types") or ["full_attention"] * config.num_layers
    sliding = not own.get("sliding_window_non_causal", False)
    everywhere = own.get("is_causal")
    found = shapes.get("confidence_head.proj.weight", (1, 0))
    # Outside of speculators' layout the rows of lm_head alone say the draft vocabulary.
    said = own | ({"draft_vocab_size": None} if nested is None else {})
    return DFlashConfig(
        **shared_fields(DFlashConfig.title, said, shapes, target, config),
        feature_layers=layers,
        block_size=own["block_size"],
        mask_token=own["mask_token_id"],
        # DeepSeek's DFlash heads name the class of their DSpark heads, and their places say the next token as well.
        from_anchor=bool(given(data, "sample_from_anchor", dspark or "dspark" in named)),
        causal=tuple(
            bool(everywhere) if everywhere is not None else kind == _SLIDING and sliding for kind in kinds
        ),
        markov_rank=shapes.get("markov_head.markov_w1.weight", (0, 0))[1],
        confidence="confidence_head.proj.weight" in shapes,
        confidence_bias="confidence_head.proj.bias" in shapes,
        confidence_markov=found[1] > config.hidden_size,
    )


def _check_kind(data: dict[str, Any], shapes: Shapes) -> None:
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


def _layer(data: dict[str, Any], shapes: Shapes, target: ModelConfig) -> ModelConfig:
    """Return the config of the layers: Qwen3's, whose norms and biases the tensors tell."""
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
    data: dict[str, Any], shapes: Shapes, target: ModelConfig, nested: bool
) -> tuple[int, ...]:
    """Return the layers whose outputs the head reads."""
    key = _STATES if nested else "target_layer_ids"
    layers, count = data.get(key), target.num_layers
    if layers is None and nested:
        raise MarsError(
            f"config.json does not say {key}: add the hidden states that the head was trained on."
        )
    if layers is None:
        # As published: spread evenly from layer 1 on (z-lab/dflash, `build_target_layer_ids`).
        many = next(reversed(shapes.get("fc.weight", (0,)))) // target.hidden_size
        spread = [round(1 + i * (count - 4) / max(many - 1, 1)) for i in range(many)]
        layers = [count // 2] if many == 1 else spread
    return read_layers(DFlashConfig.title, key, layers, count, states=nested)


def to_dflash_json(
    config: DFlashConfig, *, dtype: str, layout: str = "dflash", verifier: str | None = None
) -> dict[str, Any]:
    """Return the contents of config.json.

    Args:
      config, dtype: of the head.
      layout: of `LAYOUTS`.
      verifier: name of the target, which the layout of speculators has room for.

    Raises:
      MarsError: the layout is not known, or cannot express the head.
    """
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
    return (
        own
        | speculators(kind, config.drafts, verifier, None)
        | {
            "architectures": ["DSparkSpeculator" if kind == "dspark" else "DFlashSpeculator"],
            _STATES: [i + 1 for i in read],
            "mask_token_id": mask,
            "transformer_layer_config": layer | {"architectures": [FAMILIES["qwen3"].architecture]},
            "dtype": dtype,
        }
    )
