"""Compare the default draft, and a head with adaptive length, with plain decoding and with chains of fixed lengths.

    python -m scripts.checks.defaults --data DATA --keep scripts/results/defaults.json

Every arm decodes the same prompts greedily under `exact` at batch 1. The arms take turns at each prompt, so a slow
spell of the machine affects all of them. Compilation and the measurement of costs come first, as in a session. Each
finished turn is written, and a run with the same settings continues after it. `DATA` is the folder of prompt sets; by
default `data/eval` in the folder MARS_JAX_SHARED.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mars_jax as mj
from mars_jax import drafters
from mars_jax.assets.catalogue import default_draft
from mars_jax.cli.generate.job import SHORT
from mars_jax.serve.requests import Request
from mars_jax.serve.session import Session
from scripts import common
from scripts.smollm2.margins import prompts

KINDS = {"mt_bench": 192, "gsm8k_test": 192, "humaneval": 192, "cnn_dm": 512, "wmt19": 192}
"""Maximum tokens of a prompt by kind. Prompts with the same maximum share compiled programs."""
HEADS = {"smollm2": "eagle:smollm2/eagle3", "tiny/target": "eagle:tiny/eagle3"}
CLOCKS = {"seconds": time.perf_counter, "processor_seconds": time.process_time}


def arms_of(name: str, target: mj.Pretrained, lengths: Sequence[int]) -> dict[str, drafters.LoadedDrafter]:
    """Return plain decoding, and for the default draft and the head the adaptive length and each fixed one."""
    arms = {"plain": drafters.load("none", target)}
    for label, draft in {"default": default_draft(name, lambda _: True), "head": HEADS[name]}.items():
        arms[label] = drafters.load(draft, target, num_draft_tokens=SHORT, draft_size="auto")
        for length in lengths:
            arms[f"{label}, fixed {length}"] = drafters.load(draft, target, num_draft_tokens=length)
    return arms


def main() -> None:
    parser = common.parser(__doc__)
    folder = Path(os.environ.get("MARS_JAX_SHARED", "."), "data", "eval")
    parser.add_argument(
        "--data", type=Path, default=folder, help="folder of mt_bench.jsonl.xz and the others"
    )
    parser.add_argument("--targets", nargs="+", choices=HEADS, default=list(HEADS))
    parser.add_argument("--prompts", type=int, default=6, help="prompts of each kind; default: 6")
    parser.add_argument("--new-tokens", type=int, default=64, help="default: 64")
    parser.add_argument("--turns", type=int, default=5, help="timed turns of each arm; default: 5")
    parser.add_argument(
        "--lengths", nargs="+", type=int, default=[1, 2, SHORT], help="fixed lengths; default: 1 2 3"
    )
    parser.add_argument("--keep", type=Path, metavar="FILE", help="write the figures to this JSON file")
    args = parser.parse_args()
    settings = {name: getattr(args, name) for name in ("prompts", "new_tokens", "lengths")}
    report = common.earlier_report(args.keep)
    if report.get("settings") != settings:
        report = common.provenance(data=[args.data]) | {"settings": settings, "targets": {}}
    for name in args.targets:
        measure(name, args, report)


def measure(name: str, args: argparse.Namespace, report: dict[str, Any]) -> None:
    """Time the turns of a target that the report lacks, and add them to it."""
    target = mj.load(name)
    requests = {
        kind: mj.make_requests(
            target,
            [ids for _, ids in prompts(target, args.data / f"{kind}.jsonl.xz", args.prompts, longest)],
            max_new_tokens=args.new_tokens,
        )
        for kind, longest in KINDS.items()
    }
    # Requests of one batch have the same shapes.
    batches = {
        kind: [request for other in KINDS if KINDS[other] == KINDS[kind] for request in requests[other]]
        for kind in KINDS
    }
    arms = arms_of(name, target, args.lengths)
    sessions = {arm: Session.of(target, drafter) for arm, drafter in arms.items()}
    for session in sessions.values():
        for batch in batches.values():
            session.warm_up(batch)
    rows = report["targets"].setdefault(name, {arm: {"turns": []} for arm in sessions})
    for number in range(len(rows["plain"]["turns"]), args.turns):
        turns = {arm: [] for arm in sessions}
        for kind in KINDS:
            for position, request in enumerate(requests[kind]):
                index = batches[kind].index(request)
                for arm in list(sessions)[:: -1 if (number + position) % 2 else 1]:
                    turns[arm].append({"kind": kind} | timed(sessions[arm], batches[kind], index))
        for arm, row in rows.items():
            row["turns"].append(turns[arm])
        common.write(args.keep, report)
        print(name, f"{number + 1} of {args.turns} turns", flush=True)
    for arm in rows:
        by_kind = {kind: round(over_plain(rows, arm, [kind])["median"], 3) for kind in KINDS}
        print(name, arm, round(over_plain(rows, arm)["median"], 3), by_kind, flush=True)


def timed(session: Session, batch: Sequence[Request], index: int) -> dict[str, Any]:
    """Return the times, the number of steps and a digest of the tokens of one request."""
    began = {clock: read() for clock, read in CLOCKS.items()}
    [finished] = session.queue(batch, order=[index]).finished()
    times = {clock: round(read() - began[clock], 4) for clock, read in CLOCKS.items()}
    completion = finished.completion
    digest = common.short_digest(repr(completion.tokens).encode())
    return times | {"steps": completion.metrics.steps, "tokens": len(completion.tokens), "digest": digest}


def over_plain(
    rows: Mapping[str, Any], arm: str, kinds: Sequence[str] = tuple(KINDS), clock: str = "processor_seconds"
) -> dict[str, float]:
    """Return the speed of an arm over plain decoding: the median over turns, with both 95% bounds."""
    plain, other = (
        [sum(one[clock] for one in turn if one["kind"] in kinds) for turn in rows[name]["turns"]]
        for name in ("plain", arm)
    )
    return common.ratio(plain, other)


if __name__ == "__main__":
    main()
