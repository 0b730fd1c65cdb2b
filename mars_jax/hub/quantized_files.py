"""Dequantisation of quantised safetensors: 4-bit AWQ, GPTQ and compressed-tensors; fp8 (e4m3) and int8 with scales.

**Packed in 4 bits.** One i32 packs eight 4-bit numbers, the first in its lowest bits. A weight is (q - z) * s, with a scale s and a zero point z
for each output and group of inputs:

| | numbers q | scales | zeros |
|---|---|---|---|
| AWQ | `qweight` [in, out / 8], eight outputs in the order 0 2 4 6 1 3 5 7 | `scales` [in / G, out] | `qzeros` [in / G, out / 8], in the same order |
| GPTQ | `qweight` [in / 8, out] | `scales` [in / G, out] | `qzeros` [in / G, out / 8], less 1 in the first version |
| compressed-tensors | `weight_packed` [out, in / 8] | `weight_scale` [out, in / G] | `weight_zero_point` [out / 8, in / G], or 8 |

In GPTQ, `g_idx` [in] lists the group of each input. With `desc_act`, the inputs of a group are not adjacent. Such a
matrix is dequantised, and is rounded again only if dtype "int4" is requested. Sources: casper-hansen/AutoAWQ
`packing_utils.py`, AutoGPTQ `qlinear_cuda_old.py`, vllm-project/compressed-tensors `pack_quantized`. Tested against
matrices packed by these packages (tests/hub/packed_by_others.npz).

**Scaled.** A weight is the stored number times its scale. A matrix [out, in] has a single scale, one per output, or one per block. A
group of inputs counts as a block with one output:

| | scales | made by |
|---|---|---|
| fp8 with blocks | `NAME.weight_scale_inv` [out / b, in / b], b by `weight_block_size` | DeepSeek-V3, Qwen3 in FP8 |
| fp8 with one scale | `NAME.weight_scale` [] | AutoFP8 |
| `float-quantized`, `int-quantized` | `NAME.weight_scale` [out, 1], [1], or by blocks or groups | compressed-tensors |

These formats also describe how to round activations, keys and values. mars-jax does not round them, so it ignores their
scales. Sources: deepseek-ai/DeepSeek-V3 `inference/kernel.py` (`weight_dequant`), vllm-project/compressed-tensors
`quantizers/naive_quantized.py`. Tested against PyTorch's float8 (tests/hub/test_scaled_files.py).
"""  # noqa: E501

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mars_jax.hub.config_json import read_json
from mars_jax.hub.files import Tensor
from mars_jax.hub.values import of_its_kind
from mars_jax.utils.errors import MarsError
from mars_jax.utils.types import JsonObject

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_NIBBLES = np.arange(0, 32, 4, dtype=np.uint32)
_FUSED = ("weight_input", "weight_output")
"""Locations of compressed-tensors' transforms that are already applied to the stored weights."""
_SCALES = (".weight_scale_inv", ".weight_scale")
"""Suffixes of the scales of fp8 and int8 matrices."""
_OF_ACTIVATIONS = (".input_scale", ".activation_scale", ".output_scale", ".k_scale", ".v_scale", ".kv_scale")
"""Suffixes of scales for rounding activations, keys and values, which mars-jax does not round."""
_PIECE = re.compile(r"^(.*)\.(qweight|qzeros|scales|g_idx|weight_(?:packed|scale|zero_point|shape|g_idx))$")


class _Matrix(NamedTuple):
    """An unpacked matrix, with inputs on the first axis."""

    q: np.ndarray  # u8[in, out]
    zero: np.ndarray  # u8[groups, out]
    scale: np.ndarray  # floating [groups, out]
    group: np.ndarray  # i32[in]; the group of each input


def _quantization_config(directory: Path) -> JsonObject | None:
    """Return the `quantization_config` of a checkpoint; None if it has none."""
    data = read_json(directory / "config.json")
    quantization = data.get("quantization_config") or data.get("compression_config")
    if not isinstance(quantization, dict):
        return None
    return quantization


def packing(directory: Path) -> JsonObject | None:
    """Return the `quantization_config` of a checkpoint with packed 4-bit matrices; None for any other checkpoint.

    Raises:
      MarsError: this variant of the method is not supported, the forward pass rotates activations, or weights are
        sparse.
    """
    quantization = _quantization_config(directory)
    if quantization is None:
        return None
    # Check the forward pass first: a checkpoint of scaled matrices, for which this function returns None, may also use
    # rotations or sparsity.
    _check_forward(directory, quantization)
    if quantization.get("quant_method") not in _READERS:
        return None
    if quantization.get("format") in ("float-quantized", "int-quantized", "naive-quantized"):
        return None  # `dequantized_tensors` reads these formats
    if not _is_readable(quantization):
        raise MarsError(
            f"'{directory}' is quantised by {quantization['quant_method']} in a form that is not supported: use one "
            "in 4 bits (AWQ's version gemm, compressed-tensors' format pack-quantized), or the checkpoint that it was "
            "made from."
        )
    return quantization


def _is_readable(config: JsonObject) -> bool:
    """Return whether the config describes a supported variant of its quantisation method."""
    if config["quant_method"] == "compressed-tensors":
        weights = _group_weights(config)
        is_int4 = all(w.get("num_bits") == 4 and w.get("type", "int") == "int" for w in weights)
        return is_int4 and config.get("format") == "pack-quantized"
    # AutoAWQ calls the setting `w_bit`; transformers calls it `bits`.
    if config.get("bits", config.get("w_bit")) != 4:
        return False
    if config["quant_method"] == "gptq":
        return _gptq_format(config) in ("gptq", "gptq_v2")
    return str(config.get("version", "gemm")).lower() == "gemm"


def _check_forward(directory: Path, config: JsonObject) -> None:
    """Raise MarsError for `quantization_config` settings that change the forward pass and are not implemented.

    Sources: vllm-project/compressed-tensors `transform/transform_args.py`, ModelCloud/GPTQModel
    `quantization/rotation/rotation.py`.
    """
    with of_its_kind(f"'{directory}' has a quantization_config with values", "download it again"):
        transforms = config.get("transform_config") or {"config_groups": {}}
        uses = [use for scheme in transforms["config_groups"].values() for use in scheme["apply"]]
        locations = {use["location"] for use in uses}
        sparse_format = (config.get("sparsity_config") or {}).get("format")
    if config.get("rotation") or not locations <= set(_FUSED):
        raise MarsError(
            f"'{directory}' rotates activations while it runs (rotation or transform_config in its "
            "quantization_config), which is not supported: use a checkpoint without online rotations, or the one that "
            "it was made from."
        )
    if sparse_format not in (None, "dense"):
        raise MarsError(
            f"'{directory}' stores sparse weights (sparsity_config has the format {sparse_format!r}), which are not "
            "supported: use the checkpoint that it was made from."
        )


def _gptq_format(config: JsonObject) -> str:
    """Return the name of the format, such as "gptq" (stores z - 1) or "gptq_v2" (stores z); z is the zero point."""
    return str(config.get("checkpoint_format") or config.get("format") or "gptq").lower()


def _group_weights(config: JsonObject) -> list[JsonObject]:
    """Return the `weights` settings of each group of a compressed-tensors config."""
    groups = config.get("config_groups")
    if not isinstance(groups, dict):
        return []
    settings = [group.get("weights") for group in groups.values() if isinstance(group, dict)]
    return [weights for weights in settings if isinstance(weights, dict)]


def unpacked_tensors(
    directory: Path, files: Iterable[Mapping[str, Tensor]], config: JsonObject
) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors of a checkpoint's files, with each packed matrix as one tensor `NAME.weight`.

    Args:
      directory: for error messages.
      files: from `files.tensors`.
      config: from `packing`.

    Raises:
      MarsError: a piece of a matrix is missing.
    """
    # The pieces of a matrix may be in different files, so a matrix may be incomplete until the last file is read.
    pieces: dict[str, dict[str, Tensor]] = {}
    for file in files:
        other_tensors = {}
        for name, tensor in file.items():
            if piece_match := _PIECE.match(name):
                pieces.setdefault(piece_match[1], {})[piece_match[2]] = tensor
            elif not name.endswith(_OF_ACTIVATIONS):
                other_tensors[name] = tensor
        yield other_tensors
    method = config["quant_method"]

    def refusing(name: str) -> contextlib.AbstractContextManager[None]:
        return of_its_kind(f"'{directory}' has pieces of {name}", "download the checkpoint again")

    @functools.lru_cache(maxsize=1)  # each block of rows needs all pieces of its matrix
    def matrix(name: str) -> _Matrix:
        with refusing(name):
            arrays = {piece: tensor.read() for piece, tensor in pieces[name].items()}
            return _READERS[method](arrays, config)

    matrices = {}
    for name, matrix_pieces in pieces.items():
        with refusing(name):
            sizes = _SHAPES[method](matrix_pieces)
            matrices[f"{name}.weight"] = _tensor(functools.partial(matrix, name), matrix_pieces, sizes)
    yield matrices


def _tensor(
    matrix: Callable[[], _Matrix], pieces: Mapping[str, Tensor], sizes: tuple[int, int, int]
) -> Tensor:
    """Return the tensor of a packed matrix.

    Args:
      matrix: function that reads and unpacks the matrix.
      pieces: the stored tensors, which determine whether the matrix can stay in 4 bits.
      sizes: (outputs, inputs, groups).
    """

    def rows(first: int, last: int) -> np.ndarray:
        m = matrix()
        # Compute (q - z) s for all inputs and these outputs, and transpose, because the model stores outputs first.
        steps = m.q[:, first:last].astype(np.float32) - m.zero[m.group, first:last]
        return (steps * m.scale[m.group, first:last].astype(np.float32)).T

    def blocks(first: int, last: int) -> tuple[np.ndarray, ...]:
        m = matrix()
        scale = m.scale[:, first:last].astype(np.float16)
        # Int4 stores q - 8 in [-8, 7], so (q - z) s = values * scale + offset with the offset (8 - z) s.
        values = (m.q[:, first:last].astype(np.int8) - np.int8(8)).reshape(len(m.scale), size, -1)
        # Compute the offset from the rounded scale, so that weights near the zero point stay precise.
        return values, scale, (8 - m.zero[:, first:last].astype(np.float32)) * scale.astype(np.float32)

    outputs, inputs, groups = sizes
    size = inputs // groups
    # The inputs of an `Int4` group must be adjacent. g_idx lists the group of each input; -1 means that the inputs are
    # in order.
    neighbours = True
    if stored_group := pieces.get("g_idx") or pieces.get("weight_g_idx"):
        group = stored_group.read()
        neighbours = np.any(group < 0) or np.array_equal(group, np.arange(inputs) // size)
    if neighbours and _fit_float16(pieces.get("scales") or pieces["weight_scale"]):
        return Tensor((outputs, inputs), rows, blocks, size)
    return Tensor((outputs, inputs), rows)


def _fit_float16(scales: Tensor) -> bool:
    """Return whether scales keep the precision of bfloat16 when `models.quantize.Int4` stores them in float16."""
    if scales.rows(0, 0).dtype == np.float16:
        return True
    wide = scales.read().astype(np.float32)
    with np.errstate(over="ignore"):
        error = np.abs(wide.astype(np.float16).astype(np.float32) - wide)
    # Rounding to bfloat16, which has 8 significant bits, causes a relative error of up to 2^-8. Allow float16 half of
    # that.
    return bool(np.all(error <= np.abs(wide) * 2.0**-9))


def _spread(packed: np.ndarray) -> np.ndarray:
    """Unpack i32[..., n] to u8[..., 8 n], lowest bits first."""
    # Eight copies of each word, shifted right by 0, 4, ..., 28 bits.
    wide = packed.view(np.uint32)[..., None] >> _NIBBLES & 15
    return wide.astype(np.uint8).reshape(*packed.shape[:-1], -1)


def _awq(pieces: Mapping[str, np.ndarray], config: JsonObject) -> _Matrix:
    # In each word, the number at bit 4 i belongs to output _AWQ_ORDER[i].
    inverse_order = np.argsort(_AWQ_ORDER)
    q, zero = (
        spread.reshape(len(spread), -1, 8)[..., inverse_order].reshape(spread.shape)
        for spread in map(_spread, (pieces["qweight"], pieces["qzeros"]))
    )
    return _matrix(q, zero, pieces["scales"], None)


def _gptq(pieces: Mapping[str, np.ndarray], config: JsonObject) -> _Matrix:
    q, zero = _spread(pieces["qweight"].T.copy()).T, _spread(pieces["qzeros"])
    # The first version of the format stores z - 1.
    if _gptq_format(config) != "gptq_v2":
        zero = zero + np.uint8(1)
    return _matrix(q, zero, pieces["scales"], pieces.get("g_idx"))


def _compressed(pieces: Mapping[str, np.ndarray], config: JsonObject) -> _Matrix:
    # In the file, the first axis is the outputs; in `_Matrix`, it is the inputs.
    scale = pieces["weight_scale"].T
    q = _spread(pieces["weight_packed"]).T
    if "weight_zero_point" in pieces:
        zero = _spread(pieces["weight_zero_point"].T.copy())
    else:
        zero = np.full(scale.shape, 8, np.uint8)
    input_group = pieces.get("weight_g_idx")
    if input_group is not None and np.any(input_group < 0):  # -1 if the inputs are in order
        input_group = None
    return _matrix(q, zero, scale, input_group)


def _matrix(q: np.ndarray, zero: np.ndarray, scale: np.ndarray, input_group: np.ndarray | None) -> _Matrix:
    """Combine the pieces of a matrix. `input_group` i32[in] is each input's group; None if the inputs are in order.

    Raises:
      ValueError: the pieces do not belong to one matrix.
    """
    (inputs, outputs), groups = q.shape, len(scale)
    if input_group is None:
        input_group = np.repeat(np.arange(groups), inputs // groups)
    if (
        not scale.shape == zero.shape == (groups, outputs)
        or input_group.shape != (inputs,)
        or inputs % groups
    ):
        raise ValueError("their shapes do not fit")
    if np.any((input_group < 0) | (input_group >= groups)):
        raise ValueError("an input belongs to no group")
    return _Matrix(q, zero, scale, input_group.astype(np.int32))


_READERS = {"awq": _awq, "gptq": _gptq, "compressed-tensors": _compressed}
_SHAPES = {  # (outputs, inputs, groups) of the pieces
    "awq": lambda p: (p["scales"].shape[1], p["qweight"].shape[0], p["qzeros"].shape[0]),
    "gptq": lambda p: (p["scales"].shape[1], p["qweight"].shape[0] * 8, p["qzeros"].shape[0]),
    "compressed-tensors": lambda p: (
        p["weight_packed"].shape[0], p["weight_packed"].shape[1] * 8, p["weight_scale"].shape[1],
    ),
}  # fmt: skip


def dequantized_tensors(
    directory: Path, files: Iterable[Mapping[str, Tensor]]
) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors of a checkpoint's files, dequantising every matrix that has scales.

    Raises:
      MarsError: scales do not fit their matrix.
    """
    all_files = list(files)  # headers only; a matrix and its scales may be in different files
    scales: dict[str, Tensor] = {}
    for name, tensor in (item for file in all_files for item in file.items()):
        if end := next(filter(name.endswith, _SCALES), None):
            if (base := name.removesuffix(end)) in scales:
                raise MarsError(f"'{directory}' has two scales of {base}.weight: download it again.")
            scales[base] = tensor
    if not scales:
        yield from map(dict, all_files)
        return
    size = _block_size(directory)
    for file in all_files:
        dequantized = {}
        for name, tensor in file.items():
            base = name.removesuffix(".weight")
            if base != name and base in scales:
                dequantized[name] = _scaled_tensor(directory, name, tensor, scales[base], size)
            elif not name.endswith((*_SCALES, *_OF_ACTIVATIONS)):
                dequantized[name] = tensor
        yield dequantized


def _block_size(directory: Path) -> object:
    """Return the size [outputs, inputs] of a block from the config; None if the config does not state one."""
    quantization = _quantization_config(directory) or {}
    if size := quantization.get("weight_block_size"):
        return size
    for weights in _group_weights(quantization):
        if structure := weights.get("block_structure"):
            return structure
        # A group size of -1 stands for one scale per output.
        if (size := weights.get("group_size")) not in (None, -1):
            return [1, size]
    return None


def _scaled_tensor(directory: Path, name: str, tensor: Tensor, scale: Tensor, size: Any) -> Tensor:
    outputs, inputs = tensor.shape if len(tensor.shape) == 2 else (0, 0)
    shape = scale.shape
    blocked = isinstance(size, list) and len(size) == 2 and all(isinstance(n, int) and n > 0 for n in size)
    # Each scale belongs to a block of `tall` outputs and `wide` inputs.
    if shape in ((), (1,), (1, 1)):
        tall, wide = outputs, inputs
    elif shape in ((outputs,), (outputs, 1)):
        tall, wide = 1, inputs
    elif blocked and shape == (-(-outputs // size[0]), -(-inputs // size[1])):
        tall, wide = min(size[0], outputs), min(size[1], inputs)
    else:
        tall = wide = 0
    if not tall or not wide:
        raise MarsError(
            f"'{directory}': scales {list(shape)} of {name}, {list(tensor.shape)}, are neither one per matrix, nor one "
            "per output, nor one per block or group of the size in config.json: use the checkpoint that it was made "
            "from."
        )

    def rows(first: int, last: int) -> np.ndarray:
        numbers = tensor.rows(first, last)
        if numbers.dtype.itemsize > 1:
            raise MarsError(f"it holds {numbers.dtype} next to scales: only weights in 8 bits have them.")
        # f32[blocks of outputs, blocks of inputs]; each output uses its block's row, each input its block's column.
        row_scales = scale.read().astype(np.float32).reshape(-1, -(-inputs // wide))
        row_scales = row_scales[np.arange(first, last) // tall]
        return numbers.astype(np.float32) * np.repeat(row_scales, wide, axis=1)[:, :inputs]

    return Tensor(tensor.shape, rows)
