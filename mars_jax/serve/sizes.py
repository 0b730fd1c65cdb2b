"""Costs of a step with each size of a draft, measured where it is decoded, before the first batch of a shape.

Oracle: the clock around steps of the fixed sizes (scripts/results/bench_sizes.json of commit 5336526).
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import time
from typing import Any

import jax
import numpy as np

from mars_jax.core import activity, decode, refill
from mars_jax.core.metrics import zero_stats
from mars_jax.core.types import NO_TOKEN
from mars_jax.drafters.sized import forced, is_measured, measured
from mars_jax.placement import hosts
from mars_jax.placement.shardings import state_shardings
from mars_jax.serve.prepared import Prepared

STEPS, ROUNDS = 4, 3
"""Steps of each size in a round. The quickest round counts: what else a machine does can only add to it."""

_MEASURED: dict[Any, tuple[float, ...]] = {}
"""Costs by what they depend on, of this process."""


def with_costs(made: Prepared, rows: int, *, log_probs: bool = False, loop: str = "run") -> Prepared:
    """Return the prepared requests with a drafter that knows what its sizes cost; unchanged if there is but one size.

    Args:
      made: the requests and what decodes them.
      rows: B, which divides over the mesh.
      log_probs: as the loop that will decode them has it.
      loop: which one that is: "run", "stream" or "queue"; what is compiled for this is then compiled for it.
    """
    if is_measured(made.drafter):
        return made
    # What is compiled into the step and not seen in its shapes.
    kinds = (jax.tree.structure(made.guides.tables), made.draws, any(r.edits for r in made.requests))
    weights = tuple((x.shape, x.dtype.name) for x in jax.tree.leaves(made.params.target))
    key = (made.decoder, rows, made.width, kinds, weights, log_probs)
    if key not in _MEASURED:
        with activity.doing("measuring what drafts cost"):
            found = _measure(made, rows, log_probs=log_probs, loop=loop)
        # Several processes decode as one, and choose as one.
        same = np.frombuffer(hosts.broadcast_bytes(np.asarray(found, np.float64).tobytes()), np.float64)
        _MEASURED[key] = tuple(same.tolist())
    return _with(made, measured(made.drafter, _MEASURED[key]))


def _with(made: Prepared, drafter: Any) -> Prepared:
    return dataclasses.replace(made, drafter=drafter, params=made.params._replace(draft=drafter.params))


def _measure(made: Prepared, batch: int, *, log_probs: bool, loop: str) -> list[float]:
    """Return the seconds of a step of each size, over short prompts."""
    few = [
        dataclasses.replace(
            request,
            prompt_tokens=request.prompt_tokens[:2],
            max_new_tokens=made.width - 2,
            stop_tokens=(NO_TOKEN,) * len(request.stop_tokens),
        )
        for request in made.requests
    ]
    stand_ins = dataclasses.replace(made, requests=few)
    entries = [i % len(few) for i in range(batch)]
    assert made.drafter.sizes is not None
    sizes = made.drafter.sizes.drafters
    best = [float("inf")] * len(sizes)
    for turn in range(ROUNDS + 1):  # the first is to compile
        for size, drafter in enumerate(sizes):
            always = _with(stand_ins, forced(made.drafter, size))
            deep = drafter.max_depth
            found = _round(always, entries, STEPS * (deep + 1), log_probs=log_probs, loop=loop)
            best[size] = min(best[size], found) if turn else best[size]
    return best


def _round(made: Prepared, entries: list[int], tokens: int, *, log_probs: bool, loop: str) -> float:
    """Return the seconds of a step, of some that give so many tokens at most."""
    state = made.start(entries)
    record = made.width if log_probs else None
    depth = made.decoder.max_depth
    if loop == "run":
        # As many steps as fit under the limit, which is a value.
        controls = dataclasses.replace(state.controls, limit=state.length + tokens)
        state = dataclasses.replace(state, controls=controls)
    stats = zero_stats(len(entries), depth, record=record)
    mesh = made.target.mesh
    if mesh is not None:
        stats = hosts.put(stats, state_shardings(stats, mesh))
    with made.target.on_mesh():
        state, stats = jax.block_until_ready((state, stats))
        began = time.perf_counter()
        # No row can end in the other loops: the width is theirs to the last token.
        if loop == "stream":
            taken = itertools.islice(decode.stream(made.decoder, made.params, state, ahead=0), STEPS)
            [(last, _)] = collections.deque(taken, maxlen=1)
            jax.block_until_ready(last)
            steps = STEPS
        elif loop == "queue":
            _, _, steps = jax.block_until_ready(
                refill.advance(made.decoder, made.params, state, stats, 1, STEPS)
            )
        else:
            _, stats = jax.block_until_ready(decode.run(made.decoder, made.params, state, record=log_probs))
            steps = stats.steps
        seconds = time.perf_counter() - began
    return seconds / max(int(np.max(hosts.fetch(steps))), 1)
