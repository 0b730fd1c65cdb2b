"""Branches by distance: curves with intervals, and how relaxed tokens follow each other.

n events, H distances. Oracle: texts made by hand, in tests/lab/evaluate/test_compounding.py.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

import numpy as np

from mars_jax.lab.studies.branches import Decoded, Event

RESAMPLES = 2000


def aligned(strict: Sequence[int], ours: Sequence[int]) -> np.ndarray:
    """bool[len(ours)]: tokens that the strict continuation has too, in the same order, if not in the same place.

    >>> aligned([1, 2, 3, 4], [9, 1, 2, 4]).tolist()
    [False, True, True, True]
    """
    found = np.zeros(len(ours), bool)
    for block in difflib.SequenceMatcher(None, strict, ours, autojunk=False).get_matching_blocks():
        found[block.b : block.b + block.size] = True
    return found


def curves(events: Sequence[Event], horizon: int, *, seed: int = 0) -> dict[str, Any]:
    """Curves over the events by distance, 1 being the first token after the one that differs.

    Returns:
      `same_place`, `same_order` and `surprise`: mean, low and high (95%, bootstrap over problems) at each distance.
      Distances past the end of both continuations are left out; surprise is -log p under the target in nats, ours
      less the strict one's. `grows` has the change of each between the first and the last third of the distances,
      and `score` the score that the token costs, where there is one.
    """
    names = ("same_place", "same_order", "surprise")
    values = {name: np.full((len(events), horizon), np.nan) for name in names}
    for row, event in enumerate(events):
        ours, strict = event.ours[1:], event.strict[1:]
        order = aligned(strict, ours)
        for d in range(horizon):
            here, there = d < len(ours), d < len(strict)
            if not here and not there:
                continue
            values["same_place"][row, d] = here and there and ours[d] == strict[d]
            if here:
                values["same_order"][row, d] = order[d]
            if here and there:
                values["surprise"][row, d] = event.strict_log_p[d + 1] - event.our_log_p[d + 1]
    groups = np.asarray([event.problem for event in events])
    third = max(1, horizon // 3)
    report: dict[str, Any] = {"events": len(events), "problems": len(set(groups.tolist()))}
    for name in names:
        report[name] = interval(values[name], groups, seed=seed)
    report["grows"] = {
        name: interval(
            (_mean(values[name][:, -third:]) - _mean(values[name][:, :third]))[:, None], groups, seed=seed
        )
        for name in names
    }
    scored = [e for e in events if e.our_score is not None and e.strict_score is not None]
    report["score"] = None
    if scored:
        lost = np.asarray([[e.strict_score - e.our_score] for e in scored])  # pyright: ignore
        report["score"] = interval(lost, np.asarray([e.problem for e in scored]), seed=seed) | {
            "strict": float(np.mean([e.strict_score for e in scored])),  # pyright: ignore
            "changed": float(np.mean([e.strict_score != e.our_score for e in scored])),
        }
    return report


def _mean(values: np.ndarray) -> np.ndarray:
    """f64[n, k] -> f64[n], NaN where a row has none."""
    count = np.sum(~np.isnan(values), axis=1)
    return np.where(count > 0, np.nansum(values, axis=1) / np.maximum(count, 1), np.nan)


def interval(values: np.ndarray, groups: np.ndarray, *, seed: int = 0) -> dict[str, list[float | None]]:
    """Mean and 95% interval of each column of f64[n, k], NaN left out, by the bootstrap over groups i[n]."""
    _, index = np.unique(groups, return_inverse=True)
    count = int(index.max(initial=-1)) + 1
    known = ~np.isnan(values)
    sums, sizes = np.zeros((count, values.shape[1])), np.zeros((count, values.shape[1]))
    np.add.at(sums, index, np.where(known, values, 0.0))
    np.add.at(sizes, index, known)
    weights = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), size=RESAMPLES)
    with np.errstate(divide="ignore", invalid="ignore"):
        means = (weights @ sums) / (weights @ sizes)
        mean = sums.sum(axis=0) / sizes.sum(axis=0)
    found = {"mean": mean.tolist(), "low": [], "high": []}
    for column in means.T:
        finite = column[np.isfinite(column)]
        low, high = np.quantile(finite, [0.025, 0.975]) if len(finite) else (np.nan, np.nan)
        found["low"].append(float(low))
        found["high"].append(float(high))
    return {k: [None if np.isnan(x) else float(x) for x in xs] for k, xs in found.items()}


def relapse(texts: Sequence[Decoded], horizon: int, *, seed: int = 0) -> dict[str, Any]:
    """The rate of relaxed tokens at each distance after a relaxed one, over the rate among all: 1 is no memory."""
    hits, chances = np.zeros((len(texts), horizon)), np.zeros((len(texts), horizon))
    for row, text in enumerate(texts):
        flags = np.asarray(text.relaxed, bool)
        for d in range(1, min(horizon, len(flags) - 1) + 1):
            hits[row, d - 1] = np.sum(flags[:-d] & flags[d:])
            chances[row, d - 1] = np.sum(flags[:-d])
    relaxed = np.asarray([sum(t.relaxed) for t in texts], np.float64)
    tokens = np.asarray([len(t.tokens) for t in texts], np.float64)
    rng = np.random.default_rng(seed)
    weights = rng.multinomial(len(texts), np.full(len(texts), 1 / len(texts)), size=RESAMPLES)
    with np.errstate(divide="ignore", invalid="ignore"):
        resampled = (
            (weights @ hits) / (weights @ chances) / ((weights @ relaxed) / (weights @ tokens))[:, None]
        )
        mean = hits.sum(axis=0) / chances.sum(axis=0) / (relaxed.sum() / tokens.sum())
    found = {"mean": mean, "low": [], "high": []}
    for column in resampled.T:
        finite = column[np.isfinite(column)]
        bounds = np.quantile(finite, [0.025, 0.975]) if len(finite) else (np.nan, np.nan)
        found["low"].append(bounds[0])
        found["high"].append(bounds[1])
    return {
        "share": float(relaxed.sum() / tokens.sum()),
        **{k: [None if not np.isfinite(x) else float(x) for x in xs] for k, xs in found.items()},
    }
