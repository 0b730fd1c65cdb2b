"""Costs of a step with each draft length, measured on the device before the first batch of a shape and saved on disk.

Tested against the wall time of steps with fixed sizes (scripts/results/bench_sizes.json at commit 5336526).
"""

from __future__ import annotations

import contextlib
import json
import os
import time

import jax
import numpy as np

from mars_jax.core.decoder import Decoder
from mars_jax.drafters.sized import with_size, with_step_costs
from mars_jax.hub.pretrained import OwnConfig
from mars_jax.serve.prepare import STEPS, Prepared
from mars_jax.utils import activity, hosts
from mars_jax.utils.compilations import keep_bytes, kept_bytes
from mars_jax.utils.version import __version__

ROUNDS, SECONDS = 4, 1.0
"""Minimum number of rounds, and minimum seconds of the rounds after the first, which compiles. Each round times every
size. The fastest time counts, because other load on the machine only adds time."""
STEADY = 1.5
"""Costs are saved on disk only if the median time of each size is less than this many times the fastest one. Otherwise
other load may have slowed down all rounds, and the next process measures again."""

_MEASURED: dict[tuple[Decoder, str], list[float]] = {}
"""Costs that this process measured or read, keyed by the decoder and a string with everything else they depend on."""


def with_costs(prepared: Prepared, rows: int, *, log_probs: bool = False) -> Prepared:
    """Add measured costs of the draft's sizes to prepared requests; return them unchanged if no costs are needed.

    Args:
      prepared: the requests and their decoder.
      rows: B, a multiple of the mesh's `data`.
      log_probs: whether the loop that will decode them records log-probabilities.
    """
    drafter, mesh = prepared.drafter, prepared.target.mesh
    if drafter.sizes is None or np.all(np.asarray(drafter.params.costs) > 0):
        return prepared
    machine = (jax.devices()[0].device_kind, os.cpu_count(), jax.process_count(), mesh and dict(mesh.shape))
    # A decoder's functions differ between processes, so the key on disk has configs and names instead.
    names = (prepared.loaded_rule.rule.name, drafter.drafter.name, drafter.sizes.lengths)
    batch = (rows, prepared.width, prepared.draws, any(r.edits for r in prepared.requests), log_probs)
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype.name), prepared.params)
    cost_key = repr((__version__, STEPS, machine, prepared.target.config, names, batch, shapes))
    key = (prepared.decoder, cost_key)
    if key not in _MEASURED:
        _MEASURED[key] = _costs(prepared, rows, cost_key, log_probs=log_probs)
    return prepared.drafting(with_step_costs(drafter, _MEASURED[key]))


def _costs(prepared: Prepared, rows: int, cost_key: str, *, log_probs: bool) -> list[float]:
    """Return the costs that an earlier process saved; if there are none, measure them and save them."""
    # Save costs only in single-process runs, and only for a model that its config describes.
    is_kept = jax.process_count() == 1 and not isinstance(prepared.target.config, OwnConfig)
    with contextlib.suppress(ValueError):  # the stored text is damaged
        costs = json.loads((is_kept and kept_bytes("draft_costs", cost_key)) or "[]")
        if len(costs) == len(prepared.drafter.params.costs):
            return costs
    with activity.doing("measuring the cost of drafts"):
        times = np.asarray(_measure(prepared, rows, log_probs=log_probs))
    # All processes of a mesh must choose the same sizes, so they share the costs of the first.
    costs = np.frombuffer(hosts.broadcast_bytes(np.min(times, axis=0).tobytes())).tolist()
    if is_kept and np.all(np.median(times, axis=0) < STEADY * np.min(times, axis=0)):
        keep_bytes(lambda: json.dumps(costs).encode(), "draft_costs", cost_key)
    return costs


def _measure(prepared: Prepared, rows: int, *, log_probs: bool) -> list[list[float]]:
    """Return the seconds per step of each round, for each size."""
    # All sizes run the same compiled program, which reads the size from the costs.
    num_sizes = len(prepared.drafter.params.costs)
    by_size = [prepared.drafting(with_size(prepared.drafter, size)) for size in range(num_sizes)]

    def seconds() -> list[float]:
        return [arm.step_seconds(rows, log_probs=log_probs) for arm in by_size]

    # The first round compiles, so it does not count towards `SECONDS`.
    rounds, end_time = [seconds()], time.perf_counter() + SECONDS
    # The processes of a mesh must all run the same number of rounds, so they ignore the time.
    while len(rounds) < ROUNDS or (jax.process_count() == 1 and time.perf_counter() < end_time):
        rounds.append(seconds())
    return rounds
