"""The files of a benchmark other than its rows: summary.json, table.md, the plots, and report.html.

The page is self-contained: it needs no network access, scripts or other files.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mars_jax.hub.durable import write_whole
from mars_jax.lab.evaluate import figures
from mars_jax.lab.evaluate.benchmark import plots, tables
from mars_jax.lab.evaluate.benchmark.arms import AUTOREGRESSIVE, Arm
from mars_jax.lab.evaluate.scoring.samples import UNSCORED
from mars_jax.lab.evaluate.tasks.problems import Problem
from mars_jax.lab.folder import write_shared_json
from mars_jax.serve.rows import Row

SUMMARY, TABLE, PAGE = "summary.json", "table.md", "report.html"
TEMPLATE = "report.html.jinja"
LEGEND = {
    "exact": "drafted, and the target's own choice",
    "relaxed": "drafted, and accepted as a near tie",
    "trusted": "drafted, and accepted without a test",
    "corrected": "the target's own",
}
"""Descriptions of the kinds of tokens."""
# Replace control characters, which HTML does not allow.
_CONTROLS = {c: "\N{REPLACEMENT CHARACTER}" for c in [*range(32), *range(127, 160)] if chr(c) not in "\n\t"}


def make_summary(
    settings: Mapping[str, Any],
    environment: Mapping[str, Any],
    problems: Sequence[Problem],
    rows: Sequence[Row],
    arms: Mapping[float, Sequence[Arm]],
) -> dict[str, Any]:
    """Return the contents of summary.json.

    Args:
      settings, environment, problems, rows: those of the run.
      arms: arms by temperature.
    """
    by_arm: dict[tuple[str, float, str], list[Row]] = {}
    for row in rows:
        by_arm.setdefault((row["task"], row["temperature"], row["arm"]), []).append(row)
    tables = []
    for task, metric in {problem.task: problem.metric for problem in problems}.items():
        for temperature in settings["temperatures"]:
            strict = next((arm.name for arm in arms[temperature] if arm.role == "strict"), None)
            autoregressive_rows = by_arm[task, temperature, AUTOREGRESSIVE]
            strict_rows = None if strict is None else by_arm[task, temperature, strict]
            summaries = [
                arm.legend()
                | figures.arm_figures(
                    by_arm[task, temperature, arm.name],
                    autoregressive_rows,
                    strict_rows,
                    metric=metric,
                    seed=settings["seed"],
                )
                for arm in arms[temperature]
            ]
            tables.append({"task": task, "temperature": temperature, "metric": metric, "arms": summaries})
    # The last row may be from an earlier process.
    last = max(rows, key=lambda row: row["date"])
    return {
        "settings": dict(settings),
        "environment": {**environment, **{name: last[name] for name in ("date", "commit", "dirty")}},
        "date": last["date"],
        "days": _days(rows),
        "notes": notes(settings, problems, rows),
        "tables": tables,
    }


def _days(rows: Sequence[Row]) -> list[str]:
    return sorted({row["date"][:10] for row in rows})


def notes(settings: Mapping[str, Any], problems: Sequence[Problem], rows: Sequence[Row]) -> list[str]:
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
            "next problem; s/task is their share."
        )
    if full := sum(row["finish_reason"] == "context" for row in rows):
        sentences.append(f"In {full} rows a follow-up turn did not fit the context and was left out.")
    days, commits = _days(rows), {row["commit"] for row in rows}
    if len(days) > 1 or len(commits) > 1:
        code = f" by {len(commits)} versions of the code" if len(commits) > 1 else ""
        sentences.append(
            f"The rows were decoded on {', '.join(days)}{code}: arms that were timed apart may differ in speed for "
            "that reason alone."
        )
    programs = {p.task for p in problems if p.metric == "pass@1"}
    if any(row["task"] in programs and row["score"] is None for row in rows):
        sentences.append(UNSCORED)
    return sentences


def write_report(summary: Mapping[str, Any], texts: Mapping[str, Any], folder: Path) -> None:
    """Write summary.json, table.md, the plots and report.html. `texts` is the contents of texts.json."""
    write_shared_json(folder / SUMMARY, summary)
    write_whole(folder / TABLE, tables.markdown(summary))
    plots.draw(summary, folder, "; ".join([tables.title(summary["settings"]), *tables.facts(summary)]) + ".")
    pictures = {name: (folder / f"{name}.png").read_bytes() for name in plots.captions(summary)}
    write_whole(folder / PAGE, page(summary, texts, pictures))


def page(summary: Mapping[str, Any], texts: Mapping[str, Any], pictures: Mapping[str, bytes]) -> str:
    """Return the HTML report.

    Args:
      summary: contents of summary.json.
      texts: contents of texts.json.
      pictures: PNG files, keyed by the names in `plots.PICTURES`.
    """
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        autoescape=True,
        finalize=_plain,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    settings = {**summary["settings"], **summary["environment"]}
    return environment.get_template(TEMPLATE).render(
        title=tables.title(summary["settings"]),
        facts=tables.facts(summary),
        notes=summary["notes"],
        tables=[
            {
                "heading": tables.heading(table),
                "about": tables.about(table),
                "key": tables.key(table),
                "rows": [
                    tables.cells(arm, table["metric"]) | {"meaning": arm["meaning"]} for arm in table["arms"]
                ],
                "texts": texts.get(tables.heading(table), []),
            }
            for table in summary["tables"]
        ],
        columns=tables.COLUMNS,
        plots=[
            {"words": plots.PICTURES[name], "data": base64.b64encode(picture).decode()}
            for name, picture in pictures.items()
        ],
        legend=LEGEND,
        settings={
            name: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            for name, value in settings.items()
            if value is not None
        },
    )


def _plain(value: Any) -> Any:
    """Replace control characters and unpaired surrogates in a string.

    >>> _plain("a\\x1b[1m" + chr(0xD800))
    'a\ufffd[1m?'
    """
    if type(value) is not str:
        return value
    return value.translate(_CONTROLS).encode("utf-8", "replace").decode("utf-8")
