"""Acceptance from a budget of regret. B batch, N nodes.

Oracle: the same decisions node by node in Python, in tests/verify/test_edges.py.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jax import Array

from mars_jax.core import struct
from mars_jax.verify import Evidence, Range, Relaxed, drafted, register
from mars_jax.verify.ranges import NATS, WHOLE, nats


@register("budget", paper="2608.03447")
@struct.dataclass(kw_only=True)
class Budget(Relaxed):
    """Also accept tokens slightly below the target's best one, within a budget of nats.

    ASD (arXiv 2608.03447): a drafted token x is accepted if its regret z1 - z_x is within three limits.

    In a draft of K tokens the regret of token i, counted from 0, is at most gap (K - i): earlier tokens may cost more,
    because later ones depend on them. A step relaxes at most `max_relaxed` tokens. The regret of all relaxed tokens of
    a completion is at most `total` nats; the remaining budget is the rule's state. K is the depth of the drafter, even
    if a draft ends early. Lossy; at max_relaxed = 0 it equals `base` bit for bit.

    >>> import jax.numpy as jnp
    >>> from mars_jax import verify
    >>> from mars_jax.core.tree import chain
    >>> z = jnp.asarray([[[9.6, 10.0], [9.8, 10.0], [9.9, 10.0]]])
    >>> evidence = verify.evidence(chain(jnp.asarray([[0, 0, 0]], jnp.int32)), z)
    >>> verdict, left = verify.for_rows(Budget(total=1), 1)(evidence)
    >>> verdict.relaxed.tolist(), round(float(left.total[0]), 2)
    ([[True, True]], 0.4)
    """

    # f32[] or [B]; nats per token
    gap: Any = struct.setting(
        default=0.25,
        ranges=nats("a finite number of at least 0", NATS),
        help="nats that a token may cost for each drafted token that is left",
        kw_only=False,
    )
    # i32[] or [B]; relaxed tokens per step
    max_relaxed: Any = struct.setting(
        default=2,
        kind=int,
        ranges=WHOLE,
        help="relaxed tokens that are allowed in a step; 0 never relaxes",
    )
    # f32[] or [B]; nats
    total: Any = struct.setting(
        default=8.0,
        ranges=Range("a number of at least 0", 0),
        help="nats that all of them may cost, in a whole text",
    )

    def relaxable(self, evidence: Evidence) -> Array:
        # K - i for token i, which has depth i + 1.
        tokens_left = evidence.tree.max_depth + 1 - evidence.tree.depths
        return drafted.shortfall(evidence) <= self.gap[:, None] * tokens_left.astype(self.gap.dtype)

    def cost(self, evidence: Evidence) -> tuple[Array, Array]:
        return drafted.shortfall(evidence), self.total

    def spend(self, left: Array) -> Budget:
        return dataclasses.replace(self, total=left)
