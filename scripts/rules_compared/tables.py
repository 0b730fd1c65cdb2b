"""Tables that compare all rules, computed from eval_rules.json."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from scripts.common import load, span

SCORE = {"stories": "{:+.3f}", "arithmetic": "{:+.1f}"}
"""Formats of scores, which are in nats per token or in percent of the answers."""
EDGES = {"mars (ratio)", "mars (gap)", "adaptive", "topk", "budget", "typical", "entropy_gate", "fly"}
"""Families of relaxed rules that are based on `exact`."""
GONE = "mars (prob_ratio)"
"""A family that was measured but is not shown. Its margin was equivalent to the gap, and has been removed."""
COSTED = {
    "mars (ratio)": "mars",
    "speccascade (token_v3)": "speccascade",
    "mars over rejection": "mars over rejection",
}
"""Names in rule_cost.json of families that are named differently there."""


def figures() -> dict[str, Any]:
    """Return the variables of the page."""
    return {"rules": compared()}


def compared() -> dict[str, Any]:
    """Return the tables, the paired comparison, and the arms by name."""
    report = load("eval_rules.json")
    for table in report["tables"]:
        table["arms"] = [arm for arm in table["arms"] if arm["family"] != GONE]
    steps = _steps()
    tables = [
        {
            "title": f"{table['task'].capitalize()}, {_draft(table['draft'])}, temperature {table['temperature']:g}",
            "task": table["task"],
            "rows": [_row(table["task"], arm, _rate(table, arm, steps)) for arm in table["arms"]],
        }
        for table in report["tables"]
    ]
    arms = {
        (table["task"], table["temperature"], table["draft"], arm["arm"]): arm
        for table in report["tables"]
        for arm in table["arms"]
    }
    return {
        "tables": tables,
        "paired": [_paired(row) for row in report["ratio_less_gap"] if row["draft"] == "chain"],
        "decided": [
            row
            for row in report["ratio_less_gap"]
            for key in ("at_default", "over_sweep")
            if row[key] and (row[key][1] > 0 or row[key][2] < 0)
        ],
        "sharper": all(
            arm["less_alone"][1] > 0
            for (task, temperature, draft, _), arm in arms.items()
            if (task, temperature, draft) == ("stories", 1.0, "chain") and arm["family"] in EDGES
        ),
        "harmed": sorted(
            (temperature, name)
            for (task, temperature, draft, name), arm in arms.items()
            if (task, draft) == ("arithmetic", "chain") and (arm.get("less_strict") or [0, 0, 0])[2] < 0
        ),
        "environment": report["environment"],
        "figure": lambda task, temperature, name, draft="chain": arms[task, temperature, draft, name],
        "interval": lambda values, task="stories": _score(task, values),
    }


def _draft(draft: str) -> str:
    return {"none": "no draft", "chain": "a chain of 5", "tree": "a dynamic tree of 12 nodes"}[draft]


def _score(task: str, values: list[float] | None) -> str:
    """Format a difference between scores, in nats per token or in points."""
    if values is None:
        return "-"
    scale = 100 if task == "arithmetic" else 1
    return span(*(scale * v + 0.0 for v in values), show=SCORE[task])


def _steps() -> dict[tuple[str, float], float]:
    """Return the step time in seconds with a chain of 5 at batch 1, by rule and temperature.

    Each is the median step time of the rule's base, times the measured ratio of the rule's step time to that of its
    base.
    """
    cases = load("rule_cost.json")["cases"]
    seconds: dict[tuple[str, float], float] = {}
    for group in {case["group"] for case in cases}:
        group_cases = [case for case in cases if case["group"] == group]
        base, temperature = (
            median(case["ms_per_step"][0] for case in group_cases) / 1000,
            float(group.split()[-1]),
        )
        seconds[group_cases[0]["base"], temperature] = base
        seconds |= {(case["rule"], temperature): base * case["time_ratio"]["median"] for case in group_cases}
    return seconds


def _rate(table: Mapping[str, Any], arm: Mapping[str, Any], steps: Mapping[tuple[str, float], float]) -> str:
    """Return tokens/s, which is tau divided by the step time, or "-" if no step was timed."""
    name = COSTED.get(arm["family"], arm["family"])
    seconds = steps.get((str(name), table["temperature"])) if table["draft"] == "chain" else None
    return "-" if seconds is None else f"{arm['tau'][0] / seconds:.0f}"


def _row(task: str, arm: Mapping[str, Any], rate: str) -> list[str]:
    value = (
        span(*(100 * v for v in arm["score"]), show="{:.1f}") if task == "arithmetic" else span(*arm["score"])
    )
    drafts = arm["overshoot"] is not None
    return [
        arm["arm"],
        str(arm["prompts"]),
        span(*arm["tau"]),
        f"{arm['calls_per_token'][0]:.3f}",
        rate,
        value,
        _score(task, arm.get("less_strict")),
        _score(task, arm.get("less_mars_at_tau")),
        f"{arm['relaxed_share']:.1%}" if drafts else "-",
        f"{arm['regret']:.3f}",
        f"{arm['overshoot']:+.3f}" if drafts else "-",
        f"{arm['loop_rate']:.1%}",
    ]


def _paired(row: Mapping[str, Any]) -> list[str]:
    task = row["task"]
    return [
        f"{task}, temperature {row['temperature']:g}",
        str(row["prompts"]),
        span(*row["tau"]),
        _score(task, row["at_default"]),
        f"{row['range'][0]:.2f} to {row['range'][1]:.2f}",
        _score(task, row["over_sweep"]),
    ]
