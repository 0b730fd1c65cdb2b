"""Metrics of all arms at their own best draft lengths, from fair_arms.json and the reports of the other studies."""

from __future__ import annotations

from typing import Any

from scripts.common import RESULTS, load, span

FILES = {"model": "fair_arms.json", "head": "fair_arms_head.json", "smollm2": "fair_arms_smollm2.json"}
"""The report of each study of scripts/when_it_pays/fair_arms.py."""
PLACES = ("this CPU", "a cheap draft")
HEADER = (
    *("arm", "length", "tau", *(f"over plain, {place}" for place in PLACES)),
    *("over the best lossless one", "score less plain's", "relaxed"),
)
POINTS = ("arithmetic", "translations", "news")
"""Tasks that are scored from 0 to 100 points. The others are scored in nats per token."""


def figures() -> dict[str, Any]:
    """Return the variables of the page."""
    return {"fair": fair()}


def fair() -> dict[str, Any]:
    """Return the variables of each study that has a report, keyed by study, and the cost of a step on a TPU slice."""
    return {name: _study(load(file)) for name, file in FILES.items() if (RESULTS / file).exists()} | {
        "slice": _slice()
    }


def _slice() -> float:
    """Return the time of a step with a chain of 5, relative to a plain step (8B model with EAGLE-3 head on a TPU)."""
    cases = load("tpu_cost.json")["cases"]["now"]
    chain, baseline = (cases[name]["estimate"]["in_order_seconds"] for name in ("chain-5", "none"))
    return chain / baseline


def _study(report: dict[str, Any]) -> dict[str, Any]:
    """Return the variables of a study: a table for each task and temperature, and lookups of arms by name."""
    groups: dict[tuple[str, float], dict[str, dict[str, Any]]] = {}
    best: dict[tuple[str, float, str], str] = {}
    for table in report["tables"]:
        best[table["task"], table["temperature"], table["where"]] = table["best_lossless"]
        arms = groups.setdefault((table["task"], table["temperature"]), {})
        for arm in table["arms"]:
            arms.setdefault(arm["arm"], {})[table["where"]] = arm
    steps = report["costs"]["steps"]
    lengths = sorted(int(name.split()[1]) for name in steps if name.startswith("greedy"))
    checked = next(
        (report["check"][task] for task in ("stories", "open") if task in (report["check"] or {})), []
    )
    cores = report["costs"]["cores"]
    return {
        "cores": f"{cores} core" + "s" * (cores != 1),
        "tables": [
            {
                "title": f"{task.capitalize()}, temperature {temperature:g}",
                "rows": [_row(task, name, row) for name, row in arms.items()],
            }
            for (task, temperature), arms in groups.items()
        ],
        "header": HEADER,
        "arm": lambda task, temperature, name, where: groups[task, temperature][name][where],
        "best": lambda task, temperature, where: groups[task, temperature][best[task, temperature, where]][
            where
        ],
        "times": lambda values: span(*values),
        "named": lambda arm: {
            "rejection": "`rejection`",
            "block": "`rejection` with block verification",
            "exact": "`exact`",
            "exact over n-grams": "`exact` over n-grams",
        }[arm],
        "score": _score,
        "turns": report["check"]["turns"] if report["check"] else 0,
        "apart": max((abs(row["foretold"] / row["timed"]["median"] - 1) for row in checked), default=0.0),
        "checked": [
            [
                f"{row['arm']}, temperature {row['temperature']:g}, chain of {row['length']}",
                f"{row['tau']:.2f}",
                f"{row['foretold']:.2f}",
                span(*(row["timed"][key] for key in ("median", "lower_95", "upper_95"))),
            ]
            for row in checked
        ],
        "costs": [
            [str(n), f"{steps[f'greedy {n}']['over_plain']['median']:.2f}", f"{1 + 0.05 * n:.2f}"]
            for n in lengths
        ],
        "ngrams": [
            f"{row['over_plain']['median']:.2f}" for name, row in steps.items() if name.startswith("ngram")
        ],
    }


def _score(task: str, values: list[float]) -> str:
    points = task in POINTS
    return span(
        *((100 if points else 1) * value + 0.0 for value in values), show="{:+.1f}" if points else "{:+.3f}"
    )


def _row(task: str, name: str, by_place: dict[str, Any]) -> list[str]:
    arms = [by_place[place] for place in PLACES]
    return [
        name,
        " / ".join(str(arm["length"]) for arm in arms),
        " / ".join(f"{arm['tau'][0]:.2f}" for arm in arms),
        *(span(*arm["speed"]) for arm in arms),
        " / ".join(f"{arm['over_best_lossless'][0]:.2f}" for arm in arms),
        _score(task, arms[-1]["less_plain"]),
        f"{arms[-1]['relaxed_share']:.1%}",
    ]
