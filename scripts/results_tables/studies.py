"""What relaxed tokens do to a text."""

from __future__ import annotations

from typing import Any

from results_tables.bars import load, span


def studies() -> dict[str, Any]:
    """compounding.json."""
    compounding = load("compounding/compounding.json")["tasks"]
    math = compounding["arithmetic"]
    score = {
        kind: {k: 100 * math[kind]["score"][k][0] for k in ("mean", "low", "high")}
        for kind in ("relaxed", "control")
    }
    surprise = {task: [found["relaxed"]["grows"]["surprise"][k][0] for k in ("mean", "low", "high")]
                for task, found in compounding.items()}  # fmt: skip
    return {
        "events": math["relaxed"]["events"],
        "texts": math["texts"],
        "cost": score["relaxed"]["mean"],
        "forced": span(*score["control"].values(), show="{:.0f}"),
        "surprise": {task: span(*values, show="{:+.3f}") for task, values in surprise.items()},
        "grows": any(low > 0 for _, low, _ in surprise.values()),
    }
