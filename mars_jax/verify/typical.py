"""Typical acceptance. Tested against transformers' eta warper (tests/verify/test_edges.py).

Dimensions: B batch, N nodes.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

from mars_jax.core import struct
from mars_jax.core.rule import Evidence
from mars_jax.core.sampling import entropy
from mars_jax.core.tree import at_parent
from mars_jax.utils.settings import Range
from mars_jax.verify import drafted
from mars_jax.verify.definition import register
from mars_jax.verify.ranges import ODDS, share
from mars_jax.verify.relaxed import Relaxed


@register("typical", paper="2401.10774, section 2.3.1")
@struct.dataclass(kw_only=True)
class Typical(Relaxed):
    """Also accept likely tokens, with a lower threshold if the target is uncertain.

    Typical acceptance (Medusa, arXiv 2401.10774, section 2.3.1): accept a drafted token x if
    p(x) > min(epsilon, delta exp(-H(p))), where H is the entropy in nats.

    The threshold is lower if the target is uncertain. Here p is the target's distribution at temperature 1, regardless
    of the row's temperature. The rule is lossy. With epsilon 1 and delta inf, it equals `base` bit for bit.

    >>> import jax
    >>> from mars_jax import verify
    >>> from mars_jax.core.tree import chain
    >>> z = jnp.log(jnp.asarray([[[0.08, 0.8, 0.12], [0.1, 0.8, 0.1]]]))
    >>> inputs = [verify.evidence(chain(jnp.asarray([[2, x]], jnp.int32)), z) for x in (0, 2)]
    >>> accepted = jax.jit(lambda inputs: verify.for_rows(typical(), 1)(inputs)[0].num_accepted[0])
    >>> [int(accepted(x)) for x in inputs]
    [0, 1]
    """

    # f32[] or [B]; upper bound on the threshold
    epsilon: Any = struct.setting(
        default=0.09,
        ranges=share("a probability, a number above 0 and at most 1, or inf, which is strict", ODDS),
        help="probability above which a token is always accepted",
        kw_only=False,
    )
    # f32[] or [B]; coefficient of exp(-entropy)
    delta: Any = struct.setting(
        default=0.3,
        ranges=Range("a number above 0; inf leaves it to epsilon", 0, above=True, grid=ODDS),
        help="factor of exp(-entropy): a token is also accepted if its probability is above this product",
    )

    def relaxable(self, evidence: Evidence) -> Array:
        # log(delta exp(-H)) = log(delta) - H, f32[B, N]. A drafted token is compared with the threshold at its parent.
        by_entropy = jnp.log(self.delta)[:, None] - entropy(evidence.logits)
        threshold = jnp.minimum(jnp.log(self.epsilon)[:, None], by_entropy)
        return drafted.log_prob(evidence) > at_parent(evidence.tree, threshold)


typical = Typical
