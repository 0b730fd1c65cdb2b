"""Statistics of the rows that eval_rules.py wrote: metrics of every arm with intervals, and comparisons at equal tau.
Dimensions: n prompts, R resamples. Intervals are 95% bootstrap intervals over prompts; compared arms are resampled
together.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

RESAMPLES = 4000
TASKS = ("stories", "arithmetic")
Rows = Sequence[Mapping[str, Any]]
Key = tuple[str, float, str, str]


class Sums(NamedTuple):
    """Totals for each prompt of an arm. Every field is f64[n]."""

    steps: np.ndarray
    emitted: np.ndarray
    score: np.ndarray  # summed log-likelihood, or 1 for a correct answer
    score_count: np.ndarray  # number of tokens in the log-likelihood, or 1
    relaxed: np.ndarray
    accepted: np.ndarray
    regret: np.ndarray
    overshoot: np.ndarray  # sum of log q - log p over accepted tokens
    overshoot_count: np.ndarray
    loops: np.ndarray

    def first(self, n: int) -> Sums:
        """Return the sums of the first n prompts."""
        return Sums(*(column[:n] for column in self))


def key_of(row: Mapping[str, Any]) -> Key:
    """Return the key of a row's arm: its task, temperature, draft and name."""
    return row["task"], row["temperature"], row["draft"], row["arm"]


def sums(rows: Rows) -> Sums:
    """Sum the rows of one arm, in the order of its prompts.

    Prompts of different arms are paired by position, so a missing prompt would misalign all prompts after it.
    """
    rows = sorted(rows, key=lambda row: row["id"])
    if [row["id"] for row in rows] != list(range(len(rows))):
        raise SystemExit(
            f"an arm lacks prompts, or has one twice: {[row['id'] for row in rows]}; decode it again"
        )

    def column(value: Any) -> np.ndarray:
        return np.asarray([value(row) for row in rows], np.float64)

    return Sums(
        steps=column(lambda r: r["steps"]),
        emitted=column(lambda r: r["emitted"]),
        score=column(lambda r: r["score"][0]),
        score_count=column(lambda r: r["score"][1] if len(r["score"]) > 1 else 1.0),
        relaxed=column(lambda r: r["relaxed"]),
        accepted=column(lambda r: r["accepted"]),
        regret=column(lambda r: r["regret"]),
        overshoot=column(lambda r: r["overshoot"][0]),
        overshoot_count=column(lambda r: r["overshoot"][1]),
        loops=column(lambda r: r["loops"]),
    )


def weights(n: int) -> np.ndarray:
    """Return how often each prompt occurs in each resample, f64[R + 1, n]. Row 0 is the original sample."""
    drawn = np.random.default_rng(0).multinomial(n, np.full(n, 1 / n), size=RESAMPLES)
    return np.concatenate([np.ones((1, n)), drawn]).astype(np.float64)


def tau_of(arm: Sums, w: np.ndarray) -> np.ndarray:
    """Return the tau of an arm, f64[R + 1]."""
    return (w @ arm.emitted) / (w @ arm.steps)


def score_of(arm: Sums, w: np.ndarray) -> np.ndarray:
    """Return the score of an arm, f64[R + 1]: nats per token, or the share of correct answers."""
    return (w @ arm.score) / (w @ arm.score_count)


def spread(values: np.ndarray) -> list[float] | None:
    """Return [value, low, high], the value of the original sample and its interval.

    `values` begins with the value of the original sample, followed by those of the resamples. Return None if the first
    value is NaN, or if more than a tenth of all values are NaN.
    """
    good = values[~np.isnan(values)]
    if np.isnan(values[0]) or len(good) < 0.9 * len(values):
        return None
    low, high = np.quantile(good[1:], [0.025, 0.975])
    return [float(values[0]), float(low), float(high)]


def share(top: np.ndarray, bottom: np.ndarray) -> float:
    return float(top.sum() / max(bottom.sum(), 1e-9))


def at_tau(curve: Sequence[Sums], w: np.ndarray, tau: np.ndarray) -> np.ndarray:
    """Interpolate the score f64[R + 1] of a curve at tau f64[R + 1]; NaN outside the curve's range."""
    taus = np.stack([tau_of(arm, w) for arm in curve])
    values = np.stack([score_of(arm, w) for arm in curve])
    scores = np.full(tau.shape, np.nan)
    for i, row_tau in enumerate(tau):
        order = np.argsort(taus[:, i])
        if taus[order[0], i] <= row_tau <= taus[order[-1], i]:
            scores[i] = np.interp(row_tau, taus[order, i], values[order, i])
    return scores


def figures(arm: Sums, undrafted: Sums, strict: Sums | None, curve: Sequence[Sums]) -> dict[str, Any]:
    """Compare an arm with three others: no draft, the strict rule with the same draft, and `mars` at equal tau."""
    n = len(arm.steps)
    w = weights(n)
    tau, score = tau_of(arm, w), score_of(arm, w)
    row: dict[str, Any] = {
        "prompts": n,
        "tau": spread(tau),
        "calls_per_token": spread(1 / tau),
        "score": spread(score),
        "less_alone": spread(score - score_of(undrafted.first(n), w)),
        "relaxed_share": share(arm.relaxed, arm.accepted),
        "regret": share(arm.regret, arm.emitted),
        "overshoot": share(arm.overshoot, arm.overshoot_count) if arm.overshoot_count.sum() else None,
        "loop_rate": float(arm.loops.mean()),
        "tokens": float(arm.emitted.mean()),
    }
    if strict is not None:
        first = strict.first(n)
        row["tau_gain"] = spread(tau / tau_of(first, w) - 1)
        row["less_strict"] = spread(score - score_of(first, w))
    if curve:
        n = min(n, *(len(a.steps) for a in curve))
        w, same = weights(n), arm.first(n)
        at_equal_tau = at_tau([a.first(n) for a in curve], w, tau_of(same, w))
        row["less_mars_at_tau"] = spread(score_of(same, w) - at_equal_tau)
    return row


def paired(ratio: Sequence[Sums], gap: Sequence[Sums], default: int) -> dict[str, Any]:
    """Return the differences in score, at equal tau, between `mars` with the ratio margin and with the gap margin.

    One difference is at the tau of the ratio's default theta; the other is a mean over the range of tau that both
    sweeps cover.

    Args:
      ratio, gap: the arms of the two sweeps, each beginning with the strict arm.
      default: index of the ratio's default theta in its sweep.
    """
    n = min(len(arm.steps) for arm in (*ratio, *gap))
    ratio, gap = ([arm.first(n) for arm in curve] for curve in (ratio, gap))
    w = weights(n)
    tau = tau_of(ratio[default], w)
    top = np.minimum(*(np.max([tau_of(arm, w) for arm in curve], axis=0) for curve in (ratio, gap)))
    low = tau_of(ratio[0], w)
    differences = [
        at_tau(ratio, w, low + share * (top - low)) - at_tau(gap, w, low + share * (top - low))
        for share in np.linspace(0.1, 0.95, 10)
    ]
    return {
        "prompts": n,
        "tau": spread(tau),
        "at_default": spread(score_of(ratio[default], w) - at_tau(gap, w, tau)),
        "over_sweep": spread(np.mean(differences, axis=0)),
        "range": [float(low[0]), float(top[0])],
    }


def report(rows: Rows, arms: Mapping[str, Mapping[float, Sequence[Any]]]) -> dict[str, Any]:
    """Return the tables of all arms, and their comparisons.

    Args:
      rows: rows of the file that `eval_rules decode` wrote.
      arms: results of `eval_rules.arms`, keyed by draft and temperature.
    """
    grouped: dict[Key, list[Mapping[str, Any]]] = {}
    for row in rows:
        grouped.setdefault(key_of(row), []).append(row)
    by_arm: dict[Key, Sums] = {}
    for task, draft, temperature in itertools.product(TASKS, arms, (0.0, 1.0)):
        for arm in arms[draft][temperature]:
            key = (task, temperature, draft, arm.name)
            if key in grouped:
                by_arm[key] = sums(grouped[key]).first(arm.prompts)
    tables, comparisons = [], []
    for task, temperature, draft in itertools.product(TASKS, (0.0, 1.0), arms):
        place = {"task": task, "temperature": temperature, "draft": draft}
        by_name = {key[-1]: row for key, row in by_arm.items() if key[:-1] == (task, temperature, draft)}
        measured = [arm for arm in arms[draft][temperature] if arm.name in by_name]
        if not measured:
            continue
        families: dict[str, list[Sums]] = {}
        for arm in measured:
            families.setdefault(arm.family, []).append(by_name[arm.name])
        exact = families.get("exact", [])
        ratio = [*exact, *families.get("mars (ratio)", [])]
        gap = [*exact, *families.get("mars (gap)", [])]
        table = []
        for arm in measured:
            strict = by_name.get(arm.base) if arm.name != arm.base else None
            curve = ratio if len(ratio) > 2 and arm.family != "mars (ratio)" else []
            row = figures(by_name[arm.name], by_arm[task, temperature, "none", "target alone"], strict, curve)
            table.append({"family": arm.family, "arm": arm.name} | row)
        tables.append(place | {"arms": table})
        if min(len(ratio), len(gap)) > 3:
            comparisons.append(place | paired(ratio, gap, 2))
    return {"tables": tables, "ratio_less_gap": comparisons}
