"""Lossy rules beside the best that is lossless, each at its own best draft length, on the embedded pair.

    python scripts/fair_arms.py costs --output costs.json                                   # while nothing else runs
    python scripts/fair_arms.py decode --stories heldout.txt.xz --costs costs.json --rows rows.jsonl
    python scripts/fair_arms.py check --stories heldout.txt.xz --costs costs.json --rows rows.jsonl --output check.json
    python scripts/fair_arms.py report --costs costs.json --check check.json \
        --rows scripts/results/fair_arms.jsonl.xz --output scripts/results/fair_arms.json

A chain of the embedded draft at lengths 2 to 12, temperatures 0 and 1. An arm's length is the one of most tokens per
second on prompts that no figure uses: 300 problems, 96 stories. Its figures are then of 1,000 problems and 180 stories.
Tokens per second are tau over what a step costs, twice: on this CPU, as `costs` timed it at batch 1, and as on an
accelerator that memory bounds, where a step costs 1 + 0.05 K plain ones with a draft as small as an EAGLE head. Source
of the challenge: arXiv 2607.08690, which finds that tuned lengths give much of what relaxing gives. `decode` goes on
where it was killed. `check` holds tau over cost against a clock.
"""

from __future__ import annotations

import functools
import json
import lzma
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import common
import eval_rules
import numpy as np
from eval_rules import BATCH, Arm, swept
from rules_report import score_of, spread, sums, tau_of, weights

import mars_jax as mj
from mars_jax import assets
from mars_jax.lab.evaluate.answers import prompt_tokens
from mars_jax.lab.evaluate.tasks.catalogue import read
from mars_jax.serve.session import Session

LENGTHS = (2, 3, 5, 8, 12)
CHOOSE = {"arithmetic": 300, "stories": 96}
"""The first prompts of a task, on which a length is chosen."""
SCORE = {"arithmetic": 1000, "stories": 180}
CHEAP = 0.05
"""What a drafted token costs, in plain steps, of a draft as small as an EAGLE head on an accelerator."""
TURNS = 7


class Pair(eval_rules.Pair):
    """The models, and a session for every length."""

    def __init__(self, rows: int) -> None:
        super().__init__(None)
        self.rows = rows

    def _session(self, draft: str, sampled: bool) -> Session:
        drafter = mj.drafters.load("none", self.target)
        if draft != "none":
            length = int(draft.removeprefix("chain "))
            drafter = mj.drafters.load(
                f"model:{assets.DRAFT}", self.target, sample=sampled, dtype="float32", num_draft_tokens=length
            )
        return Session(target=self.target, drafter=drafter, batch_size=self.rows, log_probs=self.rows > 1)


def arms(temperature: float, length: int) -> list[Arm]:
    """The lossless ones first."""
    draft = f"chain {length}"
    drawn: dict[str, Any] = {"sampled": True}
    exact = swept("exact", draft, [{}])
    mars = swept("mars", draft, [{"theta": 0.9}])
    if temperature == 0:
        return [*exact, *mars, *swept("topk", draft, [{"delta": 1.2}])]
    return [
        *exact,
        *swept("rejection", draft, [{}], **drawn),
        *swept("rejection", draft, [{"block": True}], family="block", **drawn),
        *mars,
        *swept("mars", draft, [{"theta": 0.9, "base": "rejection"}], family="mars over rejection", **drawn),
    ]


TIMED = {
    ("stories", 0.0, "exact"),
    ("stories", 0.0, "mars theta 0.9"),
    ("stories", 1.0, "rejection"),
}
"""What `check` decodes."""
LOSSLESS = ("exact", "rejection", "block")


def step_costs(seconds: Mapping[str, Any], sampled: bool) -> dict[str, dict[int, float]]:
    """What a step of each length costs, in plain ones, by where it runs."""
    kind = "drawn" if sampled else "greedy"
    timed = {n: seconds[f"{kind} {n}"]["over_plain"]["median"] for n in LENGTHS}
    return {"this CPU": timed, "a cheap draft": {n: 1 + CHEAP * n for n in LENGTHS}}


def best(taus: Mapping[int, float], costs: Mapping[int, float]) -> int:
    return max(LENGTHS, key=lambda n: taus[n] / costs[n])


def time_steps() -> dict[str, Any]:
    """Seconds of a step at batch 1, in turns, of plain decoding and of each length; next to nothing is read before."""
    pair = Pair(1)
    [problem] = read("arithmetic", chat=True, limit=1)
    prompt = prompt_tokens(pair.target, problem, chat=True)[:2]
    ways: dict[str, Any] = {}
    steps: dict[str, int] = {}
    names = ["plain", *(f"{kind} {n}" for n in LENGTHS for kind in ("greedy", "drawn"))]
    for name in names:
        kind, _, length = name.partition(" ")
        drawn = kind == "drawn"
        session = pair.session(f"chain {length}" if length else "none", drawn)
        rule = mj.verify.load("rejection" if drawn else "exact", pair.target)
        asked = mj.make_requests(
            pair.target, [prompt], max_new_tokens=192, ignore_eos=True, temperature=float(drawn)
        )
        alone = session.using(rule)

        def way(name: str = name, alone: Any = alone, asked: Any = asked) -> None:
            steps[name] = alone.run(asked)[0].metrics.steps

        ways[name] = way
    taken = common.in_turns(ways, TURNS)
    per_step = {name: found / steps[name] for name, found in taken.items()}
    return {
        name: {"ms": float(np.median(found) * 1e3), "over_plain": common.ratio(found, per_step["plain"])}
        for name, found in per_step.items()
    }


def check(stories: Path, rows: Sequence[Mapping[str, Any]], costs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Seconds of 30 stories at batch 1 beside plain decoding, and what tau over cost says they take."""
    pair = Pair(1)
    some = [
        prompt_tokens(pair.target, p, chat=False) for p in read("stories", str(stories), chat=False, limit=30)
    ]
    found = []
    for choice in choices(rows, costs):
        if (choice["task"], choice["temperature"], choice["arm"]) not in TIMED:
            continue
        temperature, n = choice["temperature"], choice["best"]["this CPU"]
        arm = arms(temperature, n)[choice["at"]]
        new = eval_rules.NEW_TOKENS["stories"]
        asked = [
            mj.make_requests(pair.target, [p], max_new_tokens=new, temperature=temperature, seed=i)
            for i, p in enumerate(some)
        ]
        ways = {
            "plain": pair.session("none", False).using(mj.verify.load("exact", pair.target)),
            "arm": pair.session(arm.draft, arm.sampled).using(pair.rule(arm)),
        }
        counts: dict[str, tuple[int, int]] = {}

        def way(name: str, ways: Any = ways, asked: Any = asked, counts: Any = counts) -> None:
            said = [ways[name].run(one)[0].metrics for one in asked]
            counts[name] = sum(m.steps for m in said), sum(m.emitted for m in said)

        taken = common.in_turns({name: functools.partial(way, name) for name in ways}, TURNS - 2)
        per_token = {name: seconds / counts[name][1] for name, seconds in taken.items()}
        tau = counts["arm"][1] / counts["arm"][0]
        found.append(
            {
                "temperature": temperature,
                "arm": choice["arm"],
                "length": n,
                "tau": tau,
                "steps": counts["arm"][0],
                "foretold": tau / step_costs(costs, arm.sampled)["this CPU"][n],
                "timed": common.ratio(per_token["plain"], per_token["arm"]),
            }
        )
        print(found[-1], flush=True)
    return found


def choices(rows: Sequence[Mapping[str, Any]], costs: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Of each task, temperature and arm: tau by length, and the best length by where it runs."""
    for task, count in CHOOSE.items():
        for temperature in (0.0, 1.0):
            for at, arm in enumerate(arms(temperature, LENGTHS[0])):
                taus = {}
                for n in LENGTHS:
                    named = arms(temperature, n)[at]
                    mine = of(rows, task, temperature, named, range(count))
                    taus[n] = float(tau_of(mine, np.ones((1, count)))[0])
                where = step_costs(costs, arm.sampled)
                yield {
                    "task": task,
                    "temperature": temperature,
                    "arm": arm.name,
                    "lossless": arm.family in LOSSLESS,
                    "at": at,
                    "taus": taus,
                    "best": {name: best(taus, found) for name, found in where.items()},
                }


def of(rows: Sequence[Mapping[str, Any]], task: str, temperature: float, arm: Arm, ids: range) -> Any:
    key = (task, temperature, arm.draft, arm.name)
    mine = [r for r in rows if (r["task"], r["temperature"], r["draft"], r["arm"]) == key and r["id"] in ids]
    return sums([{**r, "id": r["id"] - ids.start} for r in mine])


def decode(stories: Path, file: Path, costs: Mapping[str, Any]) -> None:
    """Append what is missing of all rows: those that choose first."""
    pair = Pair(BATCH)
    problems = {
        task: read(
            task,
            str(stories) if task == "stories" else None,
            chat=task == "arithmetic",
            limit=CHOOSE[task] + SCORE[task],
        )
        for task in CHOOSE
    }

    def fill(task: str, temperature: float, arm: Arm, ids: range) -> None:
        have = {
            row["id"]
            for row in eval_rules.read_rows(file)
            if (row["task"], row["temperature"], row["draft"], row["arm"])
            == (task, temperature, arm.draft, arm.name)
        }
        missing = [(i, problems[task][i]) for i in ids if i not in have]
        for first in range(0, len(missing), BATCH):
            made = eval_rules.decode_batch(pair, arm, task, temperature, missing[first : first + BATCH])
            with file.open("a", encoding="utf-8") as out:
                out.writelines(json.dumps(row) + "\n" for row in made)
        print(f"{task} {temperature:g} {arm.draft} {arm.name}: {len(missing)} rows", flush=True)

    for n in LENGTHS:
        for temperature in (0.0, 1.0):
            for arm in arms(temperature, n):
                for task, count in CHOOSE.items():
                    fill(task, temperature, arm, range(count))
    for choice in list(choices(eval_rules.read_rows(file), costs)):
        for n in sorted(set(choice["best"].values())):
            arm = arms(choice["temperature"], n)[choice["at"]]
            first = CHOOSE[choice["task"]]
            fill(choice["task"], choice["temperature"], arm, range(first, first + SCORE[choice["task"]]))


def report(rows: Sequence[Mapping[str, Any]], costs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A table for each task, temperature and place: arms at their best lengths, beside the best lossless one."""
    tables: dict[tuple[str, float, str], list[dict[str, Any]]] = {}
    chosen = list(choices(rows, costs))
    for choice in chosen:
        for where, n in choice["best"].items():
            task, temperature = choice["task"], choice["temperature"]
            arm = arms(temperature, n)[choice["at"]]
            ids = range(CHOOSE[task], CHOOSE[task] + SCORE[task])
            w = weights(SCORE[task])
            mine = of(rows, task, temperature, arm, ids)
            # `exact` gives the texts of plain decoding, at whatever length it was decoded.
            exact = next(
                c for c in chosen if (c["task"], c["temperature"], c["at"]) == (task, temperature, 0)
            )
            plain = of(rows, task, temperature, arms(temperature, exact["best"][where])[0], ids)
            cost = step_costs(costs, arm.sampled)[where][n]
            tables.setdefault((task, temperature, where), []).append(
                {
                    "arm": choice["arm"],
                    "lossless": choice["lossless"],
                    "length": n,
                    "tau": spread(tau_of(mine, w)),
                    "speed": spread(tau_of(mine, w) / cost),
                    "score": spread(score_of(mine, w)),
                    "less_plain": spread(score_of(mine, w) - score_of(plain, w)),
                    "relaxed_share": float(mine.relaxed.sum() / max(mine.accepted.sum(), 1)),
                    "loops": float(mine.loops.mean()),
                    "_speed": tau_of(mine, w) / cost,
                }
            )
    made = []
    for (task, temperature, where), some in tables.items():
        free = max((arm for arm in some if arm["lossless"]), key=lambda arm: arm["speed"][0])
        for arm in some:
            arm["over_best_lossless"] = spread(arm["_speed"] / free["_speed"])
        made.append(
            {
                "task": task,
                "temperature": temperature,
                "where": where,
                "best_lossless": free["arm"],
                "arms": [{k: v for k, v in arm.items() if k != "_speed"} for arm in some],
            }
        )
    return made


def packed_rows(file: Path) -> list[dict[str, Any]]:
    """The rows of a .jsonl.xz."""
    return [json.loads(line) for line in lzma.decompress(file.read_bytes()).decode().splitlines()]


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("part", choices=("costs", "decode", "check", "report"))
    parser.add_argument("--rows", type=Path, help="made or gone on with by decode; report reads a .jsonl.xz")
    parser.add_argument("--stories", type=Path, help="held-out stories, for decode")
    parser.add_argument("--costs", type=Path, help="the JSON of costs")
    parser.add_argument("--check", type=Path, help="the JSON of check")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if args.part == "costs":
        common.write(args.output, common.provenance() | {"steps": time_steps()})
        return
    costs = json.loads(args.costs.read_text(encoding="utf-8"))
    if args.part == "decode":
        decode(args.stories, args.rows, costs["steps"])
        return
    if args.part == "check":
        checked = check(args.stories, eval_rules.read_rows(args.rows), costs["steps"])
        common.write(args.output, common.provenance() | {"turns": TURNS - 2, "stories": checked})
        return
    rows = packed_rows(args.rows)
    common.write(
        args.output,
        common.provenance()
        | {
            "costs": costs,
            "check": json.loads(args.check.read_text(encoding="utf-8")),
            "taus": [{k: v for k, v in c.items() if k != "at"} for c in choices(rows, costs["steps"])],
            "tables": report(rows, costs["steps"]),
        },
    )


if __name__ == "__main__":
    main()
