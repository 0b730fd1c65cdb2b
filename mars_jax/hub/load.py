"""Loading of checkpoints in the Hugging Face layout, of conversions, and of GGUF files."""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, Sharding

from mars_jax.core.axes import parse_mesh
from mars_jax.core.types import PyTree
from mars_jax.hub import gguf_config
from mars_jax.hub.config_json import is_mxfp4, read_directory, read_json
from mars_jax.hub.converted import is_converted, restore_params
from mars_jax.hub.families import WITH_IMAGES
from mars_jax.hub.files import Tensor, resolve, tensors
from mars_jax.hub.gguf_file import is_gguf, read_gguf
from mars_jax.hub.gguf_tensors import gguf_tensors
from mars_jax.hub.pretrained import Pretrained
from mars_jax.hub.quantized_files import dequantized_tensors, packing, unpacked_tensors
from mars_jax.hub.stacked_experts import number_experts, split_experts
from mars_jax.hub.stream import HostArray, read_array, to_params
from mars_jax.models.config import ModelConfig
from mars_jax.models.quantize import Int4, Quantized, bits_of
from mars_jax.models.shardings import params_shardings
from mars_jax.models.transformer import language_model
from mars_jax.models.weights import STACKED, Weight, build_rows, dtype_of, get, leaves, stored_tensors
from mars_jax.utils import assets, hosts
from mars_jax.utils.errors import MarsError, check_switch, check_type, prefixed
from mars_jax.utils.settings import BATCH, BITS, STORED_DTYPES, check_dtype

# Old exports contain these buffers, whose values follow from the config.
DERIVED = re.compile(r"(^|\.)(rotary_emb\.inv_freq|self_attn\.(bias|masked_bias))$")

# Multimodal checkpoints of Gemma 3, Mistral 3 and Qwen3.5 use these prefixes. Only the text model is loaded.
_TEXT = re.compile(r"^(language_model\.(?=model\.|lm_head\.)|model\.language_model\.|model\.(?=mtp\.))")
_IMAGES = re.compile(r"^model\.(vision_tower|multi_modal_projector|visual)\.")
# Name of the projection of an MTP module. All tensors with the same prefix belong to the module (`models.mtp_head`).
_MTP = re.compile(r"^(model\.(?:layers|mtp_layers)\.\d+\.|mtp\.)(?:eh_proj|input_proj|fc)\.weight$")


def read_config(name_or_path: str | os.PathLike[str]) -> ModelConfig:
    """Read the config of a checkpoint, without its weights.

    Args:
      name_or_path: directory, or `owner/name` on the Hugging Face hub.

    Raises:
      MarsError: the checkpoint does not exist or is not supported.

    >>> read_config("meta-llama/Llama-3.1-8B-Instruct").num_layers  # doctest: +SKIP
    32
    """
    return read_path(resolve(name_or_path, weights=False))[0]


def read_path(path: Path) -> tuple[ModelConfig, str | None]:
    """Read the config of a directory or a GGUF file, and its dtype (None if it has no single dtype)."""
    if is_gguf(path):
        return gguf_config.read_gguf_config(read_gguf(path))
    return read_directory(path)


def packs_experts(path: Path) -> bool:
    """Return whether a directory or a GGUF file has experts in MXFP4, which stay packed by default."""
    if is_gguf(path):
        return gguf_config.packs_experts(read_gguf(path))
    return is_mxfp4(read_json(path / "config.json"))


def outline(name_or_path: str | os.PathLike[str]) -> Pretrained:
    """Read a checkpoint without its weights (`params` is None), for tokenizing and checking prompts.

    Raises:
      MarsError: the checkpoint does not exist or is not supported.
    """
    directory = resolve(name_or_path, weights=False)
    config = read_path(directory)[0]
    return Pretrained(os.fspath(name_or_path), language_model(config), None, config, directory)


def load(
    name_or_path: str | os.PathLike[str] = assets.TARGET,
    *,
    dtype: str | None = None,
    mesh: Mesh | str | None = None,
    shardings: PyTree = None,
    check: bool = True,
    cache_dtype: str | None = None,
    prefill_chunk: int | None = None,
    attention: str = "auto",
) -> Pretrained:
    """Load a checkpoint in the Hugging Face layout, a directory written by `convert`, or a GGUF file.

    Weights are streamed to their devices: host memory holds one array of params at a time, not the whole model.

    Args:
      name_or_path: directory, .gguf file, `owner/name` on the Hugging Face hub, a short name in `utils.catalogue`,
        such as "qwen3-0.6b", or a checkpoint inside the package: "tiny/target" (the default), "tiny/draft".
      dtype: "float32" or "bfloat16". None keeps the checkpoint's dtype, except that float16 becomes bfloat16, and a
        quantised GGUF file becomes float32, or bfloat16 if it has experts in MXFP4. In 4-bit AWQ, GPTQ and
        compressed-tensors checkpoints, and in GGUF files with experts in MXFP4, None also keeps the matrices of layers
        packed if each quantisation group consists of adjacent inputs. All other weights of these checkpoints (matrices
        with GPTQ's `desc_act`, experts not in MXFP4, embeddings and unpacked matrices) get a floating-point dtype.
        "int8" rounds matrices to 8 bits per weight (`models.quantize`) and keeps everything else in the checkpoint's
        dtype. "int4" rounds matrices of layers to 4 bits, and embeddings and experts to 8. Matrices that the file
        already stores at 4 bits (GGUF's Q4_0, Q4_1 and Q4_K, AWQ, GPTQ without `desc_act`, compressed-tensors'
        pack-quantized, and experts in MXFP4) are not rounded again. If a GGUF file has such matrices, its matrices of
        more than 4 bits are rounded to 8 bits. On a CPU without a mesh or shardings, 4-bit matrices other than experts
        in MXFP4 are dequantised, because products with them are slower there. They stay packed if the dequantised model
        would take more than half of the free memory.
      mesh: devices to shard the weights over: a mesh with any of the axes `data`, `model` and `expert`, of type Auto or
        Explicit, or a string such as "data=2,model=4"; see `mars_jax.models.shardings`. `generate` then shards the
        batch over `data`.
      shardings: tree of `jax.sharding.Sharding` with the structure of params, for a custom placement; default: derived
        from the mesh, or JAX's default device without one. Each process reads the parts for its own devices.
      check: whether to verify the checksum of each file of a conversion. Other checkpoints have no checksums.
      cache_dtype: dtype of keys and values: "float32", "bfloat16", or "int8", which stores 8 bits per number and
        a scale for each token and head. The default is the dtype of the weights, but float32 on a CPU, where XLA would
        widen the whole bfloat16 cache at every step.
      prefill_chunk: prompt tokens per forward pass; default: chosen from the backend, the size of the buffer and the
        number of rows. Draft models that are loaded for this target use the same value.
      attention: "auto", "xla" or "pallas" (a kernel on TPU); see `models.language_model`.

    Raises:
      MarsError: an argument is invalid, or the checkpoint cannot be loaded. The message names the problem and the fix.

    >>> target = load("path/to/Llama-3.1-8B-Instruct", dtype="bfloat16")  # doctest: +SKIP
    >>> target = load("path/to/Llama-3.3-70B-Instruct", mesh="data=2,model=4")  # doctest: +SKIP
    """
    check_type("the checkpoint", name_or_path, (str, os.PathLike), "its name or its path")
    hosts.check_devices()
    if isinstance(mesh, str):
        mesh = parse_mesh(mesh)
    check_type(
        "the mesh", mesh, (Mesh, type(None)), 'a jax.sharding.Mesh, or a string such as "data=2,model=4"'
    )
    if mesh is not None and shardings is None:
        shardings = params_shardings(read_config(name_or_path), mesh)
    check_dtype(dtype)
    check_dtype(cache_dtype, shown="cache_dtype", known=STORED_DTYPES)
    if prefill_chunk is not None:
        BATCH["prefill_chunk"].check(prefill_chunk)
    check_switch("check", check)
    check_type("shardings", shardings, (Mapping, type(None)), "a tree of shardings like the params")
    directory = resolve(name_or_path)
    config, stored_dtype = read_path(directory)
    language_model(config, attention=attention)  # reject an unknown value before reading weights
    if is_converted(directory):
        params, dtype = restore_params(directory, config, dtype, shardings=shardings, check=check)
    else:
        # By default, packed matrices stay at 4 bits, except in GGUF files without experts in MXFP4.
        keep_packed = dtype is None and (
            packs_experts(directory) or (not is_gguf(directory) and packing(directory) is not None)
        )
        dtype, bits = resolve_dtype(dtype, stored_dtype)
        stored = find_tensors(directory, config)
        params = read_params(
            directory, stored, leaves(config), dtype, bits, keep_packed=keep_packed, shardings=shardings
        )
    if shardings is None and jax.default_backend() == "cpu":
        params = _widened(params, config, dtype)
    if cache_dtype is None:
        cache_dtype = "float32" if jax.default_backend() == "cpu" else dtype
    model = language_model(
        config, dtype=dtype, cache_dtype=cache_dtype, prefill_chunk=prefill_chunk, attention=attention
    )
    return Pretrained(os.fspath(name_or_path), model, params, config, directory, mesh)


def _widened(params: PyTree, config: ModelConfig, dtype: str) -> PyTree:
    """Convert `Int4` matrices to `dtype`, unless the model would then occupy more than half of the free memory."""
    num_bytes = sum(math.prod(leaf.shape) for leaf in leaves(config)) * jnp.dtype(dtype).itemsize
    if num_bytes > free_bytes() / 2:
        return params

    def widen(weight: jax.Array | Quantized) -> jax.Array | Quantized:
        if not isinstance(weight, Int4):
            return weight
        # Use NumPy, because JAX would compile a program for each operation and shape.
        matrix = jax.tree.map(np.asarray, weight).astype(dtype)
        return jax.device_put(np.ascontiguousarray(matrix))

    return jax.tree.map(widen, params, is_leaf=lambda weight: isinstance(weight, Int4))


def free_bytes() -> int:
    """Return the available host memory in bytes, within the container's limit; 0 if Linux does not report it."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    free = next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), 0)
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):  # without a limit, the file contains "max"
        limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        free = min(free, limit - used)
    return free


def resolve_dtype(requested: str | None, stored: str | None) -> tuple[str, int | None]:
    """Return the floating-point dtype of params, and the bits per weight of quantised matrices, or None.

    Args:
      requested: `dtype` as for `load`.
      stored: dtype of the checkpoint.

    >>> resolve_dtype(None, "float16"), resolve_dtype("int8", "float32")
    (('bfloat16', None), ('float32', 8))
    """
    if requested in ("float32", "bfloat16"):
        return requested, None
    floating = "float32" if stored in (None, "float32", "float64") else "bfloat16"
    return floating, BITS.get(requested or "")


def listed(names: list[str]) -> str:
    """Format a list of names: the first three, and the number of remaining names."""
    text = ", ".join(names[:3])
    if len(names) > 3:
        text += f" and {len(names) - 3} more"
    return text


def _alias(name: str) -> str:
    """Return a tensor's canonical name.

    Some exports omit the prefix `model.`, and others add a prefix for the text model.
    """
    name = _TEXT.sub("", name)
    if name.startswith(("model.", "lm_head.", "mtp.")):
        return name
    return f"model.{name}"


def collect(
    files: Iterable[dict[str, Tensor]], canonical: Callable[[str], str]
) -> dict[str, list[tuple[str, Tensor]]]:
    """Group (name in the file, tensor) pairs by canonical name, without reading the tensors."""
    grouped: dict[str, list[tuple[str, Tensor]]] = {}
    for file in files:
        for name, tensor in file.items():
            grouped.setdefault(canonical(name), []).append((name, tensor))
    return grouped


def check_tensors(
    directory: Path,
    grouped: Mapping[str, Sequence[tuple[str, Tensor]]],
    table: Mapping[str, Weight],
    harmless: Callable[[str], object],
) -> None:
    """Compare the tensors of a checkpoint with a table of weights, both keyed by canonical name.

    Args:
      directory: for error messages.
      grouped: the tensors, from `collect`.
      table: the expected weights.
      harmless: function that takes a tensor's name, and returns whether to ignore the tensor if the table does not list
      it.

    Raises:
      MarsError: tensors are missing, unexpected or duplicated, or have the wrong shape. The message lists them.
    """
    misshaped, extra, twice = [], [], []
    for key, candidates in grouped.items():
        (name, tensor), *duplicates = candidates
        if key not in table:
            if not harmless(key):
                extra.append(name)
            continue
        for duplicate, _ in duplicates:
            twice.append(f"{name} in two files" if name == duplicate else f"{name} and {duplicate}")
        if tensor.shape != table[key].shape:
            misshaped.append(f"{name} is {list(tensor.shape)} and not {list(table[key].shape)}")
    problems = {
        "tensors are missing": [row.name for key, row in table.items() if key not in grouped],
        "have the wrong shape": misshaped,
        "are not part of the architecture": extra,
        "are there twice, so it is unclear which one to use": twice,
    }
    summaries = [f"{len(names)} {problem} ({listed(names)})" for problem, names in problems.items() if names]
    if summaries:
        raise MarsError(
            f"the weights in '{directory}' do not fit its config.json: {'; '.join(summaries)}: use the config "
            "the weights came with."
        )


def grouped_tensors(directory: Path, config: ModelConfig) -> dict[str, list[tuple[str, Tensor]]]:
    """Return the (name in the files, tensor) pairs of a checkpoint, grouped by canonical name; see `collect`."""
    if is_gguf(directory):
        return collect(gguf_tensors(directory, config), _alias)
    if (packing_config := packing(directory)) is not None:
        files = unpacked_tensors(directory, tensors(directory), packing_config)
    else:
        files = dequantized_tensors(directory, tensors(directory))
    if config.family in STACKED:
        return collect(split_experts(files), _alias)
    return collect(number_experts(files), _alias)


def find_tensors(directory: Path, config: ModelConfig) -> dict[str, tuple[str, Tensor]]:
    """Return the (name in the files, tensor) pair of each weight, keyed by the weight's name in the table.

    Raises:
      MarsError: tensors are missing, unexpected or duplicated, or have the wrong shape. The message lists them.
    """
    grouped = grouped_tensors(directory, config)
    table = stored_tensors(config)
    mtp_modules = tuple(match[1] for name in grouped if (match := _MTP.match(name)))

    def harmless(name: str) -> bool:
        # Files may also contain a copy of a tied embedding as lm_head, a vision model, and MTP modules.
        tied = config.tie_embeddings and name == "lm_head.weight"
        of_images = config.family in WITH_IMAGES and _IMAGES.search(name)
        of_mtp = name.startswith(mtp_modules) or (config.delta is not None and name.startswith("mtp."))
        return bool(DERIVED.search(name) or tied or of_images or of_mtp)

    check_tensors(directory, grouped, {stored.name: stored for stored in table}, harmless)
    named_tensors: dict[str, tuple[str, Tensor]] = {}
    for stored, rows in table.items():
        [(name, tensor)], first = grouped[stored.name], 0
        for row in rows:
            named_tensors[row.name] = name, tensor.part(first, row.shape[0])
            first += row.shape[0]
    return named_tensors


def read_leaf(
    directory: Path,
    named_tensors: dict[str, tuple[str, Tensor]],
    leaf: Weight,
    rows: Sequence[Weight],
    dtype: str,
    bits: int | None,
    *,
    keep_packed: bool = False,
    sharding: Sharding | None = None,
) -> list[HostArray]:
    """Read one array of params into host memory; see `stream.read_array`.

    If `bits` is 4, matrices of more than 4 bits are kept at 8 bits if their GGUF file also has 4-bit matrices.

    Args:
      directory: for error messages.
      named_tensors: result of `find_tensors`.
      leaf, rows: an item of `weights.leaves`, that is, one array of params and the table rows of the weights in it.
      dtype, bits, keep_packed, sharding: as for `read_params`.
    """
    parts = [named_tensors[row.name] for row in rows]
    all_packed = all(tensor.blocks is not None for _, tensor in parts)
    if all_packed and parts[0][1].shape == leaf.shape and len(leaf.shape) == 3:
        # Only experts in MXFP4 are stored as one packed tensor for the whole stack.
        bits = 4 if keep_packed or bits == 4 else bits_of(leaf, bits)
    elif keep_packed:
        # Keep the packing only for weights that params can store in 4 bits, which excludes embeddings and experts.
        bits = 4 if all_packed and bits_of(leaf, 4) == 4 else None
    else:
        bits = bits_of(leaf, bits)
        if bits == 4 and any(tensor.wider for _, tensor in parts):
            bits = 8
    with prefixed(f"'{directory}'"):
        return read_array(parts, leaf.shape, dtype_of(leaf, dtype), sharding=sharding, bits=bits)


def read_params(
    directory: Path,
    named_tensors: dict[str, tuple[str, Tensor]],
    table: Mapping[Weight, Sequence[Weight]],
    dtype: str,
    bits: int | None,
    *,
    keep_packed: bool = False,
    shardings: PyTree = None,
) -> PyTree:
    """Read the params of a checkpoint onto their devices.

    Args:
      directory: for error messages.
      named_tensors: (name in the files, tensor) pairs, keyed by the names of the weights.
      table: the weights that each array of params consists of, as in `weights.leaves`.
      dtype: floating-point dtype of the params.
      bits: bits per weight of the matrices; see `quantize.bits_of`.
      keep_packed: whether to keep matrices at 4 bits if the checkpoint packs them. Everything else is read in `dtype`.
      shardings: tree of shardings with the structure of params; None for JAX's default device.
    """
    params: dict[Weight, jax.Array | Quantized] = {}
    for leaf, rows in table.items():
        sharding = shardings and get(shardings, leaf.path)
        arrays = read_leaf(
            directory, named_tensors, leaf, rows, dtype, bits, keep_packed=keep_packed, sharding=sharding
        )
        # Wait for the transfer, so that host memory never holds two arrays at once.
        params[leaf] = jax.block_until_ready(to_params(arrays, dtype))
    return build_rows(params, params.__getitem__)
