"""Calibration of a threshold, or a strict prefix, whose risk stays below a bound with a stated confidence.

The risk compares a rule with the strict rule on the same prompts and seeds. The statistical test is in
`studies.certify`. Oracle: 200 resamplings of a known population in tests/lab/evaluate/test_calibration.py.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np

from mars_jax import verify
from mars_jax.cli.progress import Show
from mars_jax.core.rule import LoadedRule
from mars_jax.lab.evaluate.answers import Answer, Decoding
from mars_jax.lab.evaluate.benchmark.arms import Arm, base_of
from mars_jax.lab.evaluate.figures import tau_of
from mars_jax.lab.evaluate.scoring import scores
from mars_jax.lab.evaluate.tasks.problems import UNJUDGED, Problem
from mars_jax.lab.studies.certify import FACTORS, choose_threshold, fewest
from mars_jax.serve.rows import Row, RowFile
from mars_jax.utils.errors import MarsError
from mars_jax.utils.types import JsonObject
from mars_jax.verify import RuleChoice

RISKS = {
    "regret": "increase of a text's regret due to the rule, in nats per token, mean over texts, each clipped at 1 nat",
    "accuracy": "decrease of a text's score due to the rule, from 0 to 1, mean over texts",
    "judge": "decrease of a judge's number for a text due to the rule, from 0 to 1, mean over texts",
}
"""Risks, keyed by name. All of them compare a rule with the strict rule on the same prompt and seed."""
Judge = Callable[[str, str], float]
"""`(prompt, answer) -> score` from 0 to 1; higher is better."""
CLIP = 1.0
"""Clip value of a completion's loss, in nats per token: the test needs bounded losses."""


def calibrate(
    decoding: Decoding,
    problems: Sequence[Problem],
    rows: RowFile,
    *,
    risk: str,
    bound: float,
    confidence: float,
    rule: RuleChoice,
    setting: str,
    values: Sequence[float],
    judge: Judge | None,
    temperature: float,
    seed: int,
    progress: Show,
) -> JsonObject:
    """Decode held-out problems with successively looser settings, as long as the risk is certified.

    Args:
      decoding: the pair of models and the settings of its answers.
      problems: held-out problems. The bound holds for problems from the same distribution.
      rows: file that stores the rows, so that a run with the same arguments can continue after a kill.
      risk: one of `RISKS`.
      bound: bound of the risk, in nats per token or as a share.
      confidence: confidence with which the bound holds.
      rule: the rule to calibrate, with its other settings.
      setting: "theta", or "exact_prefix", the number of strict first tokens.
      values: values of the setting from strict to loose, fixed in advance.
      judge: the judge, for the risk "judge".
      temperature, seed: problem i draws with seed + i under every rule.
      progress: `(done, total, text)`, called after every batch.

    Returns:
      `value`, the loosest certified value, or inf if there is none; its `tau`, the `strict_tau`, and `trials`.
    """
    rule_by_value = {
        value: verify.load(rule.spec, decoding.session.target, **{**rule.settings, setting: value})
        for value in values
    }
    strict_rule = base_of(rule_by_value[values[0]])

    def worth(problem: Problem, answer: Answer) -> float | None:
        """Return the negated regret per token, or the score. Higher is better."""
        if risk == "regret":
            return -answer.metrics.regret_per_token
        if judge is not None:
            return judged(judge, problem, answer.texts[-1])
        value, *_ = scores.score_answer(problem, answer.texts[-1]) or (None,)
        return value

    def decode(loaded_rule: LoadedRule, name: str) -> list[Row]:
        # Every rule decodes the same problems with the same seeds, so losses are paired.
        arm = Arm(name=name, loaded_rule=loaded_rule, drafts=True, meaning="")

        def make(group: Sequence[Problem], seeds: Sequence[int]) -> list[Row]:
            answers = decoding.answer(arm, group, seeds, temperature=temperature)
            return [
                key(problem)
                | {
                    "text": list(answer.texts),
                    "emitted": answer.metrics.emitted,
                    "steps": answer.metrics.steps,
                    "worth": worth(problem, answer),
                }
                for problem, answer in zip(group, answers, strict=True)
            ]

        def key(problem: Problem) -> Row:
            return {"rule": name, "task": problem.task, "id": problem.id}

        decoded_rows: list[Row] = []
        for first in range(0, len(problems), decoding.group):
            group = problems[first : first + decoding.group]
            seeds = [(seed + first + i) % 2**32 for i in range(len(group))]
            decoded_rows += rows.batch([key(p) for p in group], functools.partial(make, group, seeds))
            progress(len(decoded_rows), len(problems), f"{name}, tau {tau_of(decoded_rows):.2f}")
        return decoded_rows

    strict_rows = decode(strict_rule, strict_rule.rule.name)

    def losses_at(value: float) -> tuple[np.ndarray, float]:
        decoded_rows = decode(rule_by_value[value], f"{setting}={value:g}")
        # A problem's loss is the worth of the strict rule's answer minus that of the tested rule's.
        losses = [
            strict_row["worth"] - row["worth"]
            for strict_row, row in zip(strict_rows, decoded_rows, strict=True)
            if strict_row["worth"] is not None and row["worth"] is not None
        ]
        # Scale the losses to the range of the test; the bound is scaled in the same way below.
        return np.clip(np.asarray(losses) / CLIP, -1, 1), tau_of(decoded_rows)

    loosest, trials = choose_threshold(values, losses_at, bound=bound / CLIP, confidence=confidence)
    return {
        "value": loosest,
        "tau": next((t.tau for t in trials if t.value == loosest), tau_of(strict_rows)),
        "strict_tau": tau_of(strict_rows),
        "trials": [dataclasses.asdict(t) for t in trials],
    }


def judged(judge: Judge, problem: Problem, answer: str) -> float:
    """Return a judge's score of an answer.

    Raises:
      MarsError: the result is not a number from 0 to 1.

    >>> judged(lambda prompt, answer: "no" in answer, Problem(task="t", id="0", turns=("?",), metric="none"), "no")
    1.0
    """
    judgement = judge(problem.turns[-1], answer)
    try:
        number = float(judgement)
    except (TypeError, ValueError):
        number = np.nan
    if not 0 <= number <= 1:
        raise MarsError(
            f"the judge gave {judgement!r} for problem {problem.id}: expected a number from 0 to 1, higher for better."
        )
    return number


def check_certifiable(problems: Sequence[Problem], *, risk: str, bound: float, confidence: float) -> None:
    """Raise MarsError if the problems cannot measure the risk, or are too few to certify it."""
    metrics = {p.metric for p in problems}
    if risk == "accuracy" and metrics & {*UNJUDGED, "bleu", "pass@1"}:
        raise MarsError(
            "--risk accuracy needs a score of every answer, and these tasks have none of their own: choose --risk "
            "regret, a judge, or another task."
        )
    if risk == "accuracy":
        scores.check_metrics(problems)
    if len(problems) < (needed_problems := fewest(bound, confidence)):
        raise MarsError(
            f"{len(problems)} problems cannot certify a bound of {bound:g} with confidence {confidence:g}, however "
            f"good their answers are: give {FACTORS[0.1] * needed_problems} or more, or ask for less."
        )
