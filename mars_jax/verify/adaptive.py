"""Acceptance by the ratio of probabilities. B batch, N nodes. Oracle: transformers' min-p warper, in
tests/verify/test_edges.py."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

from mars_jax.core import struct
from mars_jax.core.evidence import Evidence
from mars_jax.specs import UNLIMITED_RUN
from mars_jax.verify import drafted
from mars_jax.verify.lossy import numbers
from mars_jax.verify.relaxed import Relaxed, base_of


@struct.dataclass(kw_only=True)
class Adaptive(Relaxed):
    """AdaptiveSpec (arXiv 2609.02897): accept a drafted token x if p(x) / p(top1) > theta.

    It is `mars(margin="gap", theta=-log(theta))` without the limit to the two best tokens. Lossy; for theta >= 1,
    including inf, it equals `base` bit for bit.
    """

    theta: Any  # f32[] or [B]; share of max p above which a token is accepted

    def relaxable(self, evidence: Evidence) -> Array:
        # p(x) / p(top1) = exp(z_x - z_1): the normaliser cancels.
        return jnp.exp(-drafted.shortfall(evidence)) > self.theta[:, None]


def adaptive(
    theta: Any = 0.3, *, base: Any = None, max_relaxed_run: Any = UNLIMITED_RUN, exact_prefix: Any = 0
) -> Adaptive:
    """Build the rule that accepts by the ratio of probabilities; see `Adaptive`.

    Args:
      base: the strict rule, `exact()` by default, or `rejection(...)`.
      theta: K in the paper, which tunes it per task; the default is ours.
      max_relaxed_run, exact_prefix: as for `mars`. Every number is one value, or one per row.

    Raises:
      MarsError: a number is out of range, or the base cannot be relaxed.

    >>> import jax
    >>> from mars_jax import verify
    >>> from mars_jax.core.tree import chain
    >>> z = jnp.log(jnp.asarray([[[0.2, 0.5, 0.3], [0.1, 0.8, 0.1]]]))
    >>> inputs = verify.evidence(chain(jnp.asarray([[2, 0]], jnp.int32)), z)
    >>> accepted = jax.jit(lambda rule: verify.for_rows(rule, 1)(inputs)[0].num_accepted[0])
    >>> [int(accepted(adaptive(theta=t))) for t in (0.5, 0.3)]
    [0, 1]
    """
    settings = {"theta": theta, "max_relaxed_run": max_relaxed_run, "exact_prefix": exact_prefix}
    return Adaptive(base=base_of(base, "adaptive"), **numbers("adaptive", settings))
