"""Milliseconds of a step beside what a plan expects of it, and what the draft is worth on this device."""

from __future__ import annotations

import functools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax

from mars_jax import assets, drafters, hub, verify
from mars_jax.core import decode
from mars_jax.core.rule import LoadedRule
from mars_jax.lab.commands.check.tokens import PROMPTS
from mars_jax.serve.prepare import buffer_width
from mars_jax.serve.requests import Request, make_requests
from mars_jax.serve.session import Session

TOKENS = 64
"""New ones of a prompt, in a batch of one."""
ROUNDS = 5
THETA = 0.9
SLICES = {
    "TPU v4": "v4:1x1x1",
    "TPU v5": "v5p:1x1x1",
    "TPU v5p": "v5p:1x1x1",
    "TPU v5 lite": "v5e:1x1",
    "TPU v5e": "v5e:1x1",
    "TPU v6 lite": "v6e:1x1",
    "TPU v6e": "v6e:1x1",
}
"""The slice of one chip, by what JAX calls the device."""
PLAN_SECONDS = 300


def check_speed(tick: Callable[[str], None] = lambda what: None) -> dict[str, Any]:
    """Autoregression, `exact` and `mars` over the embedded pair, in turns: ms a step, tokens/s, tau and speedups.

    A time is that of the device loop alone, prefill and compilation left out; figures are medians of `ROUNDS` rounds.
    Weights are in float32 on a CPU, and elsewhere in bfloat16.
    """
    dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    target = hub.load(assets.TARGET, dtype=dtype)
    requests = make_requests(target, PROMPTS[:2], max_new_tokens=TOKENS, ignore_eos=True)
    drafter = drafters.load(f"model:{assets.DRAFT}", target, dtype=dtype)
    exact = Session(target=target, drafter=drafter, batch_size=1)
    arms = {
        "autoregression": exact.autoregressive,
        "exact": exact,
        f"mars(theta={THETA:g})": exact.using(LoadedRule(verify.mars(theta=THETA))),
    }
    for name, session in arms.items():
        tick(name)
        _decoded(session, requests)  # compiles
    rounds: dict[str, list[tuple[float, int, int]]] = {name: [] for name in arms}
    for _ in range(ROUNDS):
        for name, session in arms.items():
            rounds[name].append(_decoded(session, requests))
    plain = [seconds / tokens for seconds, tokens, _ in rounds["autoregression"]]
    rows = []
    for name, done in rounds.items():
        ratios = [before * tokens / seconds for before, (seconds, tokens, _) in zip(plain, done, strict=True)]
        rows.append(
            {
                "arm": name,
                "step_milliseconds": statistics.median(1e3 * seconds / steps for seconds, _, steps in done),
                "tokens_per_second": statistics.median(tokens / seconds for seconds, tokens, _ in done),
                "tau": done[0][1] / done[0][2],
                "speedup": statistics.median(ratios),
                "speedup_range": [min(ratios), max(ratios)],
            }
        )
    tick("the plan")
    width = max(buffer_width(target, [request]) for request in requests)
    return {"dtype": dtype, "arms": rows, "plan": plan_of(jax.local_devices()[0].device_kind, width, dtype)}


def _decoded(session: Session, requests: list[Request]) -> tuple[float, int, int]:
    """(seconds of the device loops, tokens, steps) of requests one after the other."""
    seconds, tokens, steps = 0.0, 0, 0
    for request in requests:
        decoder, params, state = session.prepare([request])
        state = jax.block_until_ready(state)
        began = time.perf_counter()
        _, stats = jax.block_until_ready(decode.run(decoder, params, state))
        seconds += time.perf_counter() - began
        tokens += int(stats.emitted.sum())
        steps += int(stats.steps.sum())
    return seconds, tokens, steps


@functools.cache
def plan_of(kind: str, context: int, dtype: str) -> dict[str, Any]:
    """The plan of the embedded pair on one chip of this kind, as `mars-jax plan` makes it, or why there is none.

    It runs in a process of its own, since libtpu plans only where it does not run a chip.

    >>> plan_of("cpu", 128, "float32")
    {'missing': 'plans are for TPUs v4, v5e, v5p and v6e, and this device is cpu'}
    """
    if kind not in SLICES:
        return {"missing": f"plans are for TPUs v4, v5e, v5p and v6e, and this device is {kind}"}
    command = [
        sys.executable,
        "-m",
        "mars_jax",
        "plan",
        "--target",
        str(assets.path(assets.TARGET)),
        "--json",
    ]
    command += ["--draft", f"model:{assets.path(assets.DRAFT)}", "--topology", SLICES[kind]]
    command += ["--context", str(context), "--dtype", dtype]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("TPU_", "LIBTPU_"))}
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=PLAN_SECONDS,
            env=environment | {"JAX_PLATFORMS": "cpu"},
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"missing": f"mars_jax.plan took more than {PLAN_SECONDS} s"}
    try:
        plan = json.loads(done.stdout)
    except ValueError:
        said = done.stderr.strip().splitlines() or [f"it ended with code {done.returncode}"]
        return {"missing": f"mars_jax.plan failed: {said[-1][:300]}"}
    names = ("topology", "floor_seconds", "autoregressive_floor_seconds", "step", "autoregressive_step")
    return {name: plan[name] for name in names}
