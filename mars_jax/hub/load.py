"""Load a checkpoint in the Hugging Face layout."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mars_jax.errors import MarsError
from mars_jax.hub.config import read_directory
from mars_jax.hub.files import resolve, tensors
from mars_jax.models.config import ModelConfig
from mars_jax.models.transformer import language_model
from mars_jax.models.weights import Weight, build, weights
from mars_jax.types import LanguageModel, PyTree

DTYPES = ("float32", "bfloat16")

# Buffers that old exports carry and that the config determines.
_DERIVED = re.compile(r"(^|\.)(rotary_emb\.inv_freq|self_attn\.(bias|masked_bias))$")

# Of Gemma 3 with images, whose text model is loaded and nothing else.
_TEXT = re.compile(r"^(language_model\.(?=model\.|lm_head\.)|model\.language_model\.)")
_IMAGES = re.compile(r"^model\.(vision_tower|multi_modal_projector)\.")


class Checkpoint(NamedTuple):
    """A loaded model: pure functions, their params, the static config, and the directory it came from."""

    model: LanguageModel
    params: PyTree
    config: ModelConfig
    path: Path


def read_config(name_or_path: str | os.PathLike[str]) -> ModelConfig:
    """The config of a checkpoint, without its weights.

    Args:
      name_or_path: directory, or `owner/name` on the Hugging Face hub.

    Raises:
      MarsError: no such checkpoint, or one that is not supported.

    >>> read_config("meta-llama/Llama-3.1-8B-Instruct").num_layers  # doctest: +SKIP
    32
    """
    return read_directory(resolve(name_or_path, weights=False))[0]


def load(
    name_or_path: str | os.PathLike[str], *, dtype: str | None = None, feature_layers: Sequence[int] = ()
) -> Checkpoint:
    """Load a checkpoint: its config, and its weights tensor by tensor.

    Args:
      name_or_path: directory, or `owner/name` on the Hugging Face hub.
      dtype: "float32" or "bfloat16"; None is the checkpoint's own (float16 becomes bfloat16).
      feature_layers: see `models.language_model`.

    Raises:
      MarsError: with one sentence that names what is wrong and the cure.

    >>> target = load("meta-llama/Llama-3.1-8B-Instruct", dtype="bfloat16")  # doctest: +SKIP
    """
    if dtype is not None and dtype not in DTYPES:
        raise MarsError(f"dtype '{dtype}' is not supported: choose one of {', '.join(DTYPES)}.")
    directory = resolve(name_or_path)
    config, own = read_directory(directory)
    dtype = dtype or ("float32" if own in (None, "float32", "float64") else "bfloat16")
    params = read_params(directory, config, dtype)
    # XLA's CPU backend computes in float32 and would widen a bfloat16 cache anew, whole, at every step.
    cache_dtype = "float32" if jax.default_backend() == "cpu" else dtype
    model = language_model(config, dtype=dtype, cache_dtype=cache_dtype, feature_layers=feature_layers)
    return Checkpoint(model=model, params=params, config=config, path=directory)


def _listed(names: list[str]) -> str:
    """The first few names and how many there are."""
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def _alias(name: str) -> str:
    """A tensor's canonical name: some exports leave out the `model.` prefix, others name the text model."""
    name = _TEXT.sub("", name)
    return name if name.startswith(("model.", "lm_head.")) else f"model.{name}"


def _harmless(name: str, config: ModelConfig) -> bool:
    tied = config.tie_embeddings and name == "lm_head.weight"
    of_images = config.family == "gemma3_text" and _IMAGES.search(name)
    return bool(_DERIVED.search(name) or tied or of_images)


def _convert(array: np.ndarray, dtype: str) -> jax.Array:
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise MarsError(f"it holds {array.dtype}: quantised checkpoints are not supported.")
    return jnp.asarray(array.astype(jnp.dtype(dtype), copy=False))


def read_params(directory: Path, config: ModelConfig, dtype: str) -> PyTree:
    """The params of a checkpoint directory, checked against the table of weights.

    Raises:
      MarsError: missing, unexpected or mis-shaped tensors, by name.
    """
    table = {row.name: row for row in weights(config)}
    found: dict[str, jax.Array] = {}
    extra: list[str] = []
    misshaped: list[str] = []
    for file in tensors(directory):
        for name, tensor in file.items():
            row = table.get(_alias(name))
            if row is None:
                if not _harmless(_alias(name), config):
                    extra.append(name)
            elif tensor.shape != row.shape:
                misshaped.append(f"{name} is {list(tensor.shape)} and not {list(row.shape)}")
                found[row.name] = jnp.zeros(())
            else:
                try:
                    found[row.name] = _convert(tensor.read(), dtype)
                except MarsError as error:
                    raise MarsError(f"'{directory}': tensor {name}: {error}") from None
    missing = [name for name in table if name not in found]
    problems: list[str] = []
    if missing:
        problems.append(f"{len(missing)} tensors are missing ({_listed(missing)})")
    if misshaped:
        problems.append(f"{len(misshaped)} have the wrong shape ({_listed(misshaped)})")
    if extra:
        problems.append(f"{len(extra)} are not part of the architecture ({_listed(extra)})")
    if problems:
        raise MarsError(
            f"the weights in '{directory}' do not fit its config.json: {'; '.join(problems)}: use the config "
            "the weights came with."
        )

    def take(row: Weight) -> Any:
        return found.pop(row.name)

    return build(config, take)
