"""Relaxed top-k acceptance. Tested against transformers' top-k warper (tests/verify/test_edges.py)."""

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
    """Also accept the target's k best tokens if they are nearly as likely as the best one.

    Accept a drafted token x if it is among the target's top `k` tokens and log p(top1) - log p(x) <= delta.

    This is the relaxed acceptance of TensorRT-LLM (see its guide to DeepSeek-R1). TensorRT-LLM applies it only between
    the markers of a thinking span; here it applies to the whole output unless the row is strict. The rule is lossy. At
    `k` = 0, it equals `base` bit for bit.

    >>> import jax
    >>> from mars_jax import verify
    >>> from mars_jax.core.tree import chain
    >>> z = jnp.asarray([[[9.5, 10.0, 9.8], [0.0, 9.0, 0.0]]])
    >>> inputs = verify.evidence(chain(jnp.asarray([[2, 0]], jnp.int32)), z)
    >>> accepted = jax.jit(lambda rule: verify.for_rows(rule, 1)(inputs)[0].num_accepted[0])
    >>> [int(accepted(topk(k=k))) for k in (2, 3)]
    [0, 1]
    """

    # i32[] or [B]; number of the target's best tokens that are acceptable; 0 is strict
    k: Any = struct.setting(
        default=10,
        kind=int,
        ranges=WHOLE,
        help="number of the target's best tokens that are acceptable; 0 never relaxes",
        kw_only=False,
    )
    # f32[] or [B]; maximum difference between the best token's log probability and an accepted token's, in nats
    delta: Any = struct.setting(
        default=0.6,
        ranges=nats("a finite number of at least 0", NATS),
        help="maximum difference of their log probability from the best token's, in nats",
    )

    def relaxable(self, evidence: Evidence) -> Array:
        _, is_likelier = drafted.preferred(evidence, evidence.logits)
        # The rank of x is the number of tokens with a larger logit, so it is 0 for the top token.
        rank = jnp.sum(is_likelier, axis=-1, dtype=jnp.int32)
        return (rank < self.k[:, None]) & (drafted.shortfall(evidence) <= self.delta[:, None])


topk = TopK
