"""Lenient rejection. B batch, N nodes, V vocabulary. Oracle: the law of a step, enumerated in
tests/verify/test_distributions.py."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

from mars_jax.core import struct
from mars_jax.core.evidence import Evidence
from mars_jax.verify.lossy import numbers
from mars_jax.verify.retargeted import Retargeted


@struct.dataclass(kw_only=True)
class Lenience(Retargeted):
    """Speculative sampling with lenience (Leviathan et al., arXiv 2211.17192, appendix A.5): a drafted token x is
    accepted where u <= p(x) / (l q(x)), l the `factor`, and else norm((p - q)+) is drawn from, as ever.

    So no token has more than 1 / l times its probability p. In closed form the text follows
    v = min(q, p / l) + (1 - sum(min(q, p / l))) norm((p - q)+). Lossy; at factor 1 it equals `rejection` bit for bit,
    and at temperature 0 it is exact.
    """

    factor: Any  # f32[] or [B]; 1 is lossless

    def target(self, log_p: Array, log_q: Array, evidence: Evidence) -> Array:
        p, q, factor = jnp.exp(log_p), jnp.exp(log_q), self.factor[:, None, None]
        kept, missed = jnp.minimum(q, p / factor), jnp.maximum(p - q, 0.0)
        refused = jnp.maximum(1.0 - jnp.sum(kept, axis=-1, keepdims=True), 0.0)
        total = jnp.sum(missed, axis=-1, keepdims=True)
        # Where p equals q nothing is missed, and nothing refused.
        v = kept + refused * missed / jnp.where(total > 0, total, 1.0)
        return jnp.where(factor == 1, log_p, jnp.log(v))


def lenience(*, factor: Any = 0.5, block: bool = False, exact_prefix: Any = 0) -> Lenience:
    """Lenient rejection; see `Lenience`.

    Args:
      factor: the paper's l, above 0 and at most 1; the default is one of those that it tries.
      block: decide on the block as a whole, as in `rejection`.
      exact_prefix: as for `mars`. Every number is one value, or one per row.

    Raises:
      MarsError: a number out of its range.

    >>> import jax
    >>> from mars_jax import verify
    >>> from mars_jax.core.tree import chain
    >>> p, q = jnp.log(jnp.asarray([[[0.8, 0.2]] * 2] * 99)), jnp.log(jnp.asarray([[[0.2, 0.8]] * 2] * 99))
    >>> given = verify.evidence(chain(jnp.asarray([[0, 1]] * 99, jnp.int32), q), p, temperature=1.0)
    >>> accepted = jax.jit(lambda rule: verify.for_rows(rule, 99)(given)[0].num_accepted.sum())
    >>> [int(accepted(lenience(factor=l))) for l in (1.0, 0.5, 0.2)]
    [22, 47, 99]
    """
    return Lenience(block=block, **numbers("lenience", {"factor": factor, "exact_prefix": exact_prefix}))
