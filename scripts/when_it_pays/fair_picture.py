"""Draw docs/fair.svg, the picture in the README, from scripts/results/fair_arms.json.

    python -m scripts.when_it_pays.fair_picture            # after `fair_arms.py report --study model` was run again
    python -m scripts.when_it_pays.fair_picture --caption  # prints the line that belongs under the picture

Bars show the speed relative to plain decoding, and whiskers show 95% intervals. Every arm uses its own best draft
length.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mars_jax.lab.pictures import look, no_grid, picture, whiskers
from scripts import common

SOURCE = common.RESULTS / "fair_arms.json"
PLACES = {"this CPU": "a CPU", "a cheap draft": "an accelerator that memory bounds, modelled"}
ARMS = {
    "exact": ("exact: lossless", "exact"),
    "block": ("rejection, by blocks: lossless, at temperature 1", "rejection"),
    "mars theta 0.9": ("mars(theta=0.9)", "mars"),
}
"""Label and style of each arm in the picture."""
GROUPS = (("stories", 0.0), ("arithmetic", 0.0), ("stories", 1.0), ("arithmetic", 1.0))


def caption(report: Mapping[str, Any]) -> str:
    """Return the caption of the picture, which states the pair, the device, n and the date."""
    count = report["costs"]["cores"]
    cores = "1 core" if count == 1 else f"{count} cores"
    return (
        "Speed over plain decoding at batch 1, every rule at its own best draft length: `tiny/target` (12M) drafted by "
        "`tiny/draft` (1M), float32, 180 stories and 1,000 problems. Speed is tau divided by step time. Left: step "
        f"time measured on {cores} of {report['costs']['processor']}. Right: modelled as 1 + 0.05 K plain steps for K "
        f"drafted tokens. {report['date'][:10]}."
    )


def draw(report: Mapping[str, Any], file: Path) -> None:
    """Write the picture to a file. The suffix of the file determines the format."""
    speed_of = {
        (table["where"], table["task"], table["temperature"], arm["arm"]): arm["speed"]
        for table in report["tables"]
        for arm in table["arms"]
    }
    width = 0.8 / len(ARMS)
    text = caption(report).replace("`", "")
    with picture([file], columns=len(PLACES), panel=(4.4, 3.2), caption=text) as axes:
        for axis, (where, title) in zip(axes.flat, PLACES.items(), strict=True):
            for name, (words, colour) in ARMS.items():
                drawn = [(i, group) for i, group in enumerate(GROUPS) if (where, *group, name) in speed_of]
                arms = [k for k in ARMS if any((where, *group, k) in speed_of for _, group in drawn)]
                places = []
                for i, group in drawn:
                    present = [k for k in arms if (where, *group, k) in speed_of]
                    places.append(i + (present.index(name) - (len(present) - 1) / 2) * width)
                speeds = [speed_of[where, *group, name] for _, group in drawn]
                medians = [speed[0] for speed in speeds]
                axis.bar(
                    places, medians, 0.92 * width, color=look(colour).colour, label=words,
                    alpha=0.55 if name == "block" else 1.0,
                    yerr=whiskers(medians, [(low, high) for _, low, high in speeds]),
                    error_kw={"elinewidth": 0.9, "ecolor": "#AAAAAA"},
                )  # fmt: skip
                label = {"textcoords": "offset points", "ha": "center", "fontsize": 8}
                for place, (speed, _, high) in zip(places, speeds, strict=True):
                    axis.annotate(f"{speed:.2f}", (place, high), (0, 3), **label)
            axis.axhline(1, color="#888888", linewidth=0.9)
            axis.set_xticks(range(len(GROUPS)), [f"{task},\nT = {t:g}" for task, t in GROUPS])
            axis.set_title(title)
            axis.margins(y=0.12)
            no_grid(axis, "x")
        axes[0, 0].set_ylabel("times plain decoding")


def main(argv: Sequence[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--caption", action="store_true", help="print the caption and draw nothing")
    parser.add_argument("--folder", type=Path, default=common.ROOT / "docs", help="where to write fair.svg")
    args = parser.parse_args(argv)
    report = json.loads(SOURCE.read_text(encoding="utf-8"))
    if args.caption:
        print(caption(report))
        return
    draw(report, args.folder / "fair.svg")


if __name__ == "__main__":
    main()
