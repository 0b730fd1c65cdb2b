"""Ranges and grids of thresholds that several rules share. Grids run from strict to loose; `calibrate` tries them."""

from __future__ import annotations

from mars_jax.utils.settings import LARGEST_FLOAT, LARGEST_INT, Range

RATIOS = (0.98, 0.96, 0.94, 0.92, 0.9, 0.88, 0.86, 0.84, 0.82, 0.8, 0.75, 0.7, 0.65, 0.6, 0.55, 0.5)
ODDS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.25, 0.2, 0.15, 0.1, 0.07, 0.05, 0.03, 0.01)
HARMS = (0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
NATS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 1.5, 2.0, 3.0)
WHOLE = Range("a whole number of at least 0", 0, LARGEST_INT)


def share(words: str, grid: tuple[float, ...]) -> Range:
    """Return a range that contains (0, 1] and inf."""
    return Range(words, 0, 1, above=True, inf=True, grid=grid)


def nats(words: str, grid: tuple[float, ...]) -> Range:
    """Return the range of finite numbers that are at least 0."""
    return Range(words, 0, LARGEST_FLOAT, grid=grid)
