"""Summary, Markdown table and plots of an evaluation: all of it a function of its rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mars_jax import specs
from mars_jax.core.errors import MarsError
from mars_jax.evaluate import figures
from mars_jax.evaluate.benchmark.arms import AUTOREGRESSIVE, Arm
from mars_jax.evaluate.benchmark.margins import PROBLEMS
from mars_jax.evaluate.benchmark.match import Match
from mars_jax.evaluate.benchmark.rows import Row
from mars_jax.evaluate.folder import write_json
from mars_jax.evaluate.scoring import sandbox
from mars_jax.evaluate.scoring.scores import METRICS
from mars_jax.evaluate.tasks.problems import Problem

SUMMARY, TABLE = "summary.json", "table.md"

COLUMNS = {
    "arm": "how the prompts were decoded; the list below says what each arm is",
    "tau": "tokens per target forward, the correction or bonus token included",
    "relaxed": "share of the accepted draft tokens that only the relaxed rule accepts",
    "regret": "mean of z1 - z[token] over emitted tokens, in nats of the target's raw logits",
    "tokens/s": "new tokens by wall time, prefill included and compilation not",
    "speed": "tokens/s against the target alone",
    "s/task": "wall seconds of a batch by its problems, summed over turns; longer answers eat a higher speed",
    "tokens/task": "length of the answers, stop tokens included",
    "loops": "share of answers whose tail is a phrase of up to 90 tokens three times over, and 12 tokens or more",
    "cut": "share of answers that did not stop by themselves",
    "same": "share of answers that are the target's own, token for token; at temperature 0 a lossless rule has 100%, "
    "but for ties that rounding decides",
    "score": "see the heading",
    "recovered": "score against that of the target alone, with a 95% interval by the paired bootstrap over problems; "
    "of a likelihood 100% is the aim, for what exceeds it is sharper than the target's own samples",
}
"""The meaning of each column of a table."""


def check_installed() -> None:
    """Raise MarsError where plots could not be drawn."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise MarsError("plots need the package matplotlib: install mars-jax[evaluate].") from None


def summarize(
    settings: Mapping[str, Any],
    environment: Mapping[str, Any],
    matches: Mapping[str, Match],
    margins: Mapping[str, Any],
    problems: Sequence[Problem],
    rows: Sequence[Row],
    arms_at: Callable[[float, float | None], list[Arm]],
) -> dict[str, Any]:
    """The content of summary.json. `arms_at` gives the arms at a temperature and a matched threshold."""
    metrics = {problem.task: problem.metric for problem in problems}
    by_arm: dict[tuple[str, float, str], list[Row]] = {}
    for row in rows:
        by_arm.setdefault((row["task"], row["temperature"], row["arm"]), []).append(row)
    tables = []
    for task, metric in metrics.items():
        for temperature in settings["temperatures"]:
            found = matches.get(f"{task}, temperature {temperature:g}")
            arms = arms_at(temperature, found and found.theta)
            alone, strict = (by_arm[task, temperature, name] for name in (AUTOREGRESSIVE, arms[1].name))
            tables.append(
                {
                    "task": task,
                    "temperature": temperature,
                    "metric": metric,
                    "match": found and found._asdict(),
                    "margins": margins[f"{task}, temperature {temperature:g}"],
                    "arms": [
                        {"arm": arm.name, "role": arm.role, "meaning": arm.meaning}
                        | figures.summarize(
                            by_arm[task, temperature, arm.name],
                            alone,
                            strict,
                            metric=metric,
                            seed=settings["seed"],
                        )
                        for arm in arms
                    ],
                }
            )
    return {
        "settings": dict(settings),
        "environment": dict(environment),
        "notes": notes(settings, problems, rows),
        "tables": tables,
    }


def notes(settings: Mapping[str, Any], problems: Sequence[Problem], rows: Sequence[Row]) -> list[str]:
    """Facts that a reader needs and that the figures do not show."""
    told = []
    if not settings["chat"] and any(len(p.turns) > 1 for p in problems):
        told.append("Follow-up turns were left out: they need a chat template, which --chat applies.")
    if any(p.metric == "pass@1" for p in problems) and not settings["allow_code_execution"]:
        told.append("Generated programs were not run and so not scored: --allow-code-execution runs them.")
    if settings.get("confinement") == sandbox.HOOK:
        told.append("Generated programs ran under Python's audit hook alone, without walls.")
    if any(p.task == "humaneval" and p.code is None for p in problems):
        told.append("This HumanEval file has no tests, so nothing is scored: its original layout has them.")
    if full := sum(row["finish_reason"] == "context" for row in rows):
        told.append(f"In {full} rows a follow-up turn did not fit the context and was left out.")
    if settings["batch_size"] > 1:
        told.append(
            f"{settings['batch_size']} problems were decoded side by side, each row begun anew as it ended; s/task is "
            "their share."
        )
    return told


def write(summary: Mapping[str, Any], folder: Path) -> None:
    """Write summary.json, table.md and the plots."""
    from mars_jax.evaluate.benchmark import plots

    write_json(folder / SUMMARY, summary)
    (folder / TABLE).write_text(markdown(summary), encoding="utf-8")
    plots.draw(summary, folder)


def markdown(summary: Mapping[str, Any]) -> str:
    """The tables for people."""
    settings = summary["settings"]
    shown = ("target", "draft", "drafter", "dtype", "rule", "max_new_tokens")
    shown += ("batch_size", "seed", "chat", "device")
    told = {**settings, "rule": _rule(settings["rule"])}
    facts = [f"{k.replace('_', ' ')} {_fact(told[k])}" for k in shown if told.get(k) is not None]
    lines = ["# Speculative decoding, measured", "", "; ".join(facts) + ".", ""]
    for note in summary["notes"]:
        lines += [f"Note: {note}", ""]
    for table in summary["tables"]:
        lines += _table(table)
    lines += ["## Columns", "", *(f"- {name}: {text}" for name, text in COLUMNS.items()), ""]
    lines += [
        "## Plots",
        "",
        "![speed against quality](speed_quality.png)",
        "",
        "![tau against theta](tau_theta.png)",
    ]
    lines += ["", "![steps by accepted draft tokens](depth.png)", "", "![drafts by margin](margins.png)", ""]
    lines += [f"The margins are those of the first {PROBLEMS} problems of a task, in their first turn.", ""]
    return "\n".join(lines)


def _rule(rule: Mapping[str, Any]) -> str:
    """The rule with its settings."""
    row = specs.RULES.get(rule["verify"])
    said = []
    for name, value in rule["settings"].items():
        setting = row and row.settings.get(name)
        word = setting.default_words if setting and value == setting.default else _fact(value)
        said.append(f"{name.replace('_', ' ')} {word}")
    return f"{rule['verify']} ({', '.join(said)})" if said else rule["verify"]


def _fact(value: Any) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _table(table: Mapping[str, Any]) -> list[str]:
    arms, found = table["arms"], table["match"]
    lines = [
        f"## {table['task']}, temperature {table['temperature']:g}",
        "",
        f"{arms[0]['problems']} problems; {METRICS[table['metric']]}.{_match(found)}",
        "",
        "| " + " | ".join(COLUMNS) + " |",
        "|---|" + "---:|" * (len(COLUMNS) - 1),
        *("| " + " | ".join(_cells(arm)) + " |" for arm in arms),
        "",
    ]
    deepest = max(len(arm["acceptance_by_depth"]) for arm in arms)
    lines += [
        "Accepted at each depth, of the steps that came so far:",
        "",
        "| arm | " + " | ".join(str(d + 1) for d in range(deepest)) + " |",
        "|---|" + "---:|" * deepest,
    ]
    for arm in arms:
        if rates := arm["acceptance_by_depth"]:
            cells = ["-" if rate is None else f"{rate:.1%}" for rate in rates]
            lines.append(f"| {arm['arm']} | " + " | ".join(cells) + " |")
    return [*lines, "", *(f"- {arm['arm']}: {arm['meaning']}" for arm in arms), ""]


def _match(found: Mapping[str, Any] | None) -> str:
    if found is None:  # a lossless rule has no control
        return ""
    return (
        f" Matched threshold {found['theta']:g}: tau {found['tau']:.2f} for {found['wanted']:.2f}, on the problems of "
        "the match."
    )


def _cells(arm: Mapping[str, Any]) -> list[str]:
    drafts = bool(arm["acceptance_by_depth"])
    recovered = "-" if arm["recovered"] is None else f"{arm['recovered']:.1%}"
    if arm["recovered_interval"] is not None and arm["arm"] != AUTOREGRESSIVE:
        low, high = arm["recovered_interval"]
        recovered += f" [{low:.1%}, {high:.1%}]"
    return [
        arm["arm"],
        f"{arm['tau']:.2f}",
        f"{arm['relaxed_share']:.1%}" if drafts else "-",
        f"{arm['regret_per_token']:.3f}",
        f"{arm['tokens_per_second']:.1f}",
        f"{arm['speedup']:.2f}x",
        f"{arm['seconds_per_task']:.3g}",
        f"{arm['tokens_per_task']:.1f}",
        f"{arm['loop_rate']:.1%}",
        f"{arm['length_rate']:.1%}",
        f"{arm['same_as_autoregressive']:.1%}",
        "-" if arm["score"] is None else f"{100 * arm['score']:.1f}",
        recovered,
    ]
