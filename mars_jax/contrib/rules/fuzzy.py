"""Acceptance at positions where target and draft are close. B batch, N nodes, V vocabulary.

Oracle: the distribution of a step, enumerated in tests/verify/test_distributions.py.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax import Array

from mars_jax import specs
from mars_jax.core import struct
from mars_jax.core.evidence import Evidence
from mars_jax.verify.lossy import numbers
from mars_jax.verify.retargeted import Retargeted


@struct.dataclass(kw_only=True)
class Fuzzy(Retargeted):
    """Fuzzy speculative decoding (arXiv 2502.20704): accept drafted tokens where target and draft differ little.

    If the distance of p and q is below `bound`, the drafted token is accepted; otherwise it is verified by rejection,
    as in the comparison of arXiv 2607.08690. So the output follows q at the former positions and p at the latter. The
    distance is taken after temperature and filters: "js" is the Jensen-Shannon divergence in nats, at most ln 2, and
    "tv" the total variation distance, at most 1. Lossy; at bound 0 it equals `rejection` bit for bit, and at
    temperature 0 it is exact.
    """

    bound: Any  # f32[] or [B]; 0 is lossless
    distance: str = struct.field(pytree_node=False, default="js")

    @property
    def name(self) -> str:
        return "fuzzy" if self.distance == "js" else f"fuzzy({self.distance})"

    def target(self, log_p: Array, log_q: Array, evidence: Evidence) -> Array:
        p, q = jnp.exp(log_p), jnp.exp(log_q)
        if self.distance == "tv":
            terms = jnp.abs(p - q)
        else:
            log_mean = jnp.logaddexp(log_p, log_q) - math.log(2)
            terms = jnp.where(p > 0, p * (log_p - log_mean), 0.0) + jnp.where(
                q > 0, q * (log_q - log_mean), 0.0
            )
        # Clip a sum that rounds below 0, which would pass a bound of 0.
        distance = jnp.maximum(jnp.sum(terms, axis=-1) / 2, 0.0)
        return jnp.where((distance < self.bound[:, None])[..., None], log_q, log_p)


def fuzzy(*, distance: str = "js", bound: Any = 0.1, block: bool = False, exact_prefix: Any = 0) -> Fuzzy:
    """Make the rule `Fuzzy`: accept drafted tokens where target and draft differ little.

    Args:
      distance: "js" or "tv".
      bound: the paper's threshold T, from 0 to 1; the default is not from the paper.
      block: verify the block jointly, as in `rejection`.
      exact_prefix: as for `mars`. Every number is a scalar or has one value per row.

    Raises:
      MarsError: an unknown distance, or a number out of its range.

    >>> import jax
    >>> from mars_jax import verify
    >>> from mars_jax.core.tree import chain
    >>> p, q = jnp.log(jnp.asarray([[[0.8, 0.2]] * 2] * 99)), jnp.log(jnp.asarray([[[0.2, 0.8]] * 2] * 99))
    >>> evidence = verify.evidence(chain(jnp.asarray([[0, 1]] * 99, jnp.int32), q), p, temperature=1.0)
    >>> accepted = jax.jit(lambda rule: verify.for_rows(rule, 99)(evidence)[0].num_accepted.sum())
    >>> [int(accepted(fuzzy(distance="tv", bound=b))) for b in (0.0, 0.5, 0.7)]
    [22, 22, 99]
    """
    specs.check_setting("fuzzy", "distance", distance)
    settings = {"bound": bound, "exact_prefix": exact_prefix}
    return Fuzzy(distance=distance, block=block, **numbers("fuzzy", settings, distance=distance))
