"""Arms at their own best draft lengths: fair_arms.json."""

from __future__ import annotations

from typing import Any

from results_tables.bars import load, span

PLACES = ("this CPU", "a cheap draft")
HEADER = (
    *("arm", "length", "tau", *(f"over plain, {place}" for place in PLACES)),
    *("over the best lossless one", "score less plain's", "relaxed"),
)
POINTS = {"arithmetic": 100.0, "stories": 1.0}
"""A score's unit: points, or nats per token."""


def fair() -> dict[str, Any]:
    """The variables of the page: a table for each task and temperature, and every arm by name."""
    report = load("fair_arms.json")
    groups: dict[tuple[str, float], dict[str, dict[str, Any]]] = {}
    best: dict[tuple[str, float, str], str] = {}
    for table in report["tables"]:
        best[table["task"], table["temperature"], table["where"]] = table["best_lossless"]
        arms = groups.setdefault((table["task"], table["temperature"]), {})
        for arm in table["arms"]:
            arms.setdefault(arm["arm"], {})[table["where"]] = arm
    return {
        "tables": [
            {
                "title": f"{task.capitalize()}, temperature {temperature:g}",
                "rows": [_row(task, name, found) for name, found in arms.items()],
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
            "block": "`rejection` by blocks",
            "exact": "`exact`",
        }[arm],
        "score": _score,
        "turns": report["check"]["turns"],
        "apart": max(
            abs(found["foretold"] / found["timed"]["median"] - 1) for found in report["check"]["stories"]
        ),
        "checked": [
            [
                f"{found['arm']}, temperature {found['temperature']:g}, chain of {found['length']}",
                f"{found['tau']:.2f}",
                f"{found['foretold']:.2f}",
                span(*(found["timed"][key] for key in ("median", "lower_95", "upper_95"))),
            ]
            for found in report["check"]["stories"]
        ],
        "costs": [
            [
                str(n),
                f"{report['costs']['steps'][f'greedy {n}']['over_plain']['median']:.2f}",
                f"{1 + 0.05 * n:.2f}",
            ]
            for n in (2, 3, 5, 8, 12)
        ],
    }


def _score(task: str, values: list[float]) -> str:
    show = "{:+.1f}" if task == "arithmetic" else "{:+.3f}"
    return span(*(POINTS[task] * value + 0.0 for value in values), show=show)


def _row(task: str, name: str, found: dict[str, Any]) -> list[str]:
    each = [found[place] for place in PLACES]
    return [
        name,
        " / ".join(str(arm["length"]) for arm in each),
        " / ".join(f"{arm['tau'][0]:.2f}" for arm in each),
        *(span(*arm["speed"]) for arm in each),
        " / ".join(f"{arm['over_best_lossless'][0]:.2f}" for arm in each),
        _score(task, each[-1]["less_plain"]),
        f"{each[-1]['relaxed_share']:.1%}",
    ]
