"""The files of a checkpoint: where they are, which tensors they hold, reading one tensor at a time.

Oracle: `safetensors.numpy.save_file` and `torch.save`, round trip in tests/hub.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from mars_jax import assets
from mars_jax.errors import MarsError
from mars_jax.hub.config import read_json

_PATTERNS = ["*.json", "*.model", "*.jinja", "*.txt"]
"""What a checkpoint needs beside its weights: configs, index, tokenizer and chat template."""


class Tensor(NamedTuple):
    """A tensor on disk."""

    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]


def resolve(name_or_path: str | os.PathLike[str], *, weights: bool = True) -> Path:
    """The local directory of a checkpoint; a hub name (`owner/name`) is downloaded first.

    The names of `mars_jax.assets` are the checkpoints inside the package.

    Only the files that are needed are fetched: configs, tokenizer and, if `weights`, safetensors where the
    repository has them, `.bin` files otherwise.

    Raises:
      MarsError: there is no such directory, or the hub does not give it.
    """
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return path
    name = os.fspath(name_or_path)
    if (embedded := assets.path(name)) is not None:
        return embedded
    if path.exists():
        raise MarsError(f"'{name}' is a file: give the directory that holds config.json.")
    # A hub name is owner/name; anything else that does not exist is a mistyped path.
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1 or name.endswith("/"):
        raise MarsError(
            f"there is no directory '{name}': give a checkpoint's directory or a hub name (owner/name)."
        )
    try:
        from huggingface_hub import HfApi, snapshot_download

        patterns = list(_PATTERNS)
        if weights:
            patterns += _weight_patterns(name, HfApi)
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # huggingface_hub raises its own, requests', httpx's and OSError alike
        reason = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
        raise MarsError(
            f"'{name}' is neither a directory nor a checkpoint that the Hugging Face hub gave "
            f"({type(error).__name__}: {reason.rstrip('.')}): check the name, the network and your access."
        ) from None


def _weight_patterns(name: str, api: Any) -> list[str]:
    """The one format of weights to fetch; where the hub cannot be asked, both, and the cache decides."""
    try:
        files = api().list_repo_files(name)
    except Exception:  # offline: a cached snapshot may still serve
        return ["model*.safetensors", "pytorch_model*.bin"]
    safe = any(f.endswith(".safetensors") and "/" not in f for f in files)
    return ["model*.safetensors"] if safe else ["pytorch_model*.bin"]


def _shards(directory: Path, index: str) -> list[Path]:
    """The files that an index names.

    Raises:
      MarsError: one of them is not there.
    """
    mapping = read_json(directory / index).get("weight_map")
    if not isinstance(mapping, dict) or not all(isinstance(name, str) for name in mapping.values()):
        raise MarsError(f"'{directory / index}' has no weight_map: download the checkpoint again.")
    shards = [directory / name for name in dict.fromkeys(mapping.values())]
    absent = [shard.name for shard in shards if not shard.is_file()]
    if absent:
        raise MarsError(
            f"'{directory}' lacks {absent[0]}, which {index} names ({len(absent)} of {len(shards)} files are "
            "absent): download the checkpoint again."
        )
    return shards


def tensors(directory: Path) -> Iterator[dict[str, Tensor]]:
    """The tensors of a checkpoint, file by file; a file is closed before the next one opens.

    Raises:
      MarsError: no weights, an absent shard, or a file that cannot be read.
    """
    for name, read in (("model.safetensors", _safetensors), ("pytorch_model.bin", _bin)):
        if (directory / name).is_file():
            yield from read(directory / name)
            return
        if (directory / f"{name}.index.json").is_file():
            for shard in _shards(directory, f"{name}.index.json"):
                yield from read(shard)
            return
    raise MarsError(
        f"'{directory}' holds no weights: put model.safetensors, pytorch_model.bin or sharded ones there."
    )


def _quantised(name: str, path: Path, dtype: object) -> str:
    return f"tensor {name} of '{path}' holds {dtype}: quantised checkpoints are not supported."


def _safetensors(path: Path) -> Iterator[dict[str, Tensor]]:
    from safetensors import SafetensorError, safe_open

    try:
        file = safe_open(path, framework="np")
    except (SafetensorError, OSError, ValueError) as error:
        raise MarsError(f"'{path}' is truncated or corrupt ({error}): download it again.") from None
    with file:

        def reader(name: str) -> Callable[[], np.ndarray]:
            def read() -> np.ndarray:
                try:
                    return file.get_tensor(name)
                except AttributeError:  # numpy has no such dtype
                    held = file.get_slice(name).get_dtype()
                    raise MarsError(_quantised(name, path, held)) from None
                except (SafetensorError, TypeError, KeyError, ValueError) as error:
                    raise MarsError(f"tensor {name} of '{path}' cannot be read ({error}).") from None

            return read

        names = list(file.keys())
        yield {name: Tensor(tuple(file.get_slice(name).get_shape()), reader(name)) for name in names}


def _bin(path: Path) -> Iterator[dict[str, Tensor]]:
    try:
        import torch
    except ImportError:
        raise MarsError(
            f"'{path}' is a PyTorch file, and torch is not installed: pip install 'mars-jax[torch]', "
            "or use a checkpoint with safetensors."
        ) from None
    try:
        # weights_only: a .bin file is a pickle, which could otherwise run code.
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception:  # files of the format before PyTorch 1.6 cannot be mapped
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # torch raises anything from EOFError to UnpicklingError
            reason = str(error).strip().partition(". ")[0].partition("\n")[0] or type(error).__name__
            raise MarsError(
                f"'{path}' is truncated, corrupt or unsafe ({reason}): download it again."
            ) from None
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise MarsError(f"'{path}' is not a plain table of tensors: use a checkpoint with safetensors.")

    def reader(name: str, tensor) -> Callable[[], np.ndarray]:
        def read() -> np.ndarray:
            # numpy knows no torch.bfloat16; every other conversion is exact too, so widen.
            whole = tensor.detach().contiguous()
            if whole.dtype == torch.bfloat16:
                return whole.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
            try:
                return whole.numpy()
            except TypeError:  # numpy has no such dtype
                raise MarsError(_quantised(name, path, whole.dtype)) from None

        return read

    yield {name: Tensor(tuple(tensor.shape), reader(name, tensor)) for name, tensor in state.items()}
