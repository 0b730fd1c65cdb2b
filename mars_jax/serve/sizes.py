"""Costs of a step at each draft length. They are measured before the first batch of each shape and stored on disk.

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
"""Minimum number of rounds, and minimum total seconds of the rounds after the first, which includes compilation. Each
round measures every size once. The fastest time is used, because other load on the machine only adds time."""
STEADY = 1.5
"""Costs are stored on disk only if the median time of each size is less than this many times its fastest time.
Otherwise, other load may have slowed down all rounds, so the next process measures again."""

_MEASURED: dict[tuple[Decoder, str], list[float]] = {}
"""Costs that this process has measured or loaded, keyed by the decoder and a string of everything else they depend
on."""


def with_costs(prepared: Prepared, rows: int, *, log_probs: bool = False) -> Prepared:
    """Add the measured costs of the draft lengths to prepared requests, if their drafter needs them.

    Args:
      prepared: the requests and their decoder.
      rows: B, the number of rows; a multiple of the size of the mesh axis `data`.
      log_probs: whether decoding will record log-probabilities.
    """
    drafter, mesh = prepared.drafter, prepared.target.mesh
    if drafter.sizes is None or np.all(np.asarray(drafter.params.costs) > 0):
        return prepared
    machine = (jax.devices()[0].device_kind, os.cpu_count(), jax.process_count(), mesh and dict(mesh.shape))
    # A decoder's functions differ between processes, so the key on disk consists of configs and names instead.
    names = (prepared.loaded_rule.rule.name, drafter.drafter.name, drafter.sizes.lengths)
    batch = (rows, prepared.width, prepared.draws, any(r.edits for r in prepared.requests), log_probs)
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype.name), prepared.params)
    cost_key = repr((__version__, STEPS, machine, prepared.target.config, names, batch, shapes))
    key = (prepared.decoder, cost_key)
    if key not in _MEASURED:
        _MEASURED[key] = _costs(prepared, rows, cost_key, log_probs=log_probs)
    return prepared.drafting(with_step_costs(drafter, _MEASURED[key]))


def _costs(prepared: Prepared, rows: int, cost_key: str, *, log_probs: bool) -> list[float]:
    """Return the costs that an earlier process stored. If there are none, measure and store them."""
    # Store costs only in single-process runs, and only for models that are fully described by their config.
    is_kept = jax.process_count() == 1 and not isinstance(prepared.target.config, OwnConfig)
    with contextlib.suppress(ValueError):  # the stored text is damaged
        costs = json.loads((is_kept and kept_bytes("draft_costs", cost_key)) or "[]")
        if len(costs) == len(prepared.drafter.params.costs):
            return costs
    with activity.doing("measuring the cost of drafts"):
        times = np.asarray(_measure(prepared, rows, log_probs=log_probs))
    # All processes of a mesh must choose the same sizes, so they use the costs that the first process measured.
    costs = np.frombuffer(hosts.broadcast_bytes(np.min(times, axis=0).tobytes())).tolist()
    if is_kept and np.all(np.median(times, axis=0) < STEADY * np.min(times, axis=0)):
        keep_bytes(lambda: json.dumps(costs).encode(), "draft_costs", cost_key)
    return costs


def _measure(prepared: Prepared, rows: int, *, log_probs: bool) -> list[list[float]]:
    """Measure the seconds per step for each size, in several rounds. Return one list for each round."""
    # All sizes share one compiled program, which chooses the size from the costs.
    num_sizes = len(prepared.drafter.params.costs)
    by_size = [prepared.drafting(with_size(prepared.drafter, size)) for size in range(num_sizes)]

    def seconds() -> list[float]:
        return [arm.step_seconds(rows, log_probs=log_probs) for arm in by_size]

    # The first round includes compilation, so it does not count towards `SECONDS`.
    rounds, end_time = [seconds()], time.perf_counter() + SECONDS
    # All processes of a mesh must run the same number of rounds, so the number is fixed if there are several processes.
    while len(rounds) < ROUNDS or (jax.process_count() == 1 and time.perf_counter() < end_time):
        rounds.append(seconds())
    return rounds
