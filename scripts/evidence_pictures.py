"""Draw the plots of scripts/results/evidence anew from its rows and summaries; every figure that is there has to stay.

    python scripts/evidence_pictures.py                               # summaries, tables and pictures
    python scripts/evidence_pictures.py --replay --stories heldout.txt.xz   # decodes for tau against theta before

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

import mars_jax as mj
from mars_jax import drafters
from mars_jax.lab.evaluate import figures
from mars_jax.lab.evaluate.answers import Decoding, prompt_tokens
from mars_jax.lab.evaluate.benchmark import plots, rehearsal, table
from mars_jax.lab.evaluate.benchmark.arms import AUTOREGRESSIVE
from mars_jax.lab.evaluate.tasks.catalogue import read
from mars_jax.serve.folder import digest, fingerprint, write_json
from mars_jax.serve.session import Session
from mars_jax.specs import RuleChoice

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


def replayed(settings: Mapping[str, Any], stories: Path | None) -> dict[str, Any]:
    """The content of rehearsal.json, as a benchmark with these settings writes it."""
    target = mj.load(settings["target"])
    drafter = drafters.load(settings["draft"], target)
    if fingerprint((target.params, drafter.params), target.path) != settings["weights"]:
        raise SystemExit(f"{settings['target']} has other weights than in the run: run the benchmark again")
    session = Session(target=target, drafter=drafter, batch_size=settings["batch_size"])
    decoding = Decoding(session=session, chat=settings["chat"], max_new_tokens=settings["max_new_tokens"])
    choice = RuleChoice(settings["rule"]["verify"], {"margin": settings["rule"]["settings"]["margin"]})
    thetas = rehearsal.thetas_of(choice, drafter.drafter, settings["thetas"])
    rule = mj.verify.load(choice.spec, target, **choice.settings, theta=settings["thetas"][0])
    found = {}
    for task in settings["tasks"]:
        path = None if task == "arithmetic" else str(stories)
        problems = read(task, path, chat=settings["chat"], limit=settings["tasks"][task])
        if digest(repr(problems).encode()) != settings["problems"]:
            raise SystemExit(f"these are not the problems of the run: give --stories its file of {task}")
        problems = problems[: rehearsal.PROBLEMS]
        prompts = [prompt_tokens(target, problem, chat=settings["chat"]) for problem in problems]
        seeds = [settings["seed"] + number for number in range(len(problems))]
        for temperature in settings["temperatures"]:
            requests = decoding.requests(prompts, seeds, temperature)
            counted = rehearsal.walks(session.using(rule), requests, thetas, lambda: None)
            found[f"{task}, temperature {temperature:g}"] = rehearsal.as_json(thetas, counted)
            print(
                f"{task}, temperature {temperature:g}: {rehearsal.taus(rehearsal.as_json(thetas, counted))}",
                flush=True,
            )
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.add_argument(
        "--replay", action="store_true", help="decode anew what tau against theta is replayed from"
    )
    parser.add_argument("--stories", type=Path, help="held-out stories, of which --replay reads the first")
    parser.add_argument("--date", help="of rows that have none")
    parser.add_argument("--only", nargs="+", help="some of the folders")
    args = parser.parse_args(argv)
    for folder in sorted(path.parent for path in EVIDENCE.glob(f"*/{SUMMARY}")):
        if args.only and folder.name not in args.only:
            continue
        summary = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
        if args.replay:
            if args.stories is None and "stories" in summary["settings"]["tasks"]:
                parser.error("--replay of stories needs --stories")
            write_json(folder / REPLAY, replayed(summary["settings"], args.stories))
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
