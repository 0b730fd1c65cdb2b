"""How many of the changes of scripts/mutants.py the tests notice."""

from __future__ import annotations

import collections
from typing import Any

from results_tables.bars import Bar, bar, load


def mutants() -> dict[str, Any]:
    """mutants.json."""
    report = load("mutants.json")
    made = report["mutants"]
    noticed = [one for one in made if one["outcome"] in ("killed", "timeout")]
    groups = collections.Counter(one["group"] for one in made)
    caught = collections.Counter(one["group"] for one in noticed)
    explained = [one for one in made if "equivalent" in one]
    alike = collections.Counter(one["group"] for one in explained)
    return {
        "count": len(made),
        "seed": report["seed"],
        "commit": report["commit"][:7],
        "noticed": len(noticed),
        "hung": sum(one["outcome"] == "timeout" for one in made),
        "added": sum(one.get("survived_at_first", False) for one in noticed),
        "unnoticed": [
            [f"`{_place(one)}`", _change(one), f"{one['ran']} of {one['of']}"]
            for one in made
            if one["outcome"] == "survived" and "equivalent" not in one
        ],
        "rows": [[name, str(n), str(caught[name]), str(alike[name])] for name, n in groups.items()],
        "explained": [[f"`{_place(one)}`", _change(one), one["equivalent"]] for one in explained],
        "bars": _bars(len(noticed), len(made), len(explained)),
    }


def _bars(noticed: int, made: int, explained: int) -> list[Bar]:
    return [
        bar("noticed, of all mutants", 100 * noticed / made, "{:.1f}%", ">= 90%"),
        bar(
            "noticed, of those that change something", 100 * noticed / (made - explained), "{:.1f}%", ">= 90%"
        ),
    ]


def _place(one: dict[str, Any]) -> str:
    return f"{one['file'].removeprefix('mars_jax/')}:{one['line']}"


def _change(one: dict[str, Any]) -> str:
    """The line as it becomes, cut to what a table has room for."""
    added = [line[1:].strip() for line in one["diff"].splitlines() if line.startswith("+")]
    text = " ".join(added).replace("|", "\\|")
    return f"`{text if len(text) <= 90 else text[:87] + '...'}`"
