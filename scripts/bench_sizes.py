"""Drafts as long as pays against autoregression and the fixed chain, from batch 1 to 256, on the embedded family.

    taskset -c 0 python scripts/bench_sizes.py --output scripts/results/bench_sizes.json

Beginnings of stories in float32, greedy, every row to its limit, so that all ways give the same tokens. The ways take
turns within a round, in another order each round, and a round's ratio is the speed of `auto` over that of the better
of the two others in the same round: what else the machine does slows a round, not a way. Seconds are the process's own
time on its one core, which is the clock's where nothing else runs there, and are of whole batches, prefill included.
Compilation and the measuring of costs come before them, in `starting_seconds`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import jax

import mars_jax as mj
from mars_jax.core.rule import LoadedRule
from mars_jax.serve import sizes
from mars_jax.serve.session import Session

CHAIN = 5
BEGINNINGS = (
    "Once upon a time, there was a little girl named Lily.",
    "One day, a boy named Tim went to the park with his dog.",
    "The big cat and the small bird were friends.",
    "Sue had a red ball. She liked to play with it in the garden.",
    "Tom and his mom went to the shop to buy some milk.",
)


def measured(target: mj.Pretrained, draft: str, rows: int, new: int, rounds: int) -> dict[str, Any]:
    """Tokens per second of each way, by round."""
    options: dict[str, Any] = {"num_draft_tokens": CHAIN} | ({"dtype": "float32"} if ":" in draft else {})
    made = {
        "none": mj.drafters.load("none", target),
        "fixed": mj.drafters.load(draft, target, **options),
        "auto": mj.drafters.load(draft, target, draft_size="auto", **options),
    }
    prompts = [f"{BEGINNINGS[i % len(BEGINNINGS)]} {BEGINNINGS[i // 5 % 5]}" for i in range(rows)]
    requests = mj.make_requests(target, prompts, max_new_tokens=new, ignore_eos=True)
    sessions = {
        name: Session(target=target, drafter=drafter, rule=LoadedRule(mj.verify.exact()), batch_size=rows)
        for name, drafter in made.items()
    }
    began = time.perf_counter()
    for session in sessions.values():
        session.compile(requests)
        session.run(requests)
    starting = time.perf_counter() - began
    costs = list(sizes._MEASURED.values())[-1]
    speeds: dict[str, list[float]] = {name: [] for name in sessions}
    taus, tokens = {}, {}
    for turn in range(rounds):
        order = list(sessions)
        for name in order[turn % 3 :] + order[: turn % 3]:
            began = time.process_time()
            done = sessions[name].run(requests)
            seconds = time.process_time() - began
            speeds[name].append(sum(len(c.tokens) for c in done) / seconds)
            steps = max(c.metrics.steps for c in done)
            taus[name] = sum(c.metrics.emitted for c in done) / (steps * rows)
            tokens[name] = [c.tokens for c in done]
    ratios = [a / max(n, f) for n, f, a in zip(speeds["none"], speeds["fixed"], speeds["auto"], strict=True)]
    return {
        "rows": rows,
        "median_tokens_per_second": {name: statistics.median(found) for name, found in speeds.items()},
        "auto_over_the_better": statistics.median(ratios),
        "of_medians": statistics.median(speeds["auto"])
        / max(statistics.median(speeds["none"]), statistics.median(speeds["fixed"])),
        "tokens_per_row_and_forward": taus,
        "rows_that_differ_from_the_fixed_chain": sum(
            a != b for a, b in zip(tokens["auto"], tokens["fixed"], strict=True)
        ),
        "costs_seconds": dict(zip(("0", "half", "whole"), costs, strict=True)),
        "ratios": ratios,
        "tokens_per_second": speeds,
        "starting_seconds": starting,
    }


def main() -> None:
    flags = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    flags.add_argument("--draft", default="model:tiny/draft")
    flags.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64, 256])
    flags.add_argument("--new-tokens", type=int, default=48)
    flags.add_argument("--rounds", type=int, default=6)
    flags.add_argument("--output", type=Path)
    args = flags.parse_args()
    target = mj.load(dtype="float32")
    report: dict[str, Any] = {
        "draft": args.draft,
        "chain": CHAIN,
        "new_tokens": args.new_tokens,
        "machine": {"cores": len(os.sched_getaffinity(0)), "cpu": platform.machine(), "jax": jax.__version__},
        "results": [],
    }
    for rows in args.rows:
        report["results"].append(measured(target, args.draft, rows, args.new_tokens, args.rounds))
        shown = {k: v for k, v in report["results"][-1].items() if k not in ("tokens_per_second", "ratios")}
        print(json.dumps(shown), flush=True)
        if args.output is not None:
            args.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
