"""A rule that accepts drafted tokens if the target's and the draft's distributions are similar.

B batch, N nodes, V vocabulary. Tested against the distribution of a step, enumerated in
tests/verify/test_distributions.py.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax import Array

from mars_jax.core import struct
from mars_jax.verify import Evidence, Range, Retargeted, register
from mars_jax.verify.ranges import HARMS


@register("fuzzy", paper="2502.20704")
@struct.dataclass(kw_only=True)
class Fuzzy(Retargeted):
    """Accept drafted tokens if the distributions of target and draft are similar; otherwise verify by rejection.

    Fuzzy speculative decoding (arXiv 2502.20704): if the distance between p and q is below `bound`, the drafted token
    is accepted. Otherwise it is verified by rejection, as in the comparison of arXiv 2607.08690. So the output follows
    q at positions where the distance is small, and p at all others. The distance is computed after temperature and
    filters. "js" is the Jensen-Shannon divergence in nats, which is at most ln 2. "tv" is the total variation distance,
    which is at most 1. The rule is lossy. At bound 0 it equals `rejection` bit for bit, and at temperature 0 it is
    exact.

    >>> import jax
    >>> from mars_jax import verify
    >>> from mars_jax.core.tree import chain
    >>> p, q = jnp.log(jnp.asarray([[[0.8, 0.2]] * 2] * 99)), jnp.log(jnp.asarray([[[0.2, 0.8]] * 2] * 99))
    >>> evidence = verify.evidence(chain(jnp.asarray([[0, 1]] * 99, jnp.int32), q), p, temperature=1.0)
    >>> accepted = jax.jit(lambda rule: verify.for_rows(rule, 99)(evidence)[0].num_accepted.sum())
    >>> [int(accepted(Fuzzy(distance="tv", bound=b))) for b in (0.0, 0.5, 0.7)]
    [22, 22, 99]
    """

    # f32[] or [B]; 0 is lossless
    bound: Any = struct.setting(
        default=0.1,
        ranges=Range("a number from 0 to 1", 0, 1, grid=HARMS),
        help="distance between target and draft below which tokens are accepted; 0 is lossless",
    )
    # Distance between p and q
    distance: str = struct.setting(
        default="js",
        choices={"js": "Jensen-Shannon divergence, nats", "tv": "total variation"},
        help="distance between the distributions of target and draft",
    )

    @property
    def name(self) -> str:
        return "fuzzy" if self.distance == "js" else f"fuzzy({self.distance})"

    def target(self, log_p: Array, log_q: Array, evidence: Evidence) -> Array:
        p, q = jnp.exp(log_p), jnp.exp(log_q)
        if self.distance == "tv":
            terms = jnp.abs(p - q)
        else:
            # JS = (KL(p || m) + KL(q || m)) / 2 for the mean m of p and q.
            log_mean = jnp.logaddexp(log_p, log_q) - math.log(2)
            terms_p = jnp.where(p > 0, p * (log_p - log_mean), 0.0)
            terms = terms_p + jnp.where(q > 0, q * (log_q - log_mean), 0.0)
        # Both distances are half the sum of the terms. Clip them at 0: rounding can make a sum negative, and a negative
        # distance would be below even a bound of 0, which must be lossless.
        distance = jnp.maximum(jnp.sum(terms, axis=-1) / 2, 0.0)
        return jnp.where((distance < self.bound[:, None])[..., None], log_q, log_p)
