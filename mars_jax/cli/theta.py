"""Thresholds that were calibrated: the files that `mars_jax.calibrate` writes and that every command takes as --theta.

Nothing here imports jax.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mars_jax.cli.settings import from_text
from mars_jax.core.errors import MarsError

FORMAT = "mars-jax theta 1"
SETTINGS = ("target", "draft", "num_draft_tokens", "tree", "base", "margin", "temperature")
"""What a threshold was calibrated for: elsewhere its promise does not hold."""


class ThetaFile(NamedTuple):
    """A threshold from a file, and what it is for."""

    path: str
    theta: float
    settings: dict[str, Any]  # by `SETTINGS`

    def check(self, run: Mapping[str, Any]) -> None:
        """Raise MarsError where a run has other settings; those that `run` leaves out do not count.

        Models are told by the last part of their path, since a checkpoint may lie elsewhere on another machine.
        """
        for name in SETTINGS:
            if name not in run:
                continue
            theirs, ours = _plain(self.settings[name]), _plain(run[name])
            if name in ("target", "draft"):
                theirs, ours = (str(x).rpartition("/")[2] or x for x in (theirs, ours))
            if theirs != ours:
                word = name.replace("_", " ")
                raise MarsError(
                    f"'{self.path}' was calibrated for the {word} {_word(self.settings[name])}, and this run has "
                    f"{_word(run[name])}: calibrate for it with python -m mars_jax.calibrate, or give a number."
                )


def theta_from_text(text: str) -> float | ThetaFile:
    """A number, or the threshold in a file.

    Raises:
      MarsError: neither of both.

    >>> theta_from_text("0.9")
    0.9
    """
    try:
        float(text)
    except ValueError:
        if not Path(text).exists():
            raise MarsError(
                f"--theta is {text}: expected a number above 0 (inf is strict), or a file that "
                "python -m mars_jax.calibrate wrote."
            ) from None
        return read_theta(text)
    return from_text("theta", text)


def read_theta(path: str) -> ThetaFile:
    """Read what `write_theta` wrote.

    Raises:
      MarsError: the file cannot be read, or is something else.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        if data["format"] != FORMAT:
            raise ValueError
        theta = float(data["theta"])
        settings = {name: data["settings"][name] for name in SETTINGS}
        if not theta > 0 or (settings["margin"] != "gap" and 1 < theta < math.inf):
            raise ValueError
    except OSError as error:
        raise MarsError(
            f"'{path}' cannot be read ({error.strerror}): name a file of mars_jax.calibrate."
        ) from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise MarsError(
            f"'{path}' holds no threshold: give a number, or a file that python -m mars_jax.calibrate wrote."
        ) from None
    return ThetaFile(path, theta, settings)


def settings_of(args: argparse.Namespace, **more: Any) -> dict[str, Any]:
    """The settings of a run by its flags, those that it leaves to the file left out."""
    flags = {name: getattr(args, name) for name in ("target", "draft", "num_draft_tokens", "tree")}
    return {name: _plain(value) for name, value in (flags | more).items()}


def _plain(value: Any) -> Any:
    """As JSON gives it back. A dynamic tree is told from a static one by its name."""
    if isinstance(value, tuple):
        fields = getattr(value, "_asdict", None)
        return {"dynamic": list(value)} if fields else list(value)
    return value


def _word(value: Any) -> str:
    return "default" if value is None else f"{value:g}" if isinstance(value, float) else str(_plain(value))
