"""What the fast tests take, as scripts/processor_seconds.py has kept it."""

from __future__ import annotations

from typing import Any

from results_tables.bars import load


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
