"""Figures of arms at their own best draft lengths, from fair_arms.json and the reports of the other studies."""

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
"""Tasks whose score is in points of 100. The others are scored in nats per token."""


def figures() -> dict[str, Any]:
    """Return the variables of the page."""
    return {"fair": fair()}


def fair() -> dict[str, Any]:
    """Return the variables of each study that has a report, by name, and the cost of a step on a TPU slice."""
    return {name: _study(load(file)) for name, file in FILES.items() if (RESULTS / file).exists()} | {
        "slice": _slice()
    }


def _slice() -> float:
    """Return the cost of a step with a chain of 5 over a plain one, for an 8B and its EAGLE-3 head on a TPU slice."""
    cases = load("tpu_cost.json")["cases"]["now"]
    chain, plain = (cases[name]["estimate"]["in_order_seconds"] for name in ("chain-5", "none"))
    return chain / plain


def _study(report: dict[str, Any]) -> dict[str, Any]:
    """Return a table for each task and temperature, and every arm by name."""
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
            "exact over n-grams": "`exact` over n-grams",
        }[arm],
        "score": _score,
        "turns": report["check"]["turns"] if report["check"] else 0,
        "apart": max(
            (abs(found["foretold"] / found["timed"]["median"] - 1) for found in checked), default=0.0
        ),
        "checked": [
            [
                f"{found['arm']}, temperature {found['temperature']:g}, chain of {found['length']}",
                f"{found['tau']:.2f}",
                f"{found['foretold']:.2f}",
                span(*(found["timed"][key] for key in ("median", "lower_95", "upper_95"))),
            ]
            for found in checked
        ],
        "costs": [
            [str(n), f"{steps[f'greedy {n}']['over_plain']['median']:.2f}", f"{1 + 0.05 * n:.2f}"]
            for n in lengths
        ],
        "ngrams": [
            f"{found['over_plain']['median']:.2f}"
            for name, found in steps.items()
            if name.startswith("ngram")
        ],
    }


def _score(task: str, values: list[float]) -> str:
    points = task in POINTS
    return span(
        *((100 if points else 1) * value + 0.0 for value in values), show="{:+.1f}" if points else "{:+.3f}"
    )


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
