"""Reading what `conversion.convert` wrote: the files of a checkpoint, with its weights as an Orbax checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mars_jax.core.errors import MarsError
from mars_jax.core.types import PyTree
from mars_jax.hub.config_json import read_json
from mars_jax.hub.digests import Digest
from mars_jax.models.config import ModelConfig
from mars_jax.placement.shardings import abstract_params

MANIFEST = "conversion.json"
"""File that is written last: a directory without it is no converted checkpoint."""
WEIGHTS = "orbax"


class Conversion(NamedTuple):
    """The manifest of a conversion."""

    dtype: str  # of the params, where they are not in 8 bits
    int8: bool
    digests: dict[str, Digest]  # by Orbax's name of the array


def is_converted(directory: Path) -> bool:
    """Tell whether a directory holds a finished conversion."""
    return (directory / MANIFEST).is_file()


def read_conversion(directory: Path) -> Conversion:
    """Read the manifest of a conversion.

    Raises:
      MarsError: there is none, or it is not one.
    """
    data = read_json(directory / MANIFEST)
    try:
        dtype, int8, blocks = data["dtype"], data["int8"], data["blocks"]
        if dtype not in ("float32", "bfloat16") or not isinstance(int8, bool):
            raise ValueError
        digests = {
            name: Digest(int(whole), tuple(blocks[name]["shape"]), tuple(map(int, blocks[name]["crc32"])))
            for name, whole in data["checksums"].items()
        }
        return Conversion(dtype, int8, digests)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise MarsError(
            f"'{directory / MANIFEST}' is not a conversion's: convert the checkpoint again."
        ) from None


def write_digests(digests: Mapping[str, Digest]) -> dict[str, Any]:
    """Return the manifest's entries for the checksums of all arrays."""
    return {
        "checksums": {name: made.whole for name, made in digests.items()},
        "blocks": {
            name: {"shape": list(made.block), "crc32": list(made.blocks)} for name, made in digests.items()
        },
    }


def restore_params(
    directory: Path, config: ModelConfig, asked: str | None, *, shardings: PyTree = None, check: bool = True
) -> tuple[PyTree, str]:
    """Return the params of a conversion on their devices, and their floating dtype.

    Args:
      directory: of the conversion.
      config: its config.
      asked: dtype, as for `hub.load`.
      shardings: of the params.
      check: compare the checksums of what is read.

    Raises:
      MarsError: 8 bits are asked of a conversion that has more, or more of one that has 8; it cannot be read, or a
        checksum differs.
    """
    from mars_jax.hub import orbax

    made = read_conversion(directory)
    if asked == "int4":
        raise MarsError(
            f"'{directory}' is a conversion, and weights in 4 bits are made of a checkpoint itself: load that one."
        )
    if asked is not None and (asked == "int8") != made.int8:
        held = "int8" if made.int8 else made.dtype
        raise MarsError(
            f"'{directory}' was converted to {held} and the dtype is {asked}: leave it out, or convert with --dtype "
            f"{asked}."
        )
    dtype = made.dtype if asked in (None, "int8") else asked
    like = abstract_params(config, dtype, bits=8 if made.int8 else None, shardings=shardings)
    return orbax.restore(directory / WEIGHTS, like, expected=made.digests if check else None), dtype
