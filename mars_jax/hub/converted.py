"""Reading what `conversion.convert` wrote: the files of a checkpoint, with its weights as an Orbax checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from mars_jax.core.errors import MarsError
from mars_jax.core.types import PyTree
from mars_jax.hub.config import read_json
from mars_jax.models.config import ModelConfig
from mars_jax.placement.shardings import abstract_params

MANIFEST = "conversion.json"
"""Written last: a directory without it is no converted checkpoint."""
WEIGHTS = "orbax"


class Conversion(NamedTuple):
    """The manifest of a conversion."""

    dtype: str  # of the params, where they are not in 8 bits
    int8: bool
    checksums: dict[str, int]  # CRC-32 by Orbax's name of the array


def is_converted(directory: Path) -> bool:
    """Whether a directory holds a finished conversion."""
    return (directory / MANIFEST).is_file()


def read_conversion(directory: Path) -> Conversion:
    """The manifest of a conversion.

    Raises:
      MarsError: there is none, or it is not one.
    """
    data = read_json(directory / MANIFEST)
    try:
        return Conversion(str(data["dtype"]), bool(data["int8"]), dict(data["checksums"]))
    except (KeyError, TypeError, ValueError):
        raise MarsError(
            f"'{directory / MANIFEST}' is not a conversion's: convert the checkpoint again."
        ) from None


def restore_params(
    directory: Path, config: ModelConfig, asked: str | None, *, shardings: PyTree = None
) -> tuple[PyTree, str]:
    """The params of a conversion on their devices, and their floating dtype.

    Raises:
      MarsError: 8 bits are asked of a conversion that has more, or more of one that has 8.
    """
    from mars_jax.hub import orbax

    made = read_conversion(directory)
    if asked is not None and (asked == "int8") != made.int8:
        held = "int8" if made.int8 else made.dtype
        raise MarsError(
            f"'{directory}' was converted to {held} and the dtype is {asked}: leave it out, or convert with --dtype "
            f"{asked}."
        )
    dtype = made.dtype if asked in (None, "int8") else asked
    like = abstract_params(config, dtype, int8=made.int8, shardings=shardings)
    return orbax.restore(directory / WEIGHTS, like), dtype
