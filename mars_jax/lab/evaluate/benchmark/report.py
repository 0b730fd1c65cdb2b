"""The files of an evaluation: all of them functions of its rows, and of what was decoded beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mars_jax.lab.evaluate import figures
from mars_jax.lab.evaluate.benchmark import page, plots, rehearsal, table
from mars_jax.lab.evaluate.benchmark.arm_rows import Row, place_of
from mars_jax.lab.evaluate.benchmark.arms import AUTOREGRESSIVE
from mars_jax.lab.evaluate.benchmark.match import Match
from mars_jax.lab.evaluate.scoring import sandbox
from mars_jax.lab.evaluate.tasks.problems import Problem
from mars_jax.lab.folder import write_json
from mars_jax.serve.rows import write_whole

SUMMARY, TABLE, PAGE = "summary.json", "table.md", "report.html"


def summarize(
    settings: Mapping[str, Any],
    environment: Mapping[str, Any],
    matches: Mapping[str, Match],
    margins: Mapping[str, Any],
    replays: Mapping[str, Any],
    metrics: Mapping[str, str],
    told: Sequence[str],
    rows: Sequence[Row],
    arms_at: Callable[[float, float | None], list[dict[str, str]]],
) -> dict[str, Any]:
    """The content of summary.json.

    Args:
      settings, environment, matches, margins, replays, rows: of the run.
      metrics: by task, in the order of the tables.
      told: what `notes` says.
      arms_at: gives the legends of the arms at a temperature and a matched threshold.
    """
    by_arm: dict[tuple[str, float, str], list[Row]] = {}
    for row in rows:
        by_arm.setdefault((row["task"], row["temperature"], row["arm"]), []).append(row)
    tables = []
    for task, metric in metrics.items():
        for temperature in settings["temperatures"]:
            place = place_of(task, temperature)
            found = matches.get(place)
            arms = arms_at(temperature, found and found.theta)
            strict = next((arm["arm"] for arm in arms if arm["role"] == "strict"), None)
            tables.append(
                {
                    "task": task,
                    "temperature": temperature,
                    "metric": metric,
                    "match": found and found._asdict(),
                    "margins": margins.get(place, {}),
                    "replay": rehearsal.taus(replays[place], seed=settings["seed"])
                    if place in replays
                    else None,
                    "arms": [
                        arm
                        | figures.summarize(
                            by_arm[task, temperature, arm["arm"]],
                            by_arm[task, temperature, AUTOREGRESSIVE],
                            None if strict is None else by_arm[task, temperature, strict],
                            metric=metric,
                            seed=settings["seed"],
                        )
                        for arm in arms
                    ],
                }
            )
    return {
        "settings": dict(settings),
        "environment": {**environment, **latest(rows)},
        "date": max((row["date"] for row in rows if "date" in row), default=None),
        "days": _days(rows),
        "notes": [*told, *notes_of_rows(rows)],
        "tables": tables,
    }


def latest(rows: Sequence[Row]) -> dict[str, Any]:
    """When the last row was decoded, and of which commit: a run that finds them all decodes nothing."""
    last = max(rows, key=lambda row: row.get("date", ""), default={})
    return {name: last.get(name) for name in ("date", "commit", "dirty")} if last else {}


def _days(rows: Sequence[Row]) -> list[str]:
    return sorted({row["date"][:10] for row in rows if "date" in row})


def notes_of_rows(rows: Sequence[Row]) -> list[str]:
    """Facts about some rows, as `notes`."""
    told = []
    if full := sum(row["finish_reason"] == "context" for row in rows):
        told.append(f"In {full} rows a follow-up turn did not fit the context and was left out.")
    days, commits = _days(rows), {row.get("commit") for row in rows}
    if len(days) > 1 or len(commits) > 1:
        code = f" by {len(commits)} versions of the code" if len(commits) > 1 else ""
        told.append(
            f"The rows were decoded on {len(days)} {'days' if len(days) > 1 else 'day'} "
            f"({', '.join(days)}){code}: arms that were timed apart may differ in speed for that reason alone."
        )
    return told


def notes(settings: Mapping[str, Any], problems: Sequence[Problem]) -> list[str]:
    """Facts about settings and problems that a reader needs and that the figures do not show."""
    told = []
    if not settings["chat"] and any(len(p.turns) > 1 for p in problems):
        told.append("Follow-up turns were left out: they need a chat template, which --chat applies.")
    if any(p.metric == "pass@1" for p in problems) and not settings["allow_code_execution"]:
        told.append("Generated programs were not run and so not scored: --allow-code-execution runs them.")
    if settings.get("confinement") == sandbox.HOOK:
        told.append("Generated programs ran under Python's audit hook alone, without walls.")
    if any(p.task == "humaneval" and p.code is None for p in problems):
        told.append("This HumanEval file has no tests, so nothing is scored: its original layout has them.")
    if settings["batch_size"] > 1:
        told.append(
            f"{settings['batch_size']} problems were decoded side by side, each row begun again as it ended; s/task is "
            "their share."
        )
    return told


def write(summary: Mapping[str, Any], texts: Mapping[str, Any], folder: Path) -> None:
    """Write summary.json, table.md, the plots and report.html. `texts` are those of texts.json."""
    write_json(folder / SUMMARY, summary)
    write_whole(folder / TABLE, table.markdown(summary))
    plots.draw(summary, folder)
    pictures = {
        name: (folder / name).with_suffix(".svg").read_text(encoding="utf-8") for name in plots.drawn(summary)
    }
    write_whole(folder / PAGE, page.render(summary, texts, pictures))
