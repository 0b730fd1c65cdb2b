"""Relaxed top-k acceptance. B batch, N nodes. Oracle: transformers' top-k warper, in tests/verify/test_edges.py."""

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
class TopK(Relaxed):
    """Accept a drafted token x if it is among the target's top `k` and log p(top1) - log p(x) <= delta.

    This is the relaxed acceptance of TensorRT-LLM (its guide to DeepSeek-R1), which applies it only between the markers
    of a thinking span; here it applies unless the row is strict. Lossy; `k` = 0 equals `base` bit for bit.
    """

    k: Any  # i32[] or [B]; 0 is strict
    delta: Any  # f32[] or [B]; nats

    def relaxable(self, evidence: Evidence) -> Array:
        _, is_likelier = drafted.preferred(evidence, evidence.logits)
        # The rank of x is the number of likelier tokens, 0 for the top token; ties do not count against x.
        rank = jnp.sum(is_likelier, axis=-1, dtype=jnp.int32)
        return (rank < self.k[:, None]) & (drafted.shortfall(evidence) <= self.delta[:, None])


def topk(
    k: Any = 10,
    *,
    base: Any = None,
    delta: Any = 0.6,
    max_relaxed_run: Any = UNLIMITED_RUN,
    exact_prefix: Any = 0,
) -> TopK:
    """Build the rule of relaxed top-k acceptance; see `TopK`.

    Args:
      base: the strict rule, `exact()` by default, or `rejection(...)`.
      k: number of the target's top tokens that are acceptable; 0 is strict.
      delta: maximum difference of log-probability to the top token, nats.
      max_relaxed_run, exact_prefix: as for `mars`. Every number is one value, or one per row.

    Raises:
      MarsError: a number is out of range, or the base cannot be relaxed.

    >>> import jax
    >>> from mars_jax import verify
    >>> from mars_jax.core.tree import chain
    >>> z = jnp.asarray([[[9.5, 10.0, 9.8], [0.0, 9.0, 0.0]]])
    >>> inputs = verify.evidence(chain(jnp.asarray([[2, 0]], jnp.int32)), z)
    >>> accepted = jax.jit(lambda rule: verify.for_rows(rule, 1)(inputs)[0].num_accepted[0])
    >>> [int(accepted(topk(k=k))) for k in (2, 3)]
    [0, 1]
    """
    settings = {"k": k, "delta": delta, "max_relaxed_run": max_relaxed_run, "exact_prefix": exact_prefix}
    return TopK(base=base_of(base, "topk"), **numbers("topk", settings))
