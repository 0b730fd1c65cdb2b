"""Speculative cascades, which follow the draft where it is trusted. B batch, N nodes, V vocabulary.

Tested against the distribution of a step, enumerated in tests/verify/test_distributions.py.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

from mars_jax.core import struct
from mars_jax.verify import Evidence, Range, Retargeted, register
from mars_jax.verify.ranges import HARMS, nats


@register("speccascade", paper="2405.19261")
@struct.dataclass(kw_only=True)
class SpecCascade(Retargeted):
    """Verify by rejection against a mixture of target and draft that follows the draft where it is trusted.

    Speculative cascades (arXiv 2405.19261). "token_v3" trusts the tokens with p >= (1 - alpha) max p. These tokens keep
    their mass from q. The remaining mass of q is distributed over all tokens in proportion to p. "opt" decides once for
    the whole position: the output follows p if max q < max p - alpha TV(p, q), otherwise q. The rule is lossy at every
    alpha; at temperature 0 it is exact.

    >>> import jax
    >>> from mars_jax import verify
    >>> from mars_jax.core.tree import chain
    >>> p, q = jnp.log(jnp.asarray([[[0.6, 0.4]] * 2] * 99)), jnp.log(jnp.asarray([[[0.2, 0.8]] * 2] * 99))
    >>> evidence = verify.evidence(chain(jnp.asarray([[0, 1]] * 99, jnp.int32), q), p, temperature=1.0)
    >>> accepted = jax.jit(lambda rule: verify.for_rows(rule, 99)(evidence)[0].num_accepted.sum())
    >>> [int(accepted(SpecCascade(alpha=a))) for a in (0.1, 0.5)]
    [36, 99]
    """

    # f32[] or [B]; trust in the draft
    alpha: Any = struct.setting(
        default=0.1,
        ranges={
            "token_v3": Range("a number from 0 to 1 for token_v3", 0, 1, grid=HARMS),
            "opt": nats("a finite number of at least 0 for opt", HARMS),
        },
        by="trust",
        help="how much to trust the draft",
    )
    # "token_v3" decides for each token whether to trust the draft, "opt" for each position
    trust: str = struct.setting(
        default="token_v3",
        choices={
            "token_v3": "tokens with p >= (1 - alpha) max p",
            "opt": "positions, unless max q < max p - alpha TV(p, q)",
        },
        help="tokens or positions at which the draft is trusted",
    )

    @property
    def name(self) -> str:
        return "speccascade" if self.trust == "token_v3" else f"speccascade({self.trust})"

    def target(self, log_p: Array, log_q: Array, evidence: Evidence) -> Array:
        p, q, alpha = jnp.exp(log_p), jnp.exp(log_q), self.alpha[:, None, None]
        top_prob = jnp.max(p, axis=-1, keepdims=True)
        if self.trust == "opt":
            distance = jnp.sum(jnp.abs(p - q), axis=-1, keepdims=True) / 2
            return jnp.where(jnp.max(q, axis=-1, keepdims=True) < top_prob - alpha * distance, log_p, log_q)
        is_trusted = p >= (1 - alpha) * top_prob
        # Trusted tokens keep their mass from q. The rest of q is distributed over all tokens in proportion to p.
        untrusted_mass = jnp.sum(jnp.where(is_trusted, 0.0, q), axis=-1, keepdims=True)
        return jnp.log(jnp.where(is_trusted, q, 0.0) + p * untrusted_mass)
