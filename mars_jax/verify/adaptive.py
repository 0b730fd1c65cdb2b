"""Acceptance by the ratio between a token's probability and the largest probability.

Tested against transformers' min-p warper (tests/verify/test_edges.py).
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

from mars_jax.core import struct
from mars_jax.core.rule import Evidence
from mars_jax.verify import drafted
from mars_jax.verify.definition import register
from mars_jax.verify.ranges import ODDS, share
from mars_jax.verify.relaxed import Relaxed


@register("adaptive", paper="2609.02897")
@struct.dataclass(kw_only=True)
class Adaptive(Relaxed):
    """Also accept tokens whose probability is close enough to the best token's.

    AdaptiveSpec (arXiv 2609.02897): accept a drafted token x if p(x) / p(top1) > theta.

    This rule is the same as `mars(margin="gap", theta=-log(theta))`, except that it is not limited to the two best
    tokens. It is lossy. For theta >= 1, including inf, it equals `base` bit for bit.

    >>> import jax
    >>> from mars_jax import verify
    >>> from mars_jax.core.tree import chain
    >>> z = jnp.log(jnp.asarray([[[0.2, 0.5, 0.3], [0.1, 0.8, 0.1]]]))
    >>> inputs = verify.evidence(chain(jnp.asarray([[2, 0]], jnp.int32)), z)
    >>> accepted = jax.jit(lambda rule: verify.for_rows(rule, 1)(inputs)[0].num_accepted[0])
    >>> [int(accepted(adaptive(theta=t))) for t in (0.5, 0.3)]
    [0, 1]
    """

    # f32[] or [B]; a token is accepted if its probability exceeds theta times the largest probability
    theta: Any = struct.setting(
        default=0.3,
        ranges=share("a number above 0 and at most 1, or inf, which is strict", ODDS),
        help="probability / best probability above which a token is accepted; inf never relaxes",
        flag=True,
        kw_only=False,
    )

    def relaxable(self, evidence: Evidence) -> Array:
        # p(x) / p(top1) = exp(z_x - z_1), because the normaliser of the softmax cancels.
        return jnp.exp(-drafted.shortfall(evidence)) > self.theta[:, None]


adaptive = Adaptive
