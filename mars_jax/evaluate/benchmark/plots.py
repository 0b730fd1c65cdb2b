"""The plots of an evaluation, a panel for every task and temperature."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Table = Mapping[str, Any]
MARKERS = "osD^vPX*<>hp"


def draw(summary: Mapping[str, Any], folder: Path) -> None:
    """Write speed_quality.png, tau_theta.png, depth.png and margins.png."""
    tables = summary["tables"]
    panels = {
        "speed_quality.png": _speed_quality,
        "tau_theta.png": _tau_theta,
        "depth.png": _depth,
        "margins.png": functools.partial(_margins, summary["settings"]["rule"]["settings"].get("margin")),
    }
    for name, panel in panels.items():
        _picture(tables, folder / name, panel)


def _picture(tables: Sequence[Table], path: Path, panel: Callable[[Any, Table], None]) -> None:
    # Without pyplot, which would choose a window system and keep the figure.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(len(tables), len({table["temperature"] for table in tables}))
    rows = -(-len(tables) // columns)
    figure = Figure(figsize=(8 * columns, 4.5 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    for place, table in enumerate(tables):
        axis = figure.add_subplot(rows, columns, place + 1)
        axis.set_title(f"{table['task']}, temperature {table['temperature']:g}")
        axis.grid(alpha=0.3)
        panel(axis, table)
        axis.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, dpi=120, metadata={"Software": None})


def _style(table: Table, arm: Mapping[str, Any]) -> dict[str, Any]:
    """The same colour and marker for an arm in every picture."""
    place = [a["arm"] for a in table["arms"]].index(arm["arm"])
    return {"color": f"C{place % 10}", "marker": MARKERS[place % len(MARKERS)], "label": arm["arm"]}


def _speed_quality(axis: Any, table: Table) -> None:
    """Up and to the right is better, but for likelihoods, which are best where the target alone is; where nothing is
    scored, quality is little regret."""
    scored = all(arm["score"] is not None for arm in table["arms"])
    for arm in table["arms"]:
        quality = 100 * arm["score"] if scored else arm["regret_per_token"]
        axis.plot([arm["tokens_per_second"]], [quality], linestyle="none", **_style(table, arm))
    axis.set(
        xlabel="tokens/s", ylabel=f"100 x score, {table['metric']}" if scored else "regret, nats per token"
    )
    if not scored:
        axis.invert_yaxis()


def _tau_theta(axis: Any, table: Table) -> None:
    """tau over the thresholds of the relaxed rule, between its strict limit and its matched control."""
    arms = table["arms"]
    swept = [arm for arm in arms if arm["role"] == "rule" and arm["theta"] is not None]
    if swept:
        swept.sort(key=lambda arm: arm["theta"])
        axis.plot(
            [arm["theta"] for arm in swept],
            [arm["tau"] for arm in swept],
            marker="o",
            label=swept[0]["arm"].partition(" theta=")[0],
        )
    styles = {
        "strict": ("--", "gray"),
        "infinite": (":", "black"),
        "matched": ("-.", "C3"),
        "rule": ("-", "C0"),
    }
    for arm in arms:
        if arm["role"] in styles and arm not in swept:
            style, color = styles[arm["role"]]
            axis.axhline(arm["tau"], linestyle=style, color=color, label=arm["arm"])
    axis.set(xlabel="theta", ylabel="tau, tokens per target forward")


def _depth(axis: Any, table: Table) -> None:
    """Share of the steps by the number of draft tokens that they accepted."""
    arms = [arm for arm in table["arms"] if arm["acceptance_by_depth"]]
    width = 0.8 / len(arms)
    for place, arm in enumerate(arms):
        histogram = np.asarray(arm["depth_histogram"], np.float64)
        where = np.arange(len(histogram)) + (place - (len(arms) - 1) / 2) * width
        style = _style(table, arm)
        axis.bar(where, histogram / histogram.sum(), width, color=style["color"], label=style["label"])
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.set(xlabel="draft tokens accepted in a step", ylabel="share of steps")


def _margins(margin: str | None, axis: Any, table: Table) -> None:
    """Draft tokens by the margin of the target there: the strict rule's as areas, the relaxed rule's as lines."""
    for (arm, counts), filled in zip(table["margins"].items(), (True, False), strict=False):
        edges = np.asarray(counts["edges"])
        for kind, color in (("accepted", "C2"), ("relaxed", "C1"), ("rejected", "C3")):
            if any(counts[kind]):
                look = {"fill": True, "alpha": 0.3} if filled else {"linewidth": 1.5}
                axis.stairs(counts[kind], edges, color=color, label=f"{arm}: {kind}", **look)
    measured = [*table["margins"]][-1]
    theta = next((a["theta"] for a in table["arms"] if a["arm"] == measured), None)
    if theta is not None and margin is not None:
        axis.axvline(theta, linestyle=":", color="black", label=f"theta={theta:g}")
    meaning = {"ratio": "z2 / z1", "gap": "z1 - z2, nats", "prob_ratio": "p2 / p1"}[margin or "ratio"]
    axis.set_yscale("symlog", linthresh=1)
    axis.set(xlabel=f"margin of the target's two best tokens, {meaning}", ylabel="places with a draft")
