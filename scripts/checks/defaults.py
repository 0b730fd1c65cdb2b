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

import numpy as np

import mars_jax as mj
from mars_jax import drafters
from mars_jax.assets.catalogue import default_draft
from mars_jax.cli.generate.job import SHORT
from mars_jax.serve.requests import Request
from mars_jax.serve.session import Session
from scripts import common
from scripts.smollm2.margins import prompts

KINDS = ("mt_bench", "gsm8k_test", "humaneval", "cnn_dm", "wmt19")
HEADS = {"smollm2": "eagle:smollm2/eagle3", "tiny/target": "eagle:tiny/eagle3"}
LENGTHS = (1, 2, SHORT)
"""Fixed lengths to compare with the adaptive one."""
CLOCKS = {"seconds": time.perf_counter, "processor_seconds": time.process_time}


def arms_of(name: str, target: mj.Pretrained) -> dict[str, drafters.LoadedDrafter]:
    """Return plain decoding, and for the default draft and the head the adaptive length and each fixed one."""
    arms = {"plain": drafters.load("none", target)}
    for label, draft in {"default": default_draft(name, lambda _: True), "head": HEADS[name]}.items():
        arms[label] = drafters.load(draft, target, num_draft_tokens=SHORT, draft_size="auto")
        for length in LENGTHS:
            arms[f"{label}, fixed {length}"] = drafters.load(draft, target, num_draft_tokens=length)
    return arms


def main() -> None:
    parser = common.parser(__doc__)
    folder = Path(os.environ.get("MARS_JAX_SHARED", "."), "data", "eval")
    parser.add_argument("--data", type=Path, default=folder, help="folder of mt_bench.jsonl.xz and the others")
    parser.add_argument("--targets", nargs="+", choices=HEADS, default=list(HEADS))
    parser.add_argument("--prompts", type=int, default=6, help="prompts of each kind; default: 6")
    parser.add_argument("--longest", type=int, default=600, help="tokens of the longest prompt; default: 600")
    parser.add_argument("--new-tokens", type=int, default=64, help="default: 64")
    parser.add_argument("--turns", type=int, default=5, help="timed turns of each arm; default: 5")
    parser.add_argument("--arms", nargs="+", help="default: all of them")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="write the figures to this JSON file")
    args = parser.parse_args()
    settings = {name: getattr(args, name) for name in ("prompts", "longest", "new_tokens", "arms")}
    report = common.earlier_report(args.keep)
    if report.get("settings") != settings:
        report = common.provenance(data=[args.data]) | {"settings": settings, "targets": {}}
    for name in args.targets:
        measure(name, args, report)


def measure(name: str, args: argparse.Namespace, report: dict[str, Any]) -> None:
    """Time the turns of a target that the report lacks, and add them to it."""
    target = mj.load(name)
    requests = {
        kind: [
            mj.make_requests(target, [ids], max_new_tokens=args.new_tokens)
            for _, ids in prompts(target, args.data / f"{kind}.jsonl.xz", args.prompts, args.longest)
        ]
        for kind in KINDS
    }
    sessions = {
        arm: Session.of(target, drafter)
        for arm, drafter in arms_of(name, target).items()
        if args.arms is None or arm in args.arms
    }
    # The first pass compiles, and counts tokens and steps.
    rows = {arm: counts(session, requests) for arm, session in sessions.items()}
    for arm, row in rows.items():
        row["differing"] = sum(a != b for a, b in zip(row["tokens"], rows["plain"]["tokens"], strict=True))
    for row in rows.values():
        row["tokens"] = sum(map(len, row["tokens"]))
    rows = report["targets"].setdefault(name, rows)
    for turn in range(len(rows["plain"]["turns"]), args.turns):
        times = one_turn(sessions, requests, turn)
        for arm, row in rows.items():
            row["turns"].append(times[arm])
        common.write(args.keep, report)
        print(name, f"{turn + 1} of {args.turns} turns", flush=True)
    for arm, row in rows.items():
        by_kind = {kind: round(over_plain(rows, arm, [kind])["median"], 3) for kind in KINDS}
        print(name, arm, round(over_plain(rows, arm)["median"], 3), by_kind, row["steps"], flush=True)


def counts(session: Session, requests: Mapping[str, Sequence[Sequence[Request]]]) -> dict[str, Any]:
    """Return the tokens of each completion, and the numbers of steps and of steps with a draft by kind."""
    completions = {kind: [session.decode(one).completions[0] for one in group] for kind, group in requests.items()}
    return {
        "tokens": [completion.tokens for group in completions.values() for completion in group],
        "steps": {kind: sum(c.metrics.steps for c in group) for kind, group in completions.items()},
        "drafted": {kind: sum(c.metrics.proposed for c in group) for kind, group in completions.items()},
        "turns": [],
    }


def one_turn(
    sessions: Mapping[str, Session], requests: Mapping[str, Sequence[Sequence[Request]]], turn: int
) -> dict[str, dict[str, dict[str, float]]]:
    """Return the time of each arm by clock and kind."""
    times = {arm: {clock: dict.fromkeys(requests, 0.0) for clock in CLOCKS} for arm in sessions}
    for kind, group in requests.items():
        for number, one in enumerate(group):
            for arm in list(sessions)[:: -1 if (turn + number) % 2 else 1]:
                began = {clock: read() for clock, read in CLOCKS.items()}
                sessions[arm].decode(one)
                for clock, read in CLOCKS.items():
                    times[arm][clock][kind] += read() - began[clock]
    return times


def over_plain(
    rows: Mapping[str, Any], arm: str, kinds: Sequence[str] = KINDS, clock: str = "processor_seconds"
) -> dict[str, float]:
    """Return the speed of an arm over plain decoding: the median over turns, with both 95% bounds."""
    plain, other = (
        np.asarray([sum(turn[clock][kind] for kind in kinds) for turn in rows[name]["turns"]])
        for name in ("plain", arm)
    )
    return common.ratio(plain, other)


if __name__ == "__main__":
    main()
