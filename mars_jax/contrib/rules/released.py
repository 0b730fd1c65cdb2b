"""The rule of the released code of MARS, which is not the paper's. B batch, N nodes, V vocabulary. Oracle: the
decisions from their description, one by one in Python, in tests/verify/test_distributions.py."""

from __future__ import annotations

from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array

from mars_jax.core import struct
from mars_jax.core.evidence import Evidence
from mars_jax.verify.lossy import numbers
from mars_jax.verify.retargeted import Retargeted, following


@struct.dataclass(kw_only=True)
class Released(Retargeted):
    """The rule of the PyTorch code released with MARS (arXiv 2601.15498), along a chain; a reproduction, not advice.

    Above temperature 0 a drafted token x is taken with certainty where it is one of the two best and z2 / z1 > ratio,
    of the logits that the filters leave: one that they exclude is -inf, and where z1 < 0 the ratio is above 1 and
    passes. Elsewhere x is taken with min(1, p(x) / q(x)), else p without x is drawn from, which is right for q = 1
    alone: so it is biased at every ratio. With a deterministic draft q is 1. At temperature 0 it is exact.
    Stop tokens are not guarded. In strict rows it is `rejection`. The trees of that code, where the first sibling of
    the two best wins, are not reproduced; `mars` is the paper's rule.
    """

    ratio: Any  # f32[] or [B]; inf takes nothing with certainty
    chains_only: ClassVar[bool] = True

    def target(self, log_p: Array, log_q: Array, evidence: Evidence) -> Array:
        p, q, stats = jnp.exp(log_p), jnp.exp(log_q), evidence.stats
        ids, x = jnp.arange(p.shape[-1], dtype=jnp.int32)[None, None], following(evidence)

        def at(values: Array, token: Array) -> Array:
            return jnp.sum(jnp.where(ids == token[..., None], values, 0.0), axis=-1)

        second = jnp.where(at(p, stats.id2) > 0, stats.top2, -jnp.inf)
        passes = second / stats.top1 > self.ratio[:, None]
        certain = passes & ((x == stats.id1) | (x == stats.id2))
        p_x, q_x = at(p, x), at(q, x)
        accept = jnp.where(certain, 1.0, jnp.minimum(p_x / q_x, 1.0))
        # Rejection against v takes x with v(x) / q(x) and else draws from norm((v - q)+): v is q, but for what is taken
        # from x and given to the others.
        others = jnp.where(ids == x[..., None], 0.0, p) / jnp.where(p_x < 1, 1 - p_x, 1.0)[..., None]
        moved = (q_x * (1 - accept))[..., None]
        return jnp.log(jnp.where(ids == x[..., None], q - moved, q + moved * others))


def released(*, ratio: Any = 0.9, exact_prefix: Any = 0) -> Released:
    """The rule of the released code of MARS; see `Released`.

    Args:
      ratio: its threshold, a number above 0; inf takes nothing with certainty.
      exact_prefix: as for `mars`. Every number is one value, or one per row.

    Raises:
      MarsError: a number out of its range.

    >>> import jax
    >>> from mars_jax import verify
    >>> from mars_jax.core.tree import chain
    >>> z, q = jnp.asarray([[[5.0, 4.6, 0.0]] * 2] * 99), jnp.asarray([[[0.0, 2.0, 0.0]] * 2] * 99)
    >>> given = verify.evidence(chain(jnp.asarray([[0, 1]] * 99, jnp.int32), q), z, temperature=1.0)
    >>> accepted = jax.jit(lambda rule: verify.for_rows(rule, 99)(given)[0].num_accepted.sum())
    >>> [int(accepted(released(ratio=r))) for r in (0.9, 0.95)]
    [99, 48]
    """
    return Released(**numbers("released", {"ratio": ratio, "exact_prefix": exact_prefix}))
