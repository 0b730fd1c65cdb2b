"""Dequantisation of matrices in fp8 (e4m3) and int8 checkpoints, which store scales in separate tensors.

A weight is the stored number times its scale. A matrix [out, in] has one scale, one per output, or one per block. A
group of inputs is a block with one output:

| | scales | made by |
|---|---|---|
| fp8 with blocks | `NAME.weight_scale_inv` [out / b, in / b], b by `weight_block_size` | DeepSeek-V3, Qwen3 in FP8 |
| fp8 of a whole matrix | `NAME.weight_scale` [] | AutoFP8 |
| `float-quantized`, `int-quantized` | `NAME.weight_scale` [out, 1], [1], or by blocks or groups | compressed-tensors |

These formats also describe how to round activations, keys and values. mars-jax does not round them, so it ignores their
scales. Sources: deepseek-ai/DeepSeek-V3 `inference/kernel.py` (`weight_dequant`), vllm-project/compressed-tensors
`quantizers/naive_quantized.py`. Oracle: PyTorch's float8 (tests/hub/test_scaled_files.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mars_jax.hub.files import Tensor
from mars_jax.hub.packed_files import OF_ACTIVATIONS, group_weights, quantization_config
from mars_jax.utils.errors import MarsError

_SCALES = (".weight_scale_inv", ".weight_scale")


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
                dequantized[name] = _matrix(directory, name, tensor, scales[base], size)
            elif not name.endswith((*_SCALES, *OF_ACTIVATIONS)):
                dequantized[name] = tensor
        yield dequantized


def _block_size(directory: Path) -> object:
    """Return [outputs, inputs] of a block from the config; None if the config has no block size."""
    quantization = quantization_config(directory) or {}
    if size := quantization.get("weight_block_size"):
        return size
    for weights in group_weights(quantization):
        if structure := weights.get("block_structure"):
            return structure
        # A group size of -1 stands for one scale per output.
        if (size := weights.get("group_size")) not in (None, -1):
            return [1, size]
    return None


def _matrix(directory: Path, name: str, tensor: Tensor, scale: Tensor, size: Any) -> Tensor:
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
            f"'{directory}': scales {list(shape)} of {name}, {list(tensor.shape)}, are read of a whole matrix, of each "
            "output, or of blocks or groups by their size in config.json: use the checkpoint that it was made of."
        )

    def rows(first: int, last: int) -> np.ndarray:
        numbers = (tensor.numbers or tensor.rows)(first, last)
        if numbers.dtype.itemsize > 1:
            raise MarsError(f"it holds {numbers.dtype} beside scales: weights in 8 bits have them.")
        # f32[blocks of outputs, blocks of inputs]; each output takes its block's row, each input its block's column.
        row_scales = scale.read().astype(np.float32).reshape(-1, -(-inputs // wide))
        row_scales = row_scales[np.arange(first, last) // tall]
        return numbers.astype(np.float32) * np.repeat(row_scales, wide, axis=1)[:, :inputs]

    return Tensor(tensor.shape, rows)
