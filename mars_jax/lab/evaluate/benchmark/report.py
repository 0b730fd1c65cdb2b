"""The output files of a benchmark, except its rows: summary.json, table.md, the plots, and report.html.

report.html is self-contained: it needs no network access, scripts or other files.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from mars_jax.hub.durable import write_whole
from mars_jax.lab.evaluate import figures
from mars_jax.lab.evaluate.benchmark import plots
from mars_jax.lab.evaluate.benchmark.arms import AUTOREGRESSIVE, Arm
from mars_jax.lab.evaluate.scoring import METRICS, UNSCORED
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
"""Description of each kind of token, for the legend of report.html."""


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
      arms: the arms at each temperature.
    """
    by_arm: dict[tuple[str, float, str], list[Row]] = {}
    for row in rows:
        by_arm.setdefault((row["task"], row["temperature"], row["arm"]), []).append(row)
    table_summaries = []
    for task, metric in {problem.task: problem.metric for problem in problems}.items():
        for temperature in settings["temperatures"]:
            # Iterate in reverse, so that the first arm of a role overwrites the others. For a rule, this is the arm
            # with the first threshold.
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
    # Rows may come from several processes, and the last row in the list need not be the latest.
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
    """Return notes on facts that the figures do not show, such as turns that were left out."""
    sentences = []
    if not settings["chat"] and any(len(p.turns) > 1 for p in problems):
        sentences.append("Follow-up turns were left out: they need a chat template, which --chat applies.")
    if any(p.task == "humaneval" and p.code is None for p in problems):
        sentences.append(
            "This HumanEval file has no tests, so nothing is scored: its original layout has them."
        )
    if settings["batch_size"] > 1:
        sentences.append(
            f"{settings['batch_size']} problems were decoded in parallel, and each finished row was refilled with the "
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
    write_whole(folder / TABLE, markdown(summary))
    plots.draw(summary, folder, "; ".join([title(summary["settings"]), *facts(summary)]) + ".")
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
    values = contents(summary) | {"texts": texts, "settings": setting_texts, "legend": LEGEND}
    return render(TEMPLATE, **values, plots=shown_plots)


KEY = ("arm", "tau", "tokens/s", "speed", "score change")
"""The columns of the short table; `regret` replaces the last one if nothing is scored."""
COLUMNS = {
    "arm": "how the prompts were decoded; the list below the table explains each arm",
    "tau": "tokens per target forward, the correction or bonus token included",
    "relaxed": "share of the accepted draft tokens that only the relaxed rule accepts",
    "regret": "mean of z1 - z[token] over emitted tokens, in nats of the target's raw logits",
    "tokens/s": "new tokens per second of wall time, prefill included and compilation excluded",
    "speed": "tokens/s relative to the target alone",
    "s/task": "wall seconds per problem, summed over turns; longer answers take more of them",
    "tokens/task": "length of the answers, stop tokens included",
    "loops": "share of answers that end in a phrase of up to 90 tokens, repeated three times over 12 tokens or more",
    "cut": "share of answers that did not end in a stop token",
    "same": "share of answers with the target's own tokens; at temperature 0 a lossless rule has 100%, up to ties "
    "within rounding",
    "score": "see the heading",
    "score change": "score minus that of the target alone, in points of 100, with a 95% interval by the paired "
    "bootstrap over problems, and a word for whether the interval excludes 0. A likelihood should stay near 0: above "
    "it, texts are sharper than the target's own samples",
}
"""The meaning of each column."""


def markdown(summary: JsonObject) -> str:
    """Return the contents of table.md: the short tables, then the tables with all columns."""
    return render("table.md.jinja", **contents(summary), plots=plots.captions(summary))


def contents(summary: JsonObject) -> JsonObject:
    """Convert the contents of summary.json to strings for the templates."""
    tables = [
        {
            "heading": heading(table),
            "about": f"{table['arms'][0]['problems']} problems; {METRICS[table['metric']]}.",
            "key": key(table),
            "rows": [cells(arm, table["metric"]) | {"meaning": arm["meaning"]} for arm in table["arms"]],
        }
        for table in summary["tables"]
    ]
    run = {"title": title(summary["settings"]), "facts": facts(summary), "notes": summary["notes"]}
    return run | {"tables": tables, "columns": COLUMNS}


def key(table: JsonObject) -> list[str]:
    """Return the columns of the short table."""
    if any(arm["score"] is not None for arm in table["arms"]):
        return list(KEY)
    return [*KEY[:-1], "regret"]


def title(settings: JsonObject) -> str:
    """Return the names of the two models, without local folders.

    >>> title({"target": "/data/models/qwen", "draft": "eagle:owner/head"})
    'qwen drafted by eagle:owner/head'
    """

    def short(name: str) -> str:
        kind, colon, path = name.rpartition(":")
        if path.startswith(("/", "~", ".")):
            path = Path(path).name
        return kind + colon + path

    return f"{short(settings['target'])} drafted by {short(settings.get('draft') or settings['drafter'])}"


def facts(summary: JsonObject) -> list[str]:
    """Return the settings of a run, its device, and the dates of its rows."""
    settings, days = summary["settings"], summary["days"]
    rule_text = f"rule {settings['rule']['verify']}"
    if options_text := ", ".join(f"{name} {value}" for name, value in settings["rule"]["settings"].items()):
        rule_text += f" ({options_text})"
    return [
        settings["drafter"],
        rule_text,
        f"up to {settings['max_new_tokens']} tokens",
        f"batch {settings['batch_size']}",
        f"seed {settings['seed']}",
        "chat template" if settings["chat"] else "no chat template",
        settings["device"],
        "n = " + ", ".join(f"{count} problems of {task}" for task, count in settings["tasks"].items()),
        " to ".join(dict.fromkeys((days[0], days[-1]))),
    ]


def heading(table: JsonObject) -> str:
    """Return the task and the temperature of a table."""
    return f"{table['task']}, temperature {table['temperature']:g}"


def change(arm: JsonObject, metric: str) -> str:
    """Describe the difference in score between an arm and the target without a draft, with a verdict in words.

    >>> arm = {"arm": "mars", "score_change": -0.02, "intervals": {"score_change": [-0.03, -0.01]}}
    >>> change(arm, "final_answer"), change(arm, "likelihood")
    ('-2.0 [-3.0, -1.0], worse', '-2.0 [-3.0, -1.0], less likely')
    >>> change(arm | {"intervals": {"score_change": [-0.05, 0.01]}}, "final_answer")
    '-2.0 [-5.0, +1.0], within noise'
    """
    if arm["score_change"] is None or arm["arm"] == AUTOREGRESSIVE:
        return "-"
    points_text = f"{100 * arm['score_change']:+.1f}"
    interval = arm["intervals"]["score_change"]
    if interval is None:
        return f"{points_text}, no interval"
    low, high = interval
    better_word, worse_word = "better", "worse"
    if metric == "likelihood":
        better_word, worse_word = "likelier", "less likely"
    if low == high == 0:
        verdict = "the same"
    elif low > 0:
        verdict = better_word
    elif high < 0:
        verdict = worse_word
    else:
        verdict = "within noise"
    return f"{points_text} [{100 * low:+.1f}, {100 * high:+.1f}], {verdict}"


def cells(arm: JsonObject, metric: str) -> dict[str, str]:
    """Return the table row of an arm, keyed by the names in `COLUMNS`."""
    is_drafting = bool(arm["acceptance_by_depth"])
    return {
        "arm": arm["arm"],
        "tau": f"{arm['tau']:.2f}",
        "relaxed": f"{arm['relaxed_share']:.1%}" if is_drafting else "-",
        "regret": f"{arm['regret_per_token']:.3f}",
        "tokens/s": f"{arm['tokens_per_second']:.1f}",
        "speed": f"{arm['speedup']:.2f}x",
        "s/task": f"{arm['seconds_per_task']:.3g}",
        "tokens/task": f"{arm['tokens_per_task']:.1f}",
        "loops": f"{arm['loop_rate']:.1%}",
        "cut": f"{arm['length_rate']:.1%}",
        "same": f"{arm['same_as_autoregressive']:.1%}",
        "score": "-" if arm["score"] is None else f"{100 * arm['score']:.1f}",
        "score change": change(arm, metric),
    }


# Replace control characters, which HTML does not allow.
_CONTROLS = {c: "\N{REPLACEMENT CHARACTER}" for c in [*range(32), *range(127, 160)] if chr(c) not in "\n\t"}


def render(template: str, folder: Path = Path(__file__).parent, /, **values: object) -> str:
    """Render a template in a folder, by default the folder of this module. Values are escaped in HTML templates."""
    import jinja2

    # Without `finalize`, a control character in a completion would make the page invalid HTML.
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        undefined=jinja2.StrictUndefined,
        autoescape=template.endswith(".html.jinja"),
        finalize=_plain,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(values)


def _plain(value: object) -> object:
    """Replace control characters and unpaired surrogates in a string.

    >>> _plain("a\\x1b[1m" + chr(0xD800))
    'a\ufffd[1m?'
    """
    # Markup, a subclass of str, holds text that is already escaped.
    if type(value) is not str:
        return value
    return value.translate(_CONTROLS).encode("utf-8", "replace").decode("utf-8")
