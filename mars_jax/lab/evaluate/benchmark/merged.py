"""The folder of one run of `benchmark`, from those of its parts.

The rows are those of one process, but for dates and seconds, and so is what is counted in them. Oracle: a run in one
process (tests/lab/evaluate/test_merging.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mars_jax.cli.part import Part
from mars_jax.core.errors import MarsError
from mars_jax.lab.evaluate.benchmark import report
from mars_jax.lab.evaluate.benchmark.arm_loops import ROWS, TEXTS
from mars_jax.lab.evaluate.benchmark.arm_rows import place_of
from mars_jax.lab.folder import write_json
from mars_jax.lab.pictures import check_installed
from mars_jax.serve.journal import Row, to_line


class _Run(NamedTuple):
    """The files of a part."""

    rows: list[Row]
    summary: dict[str, Any]
    texts: dict[str, Any]


def _read(folder: Path, part: Part) -> _Run:
    def read(name: str, default: Any = None) -> Any:
        path = folder / name
        return default if default is not None and not path.exists() else json.loads(path.read_text("utf-8"))

    if not (folder / report.SUMMARY).exists():
        raise part.unfinished(folder)
    try:
        lines = (folder / ROWS).read_bytes().splitlines()  # of a text, U+2028 would end a line
        rows = [dict(json.loads(line)) for line in lines]
        run = _Run(rows, read(report.SUMMARY), read(TEXTS, {}))
        wanted = sum(arm["problems"] for table in run.summary["tables"] for arm in table["arms"])
        if len(rows) != wanted:
            raise ValueError
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise part.damaged(folder) from None
    return run


def write(parts: Mapping[Part, Path], settings: Mapping[str, Any], folder: Path) -> int:
    """Write all files of the run but its settings; returns the number of its rows.

    Args:
      parts: and their folders.
      settings: of the run.
      folder: an empty one.

    Raises:
      MarsError: a part is unfinished or damaged, or a package is missing.
    """
    check_installed()
    runs = [_read(there, part) for part, there in parts.items()]
    tables = [table for run in runs for table in run.summary["tables"]]
    metrics = {table["task"]: table["metric"] for table in tables}
    legends = {
        table["temperature"]: [
            {name: arm[name] for name in ("arm", "role", "meaning")} for arm in table["arms"]
        ]
        for table in tables
    }
    places = [(task, t) for task in settings["tasks"] for t in settings["temperatures"]]
    # Of one process, groups of problems are the outer loop and arms the inner one.
    size = min(settings["batch_size"], max(settings["tasks"].values()))
    group = size if size == 1 else size * settings["group"]
    keys = [
        (task, t, arm["arm"], number)
        for task, t in places
        for first in range(0, settings["tasks"][task], group)
        for arm in legends.get(t, ())
        for number in range(settings["tasks"][task])[first : first + group]
    ]
    there = {_key(row, settings): row for run in runs for row in run.rows}
    if set(there) != set(keys) or len(keys) != sum(len(run.rows) for run in runs):
        raise MarsError(
            f"the parts of '{folder.name}' have other rows than one run: remove them, and decode them again."
        )
    rows = [there[key] for key in keys]
    numbers = {(row["task"], row["id"]): number for (*_, number), row in there.items()}
    texts = {}
    for task, t in places:
        name = place_of(task, t)
        if said := [text for run in runs for text in run.texts.get(name, ())]:
            texts[name] = sorted(said, key=lambda text, task=task: numbers[task, text["id"]])
    of_rows = report.notes_of_rows(runs[0].rows)
    summary = report.summarize(
        settings,
        runs[0].summary["environment"],
        {task: metrics[task] for task in settings["tasks"]},
        [note for note in runs[0].summary["notes"] if note not in of_rows],
        rows,
        lambda temperature: legends[temperature],
    )
    (folder / ROWS).write_text("".join(f"{to_line(row)}\n" for row in rows), encoding="utf-8")
    if texts:
        write_json(folder / TEXTS, texts)
    report.write(summary, texts, folder)
    return len(rows)


def _key(row: Row, settings: Mapping[str, Any]) -> tuple[str, float, str, int]:
    """Return what a row is about. Its seed tells the number of its problem within the task."""
    return row["task"], row["temperature"], row["arm"], (row["seed"] - settings["seed"]) % 2**32
