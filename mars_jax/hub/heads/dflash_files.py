"""DFlash and DSpark heads as published on the Hugging Face hub <-> (DFlashConfig, params).

Oracle: heads that PyTorch writes (tests/hub/test_dflash_files.py). V vocabulary, W draft vocabulary.
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
from mars_jax.hub.heads.dflash_config import from_dflash_json, to_dflash_json
from mars_jax.hub.heads.eagle_files import VERIFIERS, draft_ids, head_shapes, repeats
from mars_jax.hub.load import DERIVED, convert, listed, resolve_dtype
from mars_jax.hub.save import free_directory, named_arrays, write_directory
from mars_jax.models.config import ModelConfig
from mars_jax.models.dflash_head import DFlashConfig
from mars_jax.models.quantize import Int8, is_quantized
from mars_jax.models.weights import build_rows


def load_dflash(
    name_or_path: str | os.PathLike[str],
    target_config: ModelConfig,
    target_params: PyTree,
    *,
    dtype: str | None = None,
) -> tuple[DFlashConfig, PyTree]:
    """Load a DFlash or DSpark head of a target, tensor by tensor.

    A head that repeats the target's embedding or unembedding shares it instead.

    Args:
      name_or_path, target_config, target_params, dtype: as for `load_eagle`.

    Returns:
      The config, and what `Params.draft` is to be. In it `ids` i32[W] are the target's tokens that a draft
      vocabulary smaller than V consists of.

    Raises:
      MarsError: with one sentence that names what is wrong and the cure.

    >>> target = load("Qwen/Qwen3-8B")  # doctest: +SKIP
    >>> config, head = load_dflash("z-lab/Qwen3-8B-DFlash-b16", target.config, target.params)  # doctest: +SKIP
    """
    specs.check_dtype(dtype)
    directory = resolve(name_or_path)
    data = read_json(directory / "config.json")
    own = str(data.get("dtype") or data.get("torch_dtype") or "float32").removeprefix("torch.")
    dtype, int8 = resolve_dtype(dtype, own)
    try:
        shapes = {name.removeprefix("model."): shape for name, shape in head_shapes(directory).items()}
        config = from_dflash_json(data, shapes, target_config)
        return _read(directory, config, target_config, target_params, dtype, int8)
    except MarsError as error:
        text = str(error)
        raise MarsError(text if f"'{directory}" in text else f"'{directory}': {text}") from None


def _read(
    directory: Path, config: DFlashConfig, of_target: ModelConfig, target: PyTree, dtype: str, int8: bool
) -> tuple[DFlashConfig, PyTree]:
    """The params of a head, checked against the table of weights, and its config without what the target shares."""
    shareable = {"embed_tokens.weight": target["embed"]}
    if of_target.logit_cap is None:
        shareable["lm_head.weight"] = target.get("unembed", target["embed"])
    if of_target.scale_embeddings:
        del shareable["embed_tokens.weight"]  # what the target looks up is more than its table
    table = {row.name: row for row in config.weights()}
    found: dict[str, jax.Array | Int8] = {}
    shared: set[str] = set()
    maps: dict[str, np.ndarray] = {}
    extra: list[str] = []
    for file in tensors(directory):
        for given, tensor in file.items():
            name = given.removeprefix("model.")
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
    missing = [name for name in table if name not in found and name not in shared]
    if missing or extra:
        what = "missing" if missing else "not part of a DFlash head"
        raise MarsError(
            f"tensors that are {what}: {listed(missing or extra)}; use the config the weights came with."
        )
    config = dataclasses.replace(
        config,
        own_embed=config.own_embed and "embed_tokens.weight" not in shared,
        own_unembed=config.own_unembed and "lm_head.weight" not in shared,
    )
    params = build_rows(config.weights(), lambda row: found.pop(row.name))
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
    >>> from mars_jax.models import dflash_head
    >>> layer = ModelConfig(family="qwen3", qk_norm=True, vocab_size=32, hidden_size=16, intermediate_size=24,
    ...                     num_layers=1, num_heads=2)
    >>> config = DFlashConfig(layer=layer, target_hidden_size=16, feature_layers=(0,), block_size=4, mask_token=0,
    ...                       draft_vocab_size=32)
    >>> with tempfile.TemporaryDirectory() as path:
    ...     _ = save_dflash(path, config, dflash_head.init_params(config, jax.random.key(0)))
    ...     sorted(os.listdir(path))
    ['config.json', 'model.safetensors']
    """
    target = free_directory(path, overwrite=overwrite)
    arrays = named_arrays(config.weights(), params)
    data = to_dflash_json(config, dtype=arrays["fc.weight"].dtype.name, layout=layout, verifier=verifier)
    if config.draft_vocab_size < config.layer.vocab_size:
        if "ids" not in params:
            raise MarsError("params lack ids: they belong to another config.")
        ids = np.asarray(params["ids"], np.int64)
        arrays["d2t"] = ids - np.arange(len(ids))
        arrays["t2d"] = np.isin(np.arange(config.layer.vocab_size), draft_ids(config, arrays["d2t"]))
    return write_directory(target, arrays, data)
