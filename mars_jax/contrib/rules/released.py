"""The rule in the released code of MARS, which differs from the rule in the paper. B batch, N nodes, V vocabulary.

Tested against the same decisions, made one by one in Python, in tests/verify/test_distributions.py.
"""

from __future__ import annotations

from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array

from mars_jax.core import struct
from mars_jax.core.tree import following
from mars_jax.verify import Evidence, Range, Retargeted, register
from mars_jax.verify.ranges import RATIOS


@register("released", paper="the code of 2601.15498")
@struct.dataclass(kw_only=True)
class Released(Retargeted):
    """Accept draft chains as the released code of MARS does. That code differs from the rule in the paper.

    This rule reproduces the PyTorch code released with MARS (arXiv 2601.15498), for chains only. It is not recommended;
    `mars` is the rule of the paper.

    Above temperature 0, a drafted token x is always accepted if it is one of the two best and z2 / z1 > ratio. The
    logits are those after filtering, which sets excluded tokens to -inf. If z1 < 0, the quotient is at least 1, so the
    test passes at any ratio below 1. Otherwise x is accepted with probability min(1, p(x) / q(x)), and if it is
    rejected, a token is drawn from p without x. Drawing from p without x is correct only if q(x) = 1, as for a
    deterministic draft, so with sampled drafts the rule is biased at every ratio. At temperature 0 it is exact. Unlike
    `mars`, the rule treats stop tokens like all other tokens. In strict rows the rule equals `rejection`. That code's
    tree verification, which accepts the first sibling that is one of the two best tokens, is not reproduced.

    >>> import jax
    >>> from mars_jax import verify
    >>> from mars_jax.core.tree import chain
    >>> z, q = jnp.asarray([[[5.0, 4.6, 0.0]] * 2] * 99), jnp.asarray([[[0.0, 2.0, 0.0]] * 2] * 99)
    >>> evidence = verify.evidence(chain(jnp.asarray([[0, 1]] * 99, jnp.int32), q), z, temperature=1.0)
    >>> accepted = jax.jit(lambda rule: verify.for_rows(rule, 99)(evidence)[0].num_accepted.sum())
    >>> [int(accepted(Released(ratio=r))) for r in (0.9, 0.95)]
    [99, 48]
    """

    # f32[] or [B]; inf disables the ratio test
    ratio: Any = struct.setting(
        default=0.9,
        ranges=Range("a number above 0, or inf", 0, above=True, grid=RATIOS),
        help="second-best logit / best logit above which both tokens are always accepted; never strict",
    )
    block: ClassVar[bool] = False
    needs: ClassVar[tuple[str, ...]] = ("draft", "q", "chain")

    def target(self, log_p: Array, log_q: Array, evidence: Evidence) -> Array:
        p, q, stats = jnp.exp(log_p), jnp.exp(log_q), evidence.stats
        ids, x = jnp.arange(p.shape[-1], dtype=jnp.int32)[None, None], following(evidence.tree)

        def value_of(values: Array, token: Array) -> Array:
            return jnp.sum(jnp.where(ids == token[..., None], values, 0.0), axis=-1)

        second_logit = jnp.where(value_of(p, stats.id2) > 0, stats.top2, -jnp.inf)
        ratio_passes = second_logit / stats.top1 > self.ratio[:, None]
        is_certain = ratio_passes & ((x == stats.id1) | (x == stats.id2))
        p_x, q_x = value_of(p, x), value_of(q, x)
        accept_prob = jnp.where(is_certain, 1.0, jnp.minimum(p_x / q_x, 1.0))
        # Express the rule as rejection against a distribution v: accept x with probability v(x) / q(x), and otherwise
        # draw from norm((v - q)+). To get v, take q and move the mass q(x) (1 - accept_prob) from x to the other
        # tokens.
        other_shares = jnp.where(ids == x[..., None], 0.0, p) / jnp.where(p_x < 1, 1 - p_x, 1.0)[..., None]
        moved_mass = (q_x * (1 - accept_prob))[..., None]
        return jnp.log(jnp.where(ids == x[..., None], q - moved_mass, q + moved_mass * other_shares))
