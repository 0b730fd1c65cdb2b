"""Draw docs/rule_cost.svg from scripts/results/rule_cost.json: the time of a step under each rule over its strict base.

    python scripts/cost_picture.py            # after rule_cost.py was run again

Points are medians of interleaved pairs, whiskers reach to the upper 95% bounds, and the broken line is the bar of a
group.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import common

from mars_jax.lab.pictures import BLACK, look, no_grid, picture, whiskers

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "scripts" / "results" / "rule_cost.json"


def draw(report: Mapping[str, Any], files: Sequence[Path]) -> None:
    """A panel for each group of rules."""
    groups = list(dict.fromkeys(case["group"] for case in report["cases"]))
    pairs = report["cases"][0]["starts"] * report["cases"][0]["pairs"]
    told = (
        f"tiny/target drafted by tiny/draft, a chain of 5, batch 1; {report['cores']} core; n = {pairs} pairs in "
        f"turns; {report['date']}. Whiskers reach to the upper 95% bounds; a step of the strict base is 1."
    )
    with picture(files, columns=len(groups), panel=(3.4, 3.1), caption=told) as (row,):
        for axis, group in zip(row, groups, strict=True):
            cases = [case for case in report["cases"] if case["group"] == group]
            for place, case in enumerate(cases):
                median, bound = case["time_ratio"]["median"], case["time_ratio"]["upper_95"]
                axis.errorbar(
                    [median], [place], xerr=whiskers([median], [(median, bound)]), **look(case["rule"]).line
                )
            axis.axvline(1, color=BLACK, linewidth=0.9, linestyle=":")
            axis.axvline(cases[0]["bar"], color=BLACK, linewidth=0.9, linestyle="--", label="bar")
            axis.set_yticks(range(len(cases)), [case["rule"] for case in cases])
            axis.invert_yaxis()
            axis.set_xlim(0.9, 1.2)
            axis.set(xlabel=f"time of a step over {cases[0]['base']}", title=group)
            no_grid(axis, "y")


def main(argv: Sequence[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--folder", type=Path, default=ROOT / "docs", help="where rule_cost.svg goes")
    folder = parser.parse_args(argv).folder
    draw(json.loads(SOURCE.read_text(encoding="utf-8")), [folder / "rule_cost.svg"])


if __name__ == "__main__":
    main()
