"""Rejection sampling against a target whose probability of the drafted token is raised. B batch, N nodes, V vocabulary.

Tested against an exact enumeration of the distribution of one step (tests/verify/test_distributions.py).
"""

from __future__ import annotations

from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array

from mars_jax.core import struct
from mars_jax.core.tree import following
from mars_jax.verify import Evidence, Retargeted, register
from mars_jax.verify.ranges import HARMS, nats


@register("cactus", paper="2604.04987")
@struct.dataclass(kw_only=True)
class Cactus(Retargeted):
    """Raise the target's probability of the drafted token, up to a divergence limit, then verify by rejection.

    Cactus (arXiv 2604.04987): a drafted token x is verified against h, the target with a raised probability of x.

    h(x) = min(p(x) + sqrt(2 d p(x) (1 - p(x))), 1), where d is `divergence`. The probabilities of the other tokens are
    scaled so that they sum to 1 - h(x). The token x is accepted with probability min(1, h(x) / q(x)); otherwise a token
    is drawn from norm((h - q)+). Because h depends on x, the output distribution is an average over drafted tokens. The
    rule is lossy. At divergence 0 it equals `rejection` bit for bit, and at temperature 0 it is exact.

    >>> import jax
    >>> from mars_jax import verify
    >>> from mars_jax.core.tree import chain
    >>> p, q = jnp.log(jnp.asarray([[[0.8, 0.2]] * 2] * 99)), jnp.log(jnp.asarray([[[0.2, 0.8]] * 2] * 99))
    >>> evidence = verify.evidence(chain(jnp.asarray([[0, 1]] * 99, jnp.int32), q), p, temperature=1.0)
    >>> accepted = jax.jit(lambda rule: verify.for_rows(rule, 99)(evidence)[0].num_accepted.sum())
    >>> [int(accepted(Cactus(divergence=d))) for d in (0.0, 0.1, 2.0)]
    [22, 45, 99]
    """

    # f32[] or [B]; 0 is lossless
    divergence: Any = struct.setting(
        default=0.1,
        ranges=nats("a finite number of at least 0", HARMS),
        help="divergence d within which the probability of the drafted token is raised; 0 is lossless",
    )
    block: ClassVar[bool] = False
    needs: ClassVar[tuple[str, ...]] = ("draft", "q", "chain")

    def target(self, log_p: Array, log_q: Array, evidence: Evidence) -> Array:
        divergence = self.divergence[:, None, None]
        ids = jnp.arange(log_p.shape[-1], dtype=jnp.int32)[None, None]
        is_x = ids == following(evidence.tree)[..., None]
        p_x = jnp.sum(jnp.where(is_x, jnp.exp(log_p), 0.0), axis=-1, keepdims=True)
        h_x = jnp.minimum(p_x + jnp.sqrt(2 * divergence * p_x * jnp.maximum(1 - p_x, 0.0)), 1.0)
        # Scale of the other tokens' probabilities. If p(x) = 1, the other tokens have no mass, and the scale is 0.
        other_scale = jnp.where(p_x < 1, (1 - h_x) / jnp.where(p_x < 1, 1 - p_x, 1.0), 0.0)
        log_h = jnp.where(is_x, jnp.log(h_x), log_p + jnp.log(other_scale))
        return jnp.where(divergence > 0, log_h, log_p)
