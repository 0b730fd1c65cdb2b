"""Draw docs/speed.svg and docs/speed.png, the picture of the README, from scripts/results/bench_assisted.json.

    python scripts/speed_picture.py            # after bench_assisted.py was run again
    python scripts/speed_picture.py --caption  # prints the line that belongs under the picture

Bars are medians of the runs, whiskers span the slowest and the fastest run. Colours are those of Okabe and Ito, which
people with any kind of colour vision tell apart.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "scripts" / "results" / "bench_assisted.json"
BATCH = 1


class Way(NamedTuple):
    """One way to decode: its name in the JSON, in the legend, and its colour."""

    key: str
    label: str
    colour: str


WAYS = (
    Way("mars-jax autoregressive", "mars-jax, autoregression", "#999999"),
    Way("transformers assisted", "transformers, assisted generation", "#E69F00"),
    Way("mars-jax exact", "mars-jax, exact", "#56B4E9"),
    Way("mars-jax mars(0.9)", "mars-jax, mars(theta=0.9)", "#0072B2"),
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
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams.update({"svg.hashsalt": "mars-jax", "svg.fonttype": "none", "font.size": 9})
    from matplotlib import pyplot as plt

    tasks = _ordered([case["task"] for case in report["cases"]])
    temperatures = sorted({case["temperature"] for case in report["cases"]})
    figure, axes = plt.subplots(1, len(temperatures), figsize=(8, 3.5), sharey=True, layout="constrained")
    width = 0.8 / len(WAYS)
    for axis, temperature in zip(axes, temperatures, strict=True):
        for k, way in enumerate(WAYS):
            found = [rates(report, task, temperature, way.key) for task in tasks]
            places = [i + (k - (len(WAYS) - 1) / 2) * width for i in range(len(tasks))]
            spread = [[r.median - r.slowest for r in found], [r.fastest - r.median for r in found]]
            axis.bar(
                places, [r.median for r in found], 0.92 * width, color=way.colour, label=way.label,
                yerr=spread, error_kw={"elinewidth": 0.8, "capsize": 2, "ecolor": "#333333"},
            )  # fmt: skip
            for place, rate in zip(places, found, strict=True):
                axis.annotate(
                    f"{rate.median:.0f}",
                    (place, rate.fastest),
                    (0, 3),
                    textcoords="offset points",
                    ha="center",
                )
        axis.set_xticks(range(len(tasks)), tasks)
        axis.set_title(f"temperature {temperature:g}", fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(axis="x", length=0)
    axes[0].set_ylabel("tokens/s")
    axes[0].margins(y=0.1)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
    for picture in pictures:
        metadata = {"Date": None} if picture.suffix == ".svg" else {"Software": None}
        figure.savefig(picture, dpi=160, metadata=metadata)
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--caption", action="store_true", help="print the caption and draw nothing")
    parser.add_argument("--folder", type=Path, default=ROOT / "docs", help="where speed.svg and speed.png go")
    chosen = parser.parse_args(argv)
    report = json.loads(SOURCE.read_text(encoding="utf-8"))
    if chosen.caption:
        print(caption(report))
        return
    draw(report, [chosen.folder / "speed.svg", chosen.folder / "speed.png"])


if __name__ == "__main__":
    main()
