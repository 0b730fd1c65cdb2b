"""Relaxed top-k acceptance. B batch, N nodes. Oracle: transformers' top-k warper, in tests/verify/test_edges.py."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

from mars_jax.core import struct
from mars_jax.core.rule import Evidence
from mars_jax.verify import drafted
from mars_jax.verify.definition import register
from mars_jax.verify.ranges import NATS, WHOLE, nats
from mars_jax.verify.relaxed import Relaxed


@register("topk", paper="TensorRT-LLM's relaxed acceptance")
@struct.dataclass(kw_only=True)
class TopK(Relaxed):
    """Also accept the target's k best tokens if they are near the best one.

    Accept a drafted token x if it is among the target's top `k` and log p(top1) - log p(x) <= delta.

    This is the relaxed acceptance of TensorRT-LLM (its guide to DeepSeek-R1), which applies it only between the markers
    of a thinking span; here it applies unless the row is strict. The rule is lossy; at `k` = 0 it equals `base` bit
    for bit.

    >>> import jax
    >>> from mars_jax import verify
    >>> from mars_jax.core.tree import chain
    >>> z = jnp.asarray([[[9.5, 10.0, 9.8], [0.0, 9.0, 0.0]]])
    >>> inputs = verify.evidence(chain(jnp.asarray([[2, 0]], jnp.int32)), z)
    >>> accepted = jax.jit(lambda rule: verify.for_rows(rule, 1)(inputs)[0].num_accepted[0])
    >>> [int(accepted(topk(k=k))) for k in (2, 3)]
    [0, 1]
    """

    # i32[] or [B]; 0 is strict
    k: Any = struct.setting(
        default=10,
        kind=int,
        ranges=WHOLE,
        help="how many of the target's best tokens are acceptable; 0 never relaxes",
        kw_only=False,
    )
    # f32[] or [B]; nats
    delta: Any = struct.setting(
        default=0.6,
        ranges=nats("a finite number of at least 0", NATS),
        help="nats by which they may be less likely than the best one",
    )

    def relaxable(self, evidence: Evidence) -> Array:
        _, is_likelier = drafted.preferred(evidence, evidence.logits)
        # The rank of x is the number of likelier tokens, 0 for the top token; ties do not count against x.
        rank = jnp.sum(is_likelier, axis=-1, dtype=jnp.int32)
        return (rank < self.k[:, None]) & (drafted.shortfall(evidence) <= self.delta[:, None])


topk = TopK
