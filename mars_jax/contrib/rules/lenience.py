"""Rejection sampling with lenience, which rejects fewer tokens. B batch, N nodes, V vocabulary.

Tested against the distribution of a step, enumerated in tests/verify/test_distributions.py.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

from mars_jax.core import struct
from mars_jax.verify import Evidence, Range, Retargeted, register
from mars_jax.verify.ranges import ODDS


@register("lenience", paper="2211.17192, appendix A.5")
@struct.dataclass(kw_only=True)
class Lenience(Retargeted):
    """Reject drafted tokens less often than speculative sampling does.

    Speculative sampling with lenience (Leviathan et al., arXiv 2211.17192, appendix A.5).

    A drafted token x is accepted if u <= p(x) / (l q(x)), where l is `factor` and u is uniform on [0, 1). Otherwise a
    token is drawn from norm((p - q)+), as in `rejection`. So no token gets more than 1 / l times its probability p. The
    output follows v = min(q, p / l) + (1 - sum(min(q, p / l))) norm((p - q)+). The rule is lossy. At factor 1 it equals
    `rejection` bit for bit, and at temperature 0 it is exact.

    >>> import jax
    >>> from mars_jax import verify
    >>> from mars_jax.core.tree import chain
    >>> p, q = jnp.log(jnp.asarray([[[0.8, 0.2]] * 2] * 99)), jnp.log(jnp.asarray([[[0.2, 0.8]] * 2] * 99))
    >>> evidence = verify.evidence(chain(jnp.asarray([[0, 1]] * 99, jnp.int32), q), p, temperature=1.0)
    >>> accepted = jax.jit(lambda rule: verify.for_rows(rule, 99)(evidence)[0].num_accepted.sum())
    >>> [int(accepted(Lenience(factor=l))) for l in (1.0, 0.5, 0.2)]
    [22, 47, 99]
    """

    # f32[] or [B]; 1 is lossless
    factor: Any = struct.setting(
        default=0.5,
        ranges=Range("a number above 0 and at most 1", 0, 1, above=True, grid=ODDS),
        help="factor by which the draft's probability is multiplied before comparison; 1 is lossless",
    )

    def target(self, log_p: Array, log_q: Array, evidence: Evidence) -> Array:
        p, q, factor = jnp.exp(log_p), jnp.exp(log_q), self.factor[:, None, None]
        # Each token's accepted mass is min(q, p / l). The rejected mass is redistributed in proportion to (p - q)+.
        accepted_mass, missed_mass = jnp.minimum(q, p / factor), jnp.maximum(p - q, 0.0)
        rejected_mass = jnp.maximum(1.0 - jnp.sum(accepted_mass, axis=-1, keepdims=True), 0.0)
        total_missed = jnp.sum(missed_mass, axis=-1, keepdims=True)
        # If p equals q, the missed mass and the rejected mass are both 0.
        v = accepted_mass + rejected_mass * missed_mass / jnp.where(total_missed > 0, total_missed, 1.0)
        return jnp.where(factor == 1, log_p, jnp.log(v))
