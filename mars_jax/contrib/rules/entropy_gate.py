"""Acceptance of the runner-up by entropy. B batch, N nodes. Oracle: scipy's entropy, in tests/verify/test_edges.py."""

from __future__ import annotations

from typing import Any

from jax import Array

from mars_jax.core import struct
from mars_jax.core.evidence import Evidence
from mars_jax.core.logprobs import entropy as entropy_of
from mars_jax.specs import UNLIMITED_RUN
from mars_jax.verify.lossy import numbers
from mars_jax.verify.relaxed import Relaxed, base_of, over


@struct.dataclass(kw_only=True)
class EntropyGate(Relaxed):
    """Acceptance of the runner-up if the entropy of the target's distribution at temperature 1 exceeds `entropy` nats.

    Based on the gate of FLy (arXiv 2511.22972), but over the whole distribution and without a window. Lossy; at
    entropy = inf it equals `base` bit for bit.
    """

    entropy: Any  # f32[] or [B]; nats

    @property
    def name(self) -> str:
        return over("entropy_gate", self.base)

    def low(self, evidence: Evidence) -> Array:
        return entropy_of(evidence.logits) > self.entropy[:, None]


def entropy_gate(
    entropy: Any = 1.5, *, base: Any = None, max_relaxed_run: Any = UNLIMITED_RUN, exact_prefix: Any = 0
) -> EntropyGate:
    """Make the rule `EntropyGate`: acceptance of the runner-up by entropy.

    Args:
      base: the strict rule, `exact()` by default, or `rejection(...)`.
      entropy: nats; the default is not from the paper.
      max_relaxed_run, exact_prefix: as for `mars`. Every number is a scalar or has one value per row.

    Raises:
      MarsError: a number is out of range, or a base that cannot be relaxed.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> from mars_jax import verify
    >>> from mars_jax.core.tree import chain
    >>> z = jnp.log(jnp.asarray([[[0.2, 0.45, 0.35], [0.1, 0.8, 0.1]]]))  # entropies of 1.05 and 0.64
    >>> evidence = verify.evidence(chain(jnp.asarray([[0, 2]], jnp.int32)), z)
    >>> accepted = jax.jit(lambda rule: verify.for_rows(rule, 1)(evidence)[0].num_accepted[0])
    >>> [int(accepted(entropy_gate(entropy=h))) for h in (1.1, 1.0)]
    [0, 1]
    """
    settings = {"entropy": entropy, "max_relaxed_run": max_relaxed_run, "exact_prefix": exact_prefix}
    return EntropyGate(base=base_of(base, "entropy_gate"), **numbers("entropy_gate", settings))
