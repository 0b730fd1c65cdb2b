"""EAGLE heads as published on the Hugging Face hub <-> (EagleConfig, params).

Layouts: those of SafeAILab/EAGLE and SpecForge, `midlayer.*` or `layers.0.*`, and of speculators. Oracle: heads that
PyTorch writes (tests/hub/test_heads.py). V vocabulary, W draft vocabulary.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from mars_jax import specs
from mars_jax.core.errors import MarsError
from mars_jax.core.types import PyTree
from mars_jax.hub.config_json import read_json
from mars_jax.hub.files import resolve, tensors
from mars_jax.hub.heads.eagle_config import canonical, from_head_json, to_head_json
from mars_jax.hub.load import DERIVED, convert, listed, resolve_dtype
from mars_jax.hub.save import free_directory, named_arrays, write_directory
from mars_jax.models.config import ModelConfig
from mars_jax.models.dflash_head import DFlashConfig
from mars_jax.models.eagle_head import EagleConfig
from mars_jax.models.quantize import Int8, is_quantized, quantize
from mars_jax.models.weights import build_rows

_AGAIN = "download the head again"
VERIFIERS = ("verifier_norm.weight", "verifier_lm_head.weight")
"""Copies of the target's weights that the training of the speculators library holds, and some exports keep."""


def load_eagle(
    name_or_path: str | os.PathLike[str],
    target_config: ModelConfig,
    target_params: PyTree,
    *,
    dtype: str | None = None,
) -> tuple[EagleConfig, PyTree]:
    """Load an EAGLE-1, -2 or -3 head of a target, tensor by tensor.

    A head that repeats the target's embedding (EAGLE-1: or unembedding) shares it instead.

    Args:
      name_or_path: directory, or `owner/name` on the Hugging Face hub.
      target_config: of the model that the head was trained for.
      target_params: its params.
      dtype: "float32" or "bfloat16"; None is the head's own (float16 becomes bfloat16). "int8" keeps its matrices in
        8 bits per weight, and the rest in its own.

    Returns:
      The config, and what `Params.draft` is to be. In it `ids` i32[W] are the target's tokens that a draft
      vocabulary smaller than V consists of.

    Raises:
      MarsError: with one sentence that names what is wrong and the cure.

    >>> name, target = "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", load("meta-llama/...")  # doctest: +SKIP
    >>> config, head = load_eagle(name, target.config, target.params)  # doctest: +SKIP
    """
    specs.check_dtype(dtype)
    directory = resolve(name_or_path)
    data = read_json(directory / "config.json")
    own = str(data.get("dtype") or data.get("torch_dtype") or "float32").removeprefix("torch.")
    dtype, int8 = resolve_dtype(dtype, own)
    try:
        config = from_head_json(data, head_shapes(directory), target_config)
        return _read(directory, config, target_params, dtype, int8)
    except MarsError as error:
        text = str(error)
        raise MarsError(text if f"'{directory}" in text else f"'{directory}': {text}") from None


def head_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of all tensors by canonical name; none is read yet."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in tensors(directory):
        for name, tensor in file.items():
            if canonical(name) in shapes:
                raise MarsError(f"there are two tensors {canonical(name)}: delete the one that is not meant.")
            shapes[canonical(name)] = tensor.shape
    return shapes


def _read(
    directory: Path, config: EagleConfig, target: PyTree, dtype: str, int8: bool
) -> tuple[EagleConfig, PyTree]:
    """The params of a head, checked against the table of weights, and its config without what the target shares."""
    shareable = {"embed_tokens.weight": target["embed"]}
    if config.version == 1:
        shareable["lm_head.weight"] = target.get("unembed", target["embed"])
    table = {canonical(row.name): row for row in config.weights()}
    found: dict[str, jax.Array | Int8] = {}
    shared: set[str] = set()
    maps: dict[str, np.ndarray] = {}
    extra: list[str] = []
    for file in tensors(directory):
        for given, tensor in file.items():
            name = canonical(given)
            row = table.get(name)
            if name in ("d2t", "t2d"):
                maps[name] = tensor.read()
            elif row is None:
                extra += [] if DERIVED.search(name) or name in VERIFIERS else [given]
            elif tensor.shape != row.shape:
                raise MarsError(
                    f"tensor {given} is {list(tensor.shape)} and config.json and target ask for {list(row.shape)}: "
                    "use the config the weights came with, and the target they were trained for."
                )
            else:
                array = tensor.read()
                if name in shareable and repeats(array, shareable[name]):
                    shared.add(name)
                    continue
                try:
                    found[name] = convert(array, dtype, int8=int8 and is_quantized(row))
                except MarsError as error:
                    raise MarsError(f"tensor {given}: {error}") from None
    missing = [row.name for name, row in table.items() if name not in found and name not in shared]
    if missing or extra:
        what = "missing" if missing else "not part of an EAGLE head"
        raise MarsError(
            f"tensors that are {what}: {listed(missing or extra)}; use the config the weights came with."
        )
    config = dataclasses.replace(
        config,
        own_embed=config.own_embed and "embed_tokens.weight" not in shared,
        own_unembed=config.own_unembed and "lm_head.weight" not in shared,
    )
    if config.version == 3 and config.layer.tie_embeddings and config.own_embed and not config.own_unembed:
        raise MarsError(
            "the head ties its lm_head to an embedding of its own, which is not supported: save both."
        )
    params = build_rows(config.weights(), lambda row: found.pop(canonical(row.name)))
    if "d2t" in maps:
        ids = draft_ids(config, maps["d2t"], maps.get("t2d"))
        if config.draft_vocab_size < config.layer.vocab_size:
            params["ids"] = jnp.asarray(ids)
        elif np.any(maps["d2t"]):
            raise MarsError(
                f"d2t reorders all {len(ids)} tokens of the target, which is not supported: reorder the rows of "
                "lm_head.weight and leave d2t out."
            )
    return config, params


def repeats(ours: np.ndarray, theirs: jax.Array | Int8, rows: int = 4096) -> bool:
    """Whether a table is a copy of another, perhaps in a narrower dtype; in blocks, which saves memory.

    Of one in 8 bits it is where it rounds to the same. Of one that is spread, every process compares its own parts.
    """

    def copied(a: np.ndarray, b: np.ndarray) -> bool:
        blocks = (slice(i, i + rows) for i in range(0, len(a), rows))
        with np.errstate(all="ignore"):  # what does not fit is no copy
            return all(np.array_equal(a[block].astype(b.dtype), b[block]) for block in blocks)

    if ours.shape != theirs.shape or not jnp.issubdtype(ours.dtype, jnp.floating):
        return False
    if isinstance(theirs, Int8):
        small = quantize(ours)
        pairs = [(small.values, theirs.values), (small.scale, theirs.scale)]
    else:
        pairs = [(ours, theirs)]
    same = True
    for a, b in pairs:
        for shard in b.addressable_shards:
            part, held = np.asarray(a)[shard.index], np.asarray(shard.data)
            same = same and (copied(part, held) or copied(held, part))
    if jax.process_count() > 1:  # all of them decode with the same head
        from jax.experimental import multihost_utils

        same = bool(np.all(multihost_utils.process_allgather(np.asarray(same))))
    return same


def draft_ids(
    config: EagleConfig | DFlashConfig, d2t: np.ndarray, t2d: np.ndarray | None = None
) -> np.ndarray:
    """Target tokens i32[W] from offsets d2t [W], checked against the marks t2d bool[V]."""
    count, vocab = config.draft_vocab_size, config.layer.vocab_size
    if d2t.shape != (count,):
        raise MarsError(f"d2t has shape {list(d2t.shape)} and lm_head.weight {count} rows: {_AGAIN}.")
    if not np.issubdtype(d2t.dtype, np.integer):
        raise MarsError(f"d2t holds {d2t.dtype} and not whole numbers: {_AGAIN}.")
    ids = np.arange(count) + d2t.astype(np.int64)
    wrong = np.flatnonzero((ids < 0) | (ids >= vocab))
    if len(wrong):
        raise MarsError(
            f"d2t maps draft token {wrong[0]} to {ids[wrong[0]]} and the target has {vocab} tokens: use the head "
            "that was trained for this target."
        )
    if (different := len(np.unique(ids))) < count:
        raise MarsError(f"d2t maps {count} draft tokens to {different} of the target's: {_AGAIN}.")
    if t2d is not None and count < vocab:
        marked = np.flatnonzero(t2d)
        if t2d.shape != (vocab,):
            raise MarsError(f"t2d has shape {list(t2d.shape)} and the target {vocab} tokens: {_AGAIN}.")
        if len(marked) != count:
            raise MarsError(f"t2d marks {len(marked)} tokens and the draft vocabulary has {count}: {_AGAIN}.")
        if len(odd := np.setdiff1d(ids, marked)):
            raise MarsError(f"d2t maps to token {odd[0]}, which t2d does not mark: {_AGAIN}.")
    return ids.astype(np.int32)


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
    >>> from mars_jax.models import eagle_head
    >>> layer = ModelConfig(vocab_size=32, hidden_size=16, intermediate_size=24, num_layers=1, num_heads=2)
    >>> config = EagleConfig(version=1, layer=layer, target_hidden_size=16, draft_vocab_size=32, own_unembed=False)
    >>> with tempfile.TemporaryDirectory() as path:
    ...     _ = save_eagle(path, config, eagle_head.init_params(config, jax.random.key(0)))
    ...     sorted(os.listdir(path))
    ['config.json', 'model.safetensors']
    """
    target = free_directory(path, overwrite=overwrite)
    arrays = named_arrays(config.weights(), params)
    data = to_head_json(config, dtype=arrays["fc.weight"].dtype.name, layout=layout, verifier=verifier)
    if layout == "speculators":
        arrays = {canonical(name): array for name, array in arrays.items()}
    if config.draft_vocab_size < config.layer.vocab_size:
        if "ids" not in params:
            raise MarsError("params lack ids: they belong to another config.")
        ids = np.asarray(params["ids"], np.int64)
        arrays["d2t"] = ids - np.arange(len(ids))
        arrays["t2d"] = np.isin(np.arange(config.layer.vocab_size), draft_ids(config, arrays["d2t"]))
    return write_directory(target, arrays, data)
