"""Arithmetic word problems with worked answers, from files written by scripts/arithmetic/generator.py."""

from __future__ import annotations

import itertools
from pathlib import Path

from mars_jax.lab.evaluate.scoring.scores import final_answer
from mars_jax.lab.evaluate.tasks.jsonl import read_jsonl
from mars_jax.lab.evaluate.tasks.problems import Problem


def read_arithmetic(split: str, limit: int | None = None) -> list[Problem]:
    """Return the first `limit` problems of the split "train" (4,096 problems) or "eval" (1,300 problems).

    >>> [problem] = read_arithmetic("eval", 1)
    >>> problem.metric, problem.references
    ('final_answer', ('33',))
    """
    path = Path(__file__).with_name(f"arithmetic_{split}.jsonl.xz")
    rows = itertools.islice(read_jsonl(str(path)), limit)
    return [
        Problem(
            task="arithmetic",
            id=str(number),
            turns=(fields.text("question"),),
            metric="final_answer",
            references=(str(final_answer(fields.text("answer"))),),
        )
        for number, fields in enumerate(rows)
    ]
