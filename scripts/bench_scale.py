"""The cost of a step against batch, context, nodes and the length of the buffer, on the embedded target.

    python scripts/bench_scale.py --output scripts/results/bench_scale.json

A step is a target forward over N nodes, `mars`, and what it commits, for rows that have read `context` tokens; n-grams
draft the chains and a small model's tree the trees, so the draft's share is small or named. The cache is zeros: what it
holds has no part in the cost. Every point is a loop of steps on the device, all points of a series are timed in turn
(A B A B ...) after a warm-up, figures are medians, and every single time is in the JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from bench_decode import in_turn
from jax import lax
from rich.console import Console
from rich.table import Table

import mars_jax as mj
from mars_jax import assets, drafters, verify
from mars_jax.core import decode
from mars_jax.core.types import Prompts
from mars_jax.drafters import Dynamic

BAR = 1.3
"""Most that a step at 256 tokens in a buffer of 8192 may cost over the same step in a buffer of 512."""


@functools.cache
def target(dtype: str) -> mj.Pretrained:
    return mj.load(assets.TARGET, dtype=dtype)


@functools.cache
def drafter(kind: str, nodes: int, dtype: str) -> drafters.LoadedDrafter:
    """A draft of so many nodes: none for one, else n-grams as a chain or the embedded draft's dynamic tree."""
    if nodes == 1:
        return drafters.load("none", target(dtype))
    if kind == "chain":
        return drafters.load("ngram", target(dtype), num_draft_tokens=nodes - 1)
    tree = Dynamic(top_k=10, depth=7, nodes=nodes)
    return drafters.load(f"model:{assets.DRAFT}", target(dtype), tree=tree, dtype=dtype)


def steps(
    *,
    dtype: str,
    batch: int = 1,
    context: int = 256,
    nodes: int = 6,
    buffer: int,
    kind: str = "chain",
    times: int,
) -> Callable[[], Any]:
    """A run of `times` steps from rows of `context` tokens."""
    drafted = drafter(kind, nodes, dtype)
    decoder = decode.speculative_decoder(target(dtype).model, drafted.drafter, verify.mars())
    params = mj.Params(target=target(dtype).params, draft=drafted.params)

    @functools.partial(jax.jit, donate_argnums=1)
    def loop(params: Any, state: Any) -> Any:
        return lax.fori_loop(0, times, lambda _, s: decoder.step(params, s)[0], state)

    tokens = jax.random.randint(jax.random.key(0), (batch, buffer), 3, 4000, jnp.int32)
    controls = mj.make_controls(batch, limit=buffer)
    lengths = jnp.full((batch,), 2, jnp.int32)
    keys = mj.keys_from_seeds(jnp.arange(batch, dtype=jnp.uint32))
    held = [decode.start(decoder, params, Prompts(tokens, lengths, controls, verify.mars(), keys))]

    def run() -> None:
        # Back to the same length, so that every run decodes the same stretch.
        length, done = jnp.full((batch,), context, jnp.int32), jnp.zeros((batch,), bool)
        held[0] = jax.block_until_ready(loop(params, dataclasses.replace(held[0], length=length, done=done)))

    return run


def series(
    name: str, points: dict[str, dict[str, Any]], repeats: int, dtype: str, times: int
) -> dict[str, Any]:
    """Milliseconds of a step at each point."""
    seconds = in_turn(
        {key: steps(dtype=dtype, times=times, **point) for key, point in points.items()}, repeats
    )
    rows = {
        key: {**points[key], "milliseconds": 1e3 * statistics.median(taken) / times, "seconds": taken}
        for key, taken in seconds.items()
    }
    return {"series": name, "dtype": dtype, "steps": times, "points": rows}


SERIES: dict[str, dict[str, dict[str, Any]]] = {
    "buffer": {str(b): {"buffer": b} for b in (512, 8192)},
    "buffer, tree of 60": {str(b): {"buffer": b, "nodes": 60, "kind": "tree"} for b in (512, 8192)},
    "context": {str(c): {"context": c, "buffer": 8192 + 512} for c in (256, 512, 1024, 2048, 4096, 8192)},
    "batch": {str(b): {"batch": b, "buffer": 512} for b in (1, 2, 4, 8, 16, 32, 64)},
    "nodes": {str(n): {"nodes": n, "buffer": 512} for n in (1, 2, 4, 8, 16, 32, 64)},
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output", type=Path, help="write the raw JSON here; series not run keep their figures"
    )
    parser.add_argument("--repeats", type=int, default=9, help="timed runs of each point (default 9)")
    parser.add_argument("--steps", type=int, default=16, help="steps a run takes (default 16)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--only", nargs="*", choices=tuple(SERIES), default=tuple(SERIES))
    args = parser.parse_args()
    console, table = Console(stderr=True), Table("series", "point", "ms a step", "x the first")
    report: dict[str, Any] = {"results": {}}
    if args.output and args.output.exists():
        report = json.loads(args.output.read_text())
    report["command"] = "python " + " ".join(sys.argv)
    report["machine"] = {
        "processor": platform.processor() or platform.machine(), "cores": os.cpu_count(),
        "python": platform.python_version(), "jax": jax.__version__, "device": jax.devices()[0].device_kind,
    }  # fmt: skip
    for name in args.only:
        result = series(name, SERIES[name], args.repeats, args.dtype, args.steps)
        report["results"][f"{name}, {args.dtype}"] = result
        first = next(iter(result["points"].values()))["milliseconds"]
        for key, row in result["points"].items():
            table.add_row(name, key, f"{row['milliseconds']:.2f}", f"{row['milliseconds'] / first:.2f}")
        if name.startswith("buffer"):
            result["figure"], result["bar"] = row["milliseconds"] / first, f"<= {BAR}"
        if args.output:
            args.output.parent.mkdir(parents=True, exist_ok=True)
            args.output.write_text(json.dumps(report, indent=1) + "\n")
    console.print(table)


if __name__ == "__main__":
    main()
