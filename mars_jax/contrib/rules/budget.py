"""Acceptance from a budget of regret. B batch, N nodes.

Oracle: the same decisions node by node in Python, in tests/verify/test_edges.py.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from jax import Array

from mars_jax.core import struct
from mars_jax.core.evidence import Evidence
from mars_jax.specs import UNLIMITED_RUN
from mars_jax.verify import drafted
from mars_jax.verify.lossy import numbers
from mars_jax.verify.relaxed import Relaxed, base_of


@struct.dataclass(kw_only=True)
class Budget(Relaxed):
    """ASD (arXiv 2608.03447): a drafted token x is accepted if its regret z1 - z_x is within three limits.

    In a draft of K tokens the regret of token i, counted from 0, is at most gap (K - i): earlier tokens may cost more,
    because later ones depend on them. A step relaxes at most `max_relaxed` tokens. The regret of all relaxed tokens of
    a completion is at most `total` nats; the remaining budget is the rule's state. K is the depth of the drafter, even
    if a draft ends early. Lossy; at max_relaxed = 0 it equals `base` bit for bit.
    """

    gap: Any  # f32[] or [B]; nats per token
    max_relaxed: Any = np.int32(2)  # i32[] or [B]
    total: Any  # f32[] or [B]; nats

    def relaxable(self, evidence: Evidence) -> Array:
        at_stake = evidence.tree.max_depth + 1 - evidence.tree.depths
        return drafted.shortfall(evidence) <= self.gap[:, None] * at_stake.astype(self.gap.dtype)

    def cost(self, evidence: Evidence) -> tuple[Array, Array]:
        return drafted.shortfall(evidence), self.total

    def spend(self, left: Array) -> Budget:
        return dataclasses.replace(self, total=left)


def budget(
    gap: Any = 0.25,
    *,
    base: Any = None,
    max_relaxed: Any = 2,
    total: Any = 8.0,
    max_relaxed_run: Any = UNLIMITED_RUN,
    exact_prefix: Any = 0,
) -> Budget:
    """Make the rule `Budget`: acceptance from a budget of regret.

    Args:
      base: the strict rule, `exact()` by default, or `rejection(...)`.
      gap: nats per remaining drafted token, including the current one.
      max_relaxed: maximum number of relaxed tokens per step; 0 is strict.
      total: nats for the whole completion.
      max_relaxed_run, exact_prefix: as for `mars`. Every number is a scalar or has one value per row.

    Raises:
      MarsError: a number is out of range, or a base that cannot be relaxed.

    >>> import jax.numpy as jnp
    >>> from mars_jax import verify
    >>> from mars_jax.core.tree import chain
    >>> z = jnp.asarray([[[9.6, 10.0], [9.8, 10.0], [9.9, 10.0]]])
    >>> evidence = verify.evidence(chain(jnp.asarray([[0, 0, 0]], jnp.int32)), z)
    >>> verdict, left = verify.for_rows(budget(total=1), 1)(evidence)
    >>> verdict.relaxed.tolist(), round(float(left.total[0]), 2)
    ([[True, True]], 0.4)
    """
    settings = {
        "gap": gap,
        "max_relaxed": max_relaxed,
        "total": total,
        "max_relaxed_run": max_relaxed_run,
        "exact_prefix": exact_prefix,
    }
    return Budget(base=base_of(base, "budget"), **numbers("budget", settings))
