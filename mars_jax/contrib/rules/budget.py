"""A relaxed rule that spends a budget of regret on tokens other than the target's best. B batch, N nodes.

Tested against a Python loop that makes the same decisions node by node (tests/verify/test_edges.py).
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
    """Also accept tokens that score slightly below the target's best token, within a budget of nats.

    ASD (arXiv 2608.03447): a drafted token x is accepted if its regret z1 - z_x is within three limits.

    First, in a draft of K tokens the regret of token i, counted from 0, is at most gap * (K - i). Earlier tokens may
    cost more, because later ones depend on them. Second, a step relaxes at most `max_relaxed` tokens. Third, the
    relaxed tokens of a completion have a total regret of at most `total` nats; the remaining budget is the rule's
    state. K is the drafter's maximum depth, even if a draft ends early. The rule is lossy. With max_relaxed = 0, it
    equals `base` bit for bit.

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
        help="maximum regret of a token, in nats, per token that remains in the draft",
        kw_only=False,
    )
    # i32[] or [B]; maximum number of relaxed tokens per step
    max_relaxed: Any = struct.setting(
        default=2,
        kind=int,
        ranges=WHOLE,
        help="maximum number of relaxed tokens per step; 0 never relaxes",
    )
    # f32[] or [B]; nats
    total: Any = struct.setting(
        default=8.0,
        ranges=Range("a number of at least 0", 0),
        help="maximum total regret of all relaxed tokens in a completion, in nats",
    )

    def relaxable(self, evidence: Evidence) -> Array:
        # K - i for token i, whose depth is i + 1.
        tokens_left = evidence.tree.max_depth + 1 - evidence.tree.depths
        return drafted.shortfall(evidence) <= self.gap[:, None] * tokens_left.astype(self.gap.dtype)

    def cost(self, evidence: Evidence) -> tuple[Array, Array]:
        return drafted.shortfall(evidence), self.total

    def spend(self, left: Array) -> Budget:
        return dataclasses.replace(self, total=left)
