"""Figures of one arm from its rows, beside those of the target alone.

n rows, R resamples, k numbers of a score. Oracles: recounts by hand, and the coverage of simulated intervals, in
tests/lab/evaluate/test_figures.py.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from mars_jax.core.metrics import Metrics
from mars_jax.lab.evaluate.scoring.scores import total

LONGEST_PERIOD = 90
LOOP_TOKENS = 12
RESAMPLES = 10_000


def loops(tokens: Sequence[int], stop_tokens: Sequence[int] = ()) -> bool:
    """True where a text ends in a loop: its tail is some phrase of up to 90 tokens, at least three times over.

    Holtzman et al. 1904.09751 count a text as repetitive if a phrase at its end is there three times, with phrases of
    up to 90 tokens in their code. Here the repeated tail has 12 tokens at least, so that "!!!" or "ha ha ha" is no
    loop. A text cut off inside of its phrase ends in that phrase rotated, which counts as well. A stop token at the
    end is not part of the text.

    Source: 1904.09751. Raises: nothing.

    >>> loops([5, 6, 7, 8] * 3), loops([1, 2, 3, 1, 2, 3, 1, 2]), loops([9] * 12), loops([9] * 11)
    (True, False, True, False)
    """
    text = list(tokens[:-1] if len(tokens) and tokens[-1] in stop_tokens else tokens)
    for period in range(1, min(LONGEST_PERIOD, len(text) // 3) + 1):
        span = max(3 * period, LOOP_TOKENS)
        tail = text[-span:]
        if len(tail) == span and tail[period:] == tail[:-period]:
            return True
    return False


def acceptance_by_depth(histogram: Sequence[int]) -> list[float | None]:
    """Conditional acceptance rate at each depth: of the steps that accepted d draft tokens the share that accepted one
    more, for d = 0, 1, ...; None where no step reached d.

    A step that drafted no further, or was cut off there by a stop token, counts among those that did not.

    >>> acceptance_by_depth([2, 1, 1])
    [0.5, 0.5]
    """
    reached = np.cumsum(np.asarray(histogram)[::-1])[::-1].tolist()
    return [after / before if before else None for before, after in itertools.pairwise(reached)]


def recovered_interval(
    metric: str, ours: np.ndarray, theirs: np.ndarray, *, seed: int = 0, resamples: int = RESAMPLES
) -> tuple[float, float] | None:
    """95% interval of the ratio of two scores on the same problems, by the paired bootstrap over problems.

    Percentiles, which take a ratio as it comes. It measures the choice of problems, not that of seeds.

    Args:
      metric: as `scores.total` takes it.
      ours, theirs: f64[n, k] each, rows of `scores.score` for the same problems in the same order.
      seed: of the resampling.
      resamples: R.

    Returns:
      None for a single problem, and where a bound is not finite for `theirs` is often 0.

    Source: Efron and Tibshirani 1993, chapter 13; paired as in Koehn 2004. Raises: nothing.
    """
    count = len(ours)
    if count < 2:
        return None
    rng = np.random.default_rng(seed)
    one = np.ones((count, 1))
    ours, theirs = np.hstack([ours, one]), np.hstack([theirs, one])
    ratios = []
    block = max(1, 2_000_000 // count)  # of resamples that are in memory together
    for first in range(0, resamples, block):
        rows = min(block, resamples - first)
        weights = rng.multinomial(count, np.full(count, 1 / count), size=rows).astype(np.float64)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios.append(total(metric, weights @ ours) / total(metric, weights @ theirs))
    found = np.concatenate(ratios)
    found = found[~np.isnan(found)]  # where both are 0 there is no ratio
    if not len(found):
        return None
    low, high = np.quantile(found, [0.025, 0.975], method="inverted_cdf").tolist()
    return (low, high) if math.isfinite(low) and math.isfinite(high) else None


def summarize(
    rows: Sequence[dict[str, Any]],
    alone: Sequence[dict[str, Any]],
    strict: Sequence[dict[str, Any]] | None,
    *,
    metric: str,
    seed: int = 0,
) -> dict[str, Any]:
    """The figures of one arm on one task at one temperature.

    Args:
      rows: of the arm, see `rows.make_row`.
      alone: of the target alone, on the same problems in the same order.
      strict: of the strict rule, likewise; None where it was not decoded.
      metric: of the task.
      seed: of the bootstrap.
    """
    metrics = _metrics(rows)
    seconds, tokens = sum(row["seconds"] for row in rows), metrics.emitted
    rate = tokens / max(seconds, 1e-9)
    rate_alone = sum(row["emitted"] for row in alone) / max(sum(row["seconds"] for row in alone), 1e-9)
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
        "task_speedup": sum(row["seconds"] for row in alone) / max(seconds, 1e-9),
        "tokens_per_task": tokens / len(rows),
        "loop_rate": _share(row["loops"] for row in rows),
        "length_rate": _share(row["finish_reason"] != "stop" for row in rows),
        "same_as_autoregressive": _same(rows, alone),
        "same_as_strict": None if strict is None else _same(rows, strict),
        **_quality(rows, alone, metric, seed),
        "intervals": intervals(rows, alone, metric=metric, seed=seed),
    }


def intervals(
    rows: Sequence[dict[str, Any]],
    alone: Sequence[dict[str, Any]],
    *,
    metric: str,
    seed: int = 0,
    resamples: int = 2000,
) -> dict[str, Any]:
    """95% intervals of an arm's figures, by the bootstrap over problems: percentiles of the same resamples for all.

    They measure the choice of problems, and of the machine's moods only what differs from problem to problem.

    Args:
      rows, alone, metric, seed: as for `summarize`.
      resamples: R.

    Returns:
      [low, high] by the names of `summarize`, None where there is none, as for a single problem; for
      `acceptance_by_depth` one for each depth.
    """
    depths = len(rows[0]["depth_histogram"])
    draws = np.random.default_rng(seed).multinomial(
        len(rows), np.full(len(rows), 1 / len(rows)), size=resamples if len(rows) > 1 else 0
    )
    weights = draws.astype(np.float64)

    def sums(of: Sequence[dict[str, Any]], name: str) -> np.ndarray:
        return weights @ np.asarray([row[name] for row in of], np.float64)

    tokens, seconds = sums(rows, "emitted"), sums(rows, "seconds")
    histogram = sums(rows, "depth_histogram").reshape(-1, depths)
    reached = np.cumsum(histogram[:, ::-1], axis=1)[:, ::-1]
    with np.errstate(divide="ignore", invalid="ignore"):
        rate = tokens / seconds
        found: dict[str, Any] = {
            "tau": _bounds(tokens / sums(rows, "steps")),
            "tokens_per_second": _bounds(rate),
            "speedup": _bounds(rate / (sums(alone, "emitted") / sums(alone, "seconds"))),
            "regret_per_token": _bounds(sums(rows, "regret") / tokens),
            "acceptance_by_depth": [
                _bounds(after / before) for before, after in itertools.pairwise(reached.T)
            ],
            "score": None,
            "score_change": None,
        }
        if all(row["score"] is not None for row in (*rows, *alone)):
            ours, theirs = (
                np.asarray(total(metric, weights @ np.asarray([[*row["score"], 1.0] for row in part])))
                for part in (rows, alone)
            )
            found |= {"score": _bounds(ours), "score_change": _bounds(ours - theirs)}
    return found


def _bounds(resampled: np.ndarray) -> list[float] | None:
    """The middle 95% of resamples, those left out that are no number; None of none."""
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


def _quality(
    rows: Sequence[dict[str, Any]], alone: Sequence[dict[str, Any]], metric: str, seed: int
) -> dict[str, Any]:
    if any(row["score"] is None for row in (*rows, *alone)):
        return {"score": None, "score_change": None, "recovered": None, "recovered_interval": None}
    ours, theirs = (np.asarray([row["score"] for row in part], np.float64) for part in (rows, alone))
    mine, other = (
        float(total(metric, np.append(part.sum(axis=0), len(part))[None])[0]) for part in (ours, theirs)
    )
    interval = recovered_interval(metric, ours, theirs, seed=seed) if other else None
    return {
        "score": mine,
        "score_change": mine - other,
        "recovered": mine / other if other else None,
        "recovered_interval": None if interval is None else list(interval),
    }
