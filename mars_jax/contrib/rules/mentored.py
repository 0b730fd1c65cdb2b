"""Rejection against the distribution that accepts most within a divergence of the target. B batch, N nodes, V
vocabulary. Oracles: all distributions of a grid, and the law of a step, in tests/verify/test_distributions.py."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from mars_jax.core import struct
from mars_jax.core.evidence import Evidence
from mars_jax.verify.lossy import numbers
from mars_jax.verify.retargeted import Retargeted

# Halvings of the range of a, which v follows within 2**-18 of its mass, and Newton's steps for b in each.
HALVINGS, STEPS = 18, 3


@struct.dataclass(kw_only=True)
class Mentored(Retargeted):
    """Mentored decoding (Tran-Thien and Nock, arXiv 2609.30474): the text follows the distribution v that accepts most
    drafted tokens, sum(min(q, v)), among those with KL(p || v) of at most `bound` nats.

    That is v = min(max(q, a p), b p) with a <= 1 <= b, the paper's 1 / beta and 1 / alpha: x is accepted with
    min(1, b p(x) / q(x)), else norm((a p - q)+) is drawn from. Where KL(p || q) is within the bound v is q. Tokens that
    the target excludes and the draft does not are accepted as far as a needs no more mass. Lossy; at bound 0 it equals
    `rejection` bit for bit, and at temperature 0 it is exact. `lenience` has b alone, as a setting: its 1 / factor.
    A step reads the two distributions 90 times, since a and b are sought by halving.
    """

    bound: Any  # f32[] or [B]; nats; 0 is lossless

    def target(self, log_p: Array, log_q: Array, evidence: Evidence) -> Array:
        p, q = jnp.exp(log_p), jnp.exp(log_q)
        possible = p > 0
        log_ratio = jnp.where(possible, log_q - log_p, 0.0)
        excluded = _total(jnp.where(possible, 0.0, q))
        bound = self.bound[:, None, None]

        def mass(a: Array) -> Array:
            # What max(q, a p) has above 1, to be taken from tokens above b p; below 0 it is left for excluded tokens.
            return _total(jnp.maximum(a * p - q, 0.0)) - excluded

        def top(a: Array, b: Array) -> Array:
            # What q has above b p is convex in b and falls, so that Newton's steps from below stay below, and v has no
            # more than its mass: the bound holds after any number of them.
            taken = mass(a)

            def step(_: int, b: Array) -> Array:
                above = possible & (q > b * p)
                reached = (_total(jnp.where(above, q, 0.0)) - taken) / _total(jnp.where(above, p, 0.0))
                return jnp.where(jnp.any(above, axis=-1, keepdims=True), jnp.maximum(b, reached), b)

            return jnp.where(taken > 0, jax.lax.fori_loop(0, STEPS, step, b), jnp.inf)

        def halve(_: int, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            low, high, b = carry
            middle = (low + high) / 2
            at_middle = top(middle, b)
            within = -_total(p * jnp.clip(log_ratio, jnp.log(middle), jnp.log(at_middle))) <= bound
            # b falls as a grows, so that of `high` is below the next one.
            kept, tried = (low, middle, at_middle), (middle, high, b)
            return jax.tree.map(lambda yes, no: jnp.where(within, yes, no), kept, tried)

        one = jnp.ones_like(excluded)
        _, a, b = jax.lax.fori_loop(0, HALVINGS, halve, (jnp.zeros_like(one), one, one))
        left = jnp.maximum(-mass(a), 0.0) / jnp.where(excluded > 0, excluded, 1.0)
        clipped = jnp.clip(log_q, log_p + jnp.log(a), log_p + jnp.log(b))
        log_v = jnp.where(possible, clipped, log_q + jnp.log(left))
        return jnp.where(bound > 0, log_v, log_p)


def _total(weights: Array) -> Array:
    """f32[B, N, V] -> f32[B, N, 1]"""
    return jnp.sum(weights, axis=-1, keepdims=True)


def mentored(*, bound: Any = 0.1, block: bool = False, exact_prefix: Any = 0) -> Mentored:
    """Rejection against what accepts most within a divergence of the target; see `Mentored`.

    Args:
      bound: the paper's D in nats, at least 0; the default is ours.
      block: decide on the block as a whole, as in `rejection`.
      exact_prefix: as for `mars`. Every number is one value, or one per row.

    Raises:
      MarsError: a number out of its range.

    >>> from mars_jax import verify
    >>> from mars_jax.core.tree import chain
    >>> p, q = jnp.log(jnp.asarray([[[0.8, 0.2]] * 2] * 99)), jnp.log(jnp.asarray([[[0.2, 0.8]] * 2] * 99))
    >>> given = verify.evidence(chain(jnp.asarray([[0, 1]] * 99, jnp.int32), q), p, temperature=1.0)
    >>> accepted = jax.jit(lambda rule: verify.for_rows(rule, 99)(given)[0].num_accepted.sum())
    >>> [int(accepted(mentored(bound=d))) for d in (0.0, 0.2, 0.9)]
    [22, 63, 99]
    """
    return Mentored(block=block, **numbers("mentored", {"bound": bound, "exact_prefix": exact_prefix}))
