"""Shared code for loading and saving draft heads with transformer layers: config.json, tensors and draft vocabularies.

V vocabulary, W draft vocabulary. Tested against heads written by PyTorch (tests/hub/test_heads.py,
test_dflash_files.py).
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from mars_jax.core.types import PyTree
from mars_jax.hub.config_json import dtype_of, read_json
from mars_jax.hub.families import Fields
from mars_jax.hub.files import Tensor, resolve, tensors
from mars_jax.hub.load import DERIVED, check_tensors, collect, read_params, resolve_dtype
from mars_jax.hub.save import free_directory, named_arrays, write_directory
from mars_jax.hub.values import of_its_kind, value_or_default
from mars_jax.models.config import ModelConfig
from mars_jax.models.heads import LayeredHead
from mars_jax.models.quantize import Int8, quantize
from mars_jax.utils.errors import MarsError, warn
from mars_jax.utils.settings import check_dtype
from mars_jax.utils.types import JsonObject

Head = TypeVar("Head", bound=LayeredHead)
Shapes = dict[str, tuple[int, ...]]
"""Shapes of the tensors of a head, by canonical name."""
FromJson = Callable[[JsonObject, Shapes, ModelConfig], Head]
"""Function that makes a head's config from the contents of config.json, the tensor shapes, and the target's config."""

checked = of_its_kind("config.json holds a value", "correct it")
"""Decorator that makes a function raise MarsError if a value in config.json has the wrong type."""
_OTHER = "use the head that was trained for this target"
_AGAIN = "download the head again"
_EMBED, _UNEMBED = "embed_tokens.weight", "lm_head.weight"
_OTHER_TENSORS = ("d2t", "t2d", "verifier_norm.weight", "verifier_lm_head.weight")
"""Tensors in a head's checkpoint that are not weights of the head.

`d2t` and `t2d` map a draft vocabulary to the target's: `d2t` holds id offsets, `t2d` a mask over target tokens. The
others are copies of the target's weights, which the speculators library uses in training and some exports contain.
"""


def canonical(name: str) -> str:
    """Return a tensor's canonical name. Exports may add the prefix `model.` or call the layer `midlayer`.

    >>> canonical("model.midlayer.hidden_norm.weight")
    'layers.0.hidden_norm.weight'
    """
    return re.sub(r"^midlayer\.", "layers.0.", name.removeprefix("model."))


def shared_fields(
    title: str, data: JsonObject, shapes: Shapes, target: ModelConfig, layer: ModelConfig
) -> Fields:
    """Return the fields of a head's config that all kinds of heads share.

    Raises:
      MarsError: the head is for a different target, or it has a smaller draft vocabulary and no d2t.
    """
    if layer.vocab_size != target.vocab_size:
        raise MarsError(
            f"the {title} is for a vocabulary of {layer.vocab_size} tokens and the target has {target.vocab_size}: "
            f"{_OTHER}."
        )
    width = value_or_default(data, "target_hidden_size", target.hidden_size)
    if width != target.hidden_size:
        raise MarsError(f"the {title} is for a target of width {width}, not {target.hidden_size}: {_OTHER}.")
    # Without `draft_vocab_size`, the number of draft tokens is the number of rows of the unembedding.
    rows = next(iter(shapes.get(_UNEMBED, ())), None)
    drafted = value_or_default(data, "draft_vocab_size", rows or target.vocab_size)
    if drafted != target.vocab_size and "d2t" not in shapes:
        raise MarsError(
            f"the {title} drafts from {drafted} of {target.vocab_size} tokens and has no d2t: {_AGAIN}."
        )
    return {
        "layer": layer,
        "target_hidden_size": width,
        "draft_vocab_size": drafted,
        "own_embed": _EMBED in shapes,
        "own_unembed": _UNEMBED in shapes,
    }


def nested_layer(data: JsonObject) -> JsonObject | None:
    """Return the nested config of a head's layers if config.json is in the speculators layout, otherwise None."""
    if "speculators_model_type" not in data and "transformer_layer_config" not in data:
        return None
    layer = data.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise MarsError("config.json has no transformer_layer_config: use the config the weights came with.")
    return layer


def read_layers(title: str, key: str, layers: Any, count: int, *, states: bool) -> tuple[int, ...]:
    """Check and return the numbers of the target's layers whose outputs a head reads.

    Args:
      title: the head's name, for messages.
      key: key in config.json, for messages.
      layers: the value of `key`.
      count: number of the target's layers.
      states: whether `layers` lists numbers of hidden states; state i + 1 is the output of layer i.
    """
    if not isinstance(layers, list) or any(type(i) is not int for i in layers):
        raise MarsError(f"{key} is {layers!r}: give a list of whole numbers.")
    if states and 0 in layers:
        raise MarsError(
            f"the {title} reads hidden state 0, the target's embedding, which is not supported: use a head that reads "
            "the outputs of layers."
        )
    layers = tuple(i - states for i in layers)
    if wrong := [i for i in layers if not 0 <= i < count]:
        raise MarsError(f"the {title} reads layer {wrong[0]}, and the target has 0 to {count - 1}: {_OTHER}.")
    return layers


def speculators(kind: str, tokens: int, verifier: str | None, architecture: str | None) -> JsonObject:
    """Return the config.json fields that all heads share in the speculators layout.

    Args:
      kind: name of the algorithm.
      tokens: number of drafted tokens.
      verifier: name of the target.
      architecture: architecture of the target.
    """
    proposal = {"proposal_type": "greedy", "speculative_tokens": tokens}
    config = {
        "algorithm": kind,
        "default_proposal_method": "greedy",
        "proposal_methods": [proposal | {"verifier_accept_k": 1, "accept_tolerance": 0.0}],
        "verifier": {"name_or_path": verifier, "architectures": [architecture]},
    }
    return {"speculators_model_type": kind, "speculators_config": config}


def load_head(
    name_or_path: str | os.PathLike[str],
    target_config: ModelConfig,
    target_params: PyTree,
    dtype: str | None,
    from_json: FromJson[Head],
    shares: Callable[[Head], bool],
    *,
    head_embed: str,
) -> tuple[Head, PyTree]:
    """Load a head's config and params, tensor by tensor; see `hub.load_eagle`.

    Args:
      name_or_path, target_config, target_params, dtype, head_embed: as for `hub.load_eagle`.
      from_json: function that builds the config.
      shares: function that returns whether a head may share its target's unembedding.
    """
    check_dtype(dtype)
    directory = resolve(name_or_path)
    data = read_json(directory / "config.json")
    dtype, bits = resolve_dtype(dtype, dtype_of(data))
    try:
        grouped = collect(tensors(directory), canonical)
        if twice := [name for name, candidates in grouped.items() if len(candidates) > 1]:
            raise MarsError(f"there are two tensors {twice[0]}: delete the wrong one.")
        stored = {name: candidates[0] for name, candidates in grouped.items()}
        config = from_json(data, {name: t.shape for name, (_, t) in stored.items()}, target_config)
        # Collect the target's tables that the head may share. Heads scale neither embeddings nor logits, so they cannot
        # share a table that the target scales.
        shareable = {}
        if target_config.embedding_multiplier == 1:
            shareable[_EMBED] = target_params["embed"]
        if shares(config) and target_config.logit_cap is None and target_config.logit_divisor == 1:
            shareable[_UNEMBED] = target_params.get("unembed", target_params["embed"])
        table = {canonical(row.name): row for row in config.weights()}
        check_tensors(directory, grouped, table, lambda name: DERIVED.search(name) or name in _OTHER_TENSORS)
        if head_embed == "target" and config.own_embed:
            if _EMBED not in shareable:
                raise MarsError(
                    "head_embed='target' does not apply: the target scales its embeddings, which the head does not."
                )
            config = dataclasses.replace(config, own_embed=False)
        config, params = _read(directory, config, stored, shareable, dtype, bits)
        if config.own_embed and _differs(stored[_EMBED][1], target_params["embed"]):
            warn(
                f"the embedding of the {config.title} in '{directory}' is not the target's, which lowers acceptance "
                "unless the head was trained with it: head_embed='target' (--head-embed target) reads the target's."
            )
        return config, params
    except MarsError as error:
        if f"'{directory}" in str(error):
            raise
        raise MarsError(f"'{directory}': {error}") from None


def _read(
    directory: Path,
    config: Head,
    stored: dict[str, tuple[str, Tensor]],
    shareable: dict[str, jax.Array | Int8],
    dtype: str,
    bits: int | None,
) -> tuple[Head, PyTree]:
    """Read the params of a head. In the returned config, `own_embed` and `own_unembed` are False for shared tables."""
    shared = {key for key in shareable if key in stored and _repeats(stored[key][1].read(), shareable[key])}
    config = dataclasses.replace(
        config,
        own_embed=config.own_embed and _EMBED not in shared,
        own_unembed=config.own_unembed and _UNEMBED not in shared,
    )
    # Without lm_head, EAGLE-1 heads use the target's unembedding. In other heads, tie_word_embeddings ties lm_head to
    # the head's own embedding.
    if config.feature_layers and config.layer.tie_embeddings and config.own_embed and not config.own_unembed:
        raise MarsError("lm_head tied to the head's own embedding is not supported: save both.")
    named_tensors = {row.name: stored[canonical(row.name)] for row in config.weights()}
    params = read_params(directory, named_tensors, config.leaves(), dtype, bits and 8)
    if "d2t" in stored:
        offsets = stored["d2t"][1].read()
        ids = _draft_ids(config, offsets)
        # A head without `ids` uses the target's token ids, so a d2t of full size must be all zeros.
        if config.is_narrow:
            params["ids"] = jnp.asarray(ids)
        elif np.any(offsets):
            raise MarsError(
                f"d2t reorders all {len(ids)} tokens of the target, which is not supported: reorder the rows of "
                "lm_head.weight and leave d2t out."
            )
    return config, params


def _repeats(head_table: np.ndarray, target_table: jax.Array | Int8) -> bool:
    """Return whether one table is a copy of the other, possibly in a narrower dtype. Compare in blocks to save memory.

    A table counts as a copy of an 8-bit table if its values, rounded to 8 bits, are the same. Each process compares its
    own shards.
    """

    def copied(a: np.ndarray, b: np.ndarray) -> bool:
        blocks = (slice(i, i + 4096) for i in range(0, len(a), 4096))
        with np.errstate(all="ignore"):  # a value that overflows the narrower dtype compares unequal
            return all(np.array_equal(a[block].astype(b.dtype), b[block]) for block in blocks)

    if head_table.shape != target_table.shape or not jnp.issubdtype(head_table.dtype, jnp.floating):
        return False
    if isinstance(target_table, Int8):
        rounded = quantize(head_table)
        pairs = [(rounded.values, target_table.values), (rounded.scale, target_table.scale)]
    else:
        pairs = [(head_table, target_table)]
    is_copy = True
    # Accept either rounding direction: a head may be stored in a narrower dtype than the target, or in a wider one.
    for a, b in pairs:
        for shard in b.addressable_shards:
            part, shard_values = np.asarray(a)[shard.index], np.asarray(shard.data)
            is_copy = is_copy and (copied(part, shard_values) or copied(shard_values, part))
    if jax.process_count() > 1:  # all processes must load the same head
        is_copy = bool(np.all(multihost_utils.process_allgather(np.asarray(is_copy))))
    return is_copy


def _differs(head_embed: Tensor, target_embed: jax.Array | Int8) -> bool:
    """Return whether two tables of the same shape differ by more than rounding.

    Compare only the directions of some rows, since EAGLE-3 and DFlash heads normalise embeddings. Each process samples
    its own shards.
    """
    if head_embed.shape != target_embed.shape:
        return False
    cosines = []
    if isinstance(target_embed, Int8):
        target_embed = target_embed.values  # the scale of a row does not change its direction
    for shard in target_embed.addressable_shards:
        first, last, _ = shard.index[0].indices(head_embed.shape[0])
        # Compare up to 64 evenly spaced rows. The shard may contain only some of their columns.
        ids = np.unique(np.linspace(first, last - 1, 64).round().astype(int))
        target_rows = np.asarray(shard.data[ids - first]).astype(np.float32)
        for row, target_row in zip(ids.tolist(), target_rows, strict=True):
            head_row = head_embed.rows(row, row + 1)[0, shard.index[1]].astype(np.float32)
            if norms := float(np.linalg.norm(head_row) * np.linalg.norm(target_row)):
                cosines.append(float(head_row @ target_row) / norms)
    # Rounding a table to 8 bits keeps the cosines well above 0.99.
    return bool(cosines) and float(np.mean(cosines)) < 0.99


def _draft_ids(config: LayeredHead, d2t: np.ndarray) -> np.ndarray:
    """Return target tokens i32[W] from offsets d2t [W]: draft token i is target token i + d2t[i]."""
    count, vocab = config.draft_vocab_size, config.vocab_size
    if d2t.shape != (count,) or not np.issubdtype(d2t.dtype, np.integer):
        raise MarsError(
            f"d2t is {d2t.dtype}{list(d2t.shape)}: expected {count} integers, one per row of lm_head.weight; {_AGAIN}."
        )
    ids = np.arange(count) + d2t.astype(np.int64)
    wrong = np.flatnonzero((ids < 0) | (ids >= vocab))
    if len(wrong):
        raise MarsError(
            f"d2t maps draft token {wrong[0]} to {ids[wrong[0]]} and the target has {vocab} tokens: {_OTHER}."
        )
    if (different := len(np.unique(ids))) < count:
        raise MarsError(f"d2t maps {count} draft tokens to {different} of the target's: {_AGAIN}.")
    return ids.astype(np.int32)


def save_head(
    path: str | os.PathLike[str],
    config: LayeredHead,
    params: PyTree,
    to_json: Callable[..., JsonObject],
    layouts: tuple[str, ...],
    layout: str,
    *,
    overwrite: bool,
    verifier: str | None,
) -> Path:
    """Write a head in one of `layouts`; `to_json` builds config.json. Other arguments are as for `hub.save_eagle`."""
    if layout not in layouts:
        raise MarsError(f"layout {layout!r} is not known: expected one of {', '.join(layouts)}.")
    target = free_directory(path, overwrite=overwrite)
    arrays = named_arrays(config.weights(), params)
    data = to_json(config, dtype=arrays["fc.weight"].dtype.name, layout=layout, verifier=verifier)
    if layout == "speculators":
        arrays = {canonical(name): array for name, array in arrays.items()}
    if config.is_narrow:
        if "ids" not in params:
            raise MarsError("params lack ids: they belong to another config.")
        ids = np.asarray(params["ids"], np.int64)
        # The inverse of `_draft_ids`; `t2d` bool[V] marks the target's tokens that have a draft token.
        arrays["d2t"] = ids - np.arange(len(ids))
        arrays["t2d"] = np.isin(np.arange(config.vocab_size), _draft_ids(config, arrays["d2t"]))
    return write_directory(target, arrays, data)
