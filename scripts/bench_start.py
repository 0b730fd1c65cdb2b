"""Seconds from the start of `python -m mars_jax.generate` to its first text, here and in an older checkout.

    git worktree add ../before 7240b3b
    python scripts/bench_start.py --against ../before --output scripts/results/bench_start.json

Fresh processes take turns. "cold" is with an empty folder of compiled programs, as after an install, "warm" with what
the cold run left there. Beside the clock's seconds stand those of the processes on all cores up to the same letter,
which other work on the machine lengthens less. Files are in the system's cache.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PROMPT = "Once upon a time"
BARS = {"cold": 7.0, "warm": 3.0, "over_before": 0.6}
HERE = Path(__file__).resolve().parents[1]


def first_text(checkout: Path, cache: str) -> dict[str, float]:
    """Seconds to the first letter after the prompt: {"clock": ..., "processor": ...}."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(checkout),
        "XDG_CACHE_HOME": cache,
        "PYTHONUNBUFFERED": "1",
    }
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    began = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, "-m", "mars_jax.generate", PROMPT, "--max-new-tokens", "32"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
        cwd=checkout,
    ) as process:
        assert process.stdout is not None
        head = process.stdout.read(len(PROMPT) + 1).decode()
        clock = time.perf_counter() - began
        ticks = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        process.stdout.read()
    if process.returncode or not head.startswith(PROMPT):
        raise SystemExit(f"the command failed with exit code {process.returncode} in {checkout}.")
    return {"clock": clock, "processor": (int(ticks[11]) + int(ticks[12])) / os.sysconf("SC_CLK_TCK")}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--against", type=Path, required=True, help="the older checkout")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    checkouts = {"now": HERE, "before": args.against.resolve()}
    runs: dict[str, list[dict[str, float]]] = {f"{w}, {s}": [] for w in checkouts for s in ("cold", "warm")}
    for turn in range(args.repeats):
        for where in list(checkouts)[:: 1 if turn % 2 else -1]:
            with tempfile.TemporaryDirectory() as cache:
                for state in ("cold", "warm"):
                    runs[f"{where}, {state}"].append(first_text(checkouts[where], cache))
        print(
            {name: {k: round(v, 2) for k, v in found[-1].items()} for name, found in runs.items()}, flush=True
        )
    middle: dict[str, Any] = {
        name: {kind: statistics.median(run[kind] for run in found) for kind in ("clock", "processor")}
        for name, found in runs.items()
    }
    git = ["git", "-C", str(args.against), "rev-parse", "--short", "HEAD"]
    report = {
        "before": subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip(),
        "machine": {
            "cores": len(os.sched_getaffinity(0)),
            "python": platform.python_version(),
            "jax": importlib.metadata.version("jax"),
        },
        "bars": BARS,
        "median": middle,
        "over_before": {
            state: {
                kind: statistics.median(
                    a[kind] / b[kind]
                    for a, b in zip(runs[f"now, {state}"], runs[f"before, {state}"], strict=True)
                )
                for kind in ("clock", "processor")
            }
            for state in ("cold", "warm")
        },
        "runs": runs,
    }
    args.output.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({"median": middle, "over_before": report["over_before"]}))


if __name__ == "__main__":
    main()
