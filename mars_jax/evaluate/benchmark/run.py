"""Evaluate a pair of models: every arm on the same prompts with the same seeds, in one run that a kill does not harm.

Batches are the outer loop and arms the inner one, so that a slow spell of the machine strikes all arms alike.
"""

from __future__ import annotations

import functools
import json
import math
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mars_jax import __version__, drafters, verify
from mars_jax.core.errors import MarsError
from mars_jax.core.types import LoadedRule
from mars_jax.evaluate.answers import Answer, Decoding, check_problems, prompt_tokens
from mars_jax.evaluate.batches import RowFile
from mars_jax.evaluate.benchmark import margins, report
from mars_jax.evaluate.benchmark.arms import (
    MARS,
    Arm,
    base_of,
    default_thetas,
    make_arms,
    margin_of,
    other_margin,
)
from mars_jax.evaluate.benchmark.match import PROBLEMS, Match, match
from mars_jax.evaluate.benchmark.rows import Key, make_row
from mars_jax.evaluate.folder import claim, digest, fingerprint, write_json
from mars_jax.evaluate.scoring import likelihood, sandbox, scores
from mars_jax.evaluate.tasks.problems import Problem
from mars_jax.pretrained import Pretrained
from mars_jax.serve.journal import Row
from mars_jax.specs import RuleChoice

MATCHES, MARGINS, ROWS = "matches.json", "margins.json", "rows.jsonl"

Progress = Callable[[str, int, int], None]
"""`(what, rows done, rows in all)`."""


def evaluate(
    target: Pretrained,
    drafter: drafters.LoadedDrafter,
    problems: Sequence[Problem],
    output: str | os.PathLike[str],
    *,
    rule: RuleChoice = MARS,
    thetas: Sequence[float] | None = None,
    temperatures: Sequence[float] = (0.0, 1.0),
    simulated_taus: Sequence[float] = (),
    max_new_tokens: int = 256,
    batch_size: int = 1,
    seed: int = 0,
    chat: bool = False,
    allow_code_execution: bool = False,
    allow_unconfined_code: bool = False,
    names: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Decode and score every arm, and write rows, summary, table and plots under `output`.

    Run again with the same arguments, it goes on where it was killed, and all files come out as of one run, but for
    the times.

    Args:
      target: from `mars_jax.load`.
      drafter: from `mars_jax.drafters.load`, with `sample=True` where the rule is over rejection and it has weights.
      problems: from `tasks.read`.
      output: a folder, new, empty, or of the run to go on with.
      rule: that is measured, by name, such as `specs.RuleChoice("mars", {"margin": "gap"})` or
        `specs.RuleChoice("gates.py:entropy_gate", {"entropy": 1.5})`, whose file is run.
      thetas: of the rule; the controls are matched to the first. Default: the rule's own; none for a rule without
        thresholds, or of the user's, which is one arm.
      temperatures: all arms run at each.
      simulated_taus: of further arms, which accept by chance; see `verify.simulated`.
      max_new_tokens: of a turn.
      batch_size: problems decoded side by side.
      seed: problem i of a task draws with seed + i, in every arm.
      chat: put questions through the target's chat template, with all their turns.
      allow_code_execution: run what the model writes, to score it, behind the walls of `scoring.sandbox`.
      allow_unconfined_code: and without walls where this machine has none, with your rights.
      names: whatever else tells this run from others, such as the draft's name.
      progress: called after every batch of an arm.

    Returns:
      The summary, as it is in summary.json.

    Raises:
      MarsError: problems that do not fit the target, an output of another run, a package that is missing.
    """
    if not problems:
        raise MarsError("there are no problems to evaluate on: ask for at least 1.")
    thetas = [float(theta) for theta in (default_thetas(rule) if thetas is None else thetas)]
    temperatures = [float(temperature) + 0.0 for temperature in temperatures]  # -0 is 0
    for name, values in (("thetas", thetas), ("temperatures", temperatures)):
        if (not values and name == "temperatures") or len({f"{value:g}" for value in values}) < len(values):
            raise MarsError(f"{name} are {values}: give at least one, and each once.")
    if math.inf in thetas:
        raise MarsError("thetas holds inf, an arm of every evaluation: leave it out.")
    deepest = drafter.drafter.max_depth + 1
    if simulated_taus and max(simulated_taus) > deepest:
        raise MarsError(
            f"simulated_taus has {max(simulated_taus):g}, and this draft gives {deepest} tokens a step at most: ask "
            "for less, or draft deeper."
        )
    for theta in thetas:
        rule.but(theta=theta)
    scores.check_metrics(problems, run_code=allow_code_execution, unconfined=allow_unconfined_code)
    report.check_installed()
    check_problems(target, problems, chat=chat)
    folder = Path(output)
    settings = {
        "target": target.name,
        **(names or {}),
        "drafter": drafter.drafter.name,
        "rule": rule.as_json(but=("theta",) if thetas else ()),
        "thetas": thetas,
        "temperatures": temperatures,
        # Left out where there are none, so that folders of runs before this setting can go on.
        **({"simulated_taus": [float(tau) for tau in simulated_taus]} if simulated_taus else {}),
        "tasks": {task: len(group) for task, group in _by_task(problems).items()},
        "max_new_tokens": max_new_tokens,
        "batch_size": batch_size,
        "seed": seed,
        "chat": chat,
        "allow_code_execution": allow_code_execution,
        # What kept the programs may decide what passes; left out where none ran.
        **(
            {"confinement": sandbox.confinement(unconfined=allow_unconfined_code)}
            if allow_code_execution
            else {}
        ),
        "problems": digest(repr(list(problems)).encode()),
        "weights": fingerprint((target.params, drafter.params)),
        "versions": {"mars-jax": __version__, "jax": jax.__version__},
        "device": f"{jax.device_count()} {jax.devices()[0].device_kind}",
    }
    largest = max(settings["tasks"].values())
    decoding = Decoding(
        target=target,
        drafter=drafter,
        chat=chat,
        max_new_tokens=max_new_tokens,
        batch_size=min(batch_size, largest),
    )
    with claim(folder, settings):
        evaluation = _Evaluation(decoding, folder, problems, settings, rule)
        try:
            evaluation.decode(progress or (lambda what, done, of: None))
        finally:
            evaluation.file.close()
        summary = report.summarize(
            settings,
            environment(),
            evaluation.matches,
            evaluation.margins,
            problems,
            evaluation.file.rows,
            evaluation.arms,
        )
        report.write(summary, folder)
    return summary


class _Evaluation:
    """The loops of one run over its tasks, temperatures, batches and arms."""

    def __init__(
        self,
        decoding: Decoding,
        folder: Path,
        problems: Sequence[Problem],
        settings: Mapping[str, Any],
        rule: RuleChoice,
    ):
        self._decoding, self._folder, self._settings, self._rule = decoding, folder, settings, rule
        self._made: dict[tuple[float, float | None], list[Arm]] = {}
        self._tasks = _by_task(problems)
        self._numbers = {(task, p.id): i for task, group in self._tasks.items() for i, p in enumerate(group)}
        self.matches = {place: Match(**found) for place, found in self._read(MATCHES).items()}
        self.margins = self._read(MARGINS)
        # A placeholder, since the names of arms do not depend on the threshold that is matched.
        keys = [
            Key(task, temperature, arm.name, problem.id)._asdict()
            for task, temperature in self._places()
            for group in self._batches(task)
            for arm in self.arms(temperature, self._stand_in)
            for problem in group
        ]
        self._rows = len(keys)
        self.file = RowFile(folder / ROWS, keys)

    def _read(self, name: str) -> dict[str, Any]:
        path = self._folder / name
        return json.loads(path.read_text()) if path.exists() else {}

    def _places(self) -> Iterator[tuple[str, float]]:
        return ((task, t) for task in self._tasks for t in self._settings["temperatures"])

    def _batches(self, task: str) -> Iterator[list[Problem]]:
        problems, size = self._tasks[task], self._decoding.batch_size
        return (problems[first : first + size] for first in range(0, len(problems), size))

    @property
    def _stand_in(self) -> float | None:
        """A matched threshold, before it is known."""
        return None if self._rule.row.lossless else 1.0

    def arms(self, temperature: float, matched: float | None) -> list[Arm]:
        """The arms at a temperature; a rule with weights reads them once."""
        if (temperature, matched) not in self._made:
            self._made[temperature, matched] = make_arms(
                self._rule,
                self._settings["thetas"],
                temperature=temperature,
                matched=matched,
                target=self._decoding.target,
                simulated_taus=self._settings.get("simulated_taus", ()),
            )
        return self._made[temperature, matched]

    def _seed(self, task: str, problem: Problem) -> int:
        return (self._settings["seed"] + self._numbers[task, problem.id]) % 2**32

    def decode(self, progress: Progress) -> None:
        place = 0
        for task, temperature in self._places():
            what = f"{task}, temperature {temperature:g}"
            tick = functools.partial(progress, f"{what}, matching", place, self._rows)
            found = self._match(task, temperature, tick)
            for group in self._batches(task):
                for arm in self.arms(temperature, found and found.theta):
                    keys = [Key(task, temperature, arm.name, problem.id)._asdict() for problem in group]
                    make = functools.partial(self._decode, task, temperature, arm, group)
                    rows = self.file.batch(keys, make)
                    place += len(group)
                    progress(f"{what}, {arm.name}, {_speed(rows)}", place, self._rows)
            self._margins(
                task, temperature, functools.partial(progress, f"{what}, margins", place, self._rows)
            )

    def _decode(self, task: str, temperature: float, arm: Arm, group: list[Problem]) -> list[dict[str, Any]]:
        seeds = [self._seed(task, problem) for problem in group]
        answers = self._decoding.answer(arm, group, seeds, temperature=temperature)
        stops = self._decoding.target.stop_tokens
        return [
            make_row(problem, arm, temperature, seed, answer, scored, stops)
            for problem, seed, answer, scored in zip(
                group, seeds, answers, self._scores(group, answers), strict=True
            )
        ]

    def _scores(self, group: list[Problem], answers: list[Answer]) -> list[list[float] | None]:
        """Of the last turn of each problem, a likelihood of all of its turns; the metric is that of their task."""
        if group[0].metric != "likelihood":
            how = {
                "run_code": self._settings["allow_code_execution"],
                "unconfined": self._settings.get("confinement") == sandbox.HOOK,
            }
            return [scores.score(p, a.texts[-1], **how) for p, a in zip(group, answers, strict=True)]
        target, chat = self._decoding.target, self._decoding.chat
        turns = [
            (i, prompt_tokens(target, p, a.texts[:turn], chat=chat), tokens)
            for i, (p, a) in enumerate(zip(group, answers, strict=True))
            for turn, tokens in enumerate(a.tokens)
        ]
        scored = likelihood.score_answers(target, [t[1] for t in turns], [t[2] for t in turns])
        sums = np.zeros((len(group), 2))
        np.add.at(sums, [t[0] for t in turns], scored)
        return [*sums.tolist()]

    def _margins(self, task: str, temperature: float, tick: Callable[[], None]) -> None:
        """Histograms of the strict rule's decisions and of the relaxed one's, made once and kept beside the rows."""
        name = f"{task}, temperature {temperature:g}"
        if name in self.margins:
            return
        decoding, problems = self._decoding, self._tasks[task][: margins.PROBLEMS]
        prompts = [prompt_tokens(decoding.target, p, chat=decoding.chat) for p in problems]
        requests = decoding.requests(prompts, [self._seed(task, p) for p in problems], temperature)
        arms = self.arms(temperature, self._stand_in)
        strict = next(arm for arm in arms if arm.role == "strict")
        found = {}
        for arm in (strict, next((arm for arm in arms if arm.role == "rule"), strict)):
            seen = margins.decisions(
                decoding.target, decoding.drafter, requests, arm.rule, decoding.batch_size, tick
            )
            found[arm.name] = margins.histograms(margin_of(self._rule) or "ratio", seen)
        self.margins[name] = found
        write_json(self._folder / MARGINS, self.margins)

    def _match(self, task: str, temperature: float, tick: Callable[[], None]) -> Match | None:
        """The match of a task at a temperature, found once and kept beside the rows; None for a lossless rule."""
        name = f"{task}, temperature {temperature:g}"
        if name in self.matches or self._rule.row.lossless:
            return self.matches.get(name)
        first = next(arm for arm in self.arms(temperature, self._stand_in) if arm.role == "rule")
        other = other_margin(margin_of(self._rule))
        problems = self._tasks[task][:PROBLEMS]
        size = self._decoding.batch_size

        def tau_of(rule: LoadedRule) -> float:
            arm = Arm(name="match", rule=rule, drafts=True, meaning="")
            emitted = steps = 0
            for begin in range(0, len(problems), size):
                group = problems[begin : begin + size]
                seeds = [self._seed(task, problem) for problem in group]
                for answer in self._decoding.answer(arm, group, seeds, temperature=temperature):
                    emitted += answer.metrics.emitted
                    steps += answer.metrics.steps
                tick()
            return emitted / steps

        def tau_at(theta: float) -> float:
            base, prefix = base_of(first.rule).rule, getattr(first.rule.rule, "exact_prefix", 0)
            return tau_of(LoadedRule(verify.mars(base, theta=theta, margin=other, exact_prefix=prefix)))

        found = match(tau_at, tau_of(first.rule), other)
        self.matches[name] = found
        write_json(self._folder / MATCHES, {place: m._asdict() for place, m in self.matches.items()})
        return found


def _speed(rows: Sequence[Row]) -> str:
    """How a batch went, for whoever waits."""
    emitted, steps, seconds = (sum(row[name] for row in rows) for name in ("emitted", "steps", "seconds"))
    return f"{emitted / max(seconds, 1e-9):,.0f} tokens/s, tau {emitted / max(steps, 1):.2f}"


def _by_task(problems: Sequence[Problem]) -> dict[str, list[Problem]]:
    """Problems by their task, in order of appearance."""
    tasks: dict[str, list[Problem]] = {}
    for problem in problems:
        tasks.setdefault(problem.task, []).append(problem)
    return tasks


def environment() -> dict[str, Any]:
    """The machine and the versions that the times were measured with."""
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "backend": jax.default_backend(),
    }
