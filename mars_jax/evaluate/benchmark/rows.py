"""The rows of an evaluation: one line of JSON for every problem and arm, on disk before the next batch begins.

The order of rows is known beforehand, so a killed run leaves a prefix of it and at most one torn line, and the
next run goes on behind that.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mars_jax.core.errors import MarsError
from mars_jax.evaluate.answers import Answer
from mars_jax.evaluate.benchmark.arms import Arm
from mars_jax.evaluate.figures import loops
from mars_jax.evaluate.tasks.problems import Problem

Row = dict[str, Any]


class Key(NamedTuple):
    """What a row is about."""

    task: str
    temperature: float
    arm: str
    id: str


def make_row(
    problem: Problem,
    arm: Arm,
    temperature: float,
    seed: int,
    answer: Answer,
    score: list[float] | None,
    stop_tokens: Sequence[int],
) -> Row:
    """The row of one answer. `score` is what `scores.score` gave."""
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
    }


def key_of(row: Row) -> Key:
    """What a row is about."""
    return Key(row["task"], row["temperature"], row["arm"], row["id"])


class RowFile:
    """The rows of one run. Nothing on disk changes before the first `append`."""

    def __init__(self, path: Path, keys: Sequence[Key]):
        """Read what an interrupted run left.

        Args:
          path: of the file, which need not exist.
          keys: of all rows, in order.

        Raises:
          MarsError: the file holds anything else than the first of these rows.
        """
        self._path, self._keys = path, keys
        self._descriptor: int | None = None
        self.rows: list[Row] = []
        data = path.read_bytes() if path.exists() else b""
        *lines, torn = data.split(b"\n")
        self._intact = len(data) - len(torn)
        for number, line in enumerate(lines):
            try:
                row = json.loads(line)
                known = number < len(keys) and key_of(row) == keys[number] and "seconds" in row
            except (ValueError, KeyError, TypeError, RecursionError):
                known = False
            if not known:
                raise MarsError(
                    f"line {number + 1} of '{path}' is not what this run would write there: choose another --output."
                )
            self.rows.append(row)

    def append(self, rows: Sequence[Row]) -> None:
        """Write rows, and return when they are on disk.

        Raises:
          MarsError: the disk does not take them.
        """
        text = "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
        left = memoryview(text.encode("utf-8", errors="replace"))
        try:
            if self._descriptor is None:
                self._descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
                os.ftruncate(self._descriptor, self._intact)
            while left:
                left = left[os.write(self._descriptor, left) :]
            os.fsync(self._descriptor)
        except OSError as error:
            raise MarsError(
                f"'{self._path}' cannot be written ({error.strerror}): mend that, then run the same command again."
            ) from None
        self.rows += rows

    def close(self) -> None:
        """Let go of the file."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
