"""How many of the changes of scripts/mutants.py the tests notice."""

from __future__ import annotations

import collections
from typing import Any

from results_tables.bars import RESULTS, bar, load


def mutants() -> list[dict[str, Any]]:
    """mutants_SEED.json, by seed."""
    return [_draw(load(path.name)) for path in sorted(RESULTS.glob("mutants_*.json"))]


def _draw(report: dict[str, Any]) -> dict[str, Any]:
    made = report["mutants"]
    noticed = [one for one in made if one["outcome"] != "survived"]
    first = [one for one in noticed if not one.get("survived_at_first")]
    explained = [one for one in made if "equivalent" in one]
    rooms = [[one["room"] for one in ones] for ones in (made, first, noticed, explained)]
    counts = [collections.Counter(names) for names in rooms]
    return {
        "count": len(made),
        "seed": report["seed"],
        "commit": report["commit"][:7],
        "rows": [[room, *(str(count[room]) for count in counts)] for room in counts[0]],
        "bars": [
            bar("noticed at first, of all", 100 * len(first) / len(made), "{:.0f}%", ">= 85%"),
            bar(
                "noticed at first, of those that change something",
                100 * len(first) / (len(made) - len(explained)),
                "{:.0f}%",
                ">= 85%",
            ),
        ],
        "unnoticed": [
            [f"`{_place(one)}`", _change(one), f"{one['ran']}"]
            for one in made
            if one["outcome"] == "survived" and "equivalent" not in one
        ],
        "explained": [[f"`{_place(one)}`", _change(one), one["equivalent"]] for one in explained],
    }


def _place(one: dict[str, Any]) -> str:
    return f"{one['file'].removeprefix('mars_jax/')}:{one['line']}"


def _change(one: dict[str, Any]) -> str:
    """The line as it becomes, cut to what a table has room for."""
    added = [line[1:].strip() for line in one["diff"].splitlines() if line.startswith("+")]
    text = " ".join(added).replace("|", "\\|")
    return f"`{text if len(text) <= 90 else text[:87] + '...'}`"
