"""Rejection sampling against a mixture of the target's and the draft's distributions.

Tested against transformers' `assistant_ensemble_weight` (tests/verify/test_distributions.py).

Dimensions: B batch, N nodes, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

from mars_jax.core import struct
from mars_jax.core.rule import Evidence
from mars_jax.utils.settings import Range
from mars_jax.verify.definition import register
from mars_jax.verify.ranges import ODDS
from mars_jax.verify.retargeted import Retargeted


@register("mixture", paper="2604.07622, with a static weight")
@struct.dataclass(kw_only=True)
class Mixture(Retargeted):
    """Follow a mixture of the target's and the draft's distributions, by rejection sampling.

    DIVERSED with a static weight w (arXiv 2604.07622): the output follows v = w p + (1 - w) q.

    Accept a drafted token x with probability min(1, v(x) / q(x)). Otherwise, sample from norm((v - q)+), which equals
    norm((p - q)+). Both p and q are distributions after temperature and filters. At temperature 0, the rule is exact,
    whereas transformers' `assistant_ensemble_weight` compares drafted tokens with the top token of the mixture at
    temperature 1. The rule is lossy. At weight 1, it equals `rejection` bit for bit.

    >>> import jax
    >>> from mars_jax import verify
    >>> from mars_jax.core.tree import chain
    >>> p, q = jnp.log(jnp.asarray([[[0.8, 0.2]] * 2] * 99)), jnp.log(jnp.asarray([[[0.2, 0.8]] * 2] * 99))
    >>> inputs = verify.evidence(chain(jnp.asarray([[0, 1]] * 99, jnp.int32), q), p, temperature=1.0)
    >>> accepted = jax.jit(lambda rule: verify.for_rows(rule, 99)(inputs)[0].num_accepted.sum())
    >>> [int(accepted(mixture(weight=w))) for w in (1.0, 0.5, 0.0)]
    [22, 63, 99]
    """

    # f32[] or [B]; weight of the target; 1 is lossless
    weight: Any = struct.setting(
        default=0.5,
        ranges=Range("a number from 0 to 1", 0, 1, grid=ODDS),
        help="weight of the target in the mixture; 1 is lossless, 0 follows the draft",
    )

    def target(self, log_p: Array, log_q: Array, evidence: Evidence) -> Array:
        # Compute log(w p + (1 - w) q) in log space. For w = 1, the term for q is log(0) = -inf, so v is p bit for bit.
        weight = self.weight[:, None, None]
        return jnp.logaddexp(jnp.log(weight) + log_p, jnp.log1p(-weight) + log_q)


mixture = Mixture
