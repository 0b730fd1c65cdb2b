"""Draw the pictures of docs/rules-compared.md from scripts/results/eval_rules.json: quality against tau.

    python scripts/rules_pictures.py            # after eval_rules.py was run again

A point is a rule at a setting, a line its sweep, whiskers are 95% intervals over prompts. Colours are those of Okabe
and Ito, which people with any kind of colour vision tell apart, and no two families share colour and marker.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "scripts" / "results" / "eval_rules.json"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^")
SCORES = {"stories": "log-likelihood, nats per token", "arithmetic": "right answers"}


def styles(report: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Colour and marker of every family, the same in all panels."""
    families = list(dict.fromkeys(arm["family"] for table in report["tables"] for arm in table["arms"]))
    families = [name for name in families if name not in ("exact", "rejection")]
    made = {
        name: {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i // len(COLOURS) % len(MARKERS)]}
        for i, name in enumerate(families)
    }
    strict = {"markerfacecolor": "white", "markersize": 9, "linestyle": "none"}
    made["exact"] = {"color": "#000000", "marker": "D", **strict}
    made["rejection"] = {"color": "#000000", "marker": "P", **strict}
    return made


def panel(
    axis: Any, table: Mapping[str, Any], alone: Sequence[float] | None, looks: Mapping[str, Any]
) -> None:
    """One task, temperature and draft."""
    families: dict[str, list[Mapping[str, Any]]] = {}
    for arm in table["arms"]:
        families.setdefault(arm["family"], []).append(arm)
    if alone is not None:
        axis.axhspan(alone[1], alone[2], color="#999999", alpha=0.2, linewidth=0)
        axis.axhline(alone[0], color="#999999", linewidth=1, label="target alone")
    for name, arms in families.items():
        arms = sorted(arms, key=lambda arm: arm["tau"][0])
        x, y = ([arm[what][0] for arm in arms] for what in ("tau", "score"))
        whiskers = {
            axis_name: [
                [arm[what][0] - arm[what][1] for arm in arms],
                [arm[what][2] - arm[what][0] for arm in arms],
            ]
            for axis_name, what in (("xerr", "tau"), ("yerr", "score"))
        }
        look = {"linewidth": 1, "markersize": 5, "elinewidth": 0.5, **looks[name]}
        axis.errorbar(x, y, label=name, **whiskers, **look)
    axis.set_title(f"{table['draft']}, temperature {table['temperature']:g}", fontsize=10)
    axis.spines[["right"]].set_visible(False)
    calls = axis.secondary_xaxis("top", functions=(_inverse, _inverse))
    calls.set_xlabel("target calls per token", fontsize=8)
    calls.tick_params(labelsize=7)


def _inverse(values: Any) -> Any:
    import numpy as np

    with np.errstate(divide="ignore"):
        return 1 / np.maximum(values, 1e-6)


def draw(report: Mapping[str, Any], task: str, picture: Path) -> None:
    """Write the picture of a task."""
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams.update({"svg.hashsalt": "mars-jax", "svg.fonttype": "none", "font.size": 9})
    from matplotlib import pyplot as plt

    looks = styles(report)
    tables = [table for table in report["tables"] if table["task"] == task]
    alone = {t["temperature"]: t["arms"][0]["score"] for t in tables if t["draft"] == "none"}
    tables = [table for table in tables if table["draft"] != "none"]
    if not tables:
        raise SystemExit(f"there are no drafts for {task}: run eval_rules.py first")
    figure, axes = plt.subplots(
        2, -(-len(tables) // 2), figsize=(11, 8.5), layout="constrained", squeeze=False
    )
    for axis, table in zip(axes.flat, tables, strict=False):
        panel(axis, table, alone.get(table["temperature"]), looks)
    for axis in axes.flat[len(tables) :]:
        axis.set_visible(False)
    for axis in axes[:, 0]:
        axis.set_ylabel(SCORES[task])
    for axis in axes[-1]:
        axis.set_xlabel("tau, tokens per target forward")
    named = {}
    for axis in axes.flat:
        handles, labels = axis.get_legend_handles_labels()
        named |= dict(zip(labels, handles, strict=True))
    figure.legend(
        named.values(), named.keys(), loc="outside lower center", ncols=6, frameon=False, fontsize=8
    )
    figure.savefig(picture, metadata={"Date": None})
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--source", type=Path, default=SOURCE)
    parser.add_argument("--folder", type=Path, default=ROOT / "docs", help="where the pictures go")
    parser.add_argument(
        "--task", nargs="+", choices=tuple(SCORES), default=tuple(SCORES), help="whose picture"
    )
    chosen = parser.parse_args(argv)
    report = json.loads(chosen.source.read_text(encoding="utf-8"))
    for task in chosen.task:
        draw(report, task, chosen.folder / f"rules_{task}.svg")


if __name__ == "__main__":
    main()
