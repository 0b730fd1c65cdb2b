"""Catalogue of tasks: problems from the package, local files or the Hub."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Sequence

from mars_jax.lab.evaluate.tasks.arithmetic import read_arithmetic
from mars_jax.lab.evaluate.tasks.datasets import is_hub_name, read_hub
from mars_jax.lab.evaluate.tasks.jsonl import Fields, read_jsonl
from mars_jax.lab.evaluate.tasks.layouts import READERS
from mars_jax.lab.evaluate.tasks.problems import Problem
from mars_jax.lab.training.data import documents
from mars_jax.utils.errors import MarsError, did_you_mean

STORY_WORDS = 24
"""Length in words of a prompt from stories. A document must have more than twice as many words."""


def read_problems(
    name: str, path: str | None = None, *, chat: bool, limit: int | None = None
) -> list[Problem]:
    """Return the first `limit` problems of a task, or of each part of Spec-Bench.

    Args:
      name: one of `TASKS`.
      path: path of the task's file, or (except for stories) a Hub dataset as OWNER/NAME[:CONFIG[:SPLIT]]; None for
        arithmetic, whose problems are in the package.
      chat: whether a chat template will format the prompts. Plain prompts contain their own instructions.
      limit: maximum number of problems; None for all.

    Raises:
      MarsError: the task is unknown, the file cannot be read, or a line is not a problem of the task.

    >>> [problem] = read_problems("arithmetic", chat=True, limit=1)
    >>> problem.metric, problem.references
    ('final_answer', ('33',))
    """
    if name not in TASKS:
        raise MarsError(
            f"there is no task '{name}'{did_you_mean(name, TASKS)}: choose one of {', '.join(TASKS)}."
        )
    if name == "arithmetic":
        if path is not None:
            raise MarsError(
                "the task arithmetic has its problems in the package and takes no file: leave its path out."
            )
        return read_arithmetic("eval", limit)
    if not path:
        hub_hint = ""
        if name != "stories":
            hub_hint = f", or {name}=OWNER/DATASET of the Hub"
        raise MarsError(f"the task {name} needs a file: write {name}=PATH{hub_hint}.")
    if name == "stories":
        return list(itertools.islice(_stories(path), limit))
    problems, task_counts = [], Counter[str]()
    rows = read_hub(path, name) if is_hub_name(path) else read_jsonl(path)
    if name != "spec_bench":  # limited per part below
        rows = itertools.islice(rows, limit)
    for number, fields in enumerate(rows):
        problem = READERS[name](fields, str(_id(fields, number)), chat)
        task_counts[problem.task] += 1
        if limit is None or task_counts[problem.task] <= limit:
            problems.append(problem)
    if not problems:
        raise MarsError(f"'{path}' holds no problems: give one object a line.")
    _check(problems, path)
    # List the parts of Spec-Bench one after another, each in file order.
    return [p for task in task_counts for p in problems if p.task == task]


def _id(fields: Fields, number: int) -> str | int:
    for key in ("id", "task_id", "question_id", "prompt_id"):
        value = fields.values.get(key)
        if isinstance(value, str | int):
            return value
    return number


def _check(problems: Sequence[Problem], path: str) -> None:
    # A task with two metrics makes more pairs of task and metric than there are tasks.
    if len(metrics := {(p.task, p.metric) for p in problems}) > len({task for task, _ in metrics}):
        raise MarsError(f"'{path}' mixes metrics, which cannot be averaged: make one file for each metric.")
    (task, name), count = Counter((p.task, p.id) for p in problems).most_common(1)[0]
    if count > 1:
        raise MarsError(f"'{path}' has {count} problems of {task} with the id {name}: give each its own.")


def _stories(path: str) -> Iterator[Problem]:
    """Yield the beginnings of documents. They are cut between words, so that prompts do not depend on the tokenizer."""
    opening_pattern = re.compile(rf"\s*(?:\S+\s+){{{STORY_WORDS - 1}}}\S+")
    has_story = False
    for number, document in enumerate(documents(path)):
        # `maxsplit` limits the work on a long document: its remainder counts as one word.
        if len(document.split(maxsplit=2 * STORY_WORDS)) <= 2 * STORY_WORDS:
            continue
        if opening_match := opening_pattern.match(document):
            has_story = True
            yield Problem(
                task="stories", id=str(number), turns=(opening_match[0],), metric="likelihood", continues=True
            )
    if not has_story:
        raise MarsError(
            f"'{path}' has no document of more than {2 * STORY_WORDS} words: give longer ones, divided by lines of "
            "<|endoftext|>."
        )


TASKS = ("stories", "arithmetic", *READERS)
"""Names that `read_problems` accepts."""
