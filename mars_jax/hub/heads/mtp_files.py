"""Loading and saving of MTP modules, which are part of their targets' checkpoints.

The layouts come from DeepSeek-V3 and GLM-4.5, from Qwen3-Next and Qwen3.5, and from MiMo. Tested against the weights
that transformers reads (tests/models/test_mtp.py).
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from jax.sharding import Mesh

from mars_jax.core.types import PyTree
from mars_jax.hub.config_json import to_json
from mars_jax.hub.converted import is_converted
from mars_jax.hub.files import resolve
from mars_jax.hub.load import check_tensors, grouped_tensors, read_params, read_path, resolve_dtype
from mars_jax.hub.save import free_directory, named_arrays, write_directory
from mars_jax.models.config import ModelConfig
from mars_jax.models.mtp_head import MtpConfig
from mars_jax.models.shardings import params_shardings
from mars_jax.utils.errors import MarsError
from mars_jax.utils.settings import check_dtype

_SHARED = ("embed_tokens.weight", "shared_head.head.weight")
"""Copies of the target's embedding and unembedding, which some checkpoints contain."""


def load_mtp(
    name_or_path: str | os.PathLike[str],
    target_config: ModelConfig,
    *,
    dtype: str | None = None,
    mesh: Mesh | None = None,
) -> tuple[MtpConfig, PyTree]:
    """Load the MTP module in a checkpoint.

    Args:
      name_or_path: directory, or `owner/name` on the Hugging Face hub: the target's own checkpoint, or another one
        with a module for this target.
      target_config: config of the target.
      dtype: as for `hub.load_eagle`.
      mesh: mesh to shard the weights over; default: JAX's default device.

    Returns:
      The config, and the value for `Params.draft`.

    Raises:
      MarsError: the checkpoint has no module, more than one, or one for another target.

    >>> target = load("zai-org/GLM-4.5-Air")  # doctest: +SKIP
    >>> config, module = load_mtp(target.path, target.config)  # doctest: +SKIP
    """
    check_dtype(dtype)
    directory = resolve(name_or_path)
    model_config, stored_dtype = read_path(directory)
    for name in ("family", "vocab_size", "hidden_size", "num_layers"):
        if (size := getattr(model_config, name)) != (expected := getattr(target_config, name)):
            raise MarsError(
                f"the MTP module in '{directory}' is for a target with {name} {size}, not {expected}: use the target's "
                "own checkpoint."
            )
    config, grouped = MtpConfig.outline(model_config), {}
    if not is_converted(directory):
        grouped = grouped_tensors(directory, model_config)
    if not any(name.startswith(f"{config.prefix}.") for name in grouped):
        raise MarsError(
            f"'{directory}' has no MTP module ({config.prefix}.*): draft with ngram, or name the original checkpoint "
            "with mtp:PATH."
        )
    parent, _, number = f"{config.prefix}.{config.layout.layer}".rstrip(".").rpartition(".")
    if any(name.startswith(f"{parent}.{int(number) + 1}.") for name in grouped):
        raise MarsError(
            f"'{directory}' has several MTP modules: draft with ngram, as only checkpoints with one are supported."
        )

    def harmless(name: str) -> bool:
        return not name.startswith(f"{config.prefix}.") or name.endswith(_SHARED)

    check_tensors(directory, grouped, {row.name: row for row in config.weights()}, harmless)
    floating, bits = resolve_dtype(dtype, stored_dtype)
    shardings = mesh and params_shardings(config, mesh)
    named_tensors = {name: candidates[0] for name, candidates in grouped.items()}
    # Quantise heads to 8 bits even if 4 are requested, because they are small and need the accuracy.
    bits = bits and 8
    return config, read_params(directory, named_tensors, config.leaves(), floating, bits, shardings=shardings)


def save_mtp(
    path: str | os.PathLike[str], config: MtpConfig, params: PyTree, *, overwrite: bool = False
) -> Path:
    """Write a checkpoint that contains only the module, with the config of its target; see `hub.save`."""
    target = free_directory(path, overwrite=overwrite)
    arrays = named_arrays(config.weights(), params)
    count = config.target_layers
    model = dataclasses.replace(config.layer, num_layers=count, windows=config.layer.windows * count)
    dtype = next(iter(arrays.values())).dtype.name
    data = to_json(model, dtype=dtype) | {"num_nextn_predict_layers": 1}
    return write_directory(target, arrays, data)
