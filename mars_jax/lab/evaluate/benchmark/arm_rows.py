"""The rows of an evaluation: one line of JSON for every problem and arm, on disk before the next batch begins."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from mars_jax.lab.evaluate.answers import Answer
from mars_jax.lab.evaluate.benchmark.arms import Arm
from mars_jax.lab.evaluate.figures import loops
from mars_jax.lab.evaluate.tasks.problems import Problem
from mars_jax.lab.provenance import stamp
from mars_jax.serve.rows import Row


class Key(NamedTuple):
    """The identity of a row."""

    task: str
    temperature: float
    arm: str
    id: str


def place_of(task: str, temperature: float) -> str:
    """Return the name of a task at a temperature, for files and progress."""
    return f"{task}, temperature {temperature:g}"


def make_row(
    problem: Problem,
    arm: Arm,
    temperature: float,
    seed: int,
    answer: Answer,
    score: list[float] | None,
    stop_tokens: Sequence[int],
) -> Row:
    """Return the row of one answer. `score` is the result of `scores.score`."""
    metrics = answer.metrics
    return {
        "task": problem.task,
        "temperature": temperature,
        "arm": arm.name,
        "id": problem.id,
        "theta": None if arm.theta is None else "inf" if arm.theta == math.inf else arm.theta,
        "seed": seed,
        "text": list(answer.texts),
        "tokens": [list(turn) for turn in answer.tokens],
        "finish_reason": answer.finish_reason,
        "steps": metrics.steps,
        "emitted": metrics.emitted,
        "proposed": metrics.proposed,
        "accepted_exact": metrics.accepted_exact,
        "accepted_relaxed": metrics.accepted_relaxed,
        "depth_histogram": list(metrics.depth_histogram),
        "regret": metrics.regret,
        "loops": any(loops(turn, stop_tokens) for turn in answer.tokens),
        "score": score,
        "seconds": answer.seconds,
        **stamp(),
    }
