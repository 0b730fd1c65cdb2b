"""Calibration of a threshold or a strict prefix, so that the risk stays below a bound with a given confidence.

The risk of a rule is measured relative to the strict rule, on the same prompts and seeds. There are n problems, each
with one loss per threshold. Learn then Test (Angelopoulos et al. 2110.01052) accepts a threshold only if it rejects the
hypothesis that the risk exceeds the bound. Thresholds are tested from strict to loose, and testing stops at the first
hypothesis that is not rejected. The probability that any hypothesis is wrongly rejected is therefore at most 1 -
confidence (fixed-sequence testing, section 2.3 of that paper).

Conformal risk control (2208.02814) bounds the risk only on average over calibration sets, and it needs a loss that
grows as the threshold becomes looser. Here the completions differ between thresholds, so a looser threshold can have a
lower loss.

The test bets against the hypothesis (Waudby-Smith and Ramdas 2010.09686; stated as a bound in 2101.02703, section 3.1).
It is valid for any bounded loss and any n, and it is tight if most losses are zero, as they are here. Tested against
200 resamplings of a known population in tests/lab/evaluate/test_calibration.py.
"""

from __future__ import annotations

import argparse
import bisect
import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

from mars_jax import verify
from mars_jax.cli.progress import Show
from mars_jax.core.rule import LoadedRule
from mars_jax.lab.evaluate import scoring
from mars_jax.lab.evaluate.answers import Answer, Decoding
from mars_jax.lab.evaluate.benchmark.arms import Arm, base_of
from mars_jax.lab.evaluate.benchmark.rows import Recorder, by_task, scored, turns_of
from mars_jax.lab.evaluate.figures import tau_of
from mars_jax.lab.evaluate.tasks.problems import UNJUDGED, Problem
from mars_jax.serve.rows import Row, RowFile
from mars_jax.utils.errors import MarsError
from mars_jax.utils.types import JsonObject

RISKS = {
    "regret": "mean increase in a completion's regret due to the rule, in nats per token, each clipped at 1 nat",
    "accuracy": "mean decrease in a completion's score, from 0 to 1, due to the rule",
    "judge": "mean decrease in a judge's score of a completion, from 0 to 1, due to the rule",
}
"""Risks, keyed by name. All of them compare a rule with the strict rule on the same prompt and seed."""
Judge = Callable[[str, str], float]
"""`(prompt, answer) -> score` from 0 to 1; higher is better."""
CLIP = 1.0
"""Clip value of a completion's loss, in nats per token: the test needs bounded losses."""
BET = 0.75
"""Bet size as a share of the largest bet that cannot lead to bankruptcy. Waudby-Smith and Ramdas advise 1/2 or 3/4."""


def calibrate(
    args: argparse.Namespace,
    decoding: Decoding,
    problems: Sequence[Problem],
    file: RowFile,
    *,
    judge: Judge | None,
    progress: Show,
) -> JsonObject:
    """Decode held-out problems with successively looser values of a setting, until a value cannot be certified.

    Args:
      args: parsed flags of `mars-jax calibrate`. `setting` is "theta" or "exact_prefix", the number of leading tokens
        that are verified strictly. `values` are its values to test, from strict to loose, fixed in advance.
      decoding: the pair of models, and how prompts are decoded.
      problems: held-out problems. The bound holds for problems from the same distribution. Problem i is sampled
        with seed `args.seed` + i under every rule.
      file: stores the rows, so that a killed run can be continued with the same arguments.
      judge: scores the answers if the risk is "judge", and is None otherwise.
      progress: called with `(done, total, text)` after every group of problems.

    Returns:
      A dict with `value`, the loosest certified value, or inf if there is none; `tau` at that value; `strict_tau`, the
      tau of the strict rule; and `trials`.
    """
    rule_by_value = {
        value: verify.load(
            args.rule.spec, decoding.session.target, **{**args.rule.settings, args.setting: value}
        )
        for value in args.values
    }
    strict_rule = base_of(rule_by_value[args.values[0]])
    seeds = {(problem.task, problem.id): (args.seed + i) % 2**32 for i, problem in enumerate(problems)}

    def worth(_: Decoding, group: Sequence[Problem], answers: Sequence[Answer]) -> list[list[float] | None]:
        """Return the value of each answer: the negated regret per token, or the score. Higher is better."""
        if args.risk == "regret":
            return [[-answer.metrics.regret_per_token] for answer in answers]
        if judge is None:
            return scored(decoding, group, answers)
        return [[judged(judge, p, answer.texts[-1])] for p, answer in zip(group, answers, strict=True)]

    def decode(loaded_rule: LoadedRule, name: str) -> list[Row]:
        # Decode the same problems with the same seeds under every rule, so that the losses are paired.
        arm = Arm(name=name, loaded_rule=loaded_rule, drafts=True, meaning="")
        recorder = Recorder(file, progress, turns_of(problems, decoding.chat), seeds, score=worth)
        rows: list[Row] = []
        for group in by_task(problems).values():
            rows += recorder.decode(group, args.temperature, [(arm, decoding, None)])[name, None]
        return rows

    strict_rows = decode(strict_rule, strict_rule.rule.name)

    def losses_at(value: float) -> tuple[np.ndarray, float]:
        rows = decode(rule_by_value[value], f"{args.setting}={value:g}")
        # The loss on a problem is the score of the strict rule's answer minus that of the tested rule's answer.
        losses = [
            strict_row["score"][0] - row["score"][0]
            for strict_row, row in zip(strict_rows, rows, strict=True)
            if strict_row["score"] is not None and row["score"] is not None
        ]
        # Scale the losses to the range of the test; the bound is scaled in the same way below.
        return np.clip(np.asarray(losses) / CLIP, -1, 1), tau_of(rows)

    loosest, trials = choose_threshold(
        args.values, losses_at, bound=args.bound / CLIP, confidence=args.confidence
    )
    return {
        "value": loosest,
        "tau": next((t.tau for t in trials if t.value == loosest), tau_of(strict_rows)),
        "strict_tau": tau_of(strict_rows),
        "trials": [dataclasses.asdict(t) for t in trials],
    }


def judged(judge: Judge, problem: Problem, answer: str) -> float:
    """Return a judge's score for an answer.

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


def check_certifiable(args: argparse.Namespace, problems: Sequence[Problem]) -> None:
    """Raise MarsError if the risk cannot be measured on the problems, or if there are too few to certify it."""
    risk, bound, confidence = args.risk, args.bound, args.confidence
    metrics = {p.metric for p in problems}
    if risk == "accuracy" and metrics & {*UNJUDGED, "bleu", "pass@1"}:
        raise MarsError(
            "--risk accuracy needs a score of every answer, and these tasks have none of their own: choose --risk "
            "regret, a judge, or another task."
        )
    if risk == "accuracy":
        scoring.check_metric_packages(problems)
    if len(problems) < (needed_problems := fewest(bound, confidence)):
        raise MarsError(
            f"{len(problems)} problems cannot certify a bound of {bound:g} with confidence {confidence:g}, however "
            f"good their answers are: give {FACTORS[0.1] * needed_problems} or more, or ask for less."
        )


@dataclasses.dataclass(frozen=True)
class Trial:
    """Result of testing one value of the threshold or of another setting of a rule."""

    value: float
    risk: float  # mean loss on the calibration problems
    p_value: float
    passed: bool
    tau: float


def p_value(losses: np.ndarray, bound: float, confidence: float) -> float:
    """Return the p-value of the hypothesis that the mean loss is above `bound`.

    A gambler starts with a capital of 1 and bets, before each loss is revealed, that the mean is below the bound. The
    p-value is the reciprocal of the largest capital reached. Under the hypothesis, the capital is a
    supermartingale, so Ville's inequality bounds the probability that it grows large.

    Args:
      losses: f64[n] in [-1, 1], in an order that does not depend on their values.
      bound: bound on the mean loss, in (-1, 1).
      confidence: determines the size of the bets. The p-value is valid for any confidence.

    Source: 2010.09686, section 3.2, as given in 2101.02703, equation 12.

    >>> p_value(np.zeros(400), 0.02, 0.95) < 0.05, p_value(np.full(400, 0.02), 0.02, 0.95)
    (True, 1.0)
    """
    # Map the losses and the bound from [-1, 1] to the paper's range [0, 1].
    x, r = (np.asarray(losses, np.float64) + 1) / 2, (bound + 1) / 2
    num_losses = np.arange(1, len(x) + 1)
    # The paper's running mean and variance. The prior counts as one loss, with mean 1/2 and variance 1/4.
    running_mean = (0.5 + np.cumsum(x)) / (1 + num_losses)
    running_variance = (0.25 + np.cumsum((x - running_mean) ** 2)) / (1 + num_losses)
    # Each bet depends only on earlier losses, so the capital is a supermartingale.
    earlier_variance = np.concatenate([[0.25], running_variance[:-1]])
    bets = np.sqrt(2 * math.log(1 / (1 - confidence)) / (len(x) * earlier_variance))
    bets = np.minimum(bets, BET / (1 - r))
    # Logarithm of the capital after each loss.
    log_capital = np.cumsum(np.log1p(-bets * (x - r)))
    return float(min(1.0, np.exp(-log_capital.max(initial=0.0))))


FACTORS = {0.1: 2, 0.25: 4, 0.5: 12}
"""Factors by which to multiply `fewest`, keyed by the mean loss as a share of the bound. With that many problems, 19 of
20 random samples certify the bound, even if each loss is either 0 or the maximum. With a bound of 0.02 and confidence
0.95, this is 408 problems for a mean loss of 0.002, 816 for 0.005 and 2,448 for 0.01."""


def fewest(bound: float, confidence: float) -> int:
    """Return the smallest number of problems with which the test passes if all losses are 0.

    >>> fewest(0.02, 0.95)
    204
    """

    def passes(count: int) -> bool:
        return p_value(np.zeros(count), bound, confidence) <= 1 - confidence

    upper_count = 1
    while not passes(upper_count):
        upper_count *= 2
    return 1 + bisect.bisect_left(range(1, upper_count), True, lo=upper_count // 2, key=passes)


def choose_threshold(
    thetas: Sequence[float],
    losses_at: Callable[[float], tuple[np.ndarray, float]],
    *,
    bound: float,
    confidence: float,
) -> tuple[float, list[Trial]]:
    """Return the loosest certified threshold, or inf if there is none, and the trials.

    Args:
      thetas: thresholds from strict to loose, fixed in advance.
      losses_at: theta -> (losses f64[n] in [-1, 1], tau). It is not called after the first threshold that fails.
      bound: bound on the mean loss.
      confidence: probability that the bound holds, over the choice of the calibration problems.

    >>> choose_threshold([0.9, 0.8], lambda theta: (np.full(500, 1 - theta - 0.1), 2.0), bound=0.05, confidence=0.95)[0]
    0.9
    """
    loosest, trials = math.inf, []
    for theta in thetas:
        losses, tau = losses_at(theta)
        p = p_value(losses, bound, confidence)
        passed = p <= 1 - confidence
        trials.append(Trial(theta, float(np.mean(losses)), p, passed, tau))
        if not passed:
            break
        loosest = theta
    return loosest, trials
