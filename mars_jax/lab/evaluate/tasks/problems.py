"""Problems to evaluate on, the same for every task and file."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

UNJUDGED = ("none", "likelihood")
"""Metrics that call no single answer good or bad."""


class Code(NamedTuple):
    """The parts that a generated program is run with."""

    prompt: str  # the beginning of the program, "" where the model writes it all
    entry_point: str  # the function asked for, "" where the tests say it
    tests: str  # run after the program; they fail by an exception


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """One prompt, of one turn or more, and how its answer is scored."""

    task: str
    id: str  # unique within the task
    turns: tuple[str, ...]
    metric: str = "none"  # one of `scores.METRICS`
    references: tuple[str, ...] = ()
    code: Code | None = None
    continues: bool = False  # plain text to go on with, which no chat template fits
