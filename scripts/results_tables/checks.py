"""What maintainers watch: what the fast tests take, what a step costs beside an older one, runs that are killed."""

from __future__ import annotations

from typing import Any

from results_tables.bars import bar, load, span


def checks() -> dict[str, Any]:
    """checks.json: a row for each run, in their order."""
    runs = load("checks.json")
    names = ("processor_seconds", "seconds", "largest_gib")
    rows = [
        [run["case"], *(str(run[name]) for name in names), f"`{run['commit'][:7]}`", run["date"][:10]]
        for run in runs
    ]
    machines = dict.fromkeys(
        f"{run['cores']} cores, {run['processor']}, Python {run['python']}" for run in runs
    )
    return {"rows": rows, "machines": "; ".join(machines)}


def same_cost() -> dict[str, Any]:
    """same_cost.json: steps of this commit beside those of an older one."""
    report = load("same_cost.json")
    return {
        "old": report["old"],
        "rows": [
            [
                case["case"],
                span(
                    *(case["time_ratio"][name] for name in ("median", "lower_95", "upper_95")), show="{:.3f}"
                ),
                *(f"{case['new'][name] / case['old'][name]:.3f}" for name in ("instructions", "bytes")),
            ]
            for case in report["cases"]
        ],
        "imports": [
            [name, span(*(found[key] for key in ("median", "lower_95", "upper_95")), show="{:.3f}")]
            for name, found in report["imports"].items()
        ],
    }


def kills() -> dict[str, Any]:
    """kills.json: commands that were killed at random moments."""
    rows = load("kills.json")
    return {
        "rows": [
            [f"`{row['command']}`", str(row["kills"]), f"{row['equal']} of {row['runs']}"] for row in rows
        ],
        "bars": [
            bar("runs that end otherwise", sum(len(row["differing"]) for row in rows), "{:.0f}", "== 0")
        ],
    }
