"""Choose a threshold, or a strict prefix, whose risk stays below a bound with a stated confidence.

The risk compares with the strict rule on the same prompts and seeds; the test is `studies.certify`'s.
Oracle: 200 resamplings of a known population in tests/lab/evaluate/test_calibration.py.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mars_jax import verify
from mars_jax.cli.progress import Show
from mars_jax.core.errors import MarsError
from mars_jax.core.rule import LoadedRule, facts
from mars_jax.lab.evaluate.answers import Decoding
from mars_jax.lab.evaluate.benchmark.arms import MARS, Arm, base_of
from mars_jax.lab.evaluate.scoring import scores
from mars_jax.lab.evaluate.tasks.problems import UNJUDGED, Problem
from mars_jax.lab.studies.certify import choose, fewest
from mars_jax.serve.rows import Row, RowFile
from mars_jax.specs import RuleChoice

RISKS = {
    "regret": "what the rule adds to the regret of a text, in nats per token, mean over texts, each clipped at 1 nat",
    "accuracy": "what the rule takes from the score of a text, from 0 to 1, mean over texts",
    "judge": "what the rule takes from a judge's number for a text, from 0 to 1, mean over texts",
}
"""Risks by name. Both compare with the strict rule on the same prompt and seed."""
Judge = Callable[[str, str], float]
"""(prompt, answer) -> a number from 0 to 1; higher is better."""
CLIP = 1.0
"""Nats per token at which the loss of one text is clipped: a test needs bounded losses."""


def calibrate(
    decoding: Decoding,
    problems: Sequence[Problem],
    *,
    risk: str,
    bound: float,
    confidence: float,
    rule: RuleChoice = MARS,
    thetas: Sequence[float] | None = None,
    prefixes: Sequence[int] | None = None,
    judge: Judge | None = None,
    temperature: float = 0.0,
    seed: int = 0,
    progress: Show | None = None,
    rows: RowFile | None = None,
) -> dict[str, Any]:
    """Decode held-out problems with looser and looser thresholds, as long as the risk is certified.

    Args:
      decoding: the pair of models and the settings of its answers.
      problems: held-out problems. The bound holds for problems from the same distribution.
      risk: one of `RISKS`.
      bound: bound of the risk, in nats per token or as a share.
      confidence: confidence with which the bound holds.
      rule: the rule whose theta is calibrated, with its other settings.
      thetas: thresholds from strict to loose. Default: the grid of the rule's row in `specs.RULES`.
      prefixes: decreasing numbers of strict first tokens, to try in place of thetas. The shortest certified prefix is
        chosen, at the rule's own theta.
      judge: the judge of the risk "judge".
      temperature, seed: problem i draws with seed + i under every rule.
      progress: `(done, total, text)`, called after every batch.
      rows: file that keeps the rows, so that a run with the same arguments continues after a kill.

    Returns:
      `value`, the chosen theta or prefix, or inf if none is certified; its `tau`, the `strict_tau`, and `trials`.

    Raises:
      MarsError: the problems cannot measure the risk.
    """
    setting = "theta" if prefixes is None else "exact_prefix"
    values = list(prefixes if prefixes is not None else grid(rule) if thetas is None else thetas)
    check(problems, risk=risk, bound=bound, confidence=confidence)
    rules = [
        verify.load(rule.spec, decoding.session.target, **{**rule.settings, setting: value})
        for value in values
    ]
    strict = base_of(rules[0])

    def decode(rule: LoadedRule, name: str) -> list[Row]:
        arm = Arm(name=name, rule=rule, drafts=True, meaning="")
        found, size = [], decoding.group
        for first in range(0, len(problems), size):
            group = problems[first : first + size]
            seeds = [(seed + first + i) % 2**32 for i in range(len(group))]
            make = functools.partial(
                _rows,
                decoding,
                arm,
                group,
                seeds,
                temperature=temperature,
                risk=risk,
                judge=judge,
            )
            found += make() if rows is None else rows.batch([_key(arm, problem) for problem in group], make)
            if progress is not None:
                progress(len(found), len(problems), f"{name}, tau {_tau(found):.2f}")
        return found

    alone = decode(strict, facts(strict.rule).name)

    def losses_at(value: float) -> tuple[np.ndarray, float]:
        found = decode(rules[values.index(value)], f"{setting}={value:g}")
        pairs = [(a["worth"], b["worth"]) for a, b in zip(alone, found, strict=True)]
        lost = np.asarray([before - after for before, after in pairs if None not in (before, after)])
        return np.clip(lost / CLIP, -1, 1), _tau(found)

    chosen, trials = choose(values, losses_at, bound=bound / CLIP, confidence=confidence)
    return {
        "value": chosen,
        "tau": next((t.tau for t in trials if t.value == chosen), _tau(alone)),
        "strict_tau": _tau(alone),
        "trials": [dataclasses.asdict(t) for t in trials],
    }


def grid(rule: RuleChoice) -> tuple[float, ...]:
    """Return the thresholds to try, from strict to loose. They are fixed in advance, as the test requires.

    Raises:
      MarsError: the rule has no threshold, or no grid, as a user's rule.

    >>> grid(MARS)[:3]
    (0.98, 0.96, 0.94)
    """
    if "theta" not in rule.options:
        raise MarsError(f"the rule {rule.name} has no theta to calibrate: choose one that has, such as mars.")
    setting, structure = rule.setting("theta")
    found = setting.range(**structure).grid
    if not found:
        raise MarsError(
            f"the rule {rule.name} has no thresholds of its own: give --thetas, from strict to loose."
        )
    return found


def _key(arm: Arm, problem: Problem) -> Row:
    return {"rule": arm.name, "task": problem.task, "id": problem.id}


def _tau(rows: Sequence[Row]) -> float:
    return sum(row["emitted"] for row in rows) / sum(row["steps"] for row in rows)


def _rows(
    decoding: Decoding,
    arm: Arm,
    problems: Sequence[Problem],
    seeds: Sequence[int],
    *,
    temperature: float,
    risk: str,
    judge: Judge | None,
) -> list[Row]:
    """Decode a batch, and return its rows. `worth` is the score, or the negated regret per token."""
    made = []
    answers = decoding.answer(arm, problems, seeds, temperature=temperature)
    for problem, answer in zip(problems, answers, strict=True):
        metrics = answer.metrics
        if risk == "regret":
            worth = -metrics.regret_per_token
        elif judge is not None:
            worth = _judged(judge, problem, answer.texts[-1])
        else:
            numbers = scores.score(problem, answer.texts[-1])
            worth = None if numbers is None else numbers[0]
        made.append(
            _key(arm, problem)
            | {
                "text": list(answer.texts),
                "emitted": metrics.emitted,
                "steps": metrics.steps,
                "worth": worth,
            }
        )
    return made


def _judged(judge: Judge, problem: Problem, answer: str) -> float:
    """
    >>> _judged(lambda prompt, answer: "no" in answer, Problem(task="t", id="0", turns=("?",), metric="none"), "no")
    1.0
    """
    found = judge(problem.turns[-1], answer)
    try:
        number = float(found)
    except (TypeError, ValueError):
        number = np.nan
    if not 0 <= number <= 1:
        raise MarsError(
            f"the judge gave {found!r} for problem {problem.id}: it is to give a number from 0 to 1, more for better."
        )
    return number


def check(problems: Sequence[Problem], *, risk: str, bound: float, confidence: float) -> None:
    """Raise MarsError if the problems cannot measure the risk, or are too few to certify it."""
    if not 0 < bound < 1:
        raise MarsError(f"--bound is {bound:g}: expected a number between 0 and 1.")
    if not 0 < confidence < 1:
        raise MarsError(f"--confidence is {confidence:g}: expected a number between 0 and 1.")
    metrics = {p.metric for p in problems}
    if risk == "accuracy" and metrics & {*UNJUDGED, "bleu", "pass@1"}:
        raise MarsError(
            "--risk accuracy needs a score of every answer, and these tasks have none of their own: choose --risk "
            "regret, a judge, or another task."
        )
    if risk == "accuracy":
        scores.check_metrics(problems)
    if len(problems) < (needed := fewest(bound, confidence)):
        raise MarsError(
            f"{len(problems)} problems cannot certify a bound of {bound:g} with confidence {confidence:g}, however "
            f"good their answers are: give at least {needed}, or ask for less."
        )
