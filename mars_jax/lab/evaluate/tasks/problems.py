"""Evaluation problems: one type for the problems of all tasks."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

UNJUDGED = ("none", "likelihood")
"""Metrics that do not judge a single answer as right or wrong."""


class Code(NamedTuple):
    """A HumanEval test program without its completion.

    The program consists of the prompt, the completion, the test, and the call `check(entry_point)`.
    """

    prompt: str  # the beginning of the program, "" if the model writes all of it
    entry_point: str  # the function to complete, or "None"
    test: str  # defines `check`, which raises an exception if the program is wrong


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """A prompt of one or more turns, with the data for scoring its answer."""

    task: str
    id: str  # unique within the task
    turns: tuple[str, ...]
    metric: str = "none"  # one of `scoring.METRICS`
    references: tuple[str, ...] = ()
    code: Code | None = None
    continues: bool = False  # the prompt is plain text to continue, without a chat template
