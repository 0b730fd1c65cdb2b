"""Nucleus acceptance.

Tested against transformers' top-p warper (tests/verify/test_edges.py), and the exact distribution of one step
(tests/verify/test_distributions.py).

Dimensions: B batch, N nodes.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from mars_jax.core import struct
from mars_jax.core.rule import Evidence
from mars_jax.core.sampling import at_drafted, process
from mars_jax.utils.settings import Range
from mars_jax.verify import drafted
from mars_jax.verify.definition import register
from mars_jax.verify.ranges import HARMS
from mars_jax.verify.relaxed import Relaxed, base_setting


@register("nucleus", paper="2610.07822")
@struct.dataclass(kw_only=True)
class Nucleus(Relaxed):
    """Also accept tokens in the nucleus of the target's distribution.

    Nucleus acceptance (arXiv 2610.07822): accept a drafted token x if `rejection` accepts it (u < p(x) / q(x)), or if x
    is in the nucleus of p. A token is in the nucleus if the tokens that are more likely than it have a total
    probability below `mass`.

    After a rejection, the next token is drawn from norm((p - q)+) as usual. In one step, the total variation distance
    from the target's distribution is therefore the sum of (q - p)+ over the nucleus. Here p is the target's
    distribution after temperature and filters. At temperature 0, the nucleus contains only the top token, and the rule
    is exact. The rule is lossy. At `mass` = 0, it equals `base` bit for bit.

    >>> from mars_jax import verify
    >>> from mars_jax.core.tree import chain
    >>> z = jnp.log(jnp.asarray([[[0.2, 0.5, 0.3], [0.1, 0.8, 0.1]]] * 50))
    >>> inputs = verify.evidence(chain(jnp.asarray([[2, 2]] * 50, jnp.int32)), z, temperature=1.0)
    >>> accepted = jax.jit(lambda rule: verify.for_rows(rule, 50)(inputs)[0].num_accepted.sum())
    >>> [int(accepted(nucleus(mass=m))) for m in (0.5, 0.6)]
    [15, 50]
    """

    # f32[] or [B]; probability mass of the nucleus, from 0 to 1
    mass: Any = struct.setting(
        default=0.9,
        ranges=Range("a probability, a number from 0 to 1", 0, 1, grid=HARMS),
        help="probability of the nucleus, after temperature and filters; 0 never relaxes",
        kw_only=False,
    )
    base: Any = base_setting(default="rejection")

    def relaxable(self, evidence: Evidence) -> Array:
        log_p = jax.nn.log_softmax(process(evidence.logits, evidence.controls), axis=-1)
        parent_log_p, is_likelier = drafted.preferred(evidence, log_p)
        # f32[B, N]; total probability of the tokens that are more likely than x.
        likelier_mass = jnp.sum(jnp.where(is_likelier, jnp.exp(parent_log_p), 0.0), axis=-1)
        # Tokens that the filters exclude must not be accepted. If `mass` is 1, the sum alone does not exclude them,
        # because rounding can make it smaller than 1.
        return (likelier_mass < self.mass[:, None]) & (at_drafted(evidence.tree, log_p) > -jnp.inf)


nucleus = Nucleus
