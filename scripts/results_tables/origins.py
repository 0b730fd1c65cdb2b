"""Where the figures of a page come from: what their JSON says of its run, or what git history says of the JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import common
from results_tables.bars import load

PLACES = ("environment", "made", "machine")
"""Where a report keeps its provenance, if not at its top."""


class Origin(NamedTuple):
    """The run of a report, with what git history adds where the run did not record it."""

    date: str | None  # of the run
    commit: str
    committed: str | None  # when the figures came into the history; None where the commit is of the run
    machine: str | None
    dirty: bool
    script: Mapping[str, str]  # digests by name


def origin(report: Any) -> Origin:
    """The origin of a report; of records that have their own, the latest.

    Raises:
      ValueError: it has none.

    >>> origin({"recovered": {"commit": "fa252ce", "committed": "2026-11-23T00:52:49+00:00"}}).commit
    'fa252ce'
    """
    found = list(_origins(report))
    if not found:
        raise ValueError("a report says neither its commit and date, nor what history knows of them.")
    return max(found, key=lambda one: one.date or one.committed or "")


def _origins(report: Any) -> Iterator[Origin]:
    if isinstance(report, list):
        for record in report:
            yield from _origins(record)
        return
    places = [place for place in (report, *map(report.get, PLACES)) if isinstance(place, dict)]
    dated = [place for place in places if place.get("date")]
    run = next((place for place in dated if place.get("commit")), dated[0] if dated else {})
    history = report.get("recovered", {})
    script = run.get("script") or history.get("script") or {}
    if history.get("commit"):
        yield Origin(run.get("date"), history["commit"], history["committed"], None, False, script)
    elif run.get("commit"):
        cores = f"{run['cores']} core{'s' * (run['cores'] != 1)} of {run['processor']}"
        yield Origin(run["date"], run["commit"], None, cores, bool(run["dirty"]), script)


def made(*names: str) -> str:
    """A sentence on when and of which code the figures of JSON files are, one for all or one for each."""
    said = {name: sentence(origin(load(name))) for name in names}
    if len(set(said.values())) == 1:
        return said[names[0]]
    return " ".join(f"`{name}`: {told[0].lower()}{told[1:]}" for name, told in said.items())


def sentence(found: Origin) -> str:
    """When and of which code figures are, and whether the script that wrote them has changed since."""
    if found.committed is None:
        changed = " with changes that are in no commit" if found.dirty else ""
        told = f"Measured on {str(found.date)[:10]} at {found.commit}{changed}, {found.machine}."
    elif found.date is not None:
        told = f"Measured on {found.date[:10]}, committed in {found.commit}."
    else:
        told = f"Committed on {found.committed[:10]} in {found.commit}."
    for name, digest in found.script.items():
        path = common.ROOT / name
        if not path.exists():
            told += f" Its script is in the history alone: `git show {found.commit}:{name}`."
        elif common.digest(path.read_bytes()) != digest:
            told += " Its script has changed since."
    return told
