"""Rejection against a target that is bent towards the drafted token. B batch, N nodes, V vocabulary. Oracle: the law
of a step, enumerated in tests/verify/test_distributions.py."""

from __future__ import annotations

from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array

from mars_jax.core import struct
from mars_jax.core.evidence import Evidence
from mars_jax.verify.lossy import numbers
from mars_jax.verify.retargeted import Retargeted, following


@struct.dataclass(kw_only=True)
class Cactus(Retargeted):
    """Cactus (arXiv 2604.04987): a drafted token x is verified against h, the target with more of x, within bounds.

    h(x) = min(p(x) + sqrt(2 d p(x) (1 - p(x))), 1), the other tokens share the rest as they did, d is `divergence`.
    x is accepted with min(1, h(x) / q(x)), else norm((h - q)+) is drawn from. h depends on x, so the law of the text is
    the mean over drafts. Lossy; at divergence 0 it equals `rejection` bit for bit, and at temperature 0 it is exact.
    """

    divergence: Any  # f32[] or [B]; 0 is lossless
    chains_only: ClassVar[bool] = True

    def target(self, log_p: Array, log_q: Array, evidence: Evidence) -> Array:
        divergence = self.divergence[:, None, None]
        ids = jnp.arange(log_p.shape[-1], dtype=jnp.int32)[None, None]
        is_x = ids == following(evidence)[..., None]
        p_x = jnp.sum(jnp.where(is_x, jnp.exp(log_p), 0.0), axis=-1, keepdims=True)
        h_x = jnp.minimum(p_x + jnp.sqrt(2 * divergence * p_x * jnp.maximum(1 - p_x, 0.0)), 1.0)
        # Where x is certain nothing is left to share.
        rest = jnp.where(p_x < 1, (1 - h_x) / jnp.where(p_x < 1, 1 - p_x, 1.0), 0.0)
        log_h = jnp.where(is_x, jnp.log(h_x), log_p + jnp.log(rest))
        return jnp.where(divergence > 0, log_h, log_p)


def cactus(*, divergence: Any = 0.1, exact_prefix: Any = 0) -> Cactus:
    """Rejection against a bent target; see `Cactus`.

    Args:
      divergence: the paper's delta, at least 0; the default is ours.
      exact_prefix: as for `mars`. Every number is one value, or one per row.

    Raises:
      MarsError: a number out of its range.

    >>> import jax
    >>> from mars_jax import verify
    >>> from mars_jax.core.tree import chain
    >>> p, q = jnp.log(jnp.asarray([[[0.8, 0.2]] * 2] * 99)), jnp.log(jnp.asarray([[[0.2, 0.8]] * 2] * 99))
    >>> given = verify.evidence(chain(jnp.asarray([[0, 1]] * 99, jnp.int32), q), p, temperature=1.0)
    >>> accepted = jax.jit(lambda rule: verify.for_rows(rule, 99)(given)[0].num_accepted.sum())
    >>> [int(accepted(cactus(divergence=d))) for d in (0.0, 0.1, 2.0)]
    [22, 45, 99]
    """
    return Cactus(**numbers("cactus", {"divergence": divergence, "exact_prefix": exact_prefix}))
