"""Choose a threshold whose risk stays below a bound, with a stated confidence.

n problems, each with one loss per threshold. Learn then Test (Angelopoulos et al. 2110.01052): a threshold is taken
only if the hypothesis that its risk exceeds the bound is rejected; thresholds are tested from the strictest to the
loosest, and testing stops at the first that is not rejected, so that all tests together err with probability 1 -
confidence at most (fixed-sequence testing, section 2.3 there). Conformal risk control (2208.02814) promises the mean
over calibrations only, and needs a loss that grows with looseness; answers under two thresholds are two texts, and
their loss need not grow. The test is a bet against the hypothesis (Waudby-Smith and Ramdas 2010.09686; as a bound in
2101.02703, section 3.1): valid for any bounded loss and any n, and sharp where losses are mostly zero, as here.
Oracle: 200 resamplings of a known population in tests/evaluate/test_calibration.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mars_jax import verify
from mars_jax.core.errors import MarsError
from mars_jax.core.rules import name_of
from mars_jax.core.types import LoadedRule
from mars_jax.evaluate.answers import Decoding
from mars_jax.evaluate.batches import RowFile
from mars_jax.evaluate.benchmark.arms import MARS, Arm, base_of
from mars_jax.evaluate.scoring import scores
from mars_jax.evaluate.tasks.problems import UNJUDGED, Problem
from mars_jax.serve.journal import Row
from mars_jax.specs import RuleChoice

RISKS = {
    "regret": "what the rule adds to the regret of a text, in nats per token, mean over texts, each clipped at 1 nat",
    "accuracy": "what the rule takes from the score of a text, from 0 to 1, mean over texts",
}
"""Risks by name. Both compare with the strict rule on the same prompt and seed."""
CLIP = 1.0
"""Nats per token at which the loss of one text is clipped: a test needs bounded losses."""
BET = 0.75
"""Of the largest bet that cannot go bankrupt; Waudby-Smith and Ramdas advise 1/2 or 3/4."""


@dataclasses.dataclass(frozen=True)
class Trial:
    """One threshold that was tested."""

    theta: float
    risk: float  # mean loss of the calibration problems
    p_value: float
    passed: bool
    tau: float


def p_value(losses: np.ndarray, bound: float, confidence: float) -> float:
    """Of the hypothesis that the mean loss is above `bound`; small speaks against it.

    One over the most that a gambler ever had who began with 1 and bet, loss by loss, on means below the bound: under
    the hypothesis that capital is a supermartingale, so Ville's inequality bounds how often it grows large.

    Args:
      losses: f64[n] in [-1, 1], in an order that does not depend on them.
      bound: in (-1, 1).
      confidence: for which the bets are sized; the p-value is valid whatever it is.

    Source: 2010.09686, section 3.2, by way of 2101.02703, equation 12. Raises: nothing.

    >>> p_value(np.zeros(400), 0.02, 0.95) < 0.05, p_value(np.full(400, 0.02), 0.02, 0.95)
    (True, 1.0)
    """
    x, r = (np.asarray(losses, np.float64) + 1) / 2, (bound + 1) / 2
    count = np.arange(1, len(x) + 1)
    mean = (0.5 + np.cumsum(x)) / (1 + count)
    variance = (0.25 + np.cumsum((x - mean) ** 2)) / (1 + count)
    # What is bet on a loss depends on those before it alone.
    before = np.concatenate([[0.25], variance[:-1]])
    bets = np.minimum(np.sqrt(2 * math.log(1 / (1 - confidence)) / (len(x) * before)), BET / (1 - r))
    capital = np.cumsum(np.log1p(-bets * (x - r)))
    return float(min(1.0, np.exp(-capital.max(initial=0.0))))


def fewest(bound: float, confidence: float) -> int:
    """Problems without which the test cannot pass, even if no loss is ever seen.

    >>> fewest(0.02, 0.95)
    204
    """
    low, high = 0, 1
    while p_value(np.zeros(high), bound, confidence) > 1 - confidence:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if p_value(np.zeros(middle), bound, confidence) > 1 - confidence:
            low = middle
        else:
            high = middle
    return high


def choose(
    thetas: Sequence[float],
    losses_at: Callable[[float], tuple[np.ndarray, float]],
    *,
    bound: float,
    confidence: float,
) -> tuple[float, list[Trial]]:
    """The loosest threshold that is certified, inf where none is, and what was tested.

    Args:
      thetas: from strict to loose, fixed beforehand.
      losses_at: theta -> (losses f64[n] in [-1, 1], tau); asked only as far as testing goes.
      bound: of the mean loss.
      confidence: with which it shall hold, over the choice of the calibration problems.

    >>> choose([0.9, 0.8], lambda theta: (np.full(500, 1 - theta - 0.1), 2.0), bound=0.05, confidence=0.95)[0]
    0.9
    """
    chosen, trials = math.inf, []
    for theta in thetas:
        losses, tau = losses_at(theta)
        p = p_value(losses, bound, confidence)
        passed = p <= 1 - confidence
        trials.append(Trial(theta, float(np.mean(losses)), p, passed, tau))
        if not passed:
            break
        chosen = theta
    return chosen, trials


def calibrate(
    decoding: Decoding,
    problems: Sequence[Problem],
    *,
    risk: str,
    bound: float,
    confidence: float,
    rule: RuleChoice = MARS,
    thetas: Sequence[float] | None = None,
    temperature: float = 0.0,
    seed: int = 0,
    run_code: bool = False,
    unconfined: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
    rows: Path | None = None,
) -> dict[str, Any]:
    """Decode held-out problems under looser and looser thresholds, as long as the risk is certified.

    Args:
      decoding: the pair, and how its answers are made.
      problems: held out, and of the kind that the threshold is for: the promise is about problems drawn as these are.
      risk: one of `RISKS`.
      bound: of the risk, in nats per token or as a share.
      confidence: with which the bound shall hold.
      rule: whose theta is calibrated, with its other settings.
      thetas: from strict to loose; default: those of its row in `specs.RULES`.
      temperature, seed: problem i draws with seed + i under every rule.
      run_code, unconfined: as for `scores.score`.
      progress: `(what, done, of)`, called after every batch.
      rows: file to keep what was decoded in, where a run with the same arguments that was killed goes on.

    Returns:
      `theta`, inf where nothing is certified, `tau` there and of the strict rule, and `trials`.

    Raises:
      MarsError: a risk that the problems cannot measure.
    """
    thetas = list(grid(rule) if thetas is None else thetas)
    check(problems, risk=risk, bound=bound, confidence=confidence, run_code=run_code, unconfined=unconfined)
    rules = [
        verify.load(rule.spec, decoding.session.target, **{**rule.settings, "theta": theta})
        for theta in thetas
    ]
    strict = base_of(rules[0])

    with contextlib.ExitStack() as stack:
        if rows is None:  # then they are kept as long as this takes
            rows = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "rows.jsonl"
        file = RowFile(rows)
        stack.callback(file.close)

        def decode(rule: LoadedRule, name: str) -> list[Row]:
            arm = Arm(name=name, rule=rule, drafts=True, meaning="")
            found, size = [], decoding.session.batch_size
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
                    run_code=run_code,
                    unconfined=unconfined,
                )
                found += file.batch([_key(arm, problem) for problem in group], make)
                if progress is not None:
                    progress(f"{name}, tau {_tau(found):.2f}", len(found), len(problems))
            return found

        alone = decode(strict, name_of(strict.rule))

        def losses_at(theta: float) -> tuple[np.ndarray, float]:
            found = decode(rules[thetas.index(theta)], f"theta={theta:g}")
            pairs = [(a["worth"], b["worth"]) for a, b in zip(alone, found, strict=True)]
            lost = np.asarray([before - after for before, after in pairs if None not in (before, after)])
            return np.clip(lost / CLIP, -1, 1), _tau(found)

        theta, trials = choose(thetas, losses_at, bound=bound / CLIP, confidence=confidence)
    return {
        "theta": theta,
        "tau": next((t.tau for t in trials if t.theta == theta), _tau(alone)),
        "strict_tau": _tau(alone),
        "trials": [dataclasses.asdict(t) for t in trials],
    }


def grid(rule: RuleChoice) -> tuple[float, ...]:
    """Thresholds worth trying, from strict to loose. Chosen before anything is seen, as the test asks.

    Raises:
      MarsError: a rule without a threshold, or of the user's, who knows what its thresholds are.

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
    run_code: bool,
    unconfined: bool,
) -> list[Row]:
    """A batch of answers and what each is worth: the score, or the regret per token, with its sign turned."""
    made = []
    answers = decoding.answer(arm, problems, seeds, temperature=temperature)
    for problem, answer in zip(problems, answers, strict=True):
        if risk == "regret":
            worth = -answer.metrics.regret_per_token
        else:
            numbers = scores.score(problem, answer.texts[-1], run_code=run_code, unconfined=unconfined)
            worth = None if numbers is None else numbers[0]
        made.append(
            _key(arm, problem)
            | {
                "text": list(answer.texts),
                "emitted": answer.metrics.emitted,
                "steps": answer.metrics.steps,
                "worth": worth,
            }
        )
    return made


def check(
    problems: Sequence[Problem],
    *,
    risk: str,
    bound: float,
    confidence: float,
    run_code: bool,
    unconfined: bool = False,
) -> None:
    """Raise MarsError where the problems cannot measure the risk, or are too few to certify it."""
    if not 0 < bound < 1:
        raise MarsError(f"--bound is {bound:g}: expected a number between 0 and 1.")
    if not 0 < confidence < 1:
        raise MarsError(f"--confidence is {confidence:g}: expected a number between 0 and 1.")
    metrics = {p.metric for p in problems}
    if risk == "accuracy" and metrics & {*UNJUDGED, "bleu"}:
        raise MarsError(
            "--risk accuracy needs a score of every answer, and these tasks have none of their own: choose --risk "
            "regret, or another task."
        )
    if risk == "accuracy" and "pass@1" in metrics and not run_code:
        raise MarsError("--risk accuracy on programs must run them: add --allow-code-execution.")
    if risk == "accuracy" or run_code or unconfined:
        scores.check_metrics(problems, run_code=run_code, unconfined=unconfined)
    if len(problems) < (needed := fewest(bound, confidence)):
        raise MarsError(
            f"{len(problems)} problems cannot certify a bound of {bound:g} with confidence {confidence:g}, however "
            f"good their answers are: give at least {needed}, or ask for less."
        )
