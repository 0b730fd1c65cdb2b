"""Arms at the draft length that is best for each, a lossy rule beside the lossless one that is best at its own.

A rule that accepts more makes drafts worth more, and so does a longer draft, which costs no text. The first quarter of
the problems of a task choose the lengths, and the others are scored. Source of the comparison: arXiv 2607.08690.

n problems, R resamples. Oracle: recounts from rows, and decodes of the same pair (tests/lab/evaluate/test_tuned.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mars_jax import __version__, verify
from mars_jax.core.errors import MarsError
from mars_jax.drafters import LoadedDrafter
from mars_jax.hub.pretrained import Pretrained
from mars_jax.lab.evaluate import figures
from mars_jax.lab.evaluate.answers import Decoding, check_problems
from mars_jax.lab.evaluate.benchmark.arm_loops import by_task, scored, turns_of
from mars_jax.lab.evaluate.benchmark.arm_rows import make_row
from mars_jax.lab.evaluate.benchmark.arms import ALONE, MARS, Arm, default_thetas, make_arms
from mars_jax.lab.evaluate.scoring import sandbox, scores
from mars_jax.lab.evaluate.tasks.problems import Problem
from mars_jax.lab.folder import open_rows, write_json
from mars_jax.lab.provenance import provenance
from mars_jax.lab.ticking import Progress, Speed, Work
from mars_jax.placement import hosts
from mars_jax.serve.fingerprint import digest, fingerprint
from mars_jax.serve.rows import Row, RowFile, write_whole
from mars_jax.serve.session import Session
from mars_jax.specs import RuleChoice

LENGTHS = (2, 3, 5, 8, 12)
"""Lengths of a chain that are tried unless others are asked for."""
ENOUGH = 30
"""Problems of which a table says something."""
SHARE = 4
"""One problem in so many chooses lengths."""
RESAMPLES = 2000
FILE, TABLE = "tuned.json", "table.md"
COLUMNS = ("arm", "drafted", "tau", "tokens/s", "over plain", "over the best lossless", "score less plain's")
COLUMNS += ("relaxed", "loops")
Rate = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
"""(tokens, steps, seconds), f64[R] each, -> tokens by time."""


def arms_at(
    rule: RuleChoice, thetas: Sequence[float], temperature: float, target: Pretrained, *, samples: bool
) -> list[Arm]:
    """The lossless arms, then those of the rule; the target alone is not among them.

    Args:
      rule: that is measured.
      thetas: of it, an arm for each.
      temperature: above 0 a draft that samples can be verified by `rejection`, token by token and in blocks, and a
        rule over `exact` stands over `rejection` as well.
      target: for a rule with weights.
      samples: whether the drafter does.

    >>> [arm.name for arm in arms_at(MARS, [0.9], 1.0, None, samples=True)]
    ['exact', 'rejection', 'block', 'mars theta=0.9', 'mars over rejection theta=0.9']
    """
    rules = [RuleChoice("exact", {}), rule]
    if temperature > 0 and samples:
        rules += [RuleChoice("rejection", {}), RuleChoice("rejection", {"block": True})]
        if "base" in rule.row.settings and rule.settled()["base"] == "exact":
            rules.append(rule.but(base="rejection"))
    arms: dict[str, Arm] = {}
    for choice in rules:
        made = make_arms(
            choice,
            thetas if choice.spec == rule.spec else (),
            temperature=temperature,
            matched=None,
            target=target,
            controls="paper",
        )
        arms |= {arm.name: arm for arm in made[1:]}
    lossless = [arm for arm in arms.values() if arm.rule.rule.lossless]
    return [*lossless, *(arm for arm in arms.values() if arm not in lossless)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning:
    """A pair whose drafts take several lengths, and how its arms are compared."""

    target: Pretrained
    drafters: Mapping[bool, LoadedDrafter]  # by whether the draft is sampled; each can be resized
    batch_size: int
    how: Mapping[str, Any]  # the other settings of a `Decoding`
    cost: float | None  # of a drafted token, in forwards of the target; None: by the clock

    @functools.cached_property
    def _decodings(self) -> dict[tuple[bool, int], Decoding]:
        return {}

    def decoding(self, arm: Arm, length: int) -> Decoding:
        """The settings with drafts of a length, which remember what is compiled."""
        sampled = verify.needs_q(arm.rule.rule)
        if (sampled, length) not in self._decodings:
            drafter = self.drafters[sampled]
            assert drafter.resized is not None
            drafter = drafter._replace(drafter=drafter.resized(length))
            session = Session(target=self.target, drafter=drafter, batch_size=self.batch_size)
            self._decodings[sampled, length] = Decoding(session=session, **self.how)
        return self._decodings[sampled, length]

    def rate(self, length: int) -> Rate:
        """Tokens by time at a length: seconds of this machine, or forwards of the target."""
        if self.cost is None:
            return lambda tokens, steps, seconds: tokens / seconds
        step = 1 + self.cost * length
        return lambda tokens, steps, seconds: tokens / (steps * step)


def tuned(
    target: Pretrained,
    drafters: Mapping[bool, LoadedDrafter],
    problems: Sequence[Problem],
    output: Path,
    *,
    rule: RuleChoice = MARS,
    thetas: Sequence[float] | None = None,
    lengths: Sequence[int] = LENGTHS,
    cost: float | None = None,
    temperatures: Sequence[float] = (0.0, 1.0),
    max_new_tokens: int = 256,
    batch_size: int = 1,
    seed: int = 0,
    chat: bool = False,
    allow_code_execution: bool = False,
    allow_unconfined_code: bool = False,
    names: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Choose the length of every arm on some problems, score all arms on the others, and write rows and tables.

    Run again with the same arguments, it goes on where it was killed.

    Args:
      target: from `mars_jax.load`.
      drafters: the drafter by whether it samples, from `mars_jax.drafters.load` with a chain as long as the longest.
      lengths: of chains, that are tried.
      cost: of drafting a token, in forwards of the target, where tokens per step are to be weighed by a model of the
        time and not by this machine's clock.
      problems, output, rule, thetas, temperatures, max_new_tokens, batch_size, seed, chat, allow_code_execution,
      allow_unconfined_code, names, progress: as for `evaluate`.

    Returns:
      The report, as it is in tuned.json.

    Raises:
      MarsError: a task of one problem, problems that do not fit the target, an output of another run.
    """
    tasks = by_task(problems)
    for task, group in tasks.items():
        if len(group) < 2:
            raise MarsError(
                f"the task {task} has 1 problem, and some choose lengths while others are scored: ask for at least 2."
            )
    code = {"run_code": allow_code_execution, "unconfined": allow_unconfined_code}
    scores.check_metrics(problems, **code)
    check_problems(target, problems, chat=chat)
    thetas = [float(theta) for theta in (default_thetas(rule) if thetas is None else thetas)]
    temperatures = [float(temperature) + 0.0 for temperature in temperatures]  # -0 is 0
    settings = {
        "target": target.name,
        **(names or {}),
        "tuned": sorted(lengths),
        "draft_cost": cost,
        "rule": rule.as_json(but=("theta",) if thetas else ()),
        "thetas": thetas,
        "temperatures": temperatures,
        "tasks": {task: len(group) for task, group in tasks.items()},
        "max_new_tokens": max_new_tokens,
        "batch_size": batch_size,
        "seed": seed,
        "chat": chat,
        "confinement": sandbox.confinement(unconfined=allow_unconfined_code)
        if allow_code_execution
        else None,
        "problems": digest(repr(list(problems)).encode()),
        "weights": fingerprint((target.params, [d.params for d in drafters.values()]), target.path),
        "versions": {"mars-jax": __version__, "jax": jax.__version__},
        "device": f"{jax.device_count()} {jax.devices()[0].device_kind}",
    }
    tuning = Tuning(
        target=target,
        drafters=drafters,
        batch_size=min(batch_size, max(map(len, tasks.values()))),
        how={"chat": chat, "max_new_tokens": max_new_tokens},
        cost=cost,
    )
    arms = {t: arms_at(rule, thetas, t, target, samples=True in drafters) for t in temperatures}
    with contextlib.closing(open_rows(output, settings)) as file:
        loop = _Loop(tuning, file, sorted(lengths), seed, code, progress or (lambda *told: None))
        loop.plan(tasks, {t: len(found) for t, found in arms.items()})
        tables = [
            loop.table(task, group, temperature, arms[temperature])
            for task, group in tasks.items()
            for temperature in temperatures
        ]
        made = {**provenance(), "settings": settings, "lengths": sorted(lengths), "tables": tables}
        write_json(output / FILE, made)
        if hosts.is_first():
            write_whole(output / TABLE, markdown(made))
    return made


class _Loop:
    """The decodes of a run. Arms take turns within a group of problems, so that a slow spell strikes all alike."""

    def __init__(
        self,
        tuning: Tuning,
        file: RowFile,
        lengths: Sequence[int],
        seed: int,
        code: Mapping[str, bool],
        progress: Progress,
    ):
        self._tuning, self._file, self._lengths, self._seed, self._code = tuning, file, lengths, seed, code
        self._progress = progress

    def plan(self, tasks: Mapping[str, Sequence[Problem]], arms: Mapping[float, int]) -> None:
        """Count what is to be done."""
        turns = 0
        for group in tasks.values():
            chosen = _choosing(group)
            first, rest = (
                turns_of(part, self._tuning.how["chat"]) for part in (group[:chosen], group[chosen:])
            )
            for count in arms.values():
                turns += first * count * len(self._lengths) + rest * (1 + count)
        self._work = Work({"turn": turns}, self._progress)

    def table(
        self, task: str, problems: Sequence[Problem], temperature: float, arms: Sequence[Arm]
    ) -> dict[str, Any]:
        """Choose the lengths, then score."""
        chosen = _choosing(problems)
        tried = [(arm, length) for arm in arms for length in self._lengths]
        first = self._decode(task, problems[:chosen], 0, temperature, tried)
        lengths = [max(self._lengths, key=lambda n: self._rate(first[arm.name, n], n)) for arm in arms]
        free = max(
            (at for at, arm in enumerate(arms) if arm.rule.rule.lossless),
            key=lambda at: self._rate(first[arms[at].name, lengths[at]], lengths[at]),
        )
        best = list(zip(arms, lengths, strict=True))
        rows = self._decode(task, problems[chosen:], chosen, temperature, [(ALONE, 0), *best])
        metric = problems[0].metric
        alone, other = rows[ALONE.name, 0], rows[best[free][0].name, best[free][1]]
        made = []
        for arm, n in best:
            mine = rows[arm.name, n]
            made.append(
                {"arm": arm.name, "role": arm.role, "length": n, "meaning": arm.meaning}
                | {"tau_by_length": {str(k): _tau(first[arm.name, k]) for k in self._lengths}}
                | {"rate_by_length": {str(k): self._rate(first[arm.name, k], k) for k in self._lengths}}
                | figures.summarize(mine, alone, None, metric=metric, seed=self._seed)
                | compared(
                    mine,
                    other,
                    alone,
                    self._tuning.rate(n),
                    self._tuning.rate(best[free][1]),
                    metric,
                    self._seed,
                )
            )
        return {
            "task": task,
            "temperature": temperature,
            "metric": metric,
            "chosen_on": chosen,
            "problems": len(problems) - chosen,
            "best_lossless": best[free][0].name,
            "alone": figures.summarize(alone, alone, None, metric=metric, seed=self._seed),
            "arms": made,
        }

    def _rate(self, rows: Sequence[Row], length: int) -> float:
        sums = (np.asarray(float(sum(row[name] for row in rows))) for name in ("emitted", "steps", "seconds"))
        return float(self._tuning.rate(length)(*sums))

    def _decode(
        self,
        task: str,
        problems: Sequence[Problem],
        begin: int,
        temperature: float,
        arms: Sequence[tuple[Arm, int]],
    ) -> dict[tuple[str, int], list[Row]]:
        """The rows of every arm and length, of problems whose first one has the number `begin` in its task."""
        found: dict[tuple[str, int], list[Row]] = {(arm.name, n): [] for arm, n in arms}
        size = self._tuning.decoding(arms[-1][0], arms[-1][1]).group
        for first in range(0, len(problems), size):
            group = list(problems[first : first + size])
            seeds = [(self._seed + begin + first + i) % 2**32 for i in range(len(group))]
            for arm, n in arms:
                key = {"task": task, "temperature": temperature, "arm": arm.name, "length": n}
                make = functools.partial(self._rows, arm, n, group, seeds, temperature)
                rows = self._file.batch([{**key, "id": problem.id} for problem in group], make)
                found[arm.name, n] += rows
                sums = {name: sum(row[name] for row in rows) for name in ("emitted", "steps", "seconds")}
                said = f"{task}, temperature {temperature:g}, {arm.name}"
                said += (
                    f", drafts of {n}, {Speed(**sums).describe()}" if n else f", {Speed(**sums).describe()}"
                )
                self._work.add("turn", turns_of(group, self._tuning.how["chat"]), said, sums["seconds"])
        return found

    def _rows(
        self, arm: Arm, length: int, group: list[Problem], seeds: list[int], temperature: float
    ) -> list[Row]:
        decoding = self._tuning.decoding(
            arm, length or self._lengths[0]
        )  # which the target alone does not read
        answers = decoding.answer(arm, group, seeds, temperature=temperature)
        stops = decoding.stop_tokens
        return [
            {**make_row(problem, arm, temperature, seed, answer, score, stops), "length": length}
            for problem, seed, answer, score in zip(
                group, seeds, answers, scored(decoding, group, answers, **self._code), strict=True
            )
        ]


def _choosing(problems: Sequence[Problem]) -> int:
    """Count of the problems that choose lengths."""
    return math.ceil(len(problems) / SHARE)


def _tau(rows: Sequence[Row]) -> float:
    return sum(row["emitted"] for row in rows) / sum(row["steps"] for row in rows)


def compared(
    rows: Sequence[Row], lossless: Sequence[Row], alone: Sequence[Row], rate: Rate, rate_lossless: Rate, metric: str,
    seed: int,
) -> dict[str, Any]:  # fmt: skip
    """An arm beside the best lossless one and the target alone, by the paired bootstrap over problems.

    Args:
      rows, lossless, alone: of the same problems in the same order.
      rate, rate_lossless: of the two.
      metric: of the task.
      seed: of the resampling.

    Returns:
      `over_lossless`, a ratio of tokens by time, and `less_alone`, a difference of scores between 0 and 1, each as
      [value, low, high] with a 95% interval; `less_alone` is None where the answers are not scored.
    """
    n = len(rows)
    drawn = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=RESAMPLES)
    weights = np.concatenate([np.ones((1, n)), drawn])  # the first row is the sample itself

    def timed(some: Sequence[Row], rate: Rate) -> np.ndarray:
        return rate(
            *(
                weights @ np.asarray([float(r[name]) for r in some])
                for name in ("emitted", "steps", "seconds")
            )
        )

    def score(some: Sequence[Row]) -> np.ndarray:
        return np.asarray(
            scores.total(metric, weights @ np.asarray([[*r["score"], 1.0] for r in some], np.float64))
        )

    whole = all(row["score"] is not None for row in (*rows, *alone))
    return {
        "over_lossless": _spread(timed(rows, rate) / timed(lossless, rate_lossless)),
        "less_alone": _spread(score(rows) - score(alone)) if whole else None,
    }


def _spread(values: np.ndarray) -> list[float]:
    """Value and 95% interval, of values whose first is the sample's own."""
    low, high = np.quantile(values[1:], [0.025, 0.975])
    return [float(values[0]), float(low), float(high)]


def markdown(made: Mapping[str, Any]) -> str:
    """The tables for people."""
    settings = made["settings"]
    by = (
        "the clock"
        if settings["draft_cost"] is None
        else f"tokens per step over 1 + {settings['draft_cost']:g} K, the time of a step with K drafted tokens"
    )
    lines = [
        "# Each rule at its own best draft length",
        "",
        f"Target {settings['target']}, draft {settings['draft']}, up to {settings['max_new_tokens']} tokens, batch "
        f"{settings['batch_size']}. Lengths {', '.join(map(str, made['lengths']))} were tried, by {by}, on problems "
        "that no figure uses. Intervals are 95%, by the paired bootstrap over problems.",
        "",
    ]
    for table in made["tables"]:
        lines += [
            f"## {table['task']}, temperature {table['temperature']:g}",
            "",
            f"{table['problems']} problems, after {table['chosen_on']} that chose; score: "
            f"{scores.METRICS[table['metric']]}. The best lossless arm is {table['best_lossless']}."
            + (
                f" Fewer than {ENOUGH} problems say little, whatever their intervals."
                if table["problems"] < ENOUGH
                else ""
            ),
            "",
            f"| {' | '.join(COLUMNS)} |",
            f"|---|{'---:|' * (len(COLUMNS) - 1)}",
            _line(ALONE.name, 0, table["alone"]),
            *(_line(arm["arm"], arm["length"], arm) for arm in table["arms"]),
            "",
        ]
    return "\n".join(lines)


def _line(name: str, length: int, arm: Mapping[str, Any]) -> str:
    over, less = arm.get("over_lossless"), arm.get("less_alone")
    cells = (
        name,
        str(length) if length else "-",
        f"{arm['tau']:.2f}",
        f"{arm['tokens_per_second']:.1f}",
        f"{arm['speedup']:.2f}x",
        "-" if over is None else "{:.2f} [{:.2f}, {:.2f}]".format(*over),
        "-" if less is None else "{:+.1f} [{:+.1f}, {:+.1f}]".format(*(100 * value + 0.0 for value in less)),
        f"{arm['relaxed_share']:.1%}" if length else "-",
        f"{arm['loop_rate']:.1%}",
    )
    return "| " + " | ".join(cells) + " |"
