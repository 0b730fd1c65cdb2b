"""Speculative cascades. B batch, N nodes, V vocabulary.

Oracle: the distribution of a step, enumerated in tests/verify/test_distributions.py.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

from mars_jax import specs
from mars_jax.core import struct
from mars_jax.core.evidence import Evidence
from mars_jax.verify.lossy import numbers
from mars_jax.verify.retargeted import Retargeted


@struct.dataclass(kw_only=True)
class SpecCascade(Retargeted):
    """Speculative cascades (arXiv 2405.19261): the output follows the draft where it is trusted, else the target.

    "token_v3" trusts the tokens with p >= (1 - alpha) max p. There v = q, and the mass that q has on other tokens is
    distributed over all tokens in proportion to p. "opt" decides for the position: v is p if
    max q < max p - alpha TV(p, q), else q. Lossy at every alpha; at temperature 0 it is exact.
    """

    alpha: Any  # f32[] or [B]
    trust: str = struct.field(pytree_node=False, default="token_v3")

    @property
    def name(self) -> str:
        return "speccascade" if self.trust == "token_v3" else f"speccascade({self.trust})"

    def target(self, log_p: Array, log_q: Array, evidence: Evidence) -> Array:
        p, q, alpha = jnp.exp(log_p), jnp.exp(log_q), self.alpha[:, None, None]
        top = jnp.max(p, axis=-1, keepdims=True)
        if self.trust == "opt":
            distance = jnp.sum(jnp.abs(p - q), axis=-1, keepdims=True) / 2
            return jnp.where(jnp.max(q, axis=-1, keepdims=True) < top - alpha * distance, log_p, log_q)
        trusted = p >= (1 - alpha) * top
        untrusted_mass = jnp.sum(jnp.where(trusted, 0.0, q), axis=-1, keepdims=True)
        return jnp.log(jnp.where(trusted, q, 0.0) + p * untrusted_mass)


def speccascade(
    *, trust: str = "token_v3", alpha: Any = 0.1, block: bool = False, exact_prefix: Any = 0
) -> SpecCascade:
    """Make the rule `SpecCascade`.

    Args:
      trust: "token_v3" or "opt".
      alpha: trust in the draft, from 0 to 1 for "token_v3", at least 0 for "opt"; the default is not from the paper.
      block: verify the block jointly, as in `rejection`.
      exact_prefix: as for `mars`. Every number is a scalar or has one value per row.

    Raises:
      MarsError: an unknown `trust`, or a number out of its range.

    >>> import jax
    >>> from mars_jax import verify
    >>> from mars_jax.core.tree import chain
    >>> p, q = jnp.log(jnp.asarray([[[0.6, 0.4]] * 2] * 99)), jnp.log(jnp.asarray([[[0.2, 0.8]] * 2] * 99))
    >>> evidence = verify.evidence(chain(jnp.asarray([[0, 1]] * 99, jnp.int32), q), p, temperature=1.0)
    >>> accepted = jax.jit(lambda rule: verify.for_rows(rule, 99)(evidence)[0].num_accepted.sum())
    >>> [int(accepted(speccascade(alpha=a))) for a in (0.1, 0.5)]
    [36, 99]
    """
    specs.check_setting("speccascade", "trust", trust)
    settings = {"alpha": alpha, "exact_prefix": exact_prefix}
    return SpecCascade(trust=trust, block=block, **numbers("speccascade", settings, trust=trust))
