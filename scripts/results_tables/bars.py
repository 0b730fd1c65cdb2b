"""Figures beside their bars, read from the JSON under scripts/results.

A bar is a value that a figure was asked to reach; it was set before the figure was measured.
"""

from __future__ import annotations

import json
import operator
import re
from pathlib import Path
from typing import Any, NamedTuple

RESULTS = Path(__file__).resolve().parents[1] / "results"

PROMPTS, TURNS = 30, 5
"""Fewest that carry a verdict: of fewer prompts the interval of a tau is wider than what rules differ by, and the
median of fewer turns is no median."""
_OPERATORS = {"<=": operator.le, ">=": operator.ge, "==": operator.eq, "<": operator.lt, ">": operator.gt}


class Bar(NamedTuple):
    """One figure beside its bar, in words."""

    case: str
    measured: str
    bar: str = ""
    met: str = ""


def load(name: str) -> Any:
    """The contents of a JSON file of scripts/results."""
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def bar(
    case: str, figure: float, show: str, wanted: str, *, prompts: int | None = None, turns: int | None = None
) -> Bar:
    """A figure, its text and its bar; the bar's number is in the unit of the figure.

    Args:
      prompts, turns: that the figure is of, where they say how sure it is; of too few nobody says that a bar is met.

    >>> bar("loading", 1.2, "{:.1f} GB", "<= 2 GB")
    Bar(case='loading', measured='1.2 GB', bar='<= 2 GB', met='yes')
    >>> bar("loading", 2.5, "{:.1f} GB", "<= 2 GB").met
    'no'
    >>> bar("speed", 2.5, "{:.1f} x", ">= 2 x", prompts=8).met
    'too few to say'
    """
    found = re.match(r"([<>=]=?) ?([-+]?[\d.]+)", wanted)
    if found is None:
        raise ValueError(f"'{wanted}' is no bar: it begins with one of {', '.join(_OPERATORS)} and a number.")
    met = _OPERATORS[found[1]](figure, float(found[2]))
    few = few_prompts(prompts) or (turns is not None and turns < TURNS)
    return Bar(case, show.format(figure), wanted, "too few to say" if few else "yes" if met else "no")


def few_prompts(prompts: int | None) -> bool:
    """Whether a figure of so many prompts carries no verdict."""
    return prompts is not None and prompts < PROMPTS


def gain(figure: float, base: float) -> float:
    """In percent of the base.

    >>> gain(3.0, 2.0)
    50.0
    """
    return 100 * (figure / base - 1)


def span(mean: float, low: float, high: float, show: str = "{:.2f}") -> str:
    """A mean with its interval.

    >>> span(1.0, 0.5, 1.5)
    '1.00 [0.50, 1.50]'
    """
    return f"{show.format(mean)} [{show.format(low)}, {show.format(high)}]"
