"""What decides the rows of a run, as plain values: the settings that an --output is recorded with."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from mars_jax.cli.generate.applies import Plan
from mars_jax.cli.generate.prompts import PromptRow
from mars_jax.cli.settings import FILTERS
from mars_jax.journal import plain

_ELSEWHERE = {
    "prompts", "prompts_file",  # rows are compared with their prompts one by one
    "output", "resume", "json", "stream", "speedup", "compare",
    # A row alone is the row in a batch, on one device or on many.
    "batch_size", "mesh", "coordinator", "num_processes", "process_id",
    "theta_file",  # its threshold, margin and base are flags by now
}  # fmt: skip
"""Flags that decide no row. Every other one is recorded, also one that does not exist yet."""
_DEFAULTS = {
    **FILTERS,
    "temperature": 0.0,
    "seed": 0,
    "max_new_tokens": 256,
    "theta": 0.9,
    "margin": "ratio",
    "base": "exact",
    "draft_stop": math.inf,
}


class Recorded(NamedTuple):
    """The settings of a run: JSON values that differ from the defaults."""

    settings: dict[str, Any]
    own: dict[str, dict[str, Any]]  # by the number of the prompt, where it chooses for itself


def recorded(args: argparse.Namespace, plan: Plan, rows: Sequence[PromptRow]) -> Recorded:
    """The settings of the flags and of the prompts file.

    A flag that is given with its default is one that is not given: both decode the same.
    """
    given = vars(args) | {"verify": plan.verify}
    settings = {
        name: plain(value)
        for name, value in given.items()
        if name not in _ELSEWHERE and not _is_default(name, value)
    }
    own = {str(i): plain(row.settings) for i, row in enumerate(rows) if row.settings}
    return Recorded(settings, own)


def _is_default(name: str, value: Any) -> bool:
    # By identity, since 0 equals False and is a setting.
    return value is None or value is False or (name in _DEFAULTS and value == _DEFAULTS[name])
