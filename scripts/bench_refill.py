"""Rows that are refilled against static batches: target forwards, and the same tokens as one by one.

    python scripts/bench_refill.py --output scripts/results/bench_refill.json

The embedded pair in float32, a chain of 5, uneven requests in 16 rows: word problems with limits of 8 to 64 new
tokens, and a tenth of them with 160 to 240; every other one at temperature 0.8. `limits`: stop tokens are ignored, so
that every limit is reached, and the longest begin first. `stops`: all have the same limit and end where the model
ends them, which nobody knows before. The ideal is sum(tokens) / (rows * tau): no row ever idle. Counts depend on the
tokens alone and not on the machine; seconds are of three runs in turns, and hold no compilation.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import random
import statistics
import time
from pathlib import Path
from typing import Any

import jax

import mars_jax as mj
from mars_jax.core.rule import LoadedRule
from mars_jax.lab.evaluate.tasks import catalogue
from mars_jax.serve.queue import Queue, longest_first
from mars_jax.serve.requests import Completion, Request, total
from mars_jax.serve.session import Session

CHAIN, REPEATS = 5, 3


def uneven(target: mj.Pretrained, count: int, workload: str) -> list[Request]:
    """Word problems, and how long their answers may become."""
    chance = random.Random(0)
    prompts = [problem.turns[0] for problem in catalogue.read("arithmetic", chat=False, limit=count)]
    limits = [chance.randint(160, 240) if chance.random() < 0.1 else chance.randint(8, 64) for _ in prompts]
    return mj.make_requests(
        target,
        prompts,
        temperature=[0.8 * (i % 2) for i in range(count)],
        max_new_tokens=limits if workload == "limits" else 240,
        ignore_eos=workload == "limits",
        seed=0,
    )


def refilled(session: Session, requests: list[Request]) -> tuple[list[Completion], int, float]:
    """Completions in the order of the requests, target forwards, seconds."""
    queue = session.queue(requests, order=longest_first(requests))
    assert isinstance(queue, Queue)
    began = time.perf_counter()
    found = dict(queue)
    return [found[i] for i in range(len(requests))], queue.forwards, time.perf_counter() - began


def static(session: Session, requests: list[Request]) -> tuple[list[Completion], int, float]:
    """The same, in batches that end with their last row."""
    for batch in session.batches(requests):
        batch.session.compile(batch.requests)
    completions, forwards, seconds = [], 0, 0.0
    for batch in session.batches(requests):
        began = time.perf_counter()
        done = batch.session.run(batch.requests)
        seconds += time.perf_counter() - began
        forwards += max(completion.metrics.steps for completion in done)
        completions += done
    return completions, forwards, seconds


def measured(session: Session, requests: list[Request], repeats: int) -> dict[str, Any]:
    """Both ways in turns, and every request alone."""
    ways = {"refill": refilled, "static": static}
    runs = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            runs[name].append(way(session, requests))
    alone, _, _ = refilled(dataclasses.replace(session, batch_size=1), requests)
    metrics = total(alone)
    ideal = metrics.emitted / (session.batch_size * metrics.tau)
    row: dict[str, Any] = {
        "tokens": metrics.emitted,
        "tau": metrics.tau,
        "ideal_forwards": ideal,
    }
    for name, found in runs.items():
        completions, forwards, _ = found[0]
        seconds = [seconds for _, _, seconds in found]
        row[name] = {
            "forwards": forwards,
            "of_ideal": forwards / ideal,
            "rows_that_differ_from_one_by_one": sum(
                a.tokens != b.tokens for a, b in zip(completions, alone, strict=True)
            ),
            "seconds": seconds,
            "tokens_per_second": metrics.emitted / statistics.median(seconds),
        }
    return row


def main() -> None:
    flags = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    flags.add_argument("--requests", type=int, default=240)
    flags.add_argument("--rows", type=int, default=16)
    flags.add_argument("--repeats", type=int, default=REPEATS)
    flags.add_argument("--output", type=Path)
    args = flags.parse_args()
    target = mj.load(dtype="float32")
    draft = mj.drafters.load("model:tiny/draft", target, num_draft_tokens=CHAIN, dtype="float32")
    report: dict[str, Any] = {
        "requests": args.requests,
        "rows": args.rows,
        "machine": {"cores": len(os.sched_getaffinity(0)), "cpu": platform.machine(), "jax": jax.__version__},
        "results": {},
    }
    for workload in ("limits", "stops"):
        requests = uneven(target, args.requests, workload)
        for rule in (mj.verify.exact(), mj.verify.mars(theta=0.9)):
            session = Session(target=target, drafter=draft, rule=LoadedRule(rule), batch_size=args.rows)
            name = f"{workload}, {session.rule_name}"
            report["results"][name] = measured(session, requests, args.repeats)
            print(name, json.dumps(report["results"][name]), flush=True)
    if args.output is not None:
        args.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
