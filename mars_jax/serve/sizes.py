"""Costs of a step with each draft length, measured on the device before the first batch of a shape and kept on disk.

Oracle: the wall time of steps with fixed sizes (scripts/results/bench_sizes.json at commit 5336526).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time

import jax
import numpy as np

from mars_jax import __version__
from mars_jax.core import refill
from mars_jax.core.decoder import Decoder
from mars_jax.core.types import NO_TOKEN
from mars_jax.drafters import LoadedDrafter
from mars_jax.drafters.sized import with_size, with_step_costs
from mars_jax.mesh import hosts
from mars_jax.models.config import ModelConfig
from mars_jax.serve.prepare import Prepared
from mars_jax.utils import activity
from mars_jax.utils.compilations import keep_text, kept_text

STEPS, ROUNDS = 4, 4
"""Number of steps of each size in a round, and number of rounds. The first round compiles. The fastest round
counts, because other load on the machine only adds time."""

_MEASURED: dict[tuple[Decoder, str], list[float]] = {}
"""Costs that this process measured or read, keyed by a text that contains everything they depend on."""


def with_costs(prepared: Prepared, rows: int, *, log_probs: bool = False) -> Prepared:
    """Add measured costs of the draft's sizes to prepared requests; return them unchanged if no costs are needed.

    Args:
      prepared: the requests and their decoder.
      rows: B, a multiple of the mesh's `data`.
      log_probs: whether the loop that will decode them records log-probabilities.
    """
    if prepared.drafter.sizes is None or np.all(np.asarray(prepared.drafter.params.costs) > 0):
        return prepared
    mesh, rule = prepared.target.mesh, prepared.loaded_rule.rule
    has_edits = any(request.edits for request in prepared.requests)
    machine = (jax.devices()[0].device_kind, os.cpu_count(), jax.process_count(), mesh and dict(mesh.shape))
    # A decoder's functions differ between processes, so on disk, configs and names stand for it.
    cost_key = repr(
        (
            (__version__, machine, prepared.target.config, rule.name, log_probs, rows, prepared.width),
            (prepared.drafter.drafter.name, [size.max_depth for size in prepared.drafter.sizes.drafters]),
            (jax.tree.structure(prepared.guides.tables), prepared.draws, has_edits),
            [(x.shape, x.dtype.name) for x in jax.tree.leaves(prepared.params)],
        )
    )
    key = (prepared.decoder, cost_key)
    if key not in _MEASURED:
        _MEASURED[key] = _kept_costs(prepared, cost_key) or _new_costs(
            prepared, rows, cost_key, log_probs=log_probs
        )
    return _with_drafter(prepared, with_step_costs(prepared.drafter, _MEASURED[key]))


def _is_kept(prepared: Prepared) -> bool:
    """Return whether costs are kept on disk: in a single process, for a model that its config describes."""
    return jax.process_count() == 1 and isinstance(prepared.target.config, ModelConfig)


def _kept_costs(prepared: Prepared, cost_key: str) -> list[float]:
    """Return the costs that an earlier process measured; empty if there are none."""
    costs_text = None
    if _is_kept(prepared):
        costs_text = kept_text("draft_costs", cost_key)
    with contextlib.suppress(ValueError):  # a damaged text
        costs = [float(cost) for cost in json.loads(costs_text or "[]")]
        if len(costs) == len(prepared.drafter.params.costs):
            return costs
    return []


def _new_costs(prepared: Prepared, rows: int, cost_key: str, *, log_probs: bool) -> list[float]:
    """Measure the costs, and keep them for later processes."""
    with activity.doing("measuring what drafts cost"):
        costs = np.asarray(_measure(prepared, rows, log_probs=log_probs))
    # All processes of a mesh must choose the same sizes, so they share the costs of the first.
    costs = np.frombuffer(hosts.broadcast_bytes(costs.tobytes())).tolist()
    if _is_kept(prepared):
        keep_text(lambda: json.dumps(costs), "draft_costs", cost_key)
    return costs


def _with_drafter(prepared: Prepared, drafter: LoadedDrafter) -> Prepared:
    params = prepared.params._replace(draft=drafter.params)
    return dataclasses.replace(prepared, drafter=drafter, params=params)


def _measure(prepared: Prepared, batch: int, *, log_probs: bool) -> list[float]:
    """Return the seconds per step for each size, over short prompts."""
    # No row may end during the measurement, so replace the stop tokens by one that never occurs. Their number is part
    # of a shape and stays the same.
    requests = [
        dataclasses.replace(
            request,
            prompt_tokens=request.prompt_tokens[:2],
            max_new_tokens=prepared.width - 2,
            stop_tokens=(NO_TOKEN,) * len(request.stop_tokens),
        )
        for request in prepared.requests
    ]
    prepared = dataclasses.replace(prepared, requests=requests)
    entries = [i % len(requests) for i in range(batch)]
    # All sizes run the same compiled program, which reads the size from the costs.
    num_sizes = len(prepared.drafter.params.costs)
    by_size = [_with_drafter(prepared, with_size(prepared.drafter, index)) for index in range(num_sizes)]
    times = [[_step_seconds(size, entries, log_probs=log_probs) for size in by_size] for _ in range(ROUNDS)]
    return np.min(times, axis=0).tolist()


def _step_seconds(prepared: Prepared, entries: list[int], *, log_probs: bool) -> float:
    """Return the mean seconds per step over a few steps."""
    decoder, params = prepared.decoder, prepared.params
    state = prepared.start(entries)
    stats = prepared.zero_stats(len(entries), log_probs=log_probs)
    with prepared.target.on_mesh():
        state, stats = jax.block_until_ready((state, stats))
        start_time = time.perf_counter()
        # No row ends, since the limit is the width of the buffer.
        num_steps = jax.block_until_ready(refill.advance(decoder, params, state, stats, 1, STEPS))[2]
        seconds = time.perf_counter() - start_time
    return seconds / max(int(np.max(hosts.fetch(num_steps))), 1)
