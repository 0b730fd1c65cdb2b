"""Figures of one arm from its rows, compared with the target without a draft.

R resamples. Oracles: recounts by hand and the coverage of simulated intervals, in
tests/lab/evaluate/test_figures.py.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from mars_jax.core.metrics import Metrics
from mars_jax.lab.evaluate.scoring.scores import total_score

RESAMPLES = 2000


def acceptance_by_depth(histogram: Sequence[int]) -> list[float | None]:
    """Return the conditional acceptance rate at each depth.

    Entry d = 0, 1, ... is the share of the steps with at least d accepted draft tokens that accepted one more, or None
    if no step reached d. A step whose draft ended at depth d, or that a stop token cut off there, counts as a
    rejection.

    >>> acceptance_by_depth([2, 1, 1])
    [0.5, 0.5]
    """
    reached = np.cumsum(np.asarray(histogram)[::-1])[::-1].tolist()
    return [
        num_accepted / num_reached if num_reached else None
        for num_reached, num_accepted in itertools.pairwise(reached)
    ]


def resampled(count: int, seed: int, resamples: int = RESAMPLES) -> np.ndarray:
    """Return how often each of `count` problems occurs in each resample of the bootstrap, f64[R, count]."""
    shares = np.full(count, 1 / count)
    return np.random.default_rng(seed).multinomial(count, shares, size=resamples).astype(np.float64)


def arm_figures(
    rows: Sequence[dict[str, Any]],
    alone: Sequence[dict[str, Any]],
    strict: Sequence[dict[str, Any]] | None,
    *,
    metric: str,
    seed: int = 0,
) -> dict[str, Any]:
    """Return the figures of one arm on one task at one temperature.

    Args:
      rows: rows of the arm, see `arm_rows.make_row`.
      alone: rows of the target without a draft, on the same problems in the same order.
      strict: rows of the strict rule, in the same order; None if it was not decoded.
      metric: metric of the task.
      seed: seed of the bootstrap.
    """
    metrics = _metrics(rows)
    seconds, tokens = sum(row["seconds"] for row in rows), metrics.emitted
    rate = tokens / max(seconds, 1e-9)
    seconds_alone = sum(row["seconds"] for row in alone)
    rate_alone = sum(row["emitted"] for row in alone) / max(seconds_alone, 1e-9)
    score, score_alone = None, 0.0
    if _is_scored(rows, alone):
        score, score_alone = (
            float(_scores(part, np.ones((1, len(part))), metric)[0]) for part in (rows, alone)
        )
    return {
        "problems": len(rows),
        "theta": rows[0]["theta"],
        "tau": metrics.tau,
        "depth_histogram": list(metrics.depth_histogram),
        "acceptance_by_depth": acceptance_by_depth(metrics.depth_histogram),
        "relaxed_share": metrics.relaxed_share,
        "regret_per_token": metrics.regret_per_token,
        "tokens_per_second": rate,
        "speedup": rate / rate_alone,
        "seconds_per_task": seconds / len(rows),
        "task_speedup": seconds_alone / max(seconds, 1e-9),
        "tokens_per_task": tokens / len(rows),
        "loop_rate": _share(row["loops"] for row in rows),
        "length_rate": _share(row["finish_reason"] != "stop" for row in rows),
        "same_as_autoregressive": _same(rows, alone),
        "same_as_strict": None if strict is None else _same(rows, strict),
        "score": score,
        "score_change": None if score is None else score - score_alone,
        "recovered": score / score_alone if score is not None and score_alone else None,
        "intervals": intervals(rows, alone, metric=metric, seed=seed),
    }


def intervals(
    rows: Sequence[dict[str, Any]],
    alone: Sequence[dict[str, Any]],
    *,
    metric: str,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> dict[str, Any]:
    """Compute 95% intervals of an arm's figures by the paired bootstrap over problems, with shared resamples.

    The intervals cover the choice of problems, not the choice of seeds. For speed, they cover only the variation
    between problems.

    Args:
      rows, alone, metric, seed: as for `arm_figures`.
      resamples: R.

    Returns:
      [low, high], keyed by the names in `arm_figures`; None if there is no interval, for example for a single problem.
      `acceptance_by_depth` has one interval for each depth.

    Source: Efron and Tibshirani 1993, chapter 13; paired as in Koehn 2004. Raises: nothing.
    """
    weights = resampled(len(rows), seed, resamples if len(rows) > 1 else 0)

    def sums(summed_rows: Sequence[dict[str, Any]], name: str) -> np.ndarray:
        return weights @ np.asarray([row[name] for row in summed_rows], np.float64)

    tokens, seconds = sums(rows, "emitted"), sums(rows, "seconds")
    reached = np.cumsum(sums(rows, "depth_histogram")[:, ::-1], axis=1)[:, ::-1]
    with np.errstate(divide="ignore", invalid="ignore"):
        rate = tokens / seconds
        bounds: dict[str, Any] = {
            "tau": _bounds(tokens / sums(rows, "steps")),
            "tokens_per_second": _bounds(rate),
            "speedup": _bounds(rate / (sums(alone, "emitted") / sums(alone, "seconds"))),
            "regret_per_token": _bounds(sums(rows, "regret") / tokens),
            "acceptance_by_depth": [
                _bounds(num_accepted / num_reached)
                for num_reached, num_accepted in itertools.pairwise(reached.T)
            ],
            "score": None,
            "score_change": None,
            "recovered": None,
        }
        if _is_scored(rows, alone):
            score, score_alone = (_scores(part, weights, metric) for part in (rows, alone))
            bounds |= {"score": _bounds(score), "score_change": _bounds(score - score_alone)}
            if score_alone.all():
                bounds["recovered"] = _bounds(score / score_alone)
    return bounds


def _bounds(resampled: np.ndarray) -> list[float] | None:
    """Return the middle 95% of the finite resamples, or None if there are none."""
    finite = resampled[np.isfinite(resampled)]
    return np.quantile(finite, [0.025, 0.975]).tolist() if len(finite) else None


def _metrics(rows: Sequence[dict[str, Any]]) -> Metrics:
    counters = ("steps", "emitted", "proposed", "accepted_exact", "accepted_relaxed")
    return Metrics(
        **{name: sum(row[name] for row in rows) for name in counters},
        depth_histogram=tuple(map(sum, zip(*(row["depth_histogram"] for row in rows), strict=True))),
        regret=math.fsum(row["regret"] for row in rows),
    )


def _share(values: Any) -> float:
    return float(np.mean([bool(v) for v in values]))


def _same(rows: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]]) -> float:
    return _share(a["tokens"] == b["tokens"] for a, b in zip(rows, others, strict=True))


def _is_scored(rows: Sequence[dict[str, Any]], alone: Sequence[dict[str, Any]]) -> bool:
    return all(row["score"] is not None for row in (*rows, *alone))


def _scores(rows: Sequence[dict[str, Any]], weights: np.ndarray, metric: str) -> np.ndarray:
    """Return the score of each resample, f64[R]. Row i counts `weights[:, i]` times."""
    return np.asarray(total_score(metric, weights @ np.asarray([[*row["score"], 1.0] for row in rows])))
