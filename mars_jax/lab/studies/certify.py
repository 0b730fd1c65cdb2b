"""The statistics of calibration: the loosest threshold whose risk is below a bound with a stated confidence.

There are n problems, each with one loss per threshold. Learn then Test (Angelopoulos et al. 2110.01052) accepts a
threshold only if it rejects the hypothesis that its risk exceeds the bound. Thresholds are tested from strict to loose,
and testing stops at the first hypothesis that is not rejected, so that all tests together err with probability at most
1 - confidence (fixed-sequence testing, section 2.3 of that paper).

Conformal risk control (2208.02814) bounds only the mean over calibrations and needs a loss that grows with looseness.
Here two thresholds give two different completions, so the loss need not grow.

The test is a bet against the hypothesis (Waudby-Smith and Ramdas 2010.09686; as a bound in 2101.02703, section 3.1). It
is valid for any bounded loss and any n, and it is sharp if losses are mostly zero, as they are here. Oracle: 200
resamplings of a known population in tests/lab/evaluate/test_calibration.py.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

BET = 0.75
"""Bet size as a share of the largest bet that cannot go bankrupt. Waudby-Smith and Ramdas advise 1/2 or 3/4."""


@dataclasses.dataclass(frozen=True)
class Trial:
    """A tested value of the threshold, or of another setting of a rule."""

    value: float
    risk: float  # mean loss on the calibration problems
    p_value: float
    passed: bool
    tau: float


def p_value(losses: np.ndarray, bound: float, confidence: float) -> float:
    """Return the p-value of the hypothesis that the mean loss is above `bound`.

    It is the inverse of the largest capital of a gambler who starts with 1 and bets on each loss that the mean is below
    the bound. Under the hypothesis this capital is a supermartingale, so Ville's inequality bounds the probability that
    it grows large.

    Args:
      losses: f64[n] in [-1, 1], in an order that does not depend on them.
      bound: bound of the mean loss, in (-1, 1).
      confidence: determines the size of the bets. The p-value is valid for any confidence.

    Source: 2010.09686, section 3.2, via 2101.02703, equation 12. Raises: nothing.

    >>> p_value(np.zeros(400), 0.02, 0.95) < 0.05, p_value(np.full(400, 0.02), 0.02, 0.95)
    (True, 1.0)
    """
    # Map losses and bound from [-1, 1] to the [0, 1] of the paper.
    x, r = (np.asarray(losses, np.float64) + 1) / 2, (bound + 1) / 2
    num_losses = np.arange(1, len(x) + 1)
    # The running mean and variance of the paper, with its prior of one loss: mean 1/2, variance 1/4.
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
"""Multiples of `fewest`, keyed by the mean loss as a share of the bound. That many problems certify the bound in 19 of
20 draws, even if each completion loses all or nothing. At a bound of 0.02 and confidence 0.95: 408 problems for a mean
loss of 0.002, 816 for 0.005 and 2,448 for 0.01."""


def fewest(bound: float, confidence: float) -> int:
    """Return the number of problems that the test needs to pass if all losses are 0.

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
      bound: bound of the mean loss.
      confidence: confidence with which the bound holds, over the choice of the calibration problems.

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
