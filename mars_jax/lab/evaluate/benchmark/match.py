"""Find the threshold at which another margin accepts as much: quality is then compared at equal speed.

Oracle: functions whose crossing is known, in tests/lab/evaluate/test_match.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from mars_jax.core.errors import MarsError

PROBLEMS = 16
"""The first problems of a task, on which a threshold is matched."""
STEPS = 10
CLOSE = 0.005  # of tau, relative


class Match(NamedTuple):
    """A threshold, the tau measured with it, and the tau that it was to have, all on the problems of the match."""

    theta: float
    tau: float
    wanted: float


def threshold(margin: str, looseness: float) -> float:
    """The threshold of a margin at a looseness above 0, which is the gap in nats; the ratio of logits is strict at 0.

    >>> threshold("gap", 1.5), threshold("ratio", 0.25)
    (1.5, 0.8)
    """
    if margin not in ("gap", "ratio"):
        raise MarsError(f"there is no scale for the margin {margin!r}: expected gap or ratio.")
    return looseness if margin == "gap" else 1 / (1 + looseness)


def match(tau_at: Callable[[float], float], wanted: float, margin: str, *, steps: int = STEPS) -> Match:
    """Bisect the looseness of a margin until its tau is near `wanted`; the nearest one seen is what counts.

    Tau grows with looseness but for noise, since another threshold also leads to other texts.

    Args:
      tau_at: threshold -> tau, measured on some problems.
      wanted: the tau to meet.
      margin: "gap" or "ratio".
      steps: measurements at most.

    >>> found = match(lambda theta: 2 + theta, 3.0, "gap")
    >>> round(found.theta, 1), found.wanted
    (1.0, 3.0)
    """
    low, high = 0.0, None
    looseness = 1.0 if margin == "gap" else 0.1
    best = None
    for _ in range(steps):
        # Rounded, since more digits would be of no use.
        theta = float(f"{threshold(margin, looseness):.4g}")
        tau = tau_at(theta)
        if best is None or abs(tau - wanted) < abs(best.tau - wanted):
            best = Match(theta, tau, wanted)
        if abs(best.tau - wanted) <= CLOSE * wanted:
            break
        if tau < wanted:
            low = looseness
        else:
            high = looseness
        looseness = 2 * low if high is None else (low + high) / 2
    assert best is not None
    return best
