"""Reading of conversions, which are the directories that `conversion.convert` writes.

`weights/` contains one safetensors file for each array of params, named after its path, such as
`layers.0.down.safetensors`. Each file contains `values` and, for a matrix in 8 or 4 bits, the other fields of its
quantised form. conversion.json lists the checksum of each file.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from mars_jax.core.types import PyTree
from mars_jax.hub.config_json import read_json
from mars_jax.models.config import ModelConfig
from mars_jax.models.quantize import Leaf, Quantized, form_with
from mars_jax.models.weights import Weight, build_rows, dtype_of, get, leaves
from mars_jax.utils import settings
from mars_jax.utils.errors import MarsError, first_line

MANIFEST = "conversion.json"
"""Name of the manifest. It is written last, so a directory without it is not a conversion."""
WEIGHTS = "weights"
FIELDS = ("values", "scale", "offset")
"""Names of the tensors in a file: `values`; for 8-bit and MXFP4 matrices also `scale`; for other 4-bit matrices all
three."""


class Conversion(NamedTuple):
    """Contents of conversion.json."""

    dtype: str  # floating-point dtype of all arrays that are not quantised
    bits: int | None  # bits per weight of matrices; None if they are not quantised
    checksums: dict[str, int]  # CRC-32 of each file in `WEIGHTS`, keyed by file name

    @property
    def stored(self) -> str:
        """The conversion's dtype as `convert` names it: "int8" or "int4" for quantised matrices, else `dtype`."""
        return next((name for name, bits in settings.BITS.items() if bits == self.bits), self.dtype)


def is_converted(directory: Path) -> bool:
    """Return whether a directory contains a finished conversion."""
    return (directory / MANIFEST).is_file()


def file_name(array: Weight) -> str:
    """Return the name of the file that stores an array of params."""
    return ".".join(map(str, array.path)) + ".safetensors"


def restore_params(
    directory: Path, config: ModelConfig, dtype: str | None, *, shardings: PyTree = None, check: bool = True
) -> tuple[PyTree, str]:
    """Load a conversion's params onto the devices, and return the params and their floating-point dtype.

    Each process reads only the parts for its own devices, and verifies the checksums of its share of the files.

    Args:
      directory: directory of the conversion.
      config: config of the model.
      dtype: as for `hub.load`.
      shardings: tree of shardings with the structure of the params; None for JAX's default device.
      check: whether to verify the checksum of each file.

    Raises:
      MarsError: the conversion cannot be cast to `dtype`, is damaged, or does not match its config.
    """
    conversion = read_manifest(directory)
    stored = conversion.stored
    # Loading casts only between floating-point dtypes. It neither quantises nor dequantises weights.
    if dtype not in (None, stored) and (dtype in settings.BITS or stored in settings.BITS):
        raise MarsError(
            f"'{directory}' was converted to {stored} and the dtype is {dtype}: leave it out, or convert with --dtype "
            f"{dtype}."
        )
    floating = conversion.dtype
    if dtype is not None and dtype not in settings.BITS:
        floating = dtype
    table = list(leaves(config))
    if {file_name(array) for array in table} != conversion.checksums.keys():
        raise MarsError(f"the weights in '{directory}' do not fit its config.json: convert it again.")
    own_share = table[jax.process_index() :: jax.process_count()]

    def read(array: Weight) -> jax.Array | Quantized:
        path = directory / WEIGHTS / file_name(array)
        try:
            if check and array in own_share and _checksum(path) != conversion.checksums[path.name]:
                raise MarsError(f"'{path}' is damaged, its checksum differs: convert it again.")
            sharding = shardings and get(shardings, array.path)
            return jax.block_until_ready(_read_array(path, array, floating, sharding))
        except MarsError:
            raise
        except Exception as error:  # safetensors raises ValueError, OSError and errors of its own
            raise MarsError(f"'{path}' cannot be read ({first_line(error)}): convert it again.") from None

    return build_rows(table, read), floating


def read_manifest(directory: Path) -> Conversion:
    """Read conversion.json.

    Raises:
      MarsError: the file is damaged.
    """
    manifest = read_json(directory / MANIFEST)
    conversion = Conversion(manifest.get("dtype", ""), manifest.get("bits"), manifest.get("checksums", {}))
    valid_dtype = conversion.dtype in ("float32", "bfloat16") and conversion.bits in (None, 8, 4)
    if not valid_dtype or not isinstance(conversion.checksums, dict):
        raise MarsError(f"'{directory / MANIFEST}' is damaged: convert it again.")
    return conversion


def _checksum(path: Path) -> int:
    checksum = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 24):
            checksum = zlib.crc32(block, checksum)
    return checksum


def _read_array(path: Path, array: Weight, floating: str, sharding: Sharding | None) -> jax.Array | Quantized:
    from safetensors import safe_open

    with safe_open(path, framework="np") as file:
        names = list(file.keys())
        values = file.get_slice(FIELDS[0])
        form = form_with(len(names), "uint8" if values.get_dtype() == "U8" else "int8")
        if form is None:
            return _place(values, Leaf(array.shape, dtype_of(array, floating), sharding))
        # Values of an `Int4` matrix are [in / G, G, out]. Other forms ignore the group size G.
        expected = form.leaves(array.shape, sharding, values.get_shape()[1])
        fields = [_place(file.get_slice(name), leaf) for name, leaf in zip(FIELDS, expected, strict=False)]
    return form(*fields, dtype=jnp.dtype(floating))


def _place(tensor: Any, leaf: Leaf) -> jax.Array:
    """Load a file's tensor onto the devices of `leaf`, reading only the parts that they need."""
    if tuple(tensor.get_shape()) != leaf.shape:
        raise ValueError(f"its shape is {tensor.get_shape()} and config.json implies {list(leaf.shape)}")
    dtype = jnp.dtype(leaf.dtype)
    if leaf.sharding is None:
        return jax.device_put(tensor[:].astype(dtype, copy=False))
    return jax.make_array_from_callback(
        leaf.shape, leaf.sharding, lambda index: tensor[index].astype(dtype, copy=False)
    )
