"""Compare what a step costs under every rule and under the strict rule that it is over, on the embedded family.

    python -m scripts.rules_compared.rule_cost --output scripts/results/rule_cost.json

Rules of edges are compared with `exact`, rules of distributions with `rejection`, with a chain of 5 at batch 1. A
process compiles the base and its rules, and decodes the same prompt under one and the other in turns (A B, B A, ...);
a time is that of a decode over its steps, since a rule that relaxes needs fewer. Where a process finds its memory
makes it some percent faster or slower for good, so it is started several times. The bound is the upper 95% one of a
bootstrap of the median, over starts and over pairs within them. Pin it to a core (`taskset -c 0`)
where the machine is shared.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from scripts import common

NEW_TOKENS, REPEATS = 64, 3


class Group(NamedTuple):
    """A strict rule, what is over it, and the bar."""

    base: str
    rules: Mapping[str, Mapping[str, Any]]  # by the name in the report: the settings, and `verify`, the rule
    temperature: float
    sample: bool  # the draft is drawn
    bar: float


EDGES: dict[str, dict[str, Any]] = {
    "mars": {},
    "mars (gap)": {"verify": "mars", "margin": "gap", "theta": 1.0},
    "topk": {},
    "typical": {},
    "adaptive": {},
    "entropy_gate": {},
    "fly": {"window": 2},
    "budget": {},
}
DISTRIBUTIONS: dict[str, dict[str, Any]] = {
    "lenience": {},
    "mixture": {},
    "cactus": {},
    "speccascade": {},
    "speccascade (opt)": {"verify": "speccascade", "trust": "opt"},
    "mentored": {},
    "fuzzy": {},
    "released": {},
    "nucleus": {},
    "mars over rejection": {"verify": "mars", "base": "rejection"},
}
GROUPS = {
    "edges, temperature 0": Group("exact", EDGES, 0.0, False, 1.05),
    "edges, temperature 1": Group("exact", EDGES, 1.0, False, 1.05),
    "distributions, temperature 1": Group("rejection", DISTRIBUTIONS, 1.0, True, 1.15),
}


def worker(group: Group, rules: Sequence[str]) -> None:
    """Compile, say that it is done, then decode once for every name on stdin and say the seconds of a step."""
    import jax

    import mars_jax as mj
    from mars_jax.serve.prepare import prepare

    target = mj.load()
    drafter = mj.drafters.load("model:tiny/draft", target, sample=group.sample)
    requests = mj.make_requests(
        target,
        ["Once upon a time"],
        max_new_tokens=NEW_TOKENS,
        ignore_eos=True,
        temperature=group.temperature,
    )

    def made(name: str) -> Any:
        settings = dict(group.rules.get(name, {}))
        return mj.verify.load(settings.pop("verify", name), target, **settings)

    loaded = {name: made(name) for name in (group.base, *rules)}

    def decode(name: str) -> float:
        decoder, params, state = prepare(target, drafter, requests, verify=loaded[name])
        state = jax.block_until_ready(state)
        began = time.perf_counter()
        _, stats = jax.block_until_ready(mj.run(decoder, params, state))
        return (time.perf_counter() - began) / int(stats.steps[0])

    for name in loaded:
        decode(name)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        print(json.dumps(sum(decode(line.strip()) for _ in range(REPEATS)) / REPEATS), flush=True)


def one_start(name: str, rules: Sequence[str], pairs: int, cache: Path) -> dict[str, list[list[float]]]:
    """Of every rule its pairs of seconds, [base, rule]."""
    command, compiled = (
        [__file__, "--worker", name, "--rules", *rules],
        {"JAX_COMPILATION_CACHE_DIR": str(cache)},
    )
    base = GROUPS[name].base
    with common.Worker(command, environment=compiled) as process:
        process.answer()
        found: dict[str, list[list[float]]] = {rule: [] for rule in rules}
        for turn in range(pairs + 1):
            for rule in rules:
                order = (base, rule) if turn % 2 else (rule, base)
                seconds = {which: process.ask(which) for which in order}
                found[rule].append([seconds[base], seconds[rule]])
    return {rule: taken[1:] for rule, taken in found.items()}  # the first turn warms up


def compare(name: str, rules: Sequence[str], starts: int, pairs: int, cache: Path) -> list[dict[str, Any]]:
    """The rows of a group."""
    group = GROUPS[name]
    found = [one_start(name, rules, pairs, cache) for _ in range(starts)]
    rows = []
    for rule in rules:
        seconds = np.asarray([start[rule] for start in found])  # [starts, pairs, 2]
        ratio = common.ratio(seconds[:, :, 1], seconds[:, :, 0])
        rows.append(
            {
                "group": name,
                "rule": rule,
                "base": group.base,
                "ms_per_step": [float(ms) for ms in 1e3 * np.median(seconds, axis=(0, 1))],
                "time_ratio": ratio,
                "bar": group.bar,
                "met": ratio["upper_95"] <= group.bar,
                "starts": starts,
                "pairs": pairs,
            }
        )
    return rows


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--starts", type=int, default=6, help="of the process of a group")
    parser.add_argument("--pairs", type=int, default=6, help="of turns in a start")
    parser.add_argument("--groups", nargs="+", choices=tuple(GROUPS), default=tuple(GROUPS))
    parser.add_argument("--rules", nargs="+", help="only these of a group (default: all)")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--worker", choices=tuple(GROUPS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(GROUPS[args.worker], args.rules)
        return
    report: dict[str, Any] = common.provenance() | {"cases": []}
    with tempfile.TemporaryDirectory() as cache:
        for name in args.groups:
            rules = [rule for rule in GROUPS[name].rules if args.rules is None or rule in args.rules]
            if not rules:
                continue
            for row in compare(name, rules, args.starts, args.pairs, Path(cache)):
                report["cases"].append(row)
                print(json.dumps(row), flush=True)
            common.write(args.output, report)


if __name__ == "__main__":
    main()
