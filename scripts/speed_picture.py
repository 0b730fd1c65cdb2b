"""Draw docs/speed.svg, beside transformers, from scripts/results/bench_assisted.json.

    python scripts/speed_picture.py            # after bench_assisted.py was run again
    python scripts/speed_picture.py --caption  # prints the line that belongs under the picture

Bars are medians of the runs, whiskers span the slowest and the fastest run. Colours are those of every picture.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import common

from mars_jax.lab.pictures import look, no_grid, picture, whiskers

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "scripts" / "results" / "bench_assisted.json"
BATCH = 1


class Way(NamedTuple):
    """One way to decode: its name in the JSON, in the legend, and in the palette."""

    key: str
    label: str
    look: str


WAYS = (
    Way("mars-jax autoregressive", "mars-jax, autoregression", "autoregressive"),
    Way("transformers assisted", "transformers, assisted generation", "transformers"),
    Way("mars-jax exact", "mars-jax, exact", "exact"),
    Way("mars-jax mars(0.9)", "mars-jax, mars(theta=0.9)", "mars"),
)


class Rates(NamedTuple):
    """tokens/s of one way on one task: median, slowest and fastest run."""

    median: float
    slowest: float
    fastest: float


def rates(report: Mapping[str, Any], task: str, temperature: float, key: str) -> Rates:
    """The rates of one bar."""
    case = next(
        case
        for case in report["cases"]
        if (case["task"], case["temperature"], case["batch"]) == (task, temperature, BATCH)
    )
    runs = [case["ways"][key]["tokens"] / seconds for seconds in case["ways"][key]["seconds"]]
    return Rates(statistics.median(runs), min(runs), max(runs))


def caption(report: Mapping[str, Any]) -> str:
    """The line under the picture: the pair, the device, n and the date."""
    case, machine = report["cases"][0], report["environment"]
    runs = len(next(iter(case["ways"].values()))["seconds"])
    return (
        f"tokens/s at batch {BATCH}: `tiny/target` (12M) drafted by `tiny/draft` (1M), a chain of 5, float32, "
        f"{machine['cores']} {machine['processor']} cores, n = {case['prompts']} prompts a task, medians of {runs} "
        f"runs with their range, {report['date']}."
    )


def _ordered(values: Sequence[Any]) -> list[Any]:
    return list(dict.fromkeys(values))


def draw(report: Mapping[str, Any], pictures: Sequence[Path]) -> None:
    """Write the picture to files, whose names say the format."""
    tasks = _ordered([case["task"] for case in report["cases"]])
    temperatures = sorted({case["temperature"] for case in report["cases"]})
    width = 0.8 / len(WAYS)
    told = caption(report).replace("`", "")
    grid = {"columns": len(temperatures), "panel": (4.2, 3.3), "sharey": True}
    with picture(pictures, **grid, caption=told) as axes:
        for axis, temperature in zip(axes.flat, temperatures, strict=True):
            for k, way in enumerate(WAYS):
                found = [rates(report, task, temperature, way.key) for task in tasks]
                places = [i + (k - (len(WAYS) - 1) / 2) * width for i in range(len(tasks))]
                medians, spans = [r.median for r in found], [(r.slowest, r.fastest) for r in found]
                axis.bar(
                    places, medians, 0.92 * width, color=look(way.look).colour, label=way.label,
                    yerr=whiskers(medians, spans), error_kw={"elinewidth": 0.9, "ecolor": "#AAAAAA"},
                )  # fmt: skip
                for place, rate in zip(places, found, strict=True):
                    axis.annotate(
                        f"{rate.median:.0f}",
                        (place, rate.fastest),
                        (0, 3),
                        textcoords="offset points",
                        ha="center",
                        fontsize=8,
                    )
            axis.set_xticks(range(len(tasks)), tasks)
            axis.set_title(f"temperature {temperature:g}")
            no_grid(axis, "x")
        axes[0, 0].set_ylabel("tokens/s")
        axes[0, 0].margins(y=0.1)


def main(argv: Sequence[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--caption", action="store_true", help="print the caption and draw nothing")
    parser.add_argument("--folder", type=Path, default=ROOT / "docs", help="where speed.svg goes")
    chosen = parser.parse_args(argv)
    report = json.loads(SOURCE.read_text(encoding="utf-8"))
    if chosen.caption:
        print(caption(report))
        return
    draw(report, [chosen.folder / "speed.svg"])


if __name__ == "__main__":
    main()
