"""The files of a benchmark other than its rows: summary.json, table.md, the plots, and report.html.

The page is self-contained: it needs no network access, scripts or other files.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from mars_jax.hub.durable import write_whole
from mars_jax.lab.evaluate import figures
from mars_jax.lab.evaluate.benchmark import plots, tables
from mars_jax.lab.evaluate.benchmark.arms import Arm
from mars_jax.lab.evaluate.scoring.samples import UNSCORED
from mars_jax.lab.evaluate.tasks.problems import Problem
from mars_jax.lab.folder import write_shared_json
from mars_jax.serve.rows import Row
from mars_jax.utils.types import JsonObject

SUMMARY, TABLE, PAGE = "summary.json", "table.md", "report.html"
TEMPLATE = "report.html.jinja"
LEGEND = {
    "exact": "drafted, and the target's own choice",
    "relaxed": "drafted, and accepted as a near tie",
    "trusted": "drafted, and accepted without a test",
    "corrected": "the target's own",
}
"""Descriptions of the kinds of tokens."""


def make_summary(
    settings: JsonObject,
    environment: JsonObject,
    problems: Sequence[Problem],
    rows: Sequence[Row],
    arms: Mapping[float, Sequence[Arm]],
) -> JsonObject:
    """Return the contents of summary.json.

    Args:
      settings, environment, problems, rows: those of the run.
      arms: arms by temperature.
    """
    by_arm: dict[tuple[str, float, str], list[Row]] = {}
    for row in rows:
        by_arm.setdefault((row["task"], row["temperature"], row["arm"]), []).append(row)
    table_summaries = []
    for task, metric in {problem.task: problem.metric for problem in problems}.items():
        for temperature in settings["temperatures"]:
            # Reverse the order, so that the first arm of each role is kept, such as the rule at its first threshold.
            by_role = {arm.role: by_arm[task, temperature, arm.name] for arm in reversed(arms[temperature])}
            arm_summaries = []
            for arm in arms[temperature]:
                arm_figures = figures.arm_figures(
                    by_arm[task, temperature, arm.name],
                    by_role["alone"],
                    by_role.get("strict"),
                    metric=metric,
                    seed=settings["seed"],
                )
                arm_summaries.append(arm.legend() | arm_figures)
            table = {"task": task, "temperature": temperature, "metric": metric, "arms": arm_summaries}
            table_summaries.append(table)
    # The last row may be from an earlier process.
    latest_row = max(rows, key=lambda row: row["date"])
    return {
        "settings": settings,
        "environment": {**environment, **{name: latest_row[name] for name in ("date", "commit", "dirty")}},
        "date": latest_row["date"],
        "days": _days(rows),
        "notes": notes(settings, problems, rows),
        "tables": table_summaries,
    }


def _days(rows: Sequence[Row]) -> list[str]:
    return sorted({row["date"][:10] for row in rows})


def notes(settings: JsonObject, problems: Sequence[Problem], rows: Sequence[Row]) -> list[str]:
    """Return notes on settings, problems and rows that the figures do not show."""
    sentences = []
    if not settings["chat"] and any(len(p.turns) > 1 for p in problems):
        sentences.append("Follow-up turns were left out: they need a chat template, which --chat applies.")
    if any(p.task == "humaneval" and p.code is None for p in problems):
        sentences.append(
            "This HumanEval file has no tests, so nothing is scored: its original layout has them."
        )
    if settings["batch_size"] > 1:
        sentences.append(
            f"{settings['batch_size']} problems were decoded side by side, and a row that ended made room for the "
            "next problem; s/task is each problem's share of the time."
        )
    if num_full := sum(row["finish_reason"] == "context" for row in rows):
        sentences.append(f"In {num_full} rows a follow-up turn did not fit the context and was left out.")
    days, commits = _days(rows), {row["commit"] for row in rows}
    if len(days) > 1 or len(commits) > 1:
        code_versions = ""
        if len(commits) > 1:
            code_versions = f" by {len(commits)} versions of the code"
        sentences.append(
            f"The rows were decoded on {', '.join(days)}{code_versions}: arms that were timed apart may differ in "
            "speed for that reason alone."
        )
    code_tasks = {p.task for p in problems if p.metric == "pass@1"}
    if any(row["task"] in code_tasks and row["score"] is None for row in rows):
        sentences.append(UNSCORED)
    return sentences


def write_report(summary: JsonObject, texts: JsonObject, folder: Path) -> None:
    """Write summary.json, table.md, the plots and report.html. `texts` is the contents of texts.json."""
    write_shared_json(folder / SUMMARY, summary)
    write_whole(folder / TABLE, tables.markdown(summary))
    plots.draw(summary, folder, "; ".join([tables.title(summary["settings"]), *tables.facts(summary)]) + ".")
    pictures = {name: (folder / f"{name}.png").read_bytes() for name in plots.captions(summary)}
    write_whole(folder / PAGE, page(summary, texts, pictures))


def page(summary: JsonObject, texts: JsonObject, pictures: Mapping[str, bytes]) -> str:
    """Return the HTML report.

    Args:
      summary: contents of summary.json.
      texts: contents of texts.json.
      pictures: PNG files, keyed by the names in `plots.PICTURES`.
    """
    setting_texts = {}
    for name, value in {**summary["settings"], **summary["environment"]}.items():
        if value is not None:
            setting_texts[name] = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    shown_plots = [
        {"words": plots.PICTURES[name], "data": base64.b64encode(picture).decode()}
        for name, picture in pictures.items()
    ]
    contents = tables.contents(summary) | {"texts": texts, "settings": setting_texts, "legend": LEGEND}
    return tables.render(TEMPLATE, **contents, plots=shown_plots)
