"""Problems to evaluate on, the same for every task and file."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

UNJUDGED = ("none", "likelihood")
"""Metrics that call no single answer good or bad."""


class Code(NamedTuple):
    """The parts of a test program, as in HumanEval: prompt, completion, test, and then `check(entry_point)`."""

    prompt: str  # the beginning of the program, "" if the model writes all of it
    entry_point: str  # the function to complete, or "None"
    test: str  # defines `check`, which raises an exception if the program is wrong


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
