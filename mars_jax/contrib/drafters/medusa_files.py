"""Readers and writers of Medusa heads in their published format. Tested against `torch.save`
(tests/contrib/test_medusa.py).

A directory contains config.json, which lists the numbers of heads and layers, and the heads' weights in one of the
files medusa_lm_head.safetensors, medusa_lm_head.pt and model.safetensors. In some files, the name of every tensor
begins with `medusa_head.`.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import jax.numpy as jnp

from mars_jax.contrib.models.medusa_layers import MedusaConfig
from mars_jax.core.types import PyTree
from mars_jax.hub.config_json import read_json
from mars_jax.hub.fetch import _fetch
from mars_jax.hub.files import Tensor, _bin, _safetensors, resolve
from mars_jax.hub.load import check_tensors, read_params, resolve_dtype
from mars_jax.hub.save import free_directory, named_arrays, write_directory
from mars_jax.models.config import ModelConfig
from mars_jax.utils import assets
from mars_jax.utils.errors import MarsError
from mars_jax.utils.settings import check_dtype

_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt", "model.safetensors")
_PREFIX = "medusa_head."


def load_medusa(
    name_or_path: str | os.PathLike[str], target_config: ModelConfig, *, dtype: str | None = None
) -> tuple[MedusaConfig, PyTree]:
    """Load Medusa heads for a target.

    If the weights contain more heads than config.json states, all of them are loaded, because the config of the first
    published heads states 2 although there are 5.

    Args:
      name_or_path: a directory, or `owner/name` on the Hugging Face hub.
      target_config: config of the target.
      dtype: "float32" or "bfloat16"; None keeps the stored dtype, except that float16 becomes bfloat16. "int8"
        quantises matrices to 8 bits per weight and keeps the stored dtype of other arrays.

    Raises:
      MarsError: the heads are missing or belong to a different target, or the tensors are not Medusa heads.

    >>> load_medusa("FasterDecoding/medusa-vicuna-7b-v1.3", target.config)  # doctest: +SKIP
    """
    check_dtype(dtype)
    directory = _directory(name_or_path)
    file = directory / next(name for name in _FILES if (directory / name).is_file())
    tensors = {".pt": _bin, ".safetensors": _safetensors}[file.suffix](file)
    prefixed = {name.removeprefix(_PREFIX): t for name, t in tensors.items() if name.startswith(_PREFIX)}
    if twice := sorted(prefixed.keys() & tensors.keys()):
        raise MarsError(f"'{file}' holds both {twice[0]} and {_PREFIX}{twice[0]}: delete one of them.")
    config = _config(directory, prefixed or tensors, target_config)
    return config, _read(file, config, prefixed or tensors, dtype)


def _directory(name_or_path: str | os.PathLike[str]) -> Path:
    """Return the local directory of the heads, which are first downloaded if the name refers to the hub."""
    directory = resolve(name_or_path, weights=False)
    if any((directory / name).is_file() for name in _FILES):
        return directory
    name = os.fspath(name_or_path)
    if not Path(name).expanduser().is_dir() and assets.path(name) is None:
        for file in _FILES:
            directory = _fetch(name, [file], f"{name} {file}")
            if (directory / file).is_file():
                return directory
    raise MarsError(f"'{name}' holds no Medusa heads: put {_FILES[0]} or {_FILES[1]} there.")


def _config(directory: Path, tensors: dict[str, Tensor], target: ModelConfig) -> MedusaConfig:
    """Read the heads' config from config.json and check it against the tensors."""
    data = read_json(directory / "config.json")

    def number(key: str) -> int:
        if type(data.get(key)) is not int:
            raise MarsError(
                f"{key} of '{directory / 'config.json'}' is {data.get(key)!r}: expected a whole number, as with Medusa "
                "heads."
            )
        return data[key]

    matches = [match for name in tensors if (match := re.fullmatch(r"(\d+)\.(\d+)\.(linear\.)?weight", name))]
    # In head i, `i.j.linear.weight` belongs to residual block j. `i.j.weight`, with the last j, is the unembedding.
    num_heads = len({match[1] for match in matches})
    depth = len({match[2] for match in matches if match[3]})
    for part, stated, count in (
        ("heads", number("medusa_num_heads"), num_heads),
        ("residual layers a head", number("medusa_num_layers"), depth),
    ):
        if count != stated and not (part == "heads" and count > stated):
            raise MarsError(
                f"config.json in '{directory}' says {stated} {part} and the weights hold {count}: use the config the "
                "heads came with."
            )
    unembed_shape = getattr(tensors.get(f"0.{depth}.weight"), "shape", ())
    target_sizes = (("vocabulary", target.vocab_size), ("hidden size", target.hidden_size))
    # The unembedding is [V, E]. If it is missing, `unembed_shape` is empty, and `_read` reports the missing tensor.
    for head_size, (part, target_size) in zip(unembed_shape, target_sizes, strict=False):
        if head_size != target_size:
            raise MarsError(
                f"the Medusa heads in '{directory}' are for a {part} of {head_size} and the target has {target_size}: "
                "use the heads that were trained for this target."
            )
    return MedusaConfig(
        num_heads=num_heads, num_layers=depth, hidden_size=target.hidden_size, vocab_size=target.vocab_size
    )


def _read(file: Path, config: MedusaConfig, tensors: dict[str, Tensor], dtype: str | None) -> PyTree:
    named_tensors = {name: (name, tensor) for name, tensor in tensors.items()}
    grouped = {name: [named_tensor] for name, named_tensor in named_tensors.items()}
    check_tensors(file.parent, grouped, {row.name: row for row in config.weights()}, lambda name: False)
    stored_dtype = jnp.result_type(*(tensor.rows(0, 0).dtype for tensor in tensors.values()))
    float_dtype, bits = resolve_dtype(dtype, stored_dtype.name)
    return read_params(file, named_tensors, config.leaves(), float_dtype, bits and 8)


def save_medusa(
    path: str | os.PathLike[str],
    config: MedusaConfig,
    params: PyTree,
    *,
    base_model: str = "",
    overwrite: bool = False,
) -> Path:
    """Write config.json and medusa_lm_head.safetensors in the published layout.

    Args:
      path: directory to write to; it and its parents are created if missing.
      config: config of the heads.
      params: weights of the heads, in the dtype to store.
      base_model: name of the target, which is stored as `base_model_name_or_path`.
      overwrite: allow a directory that is not empty and replace these two files in it; keep all other files.

    Returns:
      The directory.

    Raises:
      MarsError: the directory is not empty and `overwrite` is not set, or the params do not fit the config.

    >>> save_medusa("heads", config, params, base_model="lmsys/vicuna-7b-v1.3")  # doctest: +SKIP
    PosixPath('heads')
    """
    directory = free_directory(path, overwrite=overwrite)
    arrays = named_arrays(config.weights(), params)
    data = {
        "medusa_num_heads": config.num_heads,
        "medusa_num_layers": config.num_layers,
        "base_model_name_or_path": base_model,
    }
    return write_directory(directory, arrays, data, file=_FILES[0])
