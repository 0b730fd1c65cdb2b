"""Experts that are stored in one tensor per layer: those of gpt-oss (in floating point or MXFP4) and of Qwen3.5.

X experts, E hidden size, M hidden units of an expert, G blocks of 32 inputs. In gpt-oss, outputs 2i and 2i + 1 of a
fused matrix are output i of gate and output i of up:

| | gate and up, `gate_up_proj` | `down_proj` |
|---|---|---|
| floating point | [X, E, 2M] | [X, M, E] |
| MXFP4, two numbers in a byte, the first in its low half | `_blocks` u8[X, 2M, G, 16] | `_blocks` u8[X, E, G, 16] |
| MXFP4, exponents of the blocks' scales | `_scales` u8[X, 2M, G] | `_scales` u8[X, E, G] |
| biases | `_bias` [X, 2M] | `_bias` [X, E] |

Qwen3.5 stores `gate_up_proj` [X, 2M, E], whose first M rows belong to gate, and `down_proj` [X, E, M].

MXFP4: OCP Microscaling Formats, version 1.0. Tested against transformers' `integrations/mxfp4.py`,
`modeling_gpt_oss.py` and `modeling_qwen3_5_moe.py`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping

import ml_dtypes
import numpy as np

from mars_jax.hub.files import Tensor
from mars_jax.utils.errors import MarsError

_FUSED = re.compile(r"^(.*\.experts)\.(gate_up|down)_proj(_blocks|_scales|_bias)?$")
_DIMENSIONS = {None: 3, "_bias": 2, "_blocks": 4, "_scales": 3}
_PARTS = {"gate_up": {"gate": slice(0, None, 2), "up": slice(1, None, 2)}, "down": {"down": slice(None)}}
"""Rows of each matrix in a stored tensor."""


def split_experts(files: Iterable[Mapping[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors of files, with fused experts split into `gate_proj`, `up_proj` and `down_proj` [X, out, in]."""
    blocks: dict[str, Tensor] = {}
    scales: dict[str, Tensor] = {}
    by_kind = {"_blocks": blocks, "_scales": scales}
    for file in files:
        tensors: dict[str, Tensor] = {}
        for name, tensor in file.items():
            fused_match = _FUSED.match(name)
            if fused_match is None or len(tensor.shape) != _DIMENSIONS[fused_match[3]]:
                tensors[name] = tensor
                continue
            parent, key, kind = fused_match.groups()
            for part, rows in _PARTS[key].items():
                base = f"{parent}.{part}_proj"
                if kind in by_kind:
                    by_kind[kind][base] = _rows(tensor, rows)
                else:
                    tensors[base + (kind or "")] = _rows(tensor, rows, transposed=kind is None)
        yield tensors
    # Blocks and their scales may be in different files.
    yield {name: packed_experts(blocks[name], scales[name]) for name in blocks if name in scales}


def number_experts(files: Iterable[Mapping[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors of files, with the fused experts of Qwen3.5 split into matrices `experts.N.*_proj.weight`."""
    for file in files:
        tensors: dict[str, Tensor] = {}
        for name, tensor in file.items():
            fused_match = _FUSED.match(name)
            if fused_match is None or fused_match[3] or len(tensor.shape) != 3:
                tensors[name] = tensor
                continue
            parts = fused_match[2].split("_")
            experts, outputs = tensor.shape[0], tensor.shape[1] // len(parts)
            for expert, (i, part) in itertools.product(range(experts), enumerate(parts)):
                matrix = _expert(tensor, expert, i * outputs, outputs)
                tensors[f"{fused_match[1]}.{expert}.{part}_proj.weight"] = matrix
        yield tensors


def _expert(tensor: Tensor, expert: int, start: int, size: int) -> Tensor:
    """Return a tensor of `size` rows of one expert's matrix, from row `start` on."""

    def read(first: int, last: int) -> np.ndarray:
        return tensor.rows(expert, expert + 1)[0, start + first : start + last]

    return Tensor((size, *tensor.shape[2:]), read)


def _rows(tensor: Tensor, rows: slice, *, transposed: bool = False) -> Tensor:
    """Return a tensor of some rows of each expert's matrix, which is stored as [in, out] if `transposed`."""

    def read(first: int, last: int) -> np.ndarray:
        stored = tensor.rows(first, last)
        if transposed:
            stored = stored.swapaxes(1, 2)
        return stored[:, rows]

    experts, outputs, *inner = tensor.shape
    if transposed:
        outputs, inner = inner[0], [outputs]
    return Tensor((experts, len(range(outputs)[rows]), *inner), read)


def packed_experts(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the tensor [X, out, 32 G] that is stored as blocks u8[X, out, G, 16] and scales u8[X, out, G]."""

    def read(first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the fields of `models.quantize.Mxfp4`."""
        values, scale = blocks.rows(first, last), scales.rows(first, last)
        if values.dtype != np.uint8 or scale.dtype != np.uint8 or values.shape != (*scale.shape, 16):
            raise MarsError(
                f"it holds {values.dtype}{list(values.shape)} with scales {scale.dtype}{list(scale.shape)}: MXFP4 has "
                "bytes, 16 for each scale."
            )
        return values.reshape(*scale.shape[:-1], -1), scale

    def rows(first: int, last: int) -> np.ndarray:
        values, scale = read(first, last)
        codes = np.stack([values & 15, values >> 4], axis=-1).reshape(*scale.shape, 32)
        powers = scale.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
        numbers = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
        return (numbers * powers[..., None]).reshape(*scale.shape[:-1], -1)

    return Tensor((*scales.shape[:-1], 32 * scales.shape[-1]), rows, read)


def fuse_experts(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return arrays as gpt-oss stores them; the inverse of `split_experts` for floating-point matrices."""
    fused = dict(arrays)
    for name in [name for name in arrays if ".experts.gate_proj" in name]:
        gate, up = fused.pop(name), fused.pop(name.replace("gate_proj", "up_proj"))
        gate_up = np.stack([gate, up], axis=2).reshape(gate.shape[0], -1, *gate.shape[2:])
        fused[name.replace("gate_proj", "gate_up_proj")] = gate_up
    for name, array in fused.items():
        if _FUSED.match(name) and array.ndim == 3:
            fused[name] = np.ascontiguousarray(array.swapaxes(1, 2))
    return fused
