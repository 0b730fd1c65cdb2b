"""The tables of a benchmark for people, in Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mars_jax import specs
from mars_jax.lab.evaluate.benchmark import margins, rehearsal
from mars_jax.lab.evaluate.benchmark.arms import AUTOREGRESSIVE
from mars_jax.lab.evaluate.benchmark.plots import dates, drawn, pair
from mars_jax.lab.evaluate.scoring.scores import METRICS

KEY = ("arm", "tau", "tokens/s", "speed", "score change")
"""The columns that a table opens with; `regret` in the place of `score change` where nothing is scored."""
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
    "score change": "score minus that of the target alone, in points of 100, with a 95% interval by the paired "
    "bootstrap over problems; the word says whether the interval excludes 0. A likelihood aims at 0: above it, texts "
    "are sharper than the target's own samples",
}
"""The meaning of each column of a table."""


def markdown(summary: Mapping[str, Any]) -> str:
    """All tables, first those of five columns."""
    lines = [f"# {pair(summary['settings'])}, measured", "", "; ".join(facts(summary)) + ".", ""]
    for note in summary["notes"]:
        lines += [f"Note: {note}", ""]
    for table in summary["tables"]:
        lines += [f"## {heading(table)}", "", about(table), "", *_table(table, key(table)), ""]
    lines += ["## All columns", ""]
    for table in summary["tables"]:
        lines += [f"### {heading(table)}", "", *_table(table, tuple(COLUMNS)), "", *_depths(table)]
    lines += ["## Columns", "", *(f"- {name}: {text}" for name, text in COLUMNS.items()), "", "## Plots", ""]
    for name, words in drawn(summary).items():
        lines += [f"![{words}]({name})", ""]
    return "\n".join([*lines, *(f"{line}\n" for line in of_plots(summary))])


def key(table: Mapping[str, Any]) -> list[str]:
    """The five columns that a reader wants first."""
    scored = any(arm["score"] is not None for arm in table["arms"])
    return [name if scored or name != "score change" else "regret" for name in KEY]


def facts(summary: Mapping[str, Any]) -> list[str]:
    """The settings of a run, as words, and the days of its rows."""
    settings = summary["settings"]
    shown = ("drafter", "dtype", "rule", "max_new_tokens", "batch_size", "seed", "chat", "device")
    told = {**settings, "rule": _rule(settings["rule"])}
    said = [f"{k.replace('_', ' ')} {_fact(told[k])}" for k in shown if told.get(k) is not None]
    return [*said, *filter(None, [dates(summary)])]


def heading(table: Mapping[str, Any]) -> str:
    """The task and the temperature of a table."""
    return f"{table['task']}, temperature {table['temperature']:g}"


def about(table: Mapping[str, Any]) -> str:
    """The measure in words, and how the control was matched."""
    said = f"{table['arms'][0]['problems']} problems; {METRICS[table['metric']]}."
    if (found := table["match"]) is None:  # a lossless rule has no control
        return said
    return (
        f"{said} Matched threshold {found['theta']:g}: tau {found['tau']:.2f} for {found['wanted']:.2f}, on the "
        "problems of the match."
    )


def of_plots(summary: Mapping[str, Any]) -> list[str]:
    """Notes on the plots, which these do not say themselves."""
    said = []
    if any(table["margins"] for table in summary["tables"]):
        said.append(
            f"The margins are those of the first {margins.PROBLEMS} problems of a task, in their first turn."
        )
    if any(table.get("replay") for table in summary["tables"]):
        said.append(
            "The line of tau against theta is replayed: the rule says at every place of the target's own texts, of the "
            f"first {rehearsal.PROBLEMS} problems, how far it would walk at each theta. After a relaxed token a decode "
            "goes on with another text, which a replay does not know; points are decodes."
        )
    return said


def change(arm: Mapping[str, Any], metric: str) -> str:
    """Signed distance of an arm's score from that of the target alone, with a word for it.

    >>> arm = {"arm": "mars", "score_change": -0.02, "intervals": {"score_change": [-0.03, -0.01]}}
    >>> change(arm, "final_answer"), change(arm, "likelihood")
    ('-2.0 [-3.0, -1.0], worse', '-2.0 [-3.0, -1.0], less likely')
    >>> change(arm | {"intervals": {"score_change": [-0.05, 0.01]}}, "final_answer")
    '-2.0 [-5.0, +1.0], within noise'
    """
    if arm["score_change"] is None or arm["arm"] == AUTOREGRESSIVE:
        return "-"
    points = f"{100 * arm['score_change']:+.1f}"
    if (interval := arm["intervals"]["score_change"]) is None:
        return f"{points}, no interval"
    low, high = interval
    up, down = ("likelier", "less likely") if metric == "likelihood" else ("better", "worse")
    word = "the same" if low == high == 0 else up if low > 0 else down if high < 0 else "within noise"
    return f"{points} [{100 * low:+.1f}, {100 * high:+.1f}], {word}"


def cells(arm: Mapping[str, Any], metric: str) -> dict[str, str]:
    """The row of an arm, by `COLUMNS`."""
    drafts = bool(arm["acceptance_by_depth"])
    values = (
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
        change(arm, metric),
    )
    return dict(zip(COLUMNS, values, strict=True))


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


def _table(table: Mapping[str, Any], columns: Sequence[str]) -> list[str]:
    rows = [cells(arm, table["metric"]) for arm in table["arms"]]
    return [
        "| " + " | ".join(columns) + " |",
        "|---|" + "---:|" * (len(columns) - 1),
        *("| " + " | ".join(row[name] for name in columns) + " |" for row in rows),
    ]


def _depths(table: Mapping[str, Any]) -> list[str]:
    arms = table["arms"]
    deepest = max(len(arm["acceptance_by_depth"]) for arm in arms)
    lines = [
        "Accepted at each depth, of the steps that came so far:",
        "",
        "| arm | " + " | ".join(str(d + 1) for d in range(deepest)) + " |",
        "|---|" + "---:|" * deepest,
    ]
    for arm in arms:
        if rates := arm["acceptance_by_depth"]:
            shown = ["-" if rate is None else f"{rate:.1%}" for rate in rates]
            lines.append(f"| {arm['arm']} | " + " | ".join(shown) + " |")
    return [*lines, "", *(f"- {arm['arm']}: {arm['meaning']}" for arm in arms), ""]
