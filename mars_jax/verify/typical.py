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
    """Typical acceptance (Medusa, arXiv 2401.10774, section 2.3.1): accept a drafted token x if
    p(x) > min(epsilon, delta exp(-H(p))), where H is the entropy in nats.

    The threshold is lower if the target is uncertain. p is the target's distribution at temperature 1, regardless of
    the row's temperature, as for all margins here. Lossy; at epsilon 1 and delta inf it equals `base` bit for bit.
    """

    epsilon: Any  # f32[] or [B]; upper bound of the threshold
    delta: Any  # f32[] or [B]; factor of exp(-entropy)

    def relaxable(self, evidence: Evidence) -> Array:
        # log(delta exp(-H)) = log(delta) - H, f32[B, N] at each node; the token x is judged at its parent.
        by_entropy = jnp.log(self.delta)[:, None] - entropy(evidence.logits)
        threshold = jnp.minimum(jnp.log(self.epsilon)[:, None], by_entropy)
        return drafted.log_prob(evidence) > at_parent(evidence.tree, threshold)


def typical(
    epsilon: Any = 0.09,
    *,
    base: Any = None,
    delta: Any = 0.3,
    max_relaxed_run: Any = UNLIMITED_RUN,
    exact_prefix: Any = 0,
) -> Typical:
    """Build the rule of typical acceptance; see `Typical`.

    Args:
      base: the strict rule, `exact()` by default, or `rejection(...)`.
      epsilon: tokens above this probability are always accepted.
      delta: factor of exp(-H); tokens above delta exp(-H) are accepted too.
      max_relaxed_run, exact_prefix: as for `mars`. Every number is one value, or one per row.

    Raises:
      MarsError: a number is out of range, or the base cannot be relaxed.

    >>> import jax
    >>> from mars_jax import verify
    >>> from mars_jax.core.tree import chain
    >>> z = jnp.log(jnp.asarray([[[0.08, 0.8, 0.12], [0.1, 0.8, 0.1]]]))
    >>> inputs = [verify.evidence(chain(jnp.asarray([[2, x]], jnp.int32)), z) for x in (0, 2)]
    >>> accepted = jax.jit(lambda inputs: verify.for_rows(typical(), 1)(inputs)[0].num_accepted[0])
    >>> [int(accepted(x)) for x in inputs]
    [0, 1]
    """
    settings = {
        "epsilon": epsilon,
        "delta": delta,
        "max_relaxed_run": max_relaxed_run,
        "exact_prefix": exact_prefix,
    }
    return Typical(base=base_of(base, "typical"), **numbers("typical", settings))
