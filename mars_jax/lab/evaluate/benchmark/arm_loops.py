"""The loops of a run. Arms alternate within each group of problems, so that a slow spell affects all arms alike."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mars_jax.cli.progress import Show, speed
from mars_jax.core import activity
from mars_jax.hub.pretrained import Pretrained
from mars_jax.lab.evaluate.answers import Answer, Decoding, prompt_tokens, turns_asked
from mars_jax.lab.evaluate.benchmark.arm_rows import Key, make_row, place_of
from mars_jax.lab.evaluate.benchmark.arms import Arm, make_arms
from mars_jax.lab.evaluate.scoring import scores
from mars_jax.lab.evaluate.tasks.problems import Problem
from mars_jax.lab.folder import read_json, write_json
from mars_jax.serve import likelihood
from mars_jax.serve.rows import Row, RowFile
from mars_jax.specs import RuleChoice

TEXTS = "texts.json"
SHOWN = 8
"""Number of problems of a task whose texts are kept with the kind of every token, for the page."""


class Evaluation:
    """The loops of one run over its tasks, temperatures, batches and arms."""

    def __init__(
        self,
        decoding: Decoding,
        folder: Path,
        file: RowFile,
        problems: Sequence[Problem],
        settings: Mapping[str, Any],
        rule: RuleChoice,
        part: slice | None = None,
    ):
        self._decoding, self._folder, self._settings, self._rule = decoding, folder, settings, rule
        self._file, self._is_part = file, part is not None
        self.rows: list[Row] = []
        self._arms: dict[float, list[Arm]] = {}
        self._tasks = by_task(problems if part is None else problems[part])
        # Number all problems, so that seeds do not depend on the part.
        self._numbers = {
            (task, p.id): i for task, group in by_task(problems).items() for i, p in enumerate(group)
        }
        # Without rows, the folder may hold the texts of a run with other settings.
        self.texts = (read_json(folder / TEXTS) or {}) if file.rows else {}

    def _places(self) -> Iterator[tuple[str, float]]:
        return ((task, t) for task in self._tasks for t in self._settings["temperatures"])

    def _batches(self, task: str) -> Iterator[list[Problem]]:
        problems, size = self._tasks[task], self._decoding.group
        return (problems[first : first + size] for first in range(0, len(problems), size))

    def arms(self, temperature: float) -> list[Arm]:
        """Return the arms at a temperature. The weights of a rule are read once."""
        if temperature not in self._arms:
            self._arms[temperature] = make_arms(
                self._rule,
                self._settings["thetas"],
                temperature=temperature,
                target=self._decoding.session.target,
                refined=self._decoding.refiner is not None,
                controls=self._settings["controls"],
            )
        return self._arms[temperature]

    def _seed(self, task: str, problem: Problem) -> int:
        return (self._settings["seed"] + self._numbers[task, problem.id]) % 2**32

    def decode(self, show: Show) -> None:
        done, total = 0, 0
        for task, temperature in self._places():
            total += turns_of(self._tasks[task], self._decoding.chat) * len(self.arms(temperature))
        for task, temperature in self._places():
            for group in self._batches(task):
                for arm in self.arms(temperature):
                    keys = [Key(task, temperature, arm.name, problem.id)._asdict() for problem in group]
                    make = functools.partial(self._decode, task, temperature, arm, group)
                    rows = self._file.batch(keys, make)
                    self.rows += rows
                    sums = {name: sum(row[name] for row in rows) for name in ("emitted", "steps", "seconds")}
                    done += turns_of(group, self._decoding.chat)
                    show(done, total, f"{place_of(task, temperature)}, {arm.name}, {speed(**sums)}")
            if not self._is_part:
                self._keep_texts(task, temperature)

    def _shown(self, temperature: float) -> list[Arm]:
        """Return the arms whose texts the page shows: the strict rule, and the first arm of the measured rule."""
        if self._settings["controls"] == "none":
            return []
        arms = {arm.role: arm for arm in reversed(self.arms(temperature))}
        return [arms[role] for role in ("strict", "rule") if role in arms]

    def _decode(self, task: str, temperature: float, arm: Arm, group: list[Problem]) -> list[dict[str, Any]]:
        seeds = [self._seed(task, problem) for problem in group]
        answers = self._decoding.answer(arm, group, seeds, temperature=temperature)
        stops = self._decoding.stop_tokens
        return [
            make_row(problem, arm, temperature, seed, answer, scored, stops)
            for problem, seed, answer, scored in zip(
                group, seeds, answers, scored(self._decoding, group, answers), strict=True
            )
        ]

    @activity.doing("texts for the page")
    def _keep_texts(self, task: str, temperature: float) -> None:
        """Decode the first turn of the first problems again, step by step, and write each token's text and kind."""
        place, arms, problems = (
            place_of(task, temperature),
            self._shown(temperature),
            self._tasks[task][:SHOWN],
        )
        if place in self.texts or not arms:
            return
        decoding = self._decoding
        prompts = [prompt_tokens(decoding.session.target, p, chat=decoding.chat) for p in problems]
        requests = decoding.requests(prompts, [self._seed(task, p) for p in problems], temperature)
        texts = [{"id": p.id, "prompt": p.turns[0], "arms": {}} for p in problems]
        for arm in arms:
            first = 0
            for batch in decoding.session.using(arm.rule).batches(requests):
                pieces = [[] for _ in batch.requests]
                for event in batch.session.stream(batch.requests):
                    pieces[event.row] += event.pieces
                for text, of_row in zip(texts[first : first + len(pieces)], pieces, strict=True):
                    text["arms"][arm.name] = of_row
                first += len(pieces)
        self.texts[place] = texts
        write_json(self._folder / TEXTS, self.texts)


def by_task(problems: Sequence[Problem]) -> dict[str, list[Problem]]:
    """Group problems by task, in order of appearance."""
    tasks: dict[str, list[Problem]] = {}
    for problem in problems:
        tasks.setdefault(problem.task, []).append(problem)
    return tasks


def turns_of(problems: Sequence[Problem], chat: bool) -> int:
    """Return the number of turns that the problems ask."""
    return sum(len(turns_asked(problem, chat)) for problem in problems)


def scored(
    decoding: Decoding, problems: Sequence[Problem], answers: Sequence[Answer]
) -> list[list[float] | None]:
    """Score the last turn of each problem of a task by the task's metric. A likelihood covers all turns.

    Args:
      decoding: the decoding that gave the answers.
      problems, answers: in the same order.
    """
    if problems[0].metric != "likelihood":
        return [scores.score(p, a.texts[-1]) for p, a in zip(problems, answers, strict=True)]
    target, chat = decoding.session.target, decoding.chat
    turns = [
        (i, prompt_tokens(target, p, a.texts[:turn], chat=chat), tokens)
        for i, (p, a) in enumerate(zip(problems, answers, strict=True))
        for turn, tokens in enumerate(a.tokens)
    ]
    found = score_answers(target, [t[1] for t in turns], [t[2] for t in turns])
    sums = np.zeros((len(problems), 2))
    np.add.at(sums, [t[0] for t in turns], found)
    return [*sums.tolist()]


def score_answers(
    target: Pretrained, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
) -> list[list[float]]:
    """Return each answer's total log-likelihood in nats and its number of tokens."""
    texts = [(*p, *a) for p, a in zip(prompts, answers, strict=True)]
    scored = likelihood.score(target, texts, rows=max(1, min(likelihood.ROWS, len(texts))))
    return [
        [float(np.sum(s.log_p[len(p) - 1 :], dtype=np.float64)), float(len(a))]
        for s, p, a in zip(scored, prompts, answers, strict=True)
    ]
