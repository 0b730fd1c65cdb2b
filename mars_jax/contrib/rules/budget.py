"""Acceptance from a budget of regret. B batch, N nodes. Oracle: the same decisions node by node in Python, in
tests/verify/test_edges.py."""

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
    """ASD (arXiv 2608.03447): a drafted token x is accepted for its regret z1 - z_x, which a row can pay three times.

    For token i = 0, 1, ... of a draft of K the regret is at most gap (K - i), more where more of the draft is at stake;
    a step relaxes at most `max_relaxed` tokens; and the regret of all relaxed tokens of the text is at most `total`
    nats. What is left of `total` is the rule's state. K is the depth of the drafter, also where a draft is cut short.
    Lossy; at max_relaxed = 0 it equals `base` bit for bit.
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
    """Acceptance from a budget of regret; see `Budget`.

    Args:
      base: the strict rule, `exact()` by default, or `rejection(...)`.
      gap: nats for each drafted token that is left, the one in question included.
      max_relaxed: relaxed tokens allowed in a step; 0 is strict.
      total: nats for the whole text.
      max_relaxed_run, exact_prefix: as for `mars`. Every number is one value, or one per row.

    Raises:
      MarsError: a number out of its range, or a base that cannot be relaxed.

    >>> import jax.numpy as jnp
    >>> from mars_jax import verify
    >>> from mars_jax.core.tree import chain
    >>> z = jnp.asarray([[[9.6, 10.0], [9.8, 10.0], [9.9, 10.0]]])
    >>> given = verify.evidence(chain(jnp.asarray([[0, 0, 0]], jnp.int32)), z)
    >>> verdict, left = verify.for_rows(budget(total=1), 1)(given)
    >>> verdict.relaxed.tolist(), round(float(left.total[0]), 2)
    ([[True, True]], 0.4)
    """
    given = {
        "gap": gap,
        "max_relaxed": max_relaxed,
        "total": total,
        "max_relaxed_run": max_relaxed_run,
        "exact_prefix": exact_prefix,
    }
    return Budget(base=base_of(base, "budget"), **numbers("budget", given))
