"""Conversion of a Hugging Face checkpoint or GGUF file into a directory that loads onto any mesh without casting."""

from __future__ import annotations

import os
import shutil
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from mars_jax.hub.config_json import read_json, to_json, write_json
from mars_jax.hub.converted import FIELDS, MANIFEST, WEIGHTS, file_name, is_converted
from mars_jax.hub.durable import check_place, refuse_url, staging, sync, sync_directory, writing
from mars_jax.hub.files import resolve
from mars_jax.hub.gguf_file import is_gguf
from mars_jax.hub.load import find_tensors, packs_experts, read_leaf, read_path, resolve_dtype
from mars_jax.hub.stream import HostArray
from mars_jax.hub.tokenizer import read_tokenizer
from mars_jax.models.weights import leaves
from mars_jax.utils.errors import MarsError
from mars_jax.utils.paths import expanded
from mars_jax.utils.settings import check_dtype


def convert(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    overwrite: bool = False,
    progress: Callable[[int], None] = lambda size: None,
) -> Path:
    """Convert a checkpoint into a directory that loads onto any mesh, with each process reading only its own shards.

    The config, generation config and tokenizer are copied. Only one array of params is in memory at a time. The
    directory gets its final name only when it is complete and on disk.

    Args:
      source: directory, GGUF file, or `owner/name` on the Hugging Face hub.
      destination: new or empty directory.
      dtype: as for `load`, except that None dequantises all packed matrices other than MXFP4 experts.
      overwrite: whether to replace a destination that is itself a conversion.
      progress: called with the number of bytes written since the last call.

    Returns:
      The destination.

    Raises:
      MarsError: `load` does not support the source, or the destination is in use or cannot be written.

    >>> convert("Qwen/Qwen3-235B-A22B", "qwen3-235b", dtype="int8")  # doctest: +SKIP
    PosixPath('qwen3-235b')
    """
    check_dtype(dtype)
    refuse_url(destination)
    target = Path(os.path.abspath(expanded(destination)))
    with writing(target):
        _check_free(target, overwrite)
    check_place(target)
    directory = resolve(source)
    if is_converted(directory):
        raise MarsError(f"'{directory}' is a conversion already: convert its original checkpoint.")
    config, named_dtype = read_path(directory)
    floating, bits = resolve_dtype(dtype, named_dtype)
    has_mxfp4 = packs_experts(directory)
    keep_packed = dtype is None and has_mxfp4
    stays_packed = has_mxfp4 and dtype in (None, "int4")
    tensors = find_tensors(directory, config)
    with writing(target), staging(target) as staged:
        new_directory = staged / "new"
        (new_directory / WEIGHTS).mkdir(parents=True)
        checksums: dict[str, int] = {}
        for array, rows in leaves(config).items():
            fields = read_leaf(directory, tensors, array, rows, floating, bits, keep_packed=keep_packed)
            data = _to_bytes(fields)
            (new_directory / WEIGHTS / file_name(array)).write_bytes(data)
            checksums[file_name(array)] = zlib.crc32(data)
            progress(len(data))
        if is_gguf(directory):
            data = to_json(config, dtype=floating)
            if stays_packed:
                data["quantization_config"] = {"quant_method": "mxfp4"}
            write_json(new_directory / "config.json", data)
            read_tokenizer(directory).save_pretrained(new_directory)
        else:
            _copy_files(directory, new_directory, floating, packed=stays_packed)
        manifest = {"source": os.fspath(source), "dtype": floating, "bits": bits, "checksums": checksums}
        write_json(new_directory / MANIFEST, manifest)
        sync_directory(new_directory)
        # Check again: during a long conversion, another process may have written to the destination.
        _check_free(target, overwrite)
        # Move an old directory away first, because `os.rename` cannot replace a directory that is not empty. `staging`
        # deletes the old directory at the end.
        if target.exists():
            os.rename(target, staged / "old")
        os.rename(new_directory, target)
        sync(target.parent)
    return target


def _to_bytes(fields: Sequence[HostArray]) -> bytes:
    """Serialise one array of params as a safetensors file."""
    from safetensors.numpy import save

    tensors = {}
    for name, field in zip(FIELDS, fields, strict=False):
        [array] = field.parts.values()  # without a sharding there is one part
        # Store int4 as int8, because safetensors has no dtype for int4.
        tensors[name] = array.astype(np.int8) if array.dtype == jnp.int4 else array
    return save(tensors)


def _check_free(target: Path, overwrite: bool) -> None:
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not overwrite:
        raise MarsError(
            f"'{target}' exists and is not empty: choose another path, or add --overwrite if it is a conversion."
        )
    if not is_converted(target):
        raise MarsError(f"'{target}' exists and is not a conversion: choose another path.")


def _copy_files(source: Path, place: Path, dtype: str, *, packed: bool) -> None:
    """Copy all files except the weights, such as the tokenizer and the template, and set the new dtype in config.json.

    If `packed` is False, also remove `quantization_config` from config.json. If it is True, experts stay in MXFP4.
    """
    for file in sorted(source.iterdir()):
        # Leave out config.json, which is rewritten below, and the index, whose shards are not copied.
        is_copied = file.suffix in (".json", ".model", ".jinja", ".txt") and file.name != "config.json"
        if is_copied and file.is_file() and not file.name.endswith(".index.json"):
            shutil.copyfile(file, place / file.name)
    data = read_json(source / "config.json") | {"torch_dtype": dtype}
    # `dtype`, the key of transformers 5, would take precedence over `torch_dtype`.
    data.pop("dtype", None)
    if not packed:
        data.pop("quantization_config", None)
    write_json(place / "config.json", data)
