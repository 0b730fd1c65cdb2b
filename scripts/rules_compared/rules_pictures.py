"""Draw the pictures of docs/rules-compared.md from scripts/results/eval_rules.json: quality against tau.

    python -m scripts.rules_compared.rules_pictures            # after eval_rules.py was run again

Each point is a rule with one setting, each line is a sweep over its settings, and whiskers are 95% intervals over
prompts. Colours are the same in all pictures, and no two families share both colour and marker.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mars_jax.lab.pictures import GREY, honest_limits, level, look, picture, whiskers
from scripts import common
from scripts.rules_compared.tables import GONE

SOURCE = common.RESULTS / "eval_rules.json"
SCORES = {"stories": "log-likelihood, nats per token", "arithmetic": "right answers"}
LEAST = {"stories": 0.3, "arithmetic": 0.1}
"""Minimum range of the score axis, by task."""
STRICT = ("exact", "rejection", "block")
PER_PANEL = 5
"""Maximum number of families per panel, not counting the strict rules. More lines would be hard to distinguish."""


def groups(report: Mapping[str, Any], task: str) -> list[list[str]]:
    """Divide the families of a task into groups, one for each row of panels. The families of `mars` come first."""
    names = [
        arm["family"]
        for table in report["tables"]
        if table["task"] == task and table["draft"] != "none"
        for arm in table["arms"]
    ]
    families = [name for name in dict.fromkeys(names) if name not in (*STRICT, GONE)]
    families.sort(key=lambda name: not name.startswith("mars"))
    size = math.ceil(len(families) / math.ceil(len(families) / PER_PANEL))
    return [families[first : first + size] for first in range(0, len(families), size)]


def panel(
    axis: Any, table: Mapping[str, Any], undrafted: Sequence[float] | None, families: Sequence[str]
) -> list[float]:
    """Plot the scores of families in one panel, from `table`. Return all scores and their interval bounds."""
    ends: list[float] = []
    if not any(arm["family"] in families for arm in table["arms"]):
        return ends
    if undrafted is not None:
        level(axis, undrafted[0], undrafted[1:], label="target alone, its interval shaded", colour=GREY)
        ends += undrafted
    for name in (*STRICT, *families):
        arms = [arm for arm in table["arms"] if arm["family"] == name]
        if not arms:
            continue
        arms.sort(key=lambda arm: arm["tau"][0])
        x, y = ([arm[key][0] for arm in arms] for key in ("tau", "score"))
        xerr = whiskers(x, [arm["tau"][1:] for arm in arms])
        yerr = whiskers(y, [arm["score"][1:] for arm in arms])
        ends += [end for arm in arms for end in arm["score"]]
        axis.errorbar(
            x, y, xerr=xerr, yerr=yerr, label=name, linewidth=1, elinewidth=0.6, capsize=0, **look(name).line
        )
    return ends


def draw(report: Mapping[str, Any], task: str, files: Sequence[Path]) -> None:
    """Write the picture of a task: a column for each draft and temperature, a row for each group of families."""
    tables = [table for table in report["tables"] if table["task"] == task]
    undrafted = {t["temperature"]: t["arms"][0]["score"] for t in tables if t["draft"] == "none"}
    tables = [table for table in tables if table["draft"] != "none"]
    if not tables:
        raise SystemExit(f"there are no drafts for {task}: run eval_rules.py first")
    families = groups(report, task)
    ends: list[list[float]] = [[] for _ in tables]
    with picture(
        files, rows=len(families), columns=len(tables), panel=(3.3, 2.6), sharex="col", sharey="col",
        caption=caption(report, task),
    ) as axes:  # fmt: skip
        for row, row_families in zip(axes, families, strict=True):
            for axis, table, column in zip(row, tables, ends, strict=True):
                column += panel(axis, table, undrafted.get(table["temperature"]), row_families)
                axis.set_title(f"{table['draft']}, temperature {table['temperature']:g}")
        for axis, column in zip(axes[0], ends, strict=True):
            honest_limits(axis, column, least=LEAST[task])
        for axis in axes[:, 0]:
            axis.set_ylabel(SCORES[task])
        for column in axes.T:
            lowest = [axis for axis in column if axis.has_data()][-1]
            lowest.set_xlabel("tau, tokens per target forward")
            lowest.tick_params(labelbottom=True)


def caption(report: Mapping[str, Any], task: str) -> str:
    """Return the caption, which states the pair, n and the date."""
    count = max(
        arm["prompts"] for table in report["tables"] if table["task"] == task for arm in table["arms"]
    )
    facts = (
        "tiny/target drafted by tiny/draft",
        f"n = {count} prompts of {task}",
        f"jax {report['environment']['jax']} on CPU",
        report.get("date"),
        "a point is a setting, whiskers are 95% intervals over prompts",
    )
    return "; ".join(fact for fact in facts if fact) + "."


def main(argv: Sequence[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--source", type=Path, default=SOURCE)
    parser.add_argument(
        "--folder", type=Path, default=common.ROOT / "docs", help="folder to write the pictures to"
    )
    parser.add_argument("--task", nargs="+", choices=tuple(SCORES), default=tuple(SCORES))
    args = parser.parse_args(argv)
    report = json.loads(args.source.read_text(encoding="utf-8"))
    for task in args.task:
        draw(report, task, [args.folder / f"rules_{task}.svg"])


if __name__ == "__main__":
    main()
