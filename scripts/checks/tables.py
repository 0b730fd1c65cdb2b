"""Figures for the page about checks: cost of tests, comparisons with older commits, model families, kills, mutants."""

from __future__ import annotations

import collections
from typing import Any

from scripts.common import RESULTS, load, span


def figures() -> dict[str, Any]:
    """Return the variables of the page's template."""
    return {
        "checks": checks(),
        "same_cost": same_cost(),
        "same_tokens": same_tokens(),
        "family_variants": family_variants(),
        "recurrent_states": recurrent_states(),
        "kills": kills(),
        "mutants": mutants(),
    }


def checks() -> dict[str, Any]:
    """Return the runs in checks.json as table rows, and the machines that they ran on."""
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
    """Return the cost of steps and imports relative to an older commit, from same_cost.json."""
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
            [name, span(*(ratio[key] for key in ("median", "lower_95", "upper_95")), show="{:.3f}")]
            for name, ratio in report["imports"].items()
        ],
    }


def same_tokens() -> dict[str, Any]:
    """Return the results in same_tokens.json: numbers of cases, and the drafters and rules that were compared."""
    report = load("same_tokens.json")
    pairs = dict.fromkeys(tuple(case.split(", ")[:2]) for case in report["texts_that_differ"])
    return {
        "old": report["old"],
        "prompts": report["prompts"],
        "different": report["different"],
        "pairs": len(pairs),
        "drafters": ", ".join(dict.fromkeys(drafter for drafter, _ in pairs)),
        "rules": ", ".join(dict.fromkeys(rule for _, rule in pairs)),
    }


def family_variants() -> dict[str, Any]:
    """Return the variants of published configs in family_variants.json, and the number per outcome."""
    rows = load("family_variants.json")["variants"]
    return {
        "counts": collections.Counter(row["outcome"] for row in rows),
        "rows": [
            [row["checkpoint"], row["outcome"], f"{row['difference']:.0e}" if "difference" in row else ""]
            for row in rows
        ],
        "from_float64": [
            [row["checkpoint"], *(f"{distance:.1e}" for distance in row["from_float64"].values())]
            for row in rows
            if row["outcome"] == "different"
        ],
    }


def recurrent_states() -> dict[str, Any]:
    """Return sizes and times of two ways to undo rejected tokens in recurrent layers, from recurrent_states.json."""
    rows = load("recurrent_states.json")["rows"]
    ratios = {row["nodes"]: row["time_ratio"] for row in rows}
    ways = {"states": "state", "inputs": "inputs (1)", "all_states": "all states (2)"}
    columns = [f"{model}, {way}" for model in rows[0]["bytes"] for way in ways.values()]
    return {
        "header": ["nodes", *columns, "time of (2) to (1)"],
        "ratios": ratios,
        "rows": [
            [
                str(row["nodes"]),
                *(f"{sizes[way] / 1e6:.1f}" for sizes in row["bytes"].values() for way in ways),
                span(*(ratios[row["nodes"]][key] for key in ("median", "lower_95", "upper_95"))),
            ]
            for row in rows
        ],
    }


def kills() -> dict[str, Any]:
    """Return the results of killing commands at random times, from kills.json."""
    rows = load("kills.json")
    return {
        "rows": [
            [f"`{row['command']}`", str(row["kills"]), f"{row['equal']} of {row['runs']}"] for row in rows
        ],
        "differing": sum(len(row["differing"]) for row in rows),
    }


def mutants() -> list[dict[str, Any]]:
    """Return the template variables for each mutants_SEED.json, in the order of the seeds."""
    return [_draw(load(path.name)) for path in sorted(RESULTS.glob("mutants_*.json"))]


def _draw(report: dict[str, Any]) -> dict[str, Any]:
    mutants = report["mutants"]
    noticed = [mutant for mutant in mutants if mutant["outcome"] != "survived"]
    first = [mutant for mutant in noticed if not mutant.get("survived_at_first")]
    explained = [mutant for mutant in mutants if "equivalent" in mutant]
    rooms = [[mutant["room"] for mutant in group] for group in (mutants, first, noticed, explained)]
    counts = [collections.Counter(names) for names in rooms]
    return {
        "count": len(mutants),
        "seed": report["seed"],
        "commit": report["commit"][:7],
        "rows": [[room, *(str(count[room]) for count in counts)] for room in counts[0]],
        "noticed": [
            f"{100 * len(first) / count:.0f}%" for count in (len(mutants), len(mutants) - len(explained))
        ],
    }
