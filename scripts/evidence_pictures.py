"""Draw the plots of scripts/results/evidence again from its rows and summaries; every figure that is there has to stay.

    python scripts/evidence_pictures.py    # summaries, tables and pictures

The figures are computed again from rows.jsonl.xz and compared with summary.json, and the intervals are added to it.
"""

from __future__ import annotations

import json
import lzma
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import common

from mars_jax.lab.evaluate import figures
from mars_jax.lab.evaluate.benchmark import plots, rehearsal, table
from mars_jax.lab.evaluate.benchmark.arms import AUTOREGRESSIVE
from mars_jax.lab.folder import write_json

EVIDENCE = Path(__file__).resolve().parent / "results" / "evidence"
REPLAY, SUMMARY = "replay.json", "summary.json"


def completed(
    summary: dict[str, Any], rows: Sequence[Mapping[str, Any]], replays: Mapping[str, Any]
) -> dict[str, Any]:
    """A summary with the intervals of its figures, and with what was replayed.

    Raises:
      ValueError: a figure is not what the rows say.
    """
    by_arm: dict[tuple[str, float, str], list[Any]] = {}
    for row in rows:
        by_arm.setdefault((row["task"], row["temperature"], row["arm"]), []).append(row)
    seed = summary["settings"]["seed"]
    for part in summary["tables"]:
        place = (part["task"], part["temperature"])
        strict = next(arm["arm"] for arm in part["arms"] if arm["role"] == "strict")
        alone, exact = (by_arm[*place, name] for name in (AUTOREGRESSIVE, strict))
        for arm in part["arms"]:
            made = figures.summarize(
                by_arm[*place, arm["arm"]], alone, exact, metric=part["metric"], seed=seed
            )
            for name in made.keys() & arm.keys():
                if name != "intervals" and not same(made[name], arm[name]):
                    raise ValueError(
                        f"{place}, {arm['arm']}: {name} is {arm[name]}, and the rows say {made[name]}."
                    )
            arm |= made
        found = replays.get(table.heading(part))
        part["replay"] = None if found is None else rehearsal.taus(found, seed=seed)
    dates = [row["date"] for row in rows if "date" in row]
    return {**summary, "date": max(dates, default=summary.get("date"))}


def same(ours: Any, theirs: Any) -> bool:
    """Equal, but for the last digits of sums.

    >>> same([1.0, {"a": 0.3}], [1.0, {"a": 0.1 + 0.2}]), same(1, None)
    (True, False)
    """
    if isinstance(ours, float) and isinstance(theirs, float | int):
        return math.isclose(ours, theirs, rel_tol=1e-9, abs_tol=1e-12)
    if isinstance(ours, list) and isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(same(ours[key], theirs[key]) for key in ours)
    return ours == theirs


def main(argv: Sequence[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--date", help="of rows that have none")
    parser.add_argument("--only", nargs="+", help="some of the folders")
    args = parser.parse_args(argv)
    for folder in sorted(path.parent for path in EVIDENCE.glob(f"*/{SUMMARY}")):
        if args.only and folder.name not in args.only:
            continue
        summary = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
        found = folder / REPLAY
        replays = json.loads(found.read_text(encoding="utf-8")) if found.exists() else {}
        with lzma.open(folder / "rows.jsonl.xz", "rt", encoding="utf-8") as file:
            rows = [json.loads(line) for line in file]
        summary = completed(summary | ({"date": args.date} if args.date else {}), rows, replays)
        write_json(folder / SUMMARY, summary)
        (folder / "table.md").write_text(table.markdown(summary), encoding="utf-8")
        plots.draw(summary, folder, formats=("png",))


if __name__ == "__main__":
    main()
