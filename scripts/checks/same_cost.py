"""Compare the cost of a compiled decode loop at another commit of mars-jax with its cost at this commit.

    python -m scripts.checks.same_cost --old REV --output FILE

Each case reports the number of instructions in the optimised HLO of `run`, XLA's estimate of the bytes accessed, and
the time to decode a prompt. Two processes, one for each commit, take turns at decoding the same prompt. The memory
layout of a process makes it a few percent faster or slower for its lifetime, so the processes are started several
times. Each ratio is new over old. The 95% bounds of a ratio come from a bootstrap of the median, which resamples the
starts of the processes and the pairs of turns within each start. Imports are also timed in pairs. On a shared machine,
pin the script to a core (`taskset -c 0`).
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from scripts import common
from scripts.common import ROOT, script_of

CASES = (
    "none, exact",
    "ngram, exact",
    "chain, exact",
    "chain of 8 rows, exact",
    "chain, mars",
    "sampled chain, rejection",
    "eagle chain, exact",
    "eagle static tree, exact",
    "eagle tree, exact",
    "eagle tree, mars",
)
NEW_TOKENS, REPEATS = 64, 3


def worker(case: str) -> None:
    """Compile the program and report its size. For each line on stdin, decode `REPEATS` times and print the seconds."""
    import jax

    import mars_jax as mj
    from mars_jax.serve.session import prepare

    draft, name = case.split(", ")
    target = mj.load()
    model, head = "model:tiny/draft", "eagle:tiny/eagle3"
    load = functools.partial(mj.drafters.load, target=target)
    drafter = {
        "none": lambda: load("none"),
        "chain": lambda: load(model),
        "ngram": lambda: load("ngram"),
        "chain of 8 rows": lambda: load(model),
        "eagle chain": lambda: load(head, num_draft_tokens=5),
        "eagle static tree": lambda: load(head, tree=(3, 2, 1)),
        "sampled chain": lambda: load(model, sample=True),
        "eagle tree": lambda: load(head, tree=mj.drafters.Dynamic(6, 4, 24)),
    }[draft]()
    rule = getattr(mj.verify, name)()
    texts = ["Once upon a time"] * (8 if "8 rows" in draft else 1)
    requests = mj.make_requests(target, texts, max_new_tokens=NEW_TOKENS, ignore_eos=True)

    def fresh() -> tuple[Any, Any, Any]:
        return prepare(target, drafter, requests, verify=rule)

    decoder, params, state = fresh()
    compiled = mj.run.lower(decoder, params, state).compile()
    text, costs = compiled.as_text(), compiled.cost_analysis()
    assert text is not None and costs is not None
    instructions = len(re.findall(r"^\s+(?:ROOT )?%?[\w.-]+ = ", text, re.MULTILINE))
    steps = int(mj.run(decoder, params, state)[1].steps.max())
    program = {"instructions": instructions, "bytes": costs["bytes accessed"], "steps": steps}
    print(json.dumps(program), flush=True)
    for _ in sys.stdin:
        seconds = 0.0
        for _ in range(REPEATS):
            state = jax.block_until_ready(fresh()[2])
            began = time.perf_counter()
            jax.block_until_ready(mj.run(decoder, params, state))
            seconds += time.perf_counter() - began
        print(json.dumps(seconds), flush=True)


def compare(case: str, checkouts: dict[str, Path], starts: int, pairs: int, cache: Path) -> dict[str, Any]:
    programs, seconds_by_start = {}, []
    for _ in range(starts):
        programs, seconds = one_start(case, checkouts, pairs, cache)
        seconds_by_start.append([seconds[name] for name in ("old", "new")])
    steps = np.asarray([programs[name]["steps"] for name in ("old", "new")])
    per_step = np.asarray(seconds_by_start) / steps[None, :, None] / REPEATS  # [starts, 2, pairs]
    return {
        "case": case,
        **{
            name: programs[name] | {"ms_per_step": float(np.median(per_step[:, i]) * 1e3)}
            for i, name in enumerate(("old", "new"))
        },
        "time_ratio": common.ratio(per_step[:, 1], per_step[:, 0]),
        "starts": starts,
        "pairs": pairs,
    }


def one_start(
    case: str, checkouts: dict[str, Path], pairs: int, cache: Path
) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """Return the reports of both processes, and the seconds that each turn took, except the first, a warm-up."""
    with contextlib.ExitStack() as stack:
        workers = {
            name: stack.enter_context(
                common.Worker(
                    [script_of(path, "same_cost.py"), "--worker", case],
                    checkout=path,
                    environment={"JAX_COMPILATION_CACHE_DIR": str(cache)},
                )
            )
            for name, path in checkouts.items()
        }
        programs = {name: worker.answer() for name, worker in workers.items()}
        seconds: dict[str, list[float]] = {name: [] for name in workers}
        for turn in range(pairs + 1):
            for name in sorted(workers, reverse=bool(turn % 2)):
                seconds[name].append(workers[name].ask())
    return programs, {name: turns[1:] for name, turns in seconds.items()}


def imports(checkouts: dict[str, Path], pairs: int) -> dict[str, Any]:
    """Compare the import times of the checkouts, with and without access to the names that an embedded loop needs."""
    code = "import time; b = time.perf_counter(); import mars_jax; a = time.perf_counter() - b\n"
    code += "mars_jax.DraftTree, mars_jax.speculative_decoder; print(a, time.perf_counter() - b)"
    seconds: dict[str, list[list[float]]] = {name: [] for name in checkouts}
    for turn in range(pairs):
        for name in sorted(checkouts, reverse=bool(turn % 2)):
            environment = os.environ | {"PYTHONPATH": str(checkouts[name])}
            command = [sys.executable, "-c", code]
            output = subprocess.check_output(command, env=environment, cwd=checkouts[name], text=True)
            seconds[name].append([float(x) for x in output.split()])
    old, new = np.asarray(seconds["old"]), np.asarray(seconds["new"])
    return {
        name: {
            "old_s": float(np.median(old[:, i])),
            "new_s": float(np.median(new[:, i])),
            **common.ratio(new[:, i], old[:, i]),
        }
        for i, name in enumerate(("import mars_jax", "with the names of an embedded loop"))
    }


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument(
        "--old", default="HEAD", metavar="REV", help="a commit that has this script (default: HEAD)"
    )
    parser.add_argument(
        "--starts", type=int, default=6, help="how often the two processes of a case are started"
    )
    parser.add_argument("--pairs", type=int, default=6, help="pairs of turns per start")
    parser.add_argument("--cases", nargs="+", default=CASES)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.worker)
        return
    with tempfile.TemporaryDirectory() as work:
        old = Path(work) / "old"
        subprocess.run(["git", "-C", ROOT, "worktree", "add", "-q", "--detach", old, args.old], check=True)
        try:
            checkouts = {"old": old, "new": ROOT}
            report: dict[str, Any] = {"old": args.old, **common.provenance(), "cases": []}
            for case in args.cases:
                row = compare(case, checkouts, args.starts, args.pairs, Path(work) / "compiled")
                report["cases"].append(row)
                print(json.dumps(row), flush=True)
            report["imports"] = imports(checkouts, args.starts * args.pairs)
            print(json.dumps(report["imports"]))
        finally:
            subprocess.run(["git", "-C", ROOT, "worktree", "remove", "--force", old], check=True)
    common.write(args.output, report)


if __name__ == "__main__":
    main()
