"""The loops of a run: batches are the outer one and arms the inner one, so that a slow spell strikes all arms alike."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mars_jax import verify
from mars_jax.core.rule import LoadedRule, facts
from mars_jax.hub.pretrained import Pretrained
from mars_jax.lab.evaluate.answers import Answer, Decoding, prompt_tokens, turns_asked
from mars_jax.lab.evaluate.benchmark import margins, rehearsal, texts
from mars_jax.lab.evaluate.benchmark.arm_rows import Key, make_row, place_of
from mars_jax.lab.evaluate.benchmark.arms import Arm, base_of, make_arms, margin_of, other_margin
from mars_jax.lab.evaluate.benchmark.match import PROBLEMS, STEPS, Match, match
from mars_jax.lab.evaluate.scoring import sandbox, scores
from mars_jax.lab.evaluate.tasks.problems import Problem
from mars_jax.lab.folder import read_json, write_json
from mars_jax.lab.ticking import Progress, Speed, Work
from mars_jax.serve import likelihood
from mars_jax.serve.requests import Request
from mars_jax.serve.rows import Row, RowFile
from mars_jax.specs import RuleChoice

MATCHES, MARGINS = "matches.json", "margins.json"
TEXTS, REPLAY = "texts.json", "replay.json"
_REPLAYED = "replayed"
"""The kind of work that a replay is; all other kinds are the arms, by their names."""


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
        self._made: dict[tuple[float, float | None], list[Arm]] = {}
        self._tasks = by_task(problems if part is None else problems[part])
        self._code = {
            "run_code": settings["allow_code_execution"],
            "unconfined": settings.get("confinement") == sandbox.HOOK,
        }
        # Of all problems, so that seeds do not depend on the part.
        self._numbers = {
            (task, p.id): i for task, group in by_task(problems).items() for i, p in enumerate(group)
        }
        self.matches = {place: Match(**found) for place, found in self._read(MATCHES).items()}
        self.margins, self.texts, self.replays = (self._read(name) for name in (MARGINS, TEXTS, REPLAY))

    def _read(self, name: str) -> dict[str, Any]:
        return read_json(self._folder / name) or {}

    def _places(self) -> Iterator[tuple[str, float]]:
        return ((task, t) for task in self._tasks for t in self._settings["temperatures"])

    def _batches(self, task: str) -> Iterator[list[Problem]]:
        problems, size = self._tasks[task], self._decoding.group
        return (problems[first : first + size] for first in range(0, len(problems), size))

    @property
    def _stand_in(self) -> float | None:
        """A matched threshold, before it is known; None where none is matched."""
        return 1.0 if self._controls == "all" and not self._rule.row.lossless else None

    @property
    def _controls(self) -> str:
        return self._settings.get("controls", "all")

    def arms(self, temperature: float, matched: float | None) -> list[Arm]:
        """The arms at a temperature; a rule with weights reads them once."""
        if (temperature, matched) not in self._made:
            self._made[temperature, matched] = make_arms(
                self._rule,
                self._settings["thetas"],
                temperature=temperature,
                matched=matched,
                target=self._decoding.session.target,
                simulated_taus=self._settings.get("simulated_taus", ()),
                refined=self._decoding.refiner is not None,
                controls=self._controls,
            )
        return self._made[temperature, matched]

    def _seed(self, task: str, problem: Problem) -> int:
        return (self._settings["seed"] + self._numbers[task, problem.id]) % 2**32

    def decode(self, progress: Progress) -> None:
        work = Work(self._planned(), progress)
        for task, temperature in self._places():
            found = self._match(task, temperature, work)
            for group in self._batches(task):
                for arm in self.arms(temperature, found and found.theta):
                    keys = [Key(task, temperature, arm.name, problem.id)._asdict() for problem in group]
                    make = functools.partial(self._decode, task, temperature, arm, group)
                    rows = self._file.batch(keys, make)
                    self.rows += rows
                    sums = {name: sum(row[name] for row in rows) for name in ("emitted", "steps", "seconds")}
                    said = f"{place_of(task, temperature)}, {arm.name}, {Speed(**sums).describe()}"
                    turns = self._turns(group)
                    if arm.role == "strict":
                        # A replay takes a step of it for every token.
                        work.time(_REPLAYED, turns, sums["seconds"] * sums["emitted"] / sums["steps"])
                    work.add(arm.name, turns, said, sums["seconds"])
            if not self._is_part:
                self._observe(task, temperature, work)
                self._replay(task, temperature, work)

    def _planned(self) -> Counter[str]:
        """The decodes of each kind that a run makes or finds on file; one is a turn of a problem."""
        planned: Counter[str] = Counter()
        for task, temperature in self._places():
            place, problems = place_of(task, temperature), self._tasks[task]
            for arm in self.arms(temperature, self._stand_in):
                planned[arm.name] += self._turns(problems)
            if self._stand_in is not None and place not in self.matches:
                planned[self._first(temperature).name] += self._most_matching(task)
            if place not in self.margins and not self._is_part:
                for arm in self._observed(temperature):
                    planned[arm.name] += len(problems[: margins.PROBLEMS])
            if self._replayed() and place not in self.replays:
                planned[_REPLAYED] += len(problems[: rehearsal.PROBLEMS])
        return planned

    def _turns(self, problems: Sequence[Problem]) -> int:
        return turns_of(problems, self._decoding.chat)

    def _most_matching(self, task: str) -> int:
        """Decodes of a match that takes all of its steps."""
        return (1 + STEPS) * self._turns(self._tasks[task][:PROBLEMS])

    def _first(self, temperature: float) -> Arm:
        """The arm that the controls are matched to."""
        return next(arm for arm in self.arms(temperature, self._stand_in) if arm.role == "rule")

    def _observed(self, temperature: float) -> list[Arm]:
        """The arms whose margins are counted: the strict rule, and the rule where it is another."""
        if self._controls == "none":
            return []
        arms = {arm.role: arm for arm in reversed(self.arms(temperature, self._stand_in))}
        return [arms[role] for role in ("strict", "rule") if role in arms]

    def _replayed(self) -> list[float]:
        """The thresholds that are replayed."""
        if self._controls != "all":
            return []
        return rehearsal.thetas_of(self._rule, self._decoding.session.drafter, self._settings["thetas"])

    def _decode(self, task: str, temperature: float, arm: Arm, group: list[Problem]) -> list[dict[str, Any]]:
        seeds = [self._seed(task, problem) for problem in group]
        answers = self._decoding.answer(arm, group, seeds, temperature=temperature)
        stops = self._decoding.stop_tokens
        return [
            make_row(problem, arm, temperature, seed, answer, scored, stops)
            for problem, seed, answer, scored in zip(
                group, seeds, answers, scored(self._decoding, group, answers, **self._code), strict=True
            )
        ]

    def _untimed(self, task: str, temperature: float, count: int) -> tuple[list[Problem], list[Request]]:
        """The first problems of a task, in their first turn."""
        decoding, problems = self._decoding, self._tasks[task][:count]
        prompts = [prompt_tokens(decoding.session.target, p, chat=decoding.chat) for p in problems]
        return problems, decoding.requests(prompts, [self._seed(task, p) for p in problems], temperature)

    def _observe(self, task: str, temperature: float, work: Work) -> None:
        """Histograms of the strict rule's decisions and of the relaxed one's, and texts of both, made once and kept
        beside the rows."""
        name, arms = place_of(task, temperature), self._observed(temperature)
        _, requests = self._untimed(task, temperature, margins.PROBLEMS)
        if name in self.margins or not arms:
            return
        session = self._decoding.session
        found, said = {}, {}
        for arm in arms:
            tick = functools.partial(work.add, arm.name, said=f"{name}, margins")
            seen = margins.observe(session.using(arm.rule), requests, tick)
            found[arm.name] = margins.histograms(margin_of(self._rule) or "ratio", seen.decisions)
            said[arm.name] = seen
        self.texts[name] = texts.as_json(session.target, self._tasks[task][: texts.PROBLEMS], requests, said)
        write_json(self._folder / TEXTS, self.texts)
        self.margins[name] = found
        write_json(self._folder / MARGINS, self.margins)

    def _replay(self, task: str, temperature: float, work: Work) -> None:
        """tau at thresholds that no arm has, made once and kept beside the rows."""
        name, thetas = place_of(task, temperature), self._replayed()
        if name in self.replays or not thetas:
            return
        _, requests = self._untimed(task, temperature, rehearsal.PROBLEMS)
        pair = self._decoding.session.using(self._first(temperature).rule)
        tick = functools.partial(work.add, _REPLAYED, said=f"{name}, replay")
        counted = rehearsal.walks(pair, requests, thetas, tick)
        self.replays[name] = rehearsal.as_json(thetas, counted)
        write_json(self._folder / REPLAY, self.replays)

    def _match(self, task: str, temperature: float, work: Work) -> Match | None:
        """The match of a task at a temperature, found once and kept beside the rows; None where none is wanted."""
        name = place_of(task, temperature)
        if name in self.matches or self._stand_in is None:
            return self.matches.get(name)
        first, before = self._first(temperature), work.done
        other = other_margin(margin_of(self._rule))
        problems = self._tasks[task][:PROBLEMS]
        size = self._decoding.group

        def tau_of(rule: LoadedRule) -> float:
            arm = Arm(name="match", rule=rule, drafts=True, meaning="")
            emitted = steps = 0
            for begin in range(0, len(problems), size):
                group = problems[begin : begin + size]
                seeds = [self._seed(task, problem) for problem in group]
                answers = self._decoding.answer(arm, group, seeds, temperature=temperature)
                emitted += sum(answer.metrics.emitted for answer in answers)
                steps += sum(answer.metrics.steps for answer in answers)
                seconds = sum(answer.seconds for answer in answers)
                work.add(first.name, self._turns(group), f"{name}, matching", seconds)
            return emitted / steps

        def tau_at(theta: float) -> float:
            base, prefix = base_of(first.rule).rule, facts(first.rule.rule).exact_prefix
            return tau_of(LoadedRule(verify.mars(base=base, theta=theta, margin=other, exact_prefix=prefix)))

        found = match(tau_at, tau_of(first.rule), other)
        work.skip(first.name, self._most_matching(task) - (work.done - before))
        self.matches[name] = found
        write_json(self._folder / MATCHES, {place: m._asdict() for place, m in self.matches.items()})
        return found


def by_task(problems: Sequence[Problem]) -> dict[str, list[Problem]]:
    """Problems by their task, in order of appearance."""
    tasks: dict[str, list[Problem]] = {}
    for problem in problems:
        tasks.setdefault(problem.task, []).append(problem)
    return tasks


def turns_of(problems: Sequence[Problem], chat: bool) -> int:
    """Count of the turns that are asked, of all problems."""
    return sum(len(turns_asked(problem, chat)) for problem in problems)


def scored(
    decoding: Decoding, problems: Sequence[Problem], answers: Sequence[Answer], **code: bool
) -> list[list[float] | None]:
    """Scores of the last turn of each problem of a task, by its metric; a likelihood is of all turns.

    Args:
      decoding: that gave the answers.
      problems, answers: in the same order.
      code: `run_code` and `unconfined`, as for `scores.score`.
    """
    if problems[0].metric != "likelihood":
        return [scores.score(p, a.texts[-1], **code) for p, a in zip(problems, answers, strict=True)]
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
    """The sum of the log-likelihoods of each answer's tokens in nats, and how many tokens it has."""
    texts = [(*p, *a) for p, a in zip(prompts, answers, strict=True)]
    scored = likelihood.score(target, texts, rows=max(1, min(likelihood.ROWS, len(texts))))
    return [
        [float(np.sum(s.log_p[len(p) - 1 :], dtype=np.float64)), float(len(a))]
        for s, p, a in zip(scored, prompts, answers, strict=True)
    ]
