"""Compare the speed of the default draft and of a head, at adaptive and fixed lengths, with that of plain decoding.

    python -m scripts.checks.defaults --target smollm2 --keep scripts/results/defaults_smollm2.json
    python -m scripts.checks.defaults --target tiny/target --keep scripts/results/defaults_tiny.json

Every arm decodes the same prompts greedily under `exact` at batch 1. The arms take turns on each prompt, so that a
temporary slowdown of the machine affects all of them. As in a session, programs are compiled and step costs are
measured in advance. The report is written after every prompt, and a later run with the same settings continues it.
`--data` is the folder with the prompt sets. It defaults to `data/eval` in the folder given by the environment variable
MARS_JAX_SHARED.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mars_jax as mj
from mars_jax.cli.flags import draft_or_default
from mars_jax.cli.generate.job import SHORT
from mars_jax.serve.requests import Request
from mars_jax.serve.session import Session
from scripts import common
from scripts.smollm2.margins import prompts
from scripts.smollm2.tables import over_plain

KINDS = {"mt_bench": 192, "gsm8k_test": 192, "humaneval": 192, "cnn_dm": 512, "wmt19": 192}
"""Maximum number of prompt tokens, keyed by kind of prompt. Prompts with the same maximum share compiled programs."""
HEADS = {"smollm2": "eagle:smollm2/eagle3", "tiny/target": "eagle:tiny/eagle3"}
CLOCKS = {"seconds": time.perf_counter, "processor_seconds": time.process_time}


def arms_of(name: str, target: mj.Pretrained, lengths: Sequence[int]) -> dict[str, mj.drafters.LoadedDrafter]:
    """Return the arms: plain decoding, and the default draft and the head, each at adaptive and fixed lengths."""
    arms = {"plain": mj.drafters.load("none", target)}
    for label, draft in {"default": draft_or_default(None, name), "head": HEADS[name]}.items():
        arms[label] = mj.drafters.load(draft, target, num_draft_tokens=SHORT, draft_size="auto")
        for length in lengths:
            arms[f"{label}, fixed {length}"] = mj.drafters.load(draft, target, num_draft_tokens=length)
    return arms


def main() -> None:
    parser = common.parser(__doc__)
    folder = Path(os.environ.get("MARS_JAX_SHARED", "."), "data", "eval")
    parser.add_argument(
        "--data", type=Path, default=folder, help="folder with a KIND.jsonl.xz for each kind of prompt"
    )
    parser.add_argument("--target", choices=HEADS, default="smollm2", help="default: smollm2")
    parser.add_argument("--prompts", type=int, default=6, help="prompts of each kind; default: 6")
    parser.add_argument("--new-tokens", type=int, default=64, help="default: 64")
    parser.add_argument("--turns", type=int, default=5, help="timed turns of each arm; default: 5")
    parser.add_argument(
        "--lengths", nargs="+", type=int, default=[1, 2, SHORT], help="fixed lengths; default: 1 2 3"
    )
    parser.add_argument("--keep", type=Path, metavar="FILE", help="write the results to this JSON file")
    args = parser.parse_args()
    settings = {name: getattr(args, name) for name in ("target", "prompts", "new_tokens", "lengths")}
    report = common.earlier_report(args.keep)
    if report.get("settings") != settings:
        report = common.provenance(data=[args.data]) | {"settings": settings, "rows": []}
    measure(args, report)


def measure(args: argparse.Namespace, report: dict[str, Any]) -> None:
    """Time the prompts that are not in the report yet, and add their times to the report."""
    target = mj.load(args.target)
    requests = {
        kind: mj.make_requests(
            target,
            [ids for _, ids in prompts(target, args.data / f"{kind}.jsonl.xz", args.prompts, longest)],
            max_new_tokens=args.new_tokens,
        )
        for kind, longest in KINDS.items()
    }
    # Kinds with the same maximum length share a batch, so that their programs have the same shapes.
    batches = {
        kind: [request for other in KINDS if KINDS[other] == KINDS[kind] for request in requests[other]]
        for kind in KINDS
    }
    arms = arms_of(args.target, target, args.lengths)
    sessions = {arm: Session.of(target, drafter) for arm, drafter in arms.items()}
    for session in sessions.values():
        for batch in batches.values():
            session.warm_up(batch)
    rows = report["rows"]
    # Alternate between kinds, so that an interrupted run contains prompts of every kind.
    order = [
        {"turn": turn, "prompt": number, "kind": kind}
        for turn in range(args.turns)
        for number in range(args.prompts)
        for kind in KINDS
    ]
    for place in order[len(rows) :]:
        batch = batches[place["kind"]]
        index = batch.index(requests[place["kind"]][place["prompt"]])
        names = list(sessions)[:: -1 if len(rows) % 2 else 1]
        rows.append(place | {"arms": {arm: timed(sessions[arm], batch, index) for arm in names}})
        common.write(args.keep, report)
    for arm in sessions:
        by_kind = {kind: over_plain(rows, arm, kind)[0] for kind in KINDS}
        print(arm, over_plain(rows, arm), by_kind, flush=True)


def timed(session: Session, batch: Sequence[Request], index: int) -> dict[str, Any]:
    """Return the times, the number of steps and a digest of the tokens of one request."""
    began = {clock: read() for clock, read in CLOCKS.items()}
    [finished] = session.queue(batch, order=[index]).finished()
    times = {clock: round(read() - began[clock], 4) for clock, read in CLOCKS.items()}
    completion = finished.completion
    digest = common.short_digest(repr(completion.tokens).encode())
    return times | {"steps": completion.metrics.steps, "tokens": len(completion.tokens), "digest": digest}


if __name__ == "__main__":
    main()
