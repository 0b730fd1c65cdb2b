"""Typical acceptance. B batch, N nodes. Oracle: transformers' eta warper, in tests/verify/test_edges.py."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

from mars_jax.core import struct
from mars_jax.core.evidence import Evidence
from mars_jax.core.logprobs import entropy
from mars_jax.core.tree import at_parent
from mars_jax.specs import UNLIMITED_RUN
from mars_jax.verify import drafted
from mars_jax.verify.lossy import numbers
from mars_jax.verify.relaxed import Relaxed, base_of


@struct.dataclass(kw_only=True)
class Typical(Relaxed):
    """Typical acceptance (Medusa, arXiv 2401.10774, section 2.3.1): a drafted token x is accepted where
    p(x) > min(epsilon, delta exp(-H(p))), H the entropy in nats.

    The threshold is lower where the target is unsure. p is the target's distribution at temperature 1, whatever the
    row's own temperature is, as in every margin here. Lossy; at epsilon 1 and delta inf it equals `base` bit for bit.
    """

    epsilon: Any  # f32[] or [B]; what is enough however sure the target is
    delta: Any  # f32[] or [B]; factor of exp(-entropy)

    def relaxable(self, evidence: Evidence) -> Array:
        # log(delta exp(-H)) = log(delta) - H, f32[B, N] at each node; the token x is judged at its parent.
        by_entropy = jnp.log(self.delta)[:, None] - entropy(evidence.logits)
        least = jnp.minimum(jnp.log(self.epsilon)[:, None], by_entropy)
        return drafted.log_prob(evidence) > at_parent(evidence.tree, least)


def typical(
    epsilon: Any = 0.09,
    *,
    base: Any = None,
    delta: Any = 0.3,
    max_relaxed_run: Any = UNLIMITED_RUN,
    exact_prefix: Any = 0,
) -> Typical:
    """Typical acceptance; see `Typical`.

    Args:
      base: the strict rule, `exact()` by default, or `rejection(...)`.
      epsilon: a probability that is always enough.
      delta: of exp(-H), which is enough too.
      max_relaxed_run, exact_prefix: as for `mars`. Every number is one value, or one per row.

    Raises:
      MarsError: a number out of its range, or a base that cannot be relaxed.

    >>> import jax
    >>> from mars_jax import verify
    >>> from mars_jax.core.tree import chain
    >>> z = jnp.log(jnp.asarray([[[0.08, 0.8, 0.12], [0.1, 0.8, 0.1]]]))
    >>> given = [verify.evidence(chain(jnp.asarray([[2, x]], jnp.int32)), z) for x in (0, 2)]
    >>> accepted = jax.jit(lambda given: verify.for_rows(typical(), 1)(given)[0].num_accepted[0])
    >>> [int(accepted(g)) for g in given]
    [0, 1]
    """
    given = {
        "epsilon": epsilon,
        "delta": delta,
        "max_relaxed_run": max_relaxed_run,
        "exact_prefix": exact_prefix,
    }
    return Typical(base=base_of(base, "typical"), **numbers("typical", given))
