"""What flags of several commands share: their values by the tables of `specs`. Nothing here imports jax."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

from mars_jax import assets, specs

MESH_HELP = (
    "divide the work over devices: data (rows of the batch), model (heads, hidden units and vocabulary) and expert, as "
    "in data=2,model=4 (default: one device)"
)
NO_CHECK_HELP = (
    "do not compare the checksums of a --target that mars_jax.convert wrote with what is read of it"
)


def number_of(name: str, text: str, shown: str | None = None) -> Any:
    """The value of a flag in the range of the request setting `name`.

    Raises:
      MarsError: not a number, or out of range.

    >>> number_of("temperature", "0.5")
    0.5
    """
    return specs.REQUEST[name].from_text(text, shown=shown or "--" + name.replace("_", "-"))


def numbers_of(args: argparse.Namespace, names: Iterable[str]) -> None:
    """Turn the texts of flags into values, where they are given.

    Raises:
      MarsError: not a number, or out of range.
    """
    for name in names:
        text = getattr(args, name, None)
        if text is not None:
            setattr(args, name, number_of(name, text))


def draft_of(draft: str | None, target: str) -> str:
    """The draft of a pair: the one that is given, or the target's own.

    >>> draft_of(None, "owner/model")
    'ngram'
    """
    return draft or (f"model:{assets.DRAFT}" if target == assets.TARGET else "ngram")
