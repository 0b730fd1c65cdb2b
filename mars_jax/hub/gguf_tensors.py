"""The tensors of a GGUF file under their Hugging Face names, dequantised a few rows at a time.

4-bit blocks (Q4_0, Q4_1 and Q4_K) are converted to the layout of `models.quantize.Int4`. Their format is defined in
ggml-org/ggml: `block_q4_0`, `block_q4_1` and `block_q4_K` of ggml-common.h, and `get_scale_min_k4` of ggml-quants.c. A
block of 32 weights consists of a float16 scale d, a float16 minimum m (only in Q4_1), and 16 bytes. Byte j stores
weight j in its low half and weight j + 16 in its high half.

In Q4_K, eight blocks share two float16 factors, which multiply the 6-bit integer scales and offsets of the blocks. Each
group of 32 bytes stores one block in the low halves and the next block in the high halves. The scale in Q4_K is a
product, and rounding it to float16 adds a relative error of at most 2^-11. In Q4_0 and Q4_1 no weight is rounded again.

A block of MXFP4 (`block_mxfp4`) consists of the exponent of its scale and 16 bytes, whose halves are ordered as in
Q4_0. Tested against transformers, which reads the same files, and against `dequantize` of the package gguf
(tests/hub/test_gguf.py).
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mars_jax.hub.files import Tensor
from mars_jax.hub.gguf_file import GGUFFile, GGUFTensor, read_gguf
from mars_jax.models.config import Delta, ModelConfig
from mars_jax.models.weights import stored_tensors

if TYPE_CHECKING:
    from gguf import TensorNameMap

_BLOCK_SIZE = 32
"""Weights per block."""
_KINDS = ("Q4_0", "Q4_1", "Q4_K")
_MOST_BITS = 5
"""Bits per weight of Q4_1 including scales, the maximum over 4-bit kinds."""
_DERIVED = {"rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"}
"""Tensors whose values are part of the config."""
_INTERLEAVED = {"granite", "llama", "mistral3", "smollm3"}
"""Architectures whose queries and keys llama.cpp stores interleaved, to rotate adjacent dimensions. In the hub's
layout, rotation pairs the two halves of each head."""
_BLOCK = re.compile(r"blk\.(\d{1,9})\.")
_EXPERT = re.compile(r"(?<=\.experts)\.(\d+)")
_NAME = re.compile(r"(.+?)(?:[._](weight|bias))?")
"""Pattern of a tensor's name on the hub: the name that the package gguf maps, and an optional suffix (default
"weight")."""


def gguf_tensors(path: Path, config: ModelConfig) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors of a GGUF file in the same form as `files.tensors`.

    A tensor that is not part of the model keeps its GGUF name.

    Raises:
      MarsError: the file cannot be read.
    """
    import gguf

    file = read_gguf(path)
    file = file.with_tensors(_split(file, config))
    [kind] = [number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == file.architecture]
    names = gguf.get_tensor_name_map(kind, config.num_layers)
    canonical_names = {_gguf_name(names, row.name): row.name for row in stored_tensors(config)}
    # Keep matrices of more than 4 bits at 8 bits only if the file also has 4-bit matrices. In other files, all matrices
    # may be rounded to 4 bits.
    has_4_bits = any(tensor.kind.name in _KINDS for tensor in file.tensors.values())
    tensors = {
        canonical_names.get(name, name): _tensor(file, name, config, keep_wider=has_4_bits)
        for name in file.tensors
        if name not in _DERIVED
    }
    if config.delta is not None:
        output_projections = [name for name in tensors if name.endswith("linear_attn.out_proj.weight")]
        heads = _value_heads(config.delta)
        tensors |= {name: _reorder_input_heads(tensors[name], heads) for name in output_projections}
    yield tensors


def _split(file: GGUFFile, config: ModelConfig) -> dict[str, GGUFTensor]:
    """Return the tensors of the model as the hub stores them, without MTP modules (NextN), which are not loaded.

    llama.cpp stores the experts of a layer in one tensor; here expert 3 gets the name "blk.0.ffn_up_exps.3.weight".
    llama.cpp may also join queries, keys and values (the first GLM-4), and store a matrix with one row as a vector.
    """
    queries, keys = (heads * config.head_dim for heads in (config.num_heads, config.num_kv_heads))
    has_modules = bool(file.of_model("nextn_predict_layers"))
    tensors: dict[str, GGUFTensor] = {}
    for name, tensor in file.tensors.items():
        stem, _, kind = name.rpartition(".")
        rows, inner = math.prod(tensor.shape[:1]), tensor.shape[1:]
        block = _BLOCK.match(name)
        if has_modules and block is not None and int(block[1]) >= config.num_layers:
            continue
        is_stack = stem.endswith("_exps") and len(inner) == 2 and rows == config.num_experts
        # A matrix can be split at any row, because its rows consist of whole blocks. A vector can be split only if it
        # is stored in float32.
        has_rows = inner or tensor.kind.name == "F32"
        if is_stack and config.family != "gpt_oss":
            for i in range(rows):
                tensors[f"{stem}.{i}.{kind}"] = tensor.part(i, *inner)
        elif stem.endswith("attn_qkv") and config.family == "glm" and rows == queries + 2 * keys and has_rows:
            for part, first, size in (("q", 0, queries), ("k", queries, keys), ("v", queries + keys, keys)):
                tensors[f"{stem[:-3]}{part}.{kind}"] = tensor.part(first, size, *inner)
        elif stem.endswith("ffn_gate_inp_shexp") and not inner:
            tensors[name] = tensor._replace(shape=(1, rows))
        elif stem.endswith("ssm_conv1d"):
            tensors[name] = tensor._replace(shape=(rows, 1, *inner))
        elif kind == "ssm_a":
            tensors[f"{name}.weight"] = tensor
        else:
            tensors[name] = tensor
    return tensors


def _gguf_name(names: TensorNameMap, name: str) -> str:
    """Convert a tensor's name on the hub to the name of the corresponding tensor that `_split` returns."""
    match = _NAME.fullmatch(_EXPERT.sub("", name).replace("linear_attn.dt_bias", "linear_attn.dt_proj.bias"))
    assert match is not None
    stem, kind = match.groups(default="weight")
    return ".".join([str(names.get_name(stem)), *_EXPERT.findall(name), kind])


def _tensor(file: GGUFFile, name: str, config: ModelConfig, *, keep_wider: bool) -> Tensor:
    import gguf

    shape, kind, *_ = file.tensors[name]
    read = functools.partial(file.rows, name)
    stored = functools.partial(file.stored, name)
    if file.architecture in _INTERLEAVED and (".attn_q." in name or ".attn_k." in name):
        read, stored = (functools.partial(_halves, rows, config.head_dim) for rows in (read, stored))
    if config.delta is not None and (order := _row_order(name, config.delta)) is not None:
        read, stored = (functools.partial(_in_order, rows, order) for rows in (read, stored))
    if len(shape) == 2 and kind.name in _KINDS:
        return Tensor(
            shape,
            lambda first, last: _read_floats(stored(first, last), kind.name),
            lambda first, last: _read_blocks(stored(first, last), kind.name),
            _BLOCK_SIZE,
        )
    if len(shape) == 3 and kind.name == "MXFP4":
        return Tensor(shape, read, functools.partial(_read_mxfp4, stored, shape[1]))
    if config.norm_plus_one and name.endswith("norm.weight") and not name.endswith("ssm_norm.weight"):
        return Tensor(shape, lambda first, last: read(first, last) - 1.0)  # llama.cpp stores 1 + scale
    if name.endswith("ssm_a.weight"):
        return Tensor(shape, lambda first, last: np.log(-read(first, last)))  # llama.cpp stores -exp(A_log)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    return Tensor(shape, read, wider=keep_wider and 8 * size / block > _MOST_BITS)


def _value_heads(delta: Delta) -> np.ndarray:
    """Return i[value_heads]: for each value head of gated DeltaNet, in the hub's order, its position in the file.

    Value head i of key head k is number `k * groups + i` on the hub, and number `i * key_heads + k` in a file.
    """
    return np.arange(delta.value_heads).reshape(-1, delta.key_heads).T.reshape(-1)


def _row_order(name: str, delta: Delta) -> np.ndarray | None:
    """Return, for each row of a tensor, its index in the file; None if the rows do not belong to value heads."""
    query_key_rows, size = 2 * delta.key_heads * delta.key_dim, delta.value_dim
    # For each tensor: the first row of its value heads, and the number of rows per head.
    value_rows = {
        "attn_qkv": (query_key_rows, size),
        "ssm_conv1d": (query_key_rows, size),
        "attn_gate": (0, size),
    }
    value_rows |= dict.fromkeys(("ssm_alpha", "ssm_beta", "ssm_a", "ssm_dt"), (0, 1))
    stem = name.rpartition(".")[0].rpartition(".")[2]
    if stem not in value_rows:
        return None
    first, size = value_rows[stem]
    rows = first + size * _value_heads(delta)[:, None] + np.arange(size)
    return np.concatenate([np.arange(first), rows.reshape(-1)])


def _in_order(read: Callable[[int, int], np.ndarray], order: np.ndarray, first: int, last: int) -> np.ndarray:
    """Return rows `first .. last - 1` of a tensor that stores row i at `order[i]`."""
    rows = order[first:last]
    runs = np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1)
    return np.concatenate([read(int(run[0]), int(run[-1]) + 1) for run in runs])


def _reorder_input_heads(tensor: Tensor, heads: np.ndarray) -> Tensor:
    """Reorder the inputs of a matrix [out, in] by head: head i of the result is head `heads[i]` of the file."""

    def by_head(x: np.ndarray, axis: int) -> np.ndarray:
        shape = (*x.shape[:axis], len(heads), -1, *x.shape[axis + 1 :])
        return x.reshape(shape).take(heads, axis).reshape(x.shape)

    blocks = tensor.blocks
    if blocks is not None and tensor.shape[1] % (_BLOCK_SIZE * len(heads)) == 0:
        return tensor._replace(
            rows=lambda first, last: by_head(tensor.rows(first, last), 1),
            blocks=lambda first, last: tuple(by_head(field, 0) for field in blocks(first, last)),
        )
    return tensor._replace(rows=lambda first, last: by_head(tensor.rows(first, last), 1), blocks=None)


def _halves(read: Callable[[int, int], np.ndarray], size: int, first: int, last: int) -> np.ndarray:
    """Return rows `first .. last - 1` in the hub's order.

    A head's row i is stored at 2i, and row `size // 2 + i` at 2i + 1.
    """
    # Extend the range to whole heads.
    begin, end = first // size * size, -(-last // size) * size
    stored = read(begin, end)
    # [heads, pair, half] -> [heads, half, pair]
    heads = stored.reshape(-1, size // 2, 2, *stored.shape[1:]).swapaxes(1, 2).reshape(stored.shape)
    return heads[first - begin : last - begin]


def _blocks(data: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Split rows into blocks; a weight is scale * q + offset.

    Args:
      data: u8[out, bytes]; stored rows.
      kind: one of `_KINDS`.

    Returns:
      q u8[out, blocks, 32] in [0, 15], scale f32[out, blocks] and offset f32[out, blocks].
    """
    rows = len(data)
    if kind == "Q4_K":
        # A super-block has 144 bytes: factors d and dmin, scales and minimums in 12 bytes, then 8 blocks of 32 weights.
        shared = data.reshape(-1, 144)
        factors = np.ascontiguousarray(shared[:, :4]).view(np.float16).astype(np.float32)
        low, mid, high = (shared[:, 4 + i : 8 + i] for i in (0, 4, 8))
        # Unpack scales and minimums: first those of blocks 0 to 3, then those of blocks 4 to 7, whose upper two bits
        # are stored in the unused bits of the bytes of blocks 0 to 3.
        steps = np.concatenate([low & 63, high & 15 | low >> 6 << 4], axis=-1)
        minimums = np.concatenate([mid & 63, high >> 4 | mid >> 6 << 4], axis=-1)
        pairs = shared[:, 16:].reshape(-1, 4, 32)
        scale, offset = factors[:, :1] * steps, -(factors[:, 1:] * minimums)
        return (
            _halves_of_bytes(pairs).reshape(rows, -1, 32),
            scale.reshape(rows, -1),
            offset.reshape(rows, -1),
        )
    # Number of bytes before a block's weights: 2 for the scale d and, in Q4_1, 2 for the minimum m.
    head = 2 if kind == "Q4_0" else 4
    blocks = data.reshape(rows, -1, head + _BLOCK_SIZE // 2)
    factors = np.ascontiguousarray(blocks[..., :head]).view(np.float16).astype(np.float32)
    # A weight is d (q - 8) in Q4_0 and d q + m in Q4_1.
    offset = factors[..., 1] if kind == "Q4_1" else -8 * factors[..., 0]
    return _halves_of_bytes(blocks[..., None, head:]).reshape(rows, -1, 32), factors[..., 0], offset


def _halves_of_bytes(pairs: np.ndarray) -> np.ndarray:
    """Return the low halves of bytes u8[..., n], then their high halves: u8[..., 2, n]."""
    return np.stack([pairs & 15, pairs >> 4], axis=-2)


def _read_blocks(data: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the values, scale and offset of rows as in `Int4`; arguments as for `_blocks`.

    Returns:
      i8[blocks, 32, out] in [-8, 7], f16[blocks, out] and f32[blocks, out].
    """
    q, scale, offset = _blocks(data, kind)
    scale = scale.astype(np.float16)
    # scale * q + offset = scale * (q - 8) + (offset + 8 * scale)
    offset = offset + 8 * scale.astype(np.float32)
    return (q.astype(np.int8) - np.int8(8)).transpose(1, 2, 0), scale.T, offset.T


def _read_mxfp4(
    stored: Callable[[int, int], np.ndarray], outputs: int, first: int, last: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the values and scales of experts `first .. last - 1` as in `Mxfp4`."""
    blocks = stored(first, last).reshape(last - first, outputs, -1, 1 + _BLOCK_SIZE // 2)
    scale, pairs = blocks[..., 0], blocks[..., 1:]
    codes = _halves_of_bytes(pairs).reshape(*scale.shape, _BLOCK_SIZE)
    # `Mxfp4` stores two adjacent weights in each byte.
    values = codes[..., ::2] | codes[..., 1::2] << 4
    return values.reshape(last - first, outputs, -1), scale


def _read_floats(data: np.ndarray, kind: str) -> np.ndarray:
    """Return dequantised rows f32[out, in], faster than the package gguf; arguments as for `_blocks`."""
    q, scale, offset = _blocks(data, kind)
    weights = q * scale[..., None]
    weights += offset[..., None]
    return weights.reshape(len(data), -1)
