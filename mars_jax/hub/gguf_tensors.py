"""The tensors of a GGUF file by their names on the Hugging Face hub, dequantised some rows at a time.

Oracle: transformers, which reads the same files (tests/hub/test_gguf.py).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from mars_jax.hub.files import Tensor
from mars_jax.hub.gguf_blocks import BLOCK_SIZE, KINDS, read_blocks
from mars_jax.hub.gguf_file import GGUFFile, read_gguf
from mars_jax.models.config import ModelConfig
from mars_jax.models.weights import weights

_MOST_BITS = 5
"""Bits per weight of Q4_1, scales included: the most of any kind whose weights have 4 bits."""
_DERIVED = {"rope_freqs.weight"}
"""Tensors whose values follow from the config."""
_INTERLEAVED = {"llama"}
"""Architectures whose queries and keys llama.cpp stores for rotating neighbours; the hub's models rotate halves."""


def gguf_tensors(path: Any, config: ModelConfig) -> Iterator[dict[str, Tensor]]:
    """Give the tensors of a GGUF file as `files.tensors` gives those of a directory.

    A tensor that the model does not have keeps its name.

    Raises:
      MarsError: a file that cannot be read.
    """
    import gguf

    file = read_gguf(path)
    [kind] = [number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == file.architecture]
    names = gguf.get_tensor_name_map(kind, config.num_layers)
    ours = {names.get_name(row.name, try_suffixes=(".weight", ".bias")): row.name for row in weights(config)}
    yield {ours.get(name, name): _tensor(file, name, config) for name in file.tensors if name not in _DERIVED}


def _tensor(file: GGUFFile, name: str, config: ModelConfig) -> Tensor:
    import gguf

    shape, kind, *_ = file.tensors[name]
    read = functools.partial(file.rows, name)
    stored = functools.partial(file.stored, name)
    if file.architecture in _INTERLEAVED and (".attn_q." in name or ".attn_k." in name):
        read, stored = (functools.partial(_halves, rows, config.head_dim) for rows in (read, stored))
    if len(shape) == 2 and kind.name in KINDS:
        return Tensor(
            shape, read, lambda first, last: read_blocks(stored(first, last), kind.name), BLOCK_SIZE
        )
    if file.architecture.startswith("gemma") and name.endswith("norm.weight"):
        return Tensor(shape, lambda first, last: read(first, last) - 1.0)  # llama.cpp stores 1 + scale
    # Only next to matrices in 4 bits. In any other file every matrix may be rounded to 4.
    mixed = any(other.kind.name in KINDS for other in file.tensors.values())
    block, size = gguf.GGML_QUANT_SIZES[kind]
    return Tensor(shape, read, wider=mixed and 8 * size / block > _MOST_BITS)


def _halves(read: Any, size: int, first: int, last: int) -> np.ndarray:
    """Return rows `first .. last - 1`, where a head's row i is stored at 2i, and row `size // 2 + i` at 2i + 1."""
    begin, end = first // size * size, -(-last // size) * size
    stored = read(begin, end)
    heads = stored.reshape(-1, size // 2, 2, *stored.shape[1:]).swapaxes(1, 2).reshape(stored.shape)
    return heads[first - begin : last - begin]
