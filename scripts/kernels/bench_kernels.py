"""Compare the speed of the kernels on this machine with `lax.top_k`, XLA's reductions and the memory bandwidth.

    python -m scripts.kernels.bench_kernels --output scripts/results/bench_kernels_cpu.json

For each shape, all implementations are warmed up and then timed alternately (A B A B ...). Reported times are medians;
the JSON also contains each individual time. The floor is the time to read the operands once at the bandwidth of a copy
of the same array, measured in the same run (a copy moves each byte twice). Speed does not depend on the values.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas import AcceptControls, margin_accept, margin_stats
from scripts import common

STATS_SHAPES = {
    "cpu": [(8, 8, 128256), (8, 8, 4096), (1, 1, 128256), (1, 8, 151936), (8, 8, 32000)],
    "gpu": [(64, 8, 128256), (8, 8, 128256), (1, 8, 128256), (1, 60, 151936), (64, 64, 32000)],
    "tpu": [(64, 8, 128256), (8, 8, 128256), (1, 8, 128256), (1, 60, 151936), (64, 64, 32000)],
}


def timed_in_turns(
    forms: dict[str, Callable[..., Any]], operands: tuple[Any, ...], repeats: int
) -> dict[str, Any]:
    """Compile the functions, time them alternately, and return each function's times and its median time."""
    compiled = {name: functools.partial(jax.jit(form), *operands) for name, form in forms.items()}
    seconds = common.in_turns(compiled, repeats)
    return {
        name: {"median_ms": float(1e3 * np.median(s)), "seconds": s.tolist()} for name, s in seconds.items()
    }


def entry(name: str, bytes_read: int, timed: dict[str, Any], copy: str | None) -> dict[str, Any]:
    """Return a record of the timed forms.

    `copy` is the name of the form that copies the operands, or None. If given, the record also contains the floor and
    each form's share of the bandwidth, both computed from the time of the copy.
    """
    result: dict[str, Any] = {"name": name, "bytes_read": bytes_read, "forms": timed}
    if copy is not None:
        floor = timed[copy]["median_ms"] / 2
        result["copy_gb_per_s"] = 2 * bytes_read / timed[copy]["median_ms"] / 1e6
        result["floor_ms"] = floor
        for form in timed.values():
            form["share_of_bandwidth"] = floor / form["median_ms"]
    return result


def bench_stats(shape: tuple[int, ...], dtype: Any, repeats: int) -> dict[str, Any]:
    logits = jax.random.normal(jax.random.key(0), shape, jnp.float32).astype(dtype)
    top_k = functools.partial(jax.lax.top_k, k=2)
    forms = {
        "copy": lambda z: z + jnp.ones((), z.dtype),
        "margin_stats": margin_stats,
        "margin_stats logsumexp": functools.partial(margin_stats, logsumexp=True),
        "argmax twice": functools.partial(margin_stats, implementation="partitioned"),
        "argmax twice logsumexp": functools.partial(
            margin_stats, implementation="partitioned", logsumexp=True
        ),
        "top_k": top_k,
        "top_k logsumexp": lambda z: (top_k(z), jax.nn.logsumexp(z.astype(jnp.float32), axis=-1)),
    }
    if dtype == jnp.bfloat16 and jax.default_backend() == "cpu":
        # On a CPU, XLA implements a bfloat16 top_k as a sort, which takes 100 times as long as a float32 top_k. For a
        # fair comparison, widen the logits first.
        forms["top_k"] = lambda z: top_k(z.astype(jnp.float32))
        del forms["top_k logsumexp"]
    timed = timed_in_turns(forms, (logits,), repeats)
    return entry(f"margin_stats {shape} {jnp.dtype(dtype).name}", logits.nbytes, timed, "copy")


def bench_accept(draft_name: str, b: int, vocab: int, repeats: int) -> dict[str, Any]:
    """Measure `margin_accept` on chains of seven drafted tokens in `b` rows."""
    n = 8
    logits = jax.random.normal(jax.random.key(0), (b, n, vocab), jnp.float32)
    parents = jnp.broadcast_to(jnp.arange(-1, n - 1, dtype=jnp.int32), (b, n))
    tokens = jnp.concatenate([jnp.zeros((b, 1), jnp.int32), margin_stats(logits).id1[:, :-1]], axis=1)
    limits, stops = jnp.full((b,), 99, jnp.int32), jnp.full((b, 2), -1, jnp.int32)
    controls = AcceptControls(jnp.full((b,), 0.9), jnp.zeros((b,), bool), limits, stops)

    def accept(implementation: str | None) -> Callable[..., Any]:
        return lambda z, t, p: margin_accept(
            z, t, p, None, controls, max_depth=n - 1, implementation=implementation
        )

    forms = {
        "margin_accept": accept(None),
        "reference": accept("reference"),
        "margin_stats": lambda z, t, p: margin_stats(z),
    }
    timed = timed_in_turns(forms, (logits, tokens, parents), repeats)
    return entry(f"margin_accept {draft_name} {vocab} float32", logits.nbytes, timed, None)


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--output", type=Path, help="write the raw JSON here")
    parser.add_argument("--repeats", type=int, default=31)
    args = parser.parse_args()
    backend = jax.default_backend()
    results = []

    def show(result: dict[str, Any]) -> None:
        results.append(result)
        print(result["name"], f"floor {result['floor_ms']:.3f} ms" if "floor_ms" in result else "")
        for name, form in result["forms"].items():
            text = f"  {name:28} {form['median_ms']:9.3f} ms"
            if "share_of_bandwidth" in form:
                text += f"  {form['share_of_bandwidth']:6.1%} of the bandwidth"
            print(text, flush=True)

    for shape in STATS_SHAPES[backend]:
        for dtype in (jnp.float32, jnp.bfloat16):
            show(bench_stats(shape, dtype, args.repeats))
    show(bench_accept("chain", 1, 128256, args.repeats))
    if backend != "cpu":
        show(bench_accept("chain-batch", 64, 128256, args.repeats))
    # Record the load: on a busy machine, code that uses every core slows down more than single-threaded code like
    # `top_k`.
    machine = common.provenance() | {"load_average": os.getloadavg(), "backend": backend}
    machine |= {"device": jax.devices()[0].device_kind, "cores": os.cpu_count()}
    report = {"jax": jax.__version__, "machine": machine, "repeats": args.repeats, "results": results}
    common.write(args.output, report)


if __name__ == "__main__":
    main()
