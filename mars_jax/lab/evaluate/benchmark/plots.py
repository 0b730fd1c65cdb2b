"""The plots of a benchmark, with one panel per task and temperature."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mars_jax.lab.pictures import BLACK, FORMATS, honest_limits, level, look, no_grid, picture, whiskers
from mars_jax.utils.types import JsonObject

if TYPE_CHECKING:  # matplotlib is imported only when a figure is drawn
    from matplotlib.axes import Axes

PICTURES = {
    "speed_quality": "speed against quality",
    "speed": "tokens/s of every arm",
    "tau_theta": "tau against theta",
    "depth": "share accepted at each depth",
}
"""Captions of the plots, keyed by the stem of the file name."""
LEAST_POINTS = 10
"""Minimum range of a score axis, in points out of 100: differences of one or two points are noise."""


def captions(summary: JsonObject) -> dict[str, str]:
    """Return the captions of a run's plots. Omit the plot of tau against theta if no rule has a threshold."""
    arms = [arm for table in summary["tables"] for arm in table["arms"]]
    if any(arm["role"] == "rule" and arm["theta"] is not None for arm in arms):
        return PICTURES
    return {name: caption for name, caption in PICTURES.items() if name != "tau_theta"}


def draw(summary: JsonObject, folder: Path, caption: str, formats: Sequence[str] = FORMATS) -> None:
    """Draw each plot that `captions` lists, and write it in all formats."""
    tables = summary["tables"]
    columns = min(len(tables), len({table["temperature"] for table in tables}))
    rows = math.ceil(len(tables) / columns)
    # Height of a panel in inches: the title and the axis, plus one bar per arm.
    bars_height = 0.9 + 0.24 * max(len(table["arms"]) for table in tables)
    panel_by_name = {
        "speed": (_speed, bars_height),
        "speed_quality": (_speed_quality, 3.4),
        "tau_theta": (_tau_theta, 3.0),
        "depth": (_depth, 3.0),
    }
    for name in captions(summary):
        draw_panel, height = panel_by_name[name]
        files = [folder / f"{name}.{kind}" for kind in formats]
        with picture(files, rows=rows, columns=columns, panel=(4.6, height), caption=caption) as axes:
            for axis, table in zip(axes.flat, tables, strict=False):
                axis.set_title(f"{table['task']}, temperature {table['temperature']:g}")
                draw_panel(axis, table["arms"])


def _strict(arms: Sequence[JsonObject]) -> JsonObject:
    """Return the strict arm, or the autoregressive arm if the run has no strict one."""
    return next((arm for arm in arms if arm["role"] == "strict"), arms[0])


def _families(arms: Sequence[JsonObject]) -> dict[str, list[JsonObject]]:
    """Group arms that differ only in their threshold. The keys are the arms' names without the threshold."""
    families: dict[str, list[JsonObject]] = {}
    for arm in arms:
        families.setdefault(arm["arm"].partition(" theta=")[0], []).append(arm)
    return families


def _speed_quality(axis: Axes, arms: Sequence[JsonObject]) -> None:
    """Plot the score, or the regret if nothing is scored, against tokens/s."""
    is_scored = all(arm["score"] is not None for arm in arms)
    quality_name, scale = "regret_per_token", 1
    if is_scored:
        quality_name, scale = "score", 100
    plotted_values: list[float] = []

    def quality(arm: JsonObject) -> tuple[float, list[float] | None]:
        value, interval = scale * arm[quality_name], arm["intervals"][quality_name]
        plotted_values.append(value)
        if interval is not None:
            interval = [scale * end for end in interval]
            plotted_values.extend(interval)
        return value, interval

    strict_arm = _strict(arms)
    level(axis, *quality(strict_arm), label=f"{strict_arm['arm']}, its interval shaded", colour=BLACK)
    for family, members in _families(arms).items():
        members = sorted(members, key=lambda arm: arm["theta"] or 0)
        x = [arm["tokens_per_second"] for arm in members]
        y, y_intervals = zip(*map(quality, members), strict=True)
        x_errors = whiskers(x, [arm["intervals"]["tokens_per_second"] for arm in members])
        y_errors = whiskers(y, y_intervals)
        line_style = look(family).line
        axis.errorbar(x, y, xerr=x_errors, yerr=y_errors, elinewidth=0.8, label=family, **line_style)
        if len(members) > 1:
            for point, arm in zip(zip(x, y, strict=True), members, strict=True):
                axis.annotate(f"{arm['theta']:g}", point, (5, 4), textcoords="offset points", fontsize=7)
    axis.set_xlim(left=0)
    axis.set_xlabel("tokens/s")
    if is_scored:
        honest_limits(axis, plotted_values, least=LEAST_POINTS)
        axis.set_ylabel("100 x score")
    else:
        honest_limits(axis, [0.0, *plotted_values], least=0.05)
        # Put the lowest regret, which is best, at the top.
        axis.invert_yaxis()
        axis.set_ylabel("regret, nats per token")


def _speed(axis: Axes, arms: Sequence[JsonObject]) -> None:
    """Draw a bar for every arm, labelled with its value."""
    rates = [arm["tokens_per_second"] for arm in arms]
    bars = axis.barh(
        [arm["arm"] for arm in arms],
        rates,
        color=[look(arm["arm"]).colour for arm in arms],
        xerr=whiskers(rates, [arm["intervals"]["tokens_per_second"] for arm in arms]),
        ecolor="#999999",
    )
    axis.bar_label(bars, fmt="%.0f", padding=4, fontsize=8)
    axis.margins(x=0.14)
    axis.invert_yaxis()
    axis.set_xlabel("tokens/s")
    no_grid(axis, "y")


def _tau_theta(axis: Axes, arms: Sequence[JsonObject]) -> None:
    """Plot tau against the rule's threshold. Draw a rule without a threshold as a horizontal line."""
    strict_arm = _strict(arms)
    level(axis, strict_arm["tau"], strict_arm["intervals"]["tau"], label=strict_arm["arm"], colour=BLACK)
    for family, members in _families([arm for arm in arms if arm["role"] == "rule"]).items():
        taus, intervals = [arm["tau"] for arm in members], [arm["intervals"]["tau"] for arm in members]
        if members[0]["theta"] is None:
            level(axis, taus[0], intervals[0], label=family, colour=look(family).colour)
            continue
        thetas = [arm["theta"] for arm in members]
        tau_errors = whiskers(taus, intervals)
        axis.errorbar(thetas, taus, yerr=tau_errors, label=family, linestyle="none", **look(family).line)
    axis.set(xlabel="theta", ylabel="tau, tokens per target forward")
    axis.set_ylim(bottom=1)


def _depth(axis: Axes, arms: Sequence[JsonObject]) -> None:
    """Plot the acceptance rate at each depth, given that the depth was reached, for the first arm of each family."""
    families = _families([arm for arm in arms if arm["acceptance_by_depth"]])
    for number, (family, members) in enumerate(families.items()):
        arm = members[0]
        rates = [rate for rate in arm["acceptance_by_depth"] if rate is not None]
        intervals = arm["intervals"]["acceptance_by_depth"][: len(rates)]
        # Offset the arms so that their whiskers do not hide each other.
        depths = [depth + 1 + 0.08 * number for depth in range(len(rates))]
        rate_errors = whiskers(rates, intervals)
        axis.errorbar(depths, rates, yerr=rate_errors, elinewidth=0.8, label=family, **look(family).line)
    axis.set_ylim(0, 1.02)
    axis.locator_params(axis="x", integer=True)
    axis.set(xlabel="depth of the draft", ylabel="share accepted")
