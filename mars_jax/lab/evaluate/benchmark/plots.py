"""The plots of an evaluation: small multiples, one panel for every task and temperature, or for every arm of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mars_jax.lab.evaluate.benchmark import margins, rehearsal
from mars_jax.lab.pictures.palette import BLACK, KINDS, look
from mars_jax.lab.pictures.style import FORMATS, beside, honest_limits, level, no_grid, picture, whiskers

Table = Mapping[str, Any]
Arm = Mapping[str, Any]

PICTURES = {
    "speed_quality.png": "speed against quality",
    "speed.png": "tokens/s of every arm",
    "tau_theta.png": "tau against theta",
    "depth.png": "share accepted at each depth",
    "margins.png": "drafts by margin",
}
"""The plots by file, and what each shows."""
LEAST_POINTS = 10
"""Smallest range of an axis of quality, in points of 100; differences of one or two points are noise."""


def drawn(summary: Mapping[str, Any]) -> dict[str, str]:
    """Those of `PICTURES` that a run has: without the margins where none were counted."""
    counted = any(table["margins"] for table in summary["tables"])
    return {name: words for name, words in PICTURES.items() if counted or name != "margins.png"}


def draw(summary: Mapping[str, Any], folder: Path, formats: Sequence[str] = FORMATS) -> None:
    """Write the files of `drawn`, each in all formats."""
    tables, told = summary["tables"], caption(summary)
    margin = summary["settings"]["rule"]["settings"].get("margin")
    columns = min(len(tables), len({table["temperature"] for table in tables}))
    grid: dict[str, Any] = {"rows": -(-len(tables) // columns), "columns": columns}

    def files(name: str) -> list[Path]:
        return beside(folder / name, formats)

    with picture(files("speed_quality.png"), **grid, panel=(4.6, 3.4), caption=told) as axes:
        for axis, table in zip(axes.flat, tables, strict=False):
            _speed_quality(axis, table)
    height = 0.9 + 0.24 * max(len(table["arms"]) for table in tables)
    with picture(files("speed.png"), **grid, panel=(4.6, height), caption=told, sharex="row") as axes:
        for axis, table in zip(axes.flat, tables, strict=False):
            _speed(axis, table)
    more = (
        f", replayed: the first {rehearsal.PROBLEMS}" if any(table.get("replay") for table in tables) else ""
    )
    with picture(files("tau_theta.png"), **grid, caption=caption(summary, more=more)) as axes:
        for axis, table in zip(axes.flat, tables, strict=False):
            _tau_theta(axis, table)
    most = max(len(_beside_strict(table)) for table in tables)
    grid = {"rows": len(tables), "columns": most, "sharey": True}
    with picture(files("depth.png"), **grid, panel=(3.0, 2.5), caption=told) as axes:
        for row, table in zip(axes, tables, strict=True):
            _depth(row, table)
    if "margins.png" not in drawn(summary):
        return
    most = max(len(table["margins"]) for table in tables)
    grid = {"rows": len(tables), "columns": most, "sharey": "row"}
    told = caption(summary, first=margins.PROBLEMS)
    with picture(files("margins.png"), **grid, panel=(4.6, 2.8), caption=told) as axes:
        for row, table in zip(axes, tables, strict=True):
            _margins(row, table, margin)


def caption(summary: Mapping[str, Any], *, first: int | None = None, more: str = "") -> str:
    """The pair, the device, n (of which only the `first` may be drawn), the date, and what the whiskers are."""
    settings = summary["settings"]
    device = settings["device"].removeprefix("1 ")
    if device == "cpu":
        device = f"a {summary['environment']['cores']}-core {summary['environment']['machine']} machine"
    counts = settings["tasks"].items()
    tasks = ", ".join(f"{n if first is None else min(n, first)} problems of {task}" for task, n in counts)
    facts = (
        f"{pair(settings)}, {settings['drafter']}",
        f"batch {settings['batch_size']}",
        device,
        f"n = {tasks}{more}",
        dates(summary),
        "intervals: 95%, bootstrap over problems" if first is None else "counts",
    )
    return "; ".join(fact for fact in facts if fact) + "."


def pair(settings: Mapping[str, Any]) -> str:
    """The two models, without the folders of a machine.

    >>> pair({"target": "/data/models/qwen", "draft": "eagle:owner/head", "drafter": "eagle3(60)"})
    'qwen drafted by eagle:owner/head'
    """

    def short(name: str) -> str:
        kind, colon, path = name.rpartition(":")
        return kind + colon + (Path(path).resolve().name if path.startswith(("/", "~", ".")) else path)

    return f"{short(settings['target'])} drafted by {short(settings.get('draft') or settings['drafter'])}"


def dates(summary: Mapping[str, Any]) -> str:
    """The first and the last day of a run's rows; "" of a run whose rows have none.

    >>> dates({"days": ["2026-11-24", "2026-11-25"]}), dates({"date": "2026-11-25T22:36+00:00"})
    ('2026-11-24 to 2026-11-25', '2026-11-25')
    """
    days = summary.get("days") or [(summary.get("date") or "")[:10]]
    return " to ".join(dict.fromkeys((days[0], days[-1])))


def _title(axis: Any, table: Table, more: str = "") -> None:
    axis.set_title(f"{table['task']}, temperature {table['temperature']:g}{more}")


def _interval(arm: Arm, name: str) -> Any:
    """Summaries of before there were intervals have none."""
    return arm.get("intervals", {}).get(name)


def _strict(table: Table) -> Arm:
    """The strict rule; the target alone, which is first, where a run has no such arm."""
    return next((arm for arm in table["arms"] if arm["role"] == "strict"), table["arms"][0])


def _family(arm: Arm) -> str:
    """An arm without its threshold, of which a rule may have several."""
    return arm["arm"].partition(" theta=")[0]


def _speed_quality(axis: Any, table: Table) -> None:
    """Up and to the right is better, but for likelihoods, which are best where the target alone is; where nothing is
    scored, quality is little regret. Arms that cannot differ from the strict rule, or mean nothing, are left out."""
    arms = [arm for arm in table["arms"] if arm["role"] not in ("infinite", "simulated")]
    scored = all(arm["score"] is not None for arm in arms)
    name, unit = ("score", 100) if scored else ("regret_per_token", 1)

    def quality(arm: Arm) -> tuple[float, list[float] | None]:
        found = _interval(arm, name)
        return unit * arm[name], None if found is None else [unit * x for x in found]

    value, noise = quality(_strict(table))
    level(axis, value, noise, label=f"{_strict(table)['arm']}, its interval shaded", colour=BLACK)
    ends = [value, *(noise or ())]
    for family, here in _by_family(arms).items():
        x, (y, spans) = [arm["tokens_per_second"] for arm in here], zip(*map(quality, here), strict=True)
        ends += [*y, *(end for span in spans if span for end in span)]
        intervals = [_interval(arm, "tokens_per_second") for arm in here]
        axis.errorbar(
            x, y, xerr=whiskers(x, intervals), yerr=whiskers(y, spans), elinewidth=0.8, label=family,
            linewidth=0.8, **look(family).line,
        )  # fmt: skip
        if len(here) > 1 and here[0]["theta"] is not None:
            for place, (arm, at) in enumerate(zip(here, zip(x, y, strict=True), strict=True)):
                axis.annotate(
                    f"{arm['theta']:g}",
                    at,
                    (5, -9 if place % 2 else 4),
                    textcoords="offset points",
                    fontsize=7,
                )
    fastest = max((_interval(a, "tokens_per_second") or [a["tokens_per_second"]])[-1] for a in arms)
    axis.set_xlim(0, 1.08 * fastest)
    if scored:
        honest_limits(axis, ends, noise, least=LEAST_POINTS, bounds=(0, 100))
    else:
        honest_limits(axis, [0.0, *ends], noise, least=0.05, bounds=(0, math.inf))
        axis.invert_yaxis()
    axis.set(
        xlabel="tokens/s", ylabel=f"100 x score, {table['metric']}" if scored else "regret, nats per token"
    )
    _title(axis, table)


def _by_family(arms: Sequence[Arm]) -> dict[str, list[Arm]]:
    """Arms that differ in their threshold alone, by it."""
    found: dict[str, list[Arm]] = {}
    for arm in arms:
        found.setdefault(_family(arm), []).append(arm)
    return {name: sorted(here, key=lambda arm: arm["theta"] or 0) for name, here in found.items()}


def _speed(axis: Any, table: Table) -> None:
    """Bars from zero, the number beside each."""
    arms = table["arms"]
    rates = [arm["tokens_per_second"] for arm in arms]
    spans = [_interval(arm, "tokens_per_second") for arm in arms]
    places = np.arange(len(arms))
    axis.barh(places, rates, 0.7, color=[look(arm["arm"]).colour for arm in arms])
    axis.errorbar(rates, places, xerr=whiskers(rates, spans), fmt="none", ecolor="#999999", elinewidth=1.2)
    for place, rate, span in zip(places, rates, spans, strict=True):
        end = rate if span is None else span[1]
        axis.annotate(
            f"{rate:.0f}", (end, place), (4, 0), textcoords="offset points", va="center", fontsize=8
        )
    axis.set_yticks(places, [arm["arm"] for arm in arms])
    axis.invert_yaxis()
    axis.margins(x=0.14)
    axis.set_xlabel("tokens/s")
    no_grid(axis, "y")
    _title(axis, table)


def _tau_theta(axis: Any, table: Table) -> None:
    """tau over the threshold of the rule: decodes as points, replays as a line with its interval."""
    strict = _strict(table)
    level(axis, strict["tau"], _interval(strict, "tau"), label=strict["arm"], colour=BLACK)
    rules = [arm for arm in table["arms"] if arm["role"] == "rule"]
    if replayed := table.get("replay"):
        name = _family(rules[0])
        points = [
            (theta, tau, span)
            for theta, tau, span in zip(
                replayed["thetas"], replayed["tau"], replayed["interval"], strict=True
            )
            if theta != "inf"
        ]
        theta, tau, spans = zip(*sorted(points, key=lambda point: point[0]), strict=True)
        axis.plot(theta, tau, ".-", color=look(name).colour, markersize=4, label=f"{name}, replayed")
        if spans[0] is not None:
            axis.fill_between(
                theta, *zip(*spans, strict=True), color=look(name).colour, alpha=0.15, linewidth=0
            )
    for arm in rules:
        if arm["theta"] is None:
            level(axis, arm["tau"], _interval(arm, "tau"), label=arm["arm"], colour=look(arm["arm"]).colour)
            continue
        axis.errorbar(
            [arm["theta"]], [arm["tau"]], yerr=whiskers([arm["tau"]], [_interval(arm, "tau")]),
            linestyle="none", label=f"{_family(arm)}, decoded", **look(arm["arm"]).line,
        )  # fmt: skip
    axis.set(xlabel="theta", ylabel="tau, tokens per target forward")
    axis.set_ylim(bottom=1)
    _title(axis, table)


def _beside_strict(table: Table) -> list[Arm]:
    """The arms with a panel of their own beside the strict rule; that rule where nothing else drafts."""
    arms = [arm for arm in table["arms"] if arm["role"] in ("rule", "matched", "refined")]
    return arms or [_strict(table)]


def _depth(row: Any, table: Table) -> None:
    """Draw the conditional acceptance rate at each depth, a panel per arm, over the strict rule's."""
    strict = _strict(table)
    for axis, arm in zip(row, _beside_strict(table), strict=False):
        # The arm is moved a little aside, so that whiskers do not hide each other.
        for shown, aside in ((strict, -0.08), (arm, 0.08)):
            rates = [(d + 1 + aside, r) for d, r in enumerate(shown["acceptance_by_depth"]) if r is not None]
            if not rates or (shown is strict and arm is strict and aside > 0):
                continue
            x, y = zip(*rates, strict=True)
            spans = (_interval(shown, "acceptance_by_depth") or [None] * len(y))[: len(y)]
            axis.errorbar(
                x, y, yerr=whiskers(y, spans), elinewidth=0.8, label=_family(shown), **look(shown["arm"]).line
            )
        axis.set_ylim(0, 1.02)
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.set_xlabel("depth of the draft")
        axis.set_title(f"{arm['arm']}")
    row[0].set_ylabel(f"{table['task']}, T = {table['temperature']:g}\nshare accepted")


def _margins(row: Any, table: Table, margin: str | None) -> None:
    """Draft tokens by the margin of the target there, a panel an arm."""
    meaning = {"ratio": "z2 / z1", "gap": "z1 - z2, nats"}[margin or "ratio"]
    for axis, (name, counts) in zip(row, table["margins"].items(), strict=False):
        for kind, colour in KINDS.items():
            if any(counts[kind]):
                axis.stairs(counts[kind], counts["edges"], color=colour, linewidth=1.6, label=kind)
        theta = next((arm["theta"] for arm in table["arms"] if arm["arm"] == name), None)
        if theta is not None and margin is not None and theta != "inf":
            axis.axvline(theta, linestyle=":", color=BLACK)
            axis.annotate(
                f"theta = {theta:g}", (theta, 1), (-4, -3), xycoords=("data", "axes fraction"),
                textcoords="offset points", ha="right", va="top", fontsize=7.5,
            )  # fmt: skip
        axis.set_yscale("symlog", linthresh=1)
        axis.yaxis.set_major_formatter("{x:,.0f}")
        axis.set_ylim(0, 4 * max(max(counts[kind]) for kind in KINDS))  # room above for the threshold
        axis.set_xlabel(f"margin of the target's two best tokens, {meaning}")
        _title(axis, table, f": {name}")
    row[0].set_ylabel("places with a draft")
