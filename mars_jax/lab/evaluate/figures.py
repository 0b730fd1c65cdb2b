"""Figures for one arm, computed from its rows; some are relative to the target without a draft.

R is the number of resamples. The figures are tested against figures computed by hand, and the intervals by their
coverage on simulated data (tests/lab/evaluate/test_figures.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from mars_jax.lab.evaluate.scoring import total_score
from mars_jax.serve.rows import Row
from mars_jax.utils.types import JsonObject

RESAMPLES = 2000


def resampled(count: int, seed: int, resamples: int = RESAMPLES) -> np.ndarray:
    """Return how often each of `count` problems occurs in each bootstrap resample, f64[R, count]."""
    probabilities = np.full(count, 1 / count)
    return np.random.default_rng(seed).multinomial(count, probabilities, size=resamples).astype(np.float64)


def arm_figures(
    rows: Sequence[Row],
    autoregressive: Sequence[Row],
    strict: Sequence[Row] | None,
    *,
    metric: str,
    seed: int = 0,
) -> JsonObject:
    """Return the figures for one arm on one task at one temperature.

    Args:
      rows: rows of the arm; see `rows.make_row`.
      autoregressive: rows of the target without a draft, on the same problems in the same order.
      strict: rows of the strict rule, in the same order; None if it was not decoded.
      metric: metric of the task.
      seed: seed of the bootstrap.
    """
    num_tokens, seconds = (sum(row[name] for row in rows) for name in ("emitted", "seconds"))
    num_relaxed, num_exact = (sum(row[f"accepted_{kind}"] for row in rows) for kind in ("relaxed", "exact"))
    # Compute the figures themselves on a single "resample" that contains every problem once.
    figure_arrays = _figures(rows, autoregressive, np.ones((1, len(rows))), metric)
    figure_values = {name: _each_depth(_value, figure) for name, figure in figure_arrays.items()}
    return {
        "problems": len(rows),
        "theta": rows[0]["theta"],
        **figure_values,
        "depth_histogram": np.sum([row["depth_histogram"] for row in rows], axis=0).tolist(),
        "relaxed_share": num_relaxed / max(num_relaxed + num_exact, 1),
        "seconds_per_task": seconds / len(rows),
        "task_speedup": sum(row["seconds"] for row in autoregressive) / max(seconds, 1e-9),
        "tokens_per_task": num_tokens / len(rows),
        "loop_rate": _mean(row["loops"] for row in rows),
        "length_rate": _mean(row["finish_reason"] != "stop" for row in rows),
        "same_as_autoregressive": _same(rows, autoregressive),
        "same_as_strict": None if strict is None else _same(rows, strict),
        "intervals": intervals(rows, autoregressive, metric=metric, seed=seed),
    }


def intervals(
    rows: Sequence[Row],
    autoregressive: Sequence[Row],
    *,
    metric: str,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> JsonObject:
    """Compute 95% confidence intervals for an arm's figures by the paired bootstrap over problems.

    All figures share the same resamples. The intervals reflect the choice of problems, but not the choice of seeds.
    Intervals for speeds reflect only the variation between problems, not the variation between repeated timings.

    Args:
      rows, autoregressive, metric, seed: as for `arm_figures`.
      resamples: R.

    Returns:
      [low, high], keyed by the names in `arm_figures`; None if there is no interval, for example for a single problem.
      `acceptance_by_depth` has one interval for each depth.

    Source: Efron and Tibshirani 1993, chapter 13; paired as in Koehn 2004. Raises: nothing.
    """
    if len(rows) == 1:
        # With a single problem there is no variation between problems, so there are no intervals.
        resamples = 0
    weights = resampled(len(rows), seed, resamples)
    figure_arrays = _figures(rows, autoregressive, weights, metric)
    return {name: _each_depth(_bounds, figure) for name, figure in figure_arrays.items()}


def _figures(
    rows: Sequence[Row], autoregressive: Sequence[Row], weights: np.ndarray, metric: str
) -> dict[str, np.ndarray]:
    """Return every figure that has an interval, for each resample: f64[R], or f64[D, R] for a figure by depth.

    A figure that is undefined in a resample is NaN or infinite. `weights` f64[R, n] counts how often each problem
    occurs in each resample. All figures use the same weights, so that ratios and differences are paired.
    """

    def sums(summed_rows: Sequence[Row], name: str) -> np.ndarray:
        return weights @ np.asarray([row[name] for row in summed_rows], np.float64)

    tokens, seconds = sums(rows, "emitted"), sums(rows, "seconds")
    # reached[d, r] counts the steps that accepted at least d draft tokens. A step whose draft ended at depth d, or was
    # cut off there by a stop token, counts as a rejection at depth d + 1.
    reached = np.cumsum(sums(rows, "depth_histogram").T[::-1], axis=0)[::-1]
    score = base_score = np.full(len(weights), np.nan)
    if all(row["score"] is not None for row in (*rows, *autoregressive)):
        score, base_score = (_scores(arm_rows, weights, metric) for arm_rows in (rows, autoregressive))
    with np.errstate(divide="ignore", invalid="ignore"):
        token_rate = tokens / seconds
        recovered_share = score / base_score
        if not base_score.all():
            # If the target scores 0 in any resample, the share is undefined there. Report no interval in that case,
            # because it would cover only the other resamples.
            recovered_share = np.full_like(recovered_share, np.nan)
        return {
            "tau": tokens / sums(rows, "steps"),
            "acceptance_by_depth": reached[1:] / reached[:-1],
            "regret_per_token": sums(rows, "regret") / tokens,
            "tokens_per_second": token_rate,
            "speedup": token_rate / (sums(autoregressive, "emitted") / sums(autoregressive, "seconds")),
            "score": score,
            "score_change": score - base_score,
            "recovered": recovered_share,
        }


def _each_depth(summarize: Callable[[np.ndarray], object], figure: np.ndarray) -> object:
    """Apply `summarize` to a figure f64[R], or to each depth of a figure f64[D, R]."""
    if figure.ndim == 2:
        return [summarize(depth) for depth in figure]
    return summarize(figure)


def _value(figure: np.ndarray) -> float | None:
    """Return the value of a figure f64[1], which has a single resample, or None if the figure is undefined."""
    return figure.item() if np.isfinite(figure).all() else None


def _bounds(figure: np.ndarray) -> list[float] | None:
    """Return the bounds of the middle 95% of the finite values in `figure` f64[R], or None if there are none."""
    finite_values = figure[np.isfinite(figure)]
    return np.quantile(finite_values, [0.025, 0.975]).tolist() if len(finite_values) else None


def _mean(values: Iterable[bool]) -> float:
    return float(np.mean(list(values)))


def _same(rows: Sequence[Row], reference: Sequence[Row]) -> float:
    """Return the share of answers whose tokens are identical to those of the reference arm."""
    return _mean(a["tokens"] == b["tokens"] for a, b in zip(rows, reference, strict=True))


def tau_of(rows: Sequence[Row]) -> float:
    """Return tau over all rows: the number of tokens emitted per forward pass of the target."""
    return sum(row["emitted"] for row in rows) / sum(row["steps"] for row in rows)


def _scores(rows: Sequence[Row], weights: np.ndarray, metric: str) -> np.ndarray:
    """Return the score of each resample, f64[R]. Row i counts `weights[:, i]` times."""
    return total_score(metric, weights @ np.asarray([[*row["score"], 1.0] for row in rows]))
