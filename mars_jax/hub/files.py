"""The files of a checkpoint: where they are, which tensors they contain, and how to read some rows of a tensor.

Tested against round trips of `safetensors.numpy.save_file` and `torch.save` (tests/hub).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, NamedTuple

import ml_dtypes
import numpy as np

from mars_jax.hub.config_json import read_json
from mars_jax.hub.fetch import cached, fetch_directory, fetch_file, installed
from mars_jax.hub.gguf_file import is_gguf
from mars_jax.hub.versions import check_version, version_of
from mars_jax.utils import assets
from mars_jax.utils.catalogue import MODELS, find_model_row
from mars_jax.utils.errors import MarsError, did_you_mean, first_line
from mars_jax.utils.limits import INDEX_BYTES, JSON_BYTES, SHARDS
from mars_jax.utils.paths import expanded
from mars_jax.utils.types import JsonObject

if TYPE_CHECKING:
    import torch

_DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
"""numpy dtypes by their names in safetensors."""


class Tensor(NamedTuple):
    """A tensor on disk."""

    shape: tuple[int, ...]
    rows: Callable[[int, int], np.ndarray]  # (first, last) -> [last - first, ...], along the first axis
    # Function that reads the fields of some rows of a 4-bit matrix: those of `models.quantize.Int4`, with outputs on
    # the last axis, or those of `Mxfp4`. None for other tensors.
    blocks: Callable[[int, int], tuple[np.ndarray, ...]] | None = None
    group: int | None = None  # inputs per scale of a 4-bit matrix
    # True if the matrix must keep at least 8 bits, because its file has 4-bit matrices but stores this one with more
    # bits.
    wider: bool = False

    def read(self) -> np.ndarray:
        """Read the whole tensor."""
        if not self.shape:
            return self.rows(0, 1).reshape(())
        return self.rows(0, self.shape[0])

    def part(self, first: int, size: int) -> Tensor:
        """Return a tensor of `size` rows, starting at row `first`."""
        if (first, size) == (0, self.shape[0]):
            return self

        def shifted(read: Callable[[int, int], Any]) -> Callable[[int, int], Any]:
            return lambda begin, end: read(first + begin, first + end)

        part = self._replace(shape=(size, *self.shape[1:]), rows=shifted(self.rows))
        if self.blocks is not None:
            part = part._replace(blocks=shifted(self.blocks))
        return part


def resolve(name_or_path: str | os.PathLike[str], *, weights: bool = True) -> Path:
    """Return the local directory or GGUF file of a checkpoint, after downloading it if it is only on the hub.

    A checkpoint is given by a path, a name in `utils.assets` or `utils.catalogue`, or `owner/name` on the hub. Only the
    required files are downloaded: one GGUF file, or else the configs, the tokenizer and, if `weights`, the weights. The
    weights are the safetensors files of the repository or, if there are none, its `.bin` files.

    Raises:
      MarsError: there is no such directory or file, or the download fails.
    """
    local, row = _local(name_or_path), find_model_row(os.fspath(name_or_path))
    if local is not None:
        return local
    if row is None:
        return fetch_directory(os.fspath(name_or_path), weights=weights)
    if row.file:
        return fetch_file(row)
    return fetch_directory(row.repository, weights=weights)


def is_here(name_or_path: str | os.PathLike[str]) -> bool:
    """Return whether a checkpoint is available offline: as a path, in a package, or complete in the hub's cache.

    >>> is_here("tiny/target"), is_here("./nowhere")
    (True, False)
    """
    repository, file = os.fspath(name_or_path), None
    if (row := find_model_row(repository)) is not None:
        repository, file = row.repository, row.file
    try:
        if _local(name_or_path) is not None:
            return True
        cached_path = cached(repository, file)
        return cached_path is not None and (cached_path.is_file() or _is_whole(cached_path))
    except (MarsError, ValueError):  # huggingface_hub raises ValueError for an invalid name
        return False


def _is_whole(directory: Path) -> bool:
    """Return whether a downloaded checkpoint has all of its weights; an interrupted download leaves only some."""
    files = [file.name for file in directory.iterdir() if file.is_file()]
    # As in `tensors`, ignore an index if there is also a single file with all weights.
    for index in (name for name in files if name.endswith(".index.json")):
        if index.removesuffix(".index.json") not in files:
            return bool(_shards(directory, index, _weight_map(directory, index)))
    # If there is no index, ignore shards, because some of them may be missing.
    return any(name.endswith((".safetensors", ".bin", ".pt")) and "-of-" not in name for name in files)


def _local(name_or_path: str | os.PathLike[str]) -> Path | None:
    """Return the local directory or file of a checkpoint; None if the name refers to the hub.

    Raises:
      MarsError: the name is neither an existing path nor a possible hub name, or it is the name of a checkpoint that is
        in a package that is not installed or that the wheel leaves out.
    """
    path, name = expanded(name_or_path), os.fspath(name_or_path)
    embedded, row = assets.path(name), find_model_row(name)
    # A local folder with the name of a known model counts only if it contains a checkpoint.
    if path.is_dir() and ((embedded or row) is None or (path / "config.json").is_file()):
        return path
    if embedded is not None:
        if not embedded.is_dir():
            raise MarsError(
                f"'{name}' is not in the wheel, which leaves out weights of examples: install mars-jax from a checkout "
                f"by pip install -e ., or name a copy of its folder mars_jax/assets/{name}."
            )
        return embedded
    if row is not None and row.package:
        return installed(row)
    if is_gguf(path):
        return path
    if path.exists():
        raise MarsError(f"'{name}' is a file: give a .gguf file, or the directory that holds config.json.")
    # A hub name is owner/name; anything else that does not exist is a mistyped path.
    is_path = path.is_absolute() or name.startswith((".", "~")) or name.endswith("/")
    if row is None and (is_path or name.count("/") != 1):
        suggestion = did_you_mean(name, (*assets.NAMES, *MODELS))
        raise MarsError(
            f"there is no directory '{name}'{suggestion}: give a checkpoint's directory, a hub name (owner/name), or a "
            "name that mars-jax models lists."
        )
    return None


def _weight_map(directory: Path, index: str) -> dict[str, str]:
    """Read an index, and return a map from the name of each tensor to its file, relative to the directory.

    Raises:
      MarsError: the file is not an index, or lists a file outside the directory.
    """
    mapping = read_json(directory / index, INDEX_BYTES).get("weight_map")
    if not isinstance(mapping, dict) or not all(isinstance(name, str) for name in mapping.values()):
        raise MarsError(f"'{directory / index}' has no weight_map: download the checkpoint again.")
    for tensor, name in mapping.items():
        if not _is_within(name):
            raise MarsError(
                f"'{directory / index}' names {name!r} for tensor {tensor}, which is no file within its directory: "
                "use a checkpoint from a source that you trust."
            )
    return mapping


def _shards(directory: Path, index: str, weight_map: dict[str, str]) -> list[str]:
    """Return the names of all shards in an index.

    Raises:
      MarsError: a shard is absent, or the index lists too many shards.
    """
    shards = list(dict.fromkeys(weight_map.values()))
    if len(shards) > SHARDS:
        raise MarsError(
            f"'{directory / index}' names {len(shards):,} files: expected at most {SHARDS:,}; download the checkpoint "
            "again."
        )
    absent = [shard for shard in shards if not os.path.isfile(directory / shard)]
    if absent:
        raise MarsError(
            f"'{directory}' lacks {absent[0]}, which {index} names ({len(absent)} of {len(shards)} files are "
            "absent): download the checkpoint again."
        )
    return shards


def _is_within(name: str) -> bool:
    """Return whether a relative path stays in its directory. Symbolic links are allowed: the hub's cache uses them."""
    path = PurePath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and "\0" not in name


def tensors(directory: Path) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors of a checkpoint, file by file. Only headers are in memory; tensors can be read in any order.

    As in transformers, a single file takes precedence over an index and its shards. If several shards contain a tensor
    and the index lists one of them, the other copies are left out.

    Raises:
      MarsError: there are no weights, a shard is absent, or a file cannot be read.
    """
    for name, read in (("model.safetensors", _safetensors), ("pytorch_model.bin", _bin)):
        index = f"{name}.index.json"
        if (directory / name).is_file():
            yield read(directory / name)
            return
        if (directory / index).is_file():
            weight_map = _weight_map(directory, index)
            shards = {shard: read(directory / shard) for shard in _shards(directory, index, weight_map)}
            for shard, shard_tensors in shards.items():
                yield {
                    key: tensor
                    for key, tensor in shard_tensors.items()
                    if (listed := weight_map.get(key, shard)) == shard or key not in shards[listed]
                }
            return
    raise MarsError(f"'{directory}' holds no weights: put model.safetensors or pytorch_model.bin there.")


def _quantised(name: str, path: Path, dtype: object) -> MarsError:
    return MarsError(f"tensor {name} of '{path}' holds {dtype}: quantised checkpoints are not supported.")


def _safetensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file.

    Rows are read with `np.fromfile`: safetensors would memory-map the file, whose pages would then count as memory of
    this process.
    """
    from safetensors import SafetensorError, safe_open

    version = version_of(path)
    try:
        with open(path, "rb") as file:
            # The file begins with the size of its JSON header: 8 bytes, little-endian.
            size = int.from_bytes(file.read(8), "little")
            if size > JSON_BYTES:
                raise ValueError(f"its header has {size:,} bytes, and at most {JSON_BYTES:,} are read")
            with safe_open(path, framework="np"):  # checks the header against the size of the file
                pass
            header = json.loads(file.read(size))
    except (SafetensorError, OSError, ValueError) as error:
        raise MarsError(f"'{path}' is truncated or corrupt ({error}): download it again.") from None

    def tensor(name: str, entry: JsonObject) -> Tensor:
        # The data follows the header and the 8 bytes that store the header's size.
        shape, begin = tuple(entry["shape"]), 8 + size + entry["data_offsets"][0]
        width = math.prod(shape[1:])

        def rows(first: int, last: int) -> np.ndarray:
            if (dtype := _DTYPES.get(entry["dtype"])) is None:
                raise _quantised(name, path, entry["dtype"])
            count = (last - first) * width
            try:
                with open(path, "rb", buffering=0) as file:
                    file.seek(begin + first * width * np.dtype(dtype).itemsize)
                    numbers = np.fromfile(file, dtype, count)
            except OSError as error:
                raise MarsError(f"tensor {name} of '{path}' cannot be read ({error}).") from None
            # At the end of a file, `np.fromfile` returns fewer numbers and raises no error.
            if len(numbers) < count:
                raise MarsError(f"'{path}' ends within tensor {name}: download it again.")
            check_version(path, version)
            return numbers.reshape(last - first, *shape[1:])

        return Tensor(shape, rows)

    return {name: tensor(name, entry) for name, entry in header.items() if name != "__metadata__"}


def _bin(path: Path) -> dict[str, Tensor]:
    try:
        import torch
    except ImportError:
        raise MarsError(
            f"'{path}' is a PyTorch file, and torch is not installed: pip install torch, "
            "or use a checkpoint with safetensors."
        ) from None
    version = version_of(path)
    try:
        # A .bin file is a pickle. Without `weights_only`, loading it could run arbitrary code.
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception:  # files in the pre-1.6 PyTorch format cannot be memory-mapped
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # torch raises anything from EOFError to UnpicklingError
            reason = first_line(error).partition(". ")[0]
            raise MarsError(f"'{path}' is damaged or unsafe ({reason}): download it again.") from None
    # A .bin file may contain values other than tensors, or tensors whose rows cannot be read: sparse, nested or meta
    # tensors.
    if not isinstance(state, dict) or not all(
        isinstance(name, str)
        and isinstance(value, torch.Tensor)
        and value.layout == torch.strided
        and value.device.type == "cpu"
        and not value.is_nested
        for name, value in state.items()
    ):
        raise MarsError(f"'{path}' is not a table of dense tensors: use a checkpoint with safetensors.")

    def reader(name: str, tensor: torch.Tensor) -> Callable[[int, int], np.ndarray]:
        def rows(first: int, last: int) -> np.ndarray:
            check_version(path, version)
            try:
                part = torch.atleast_1d(tensor.detach())[first:last].contiguous()
                if part.dtype == torch.bfloat16:  # not a numpy dtype
                    return part.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
                # torch conjugates and negates lazily, using a flag that numpy does not support.
                return part.resolve_conj().resolve_neg().numpy()
            except (TypeError, RuntimeError):  # numpy lacks the dtype, or torch cannot slice such a tensor
                raise _quantised(name, path, tensor.dtype) from None

        return rows

    return {name: Tensor(tuple(tensor.shape), reader(name, tensor)) for name, tensor in state.items()}
