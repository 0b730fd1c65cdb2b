"""The folder of one run, from those of its parts; see `cli.part`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mars_jax.cli import signals
from mars_jax.cli.part import Part, rows_of
from mars_jax.core.errors import MarsError
from mars_jax.hub.durable import staging
from mars_jax.lab.evaluate.benchmark import merged
from mars_jax.lab.folder import SETTINGS, check_writable, write_json
from mars_jax.serve.journal import difference


def merge(parts: Mapping[Part, Path], target: Path) -> str:
    """Write the folder of all parts together; returns how many rows it has, in words.

    Args:
      parts: from `parts_of`.
      target: the folder, which is not there yet. It comes into being whole.

    Raises:
      MarsError: a part is unfinished or damaged, they differ in a setting, or a package is missing.
    """
    check_writable(target)
    first: dict[str, Any] = {}
    for part, folder in parts.items():
        settings = _settings(folder, part)
        settings["rows"] = rows_of(folder, part, settings.pop("part"))
        first = first or settings
        if found := difference(first, settings):
            raise MarsError(f"'{folder}' was decoded with {found} than the parts before it: decode it again.")
    del first["rows"]
    try:
        leftover = ": the same command removes what is unfinished and starts again."
        with signals.ending(lambda: leftover), staging(target) as staged:
            made = staged / target.name
            made.mkdir()
            told = f"{merged.write(parts, first, made)} rows"
            write_json(made / SETTINGS, first)
            made.rename(target)
    except OSError as error:
        raise MarsError(f"'{target}' cannot be written ({error.strerror}): fix that.") from None
    return told


def _settings(folder: Path, part: Part) -> dict[str, Any]:
    try:
        found = dict(json.loads((folder / SETTINGS).read_text("utf-8")))
        Part(**found["part"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise part.damaged(folder) from None
    return found
