"""Rejection against the distribution with the highest acceptance rate within a given divergence from the target.

B batch, N nodes, V vocabulary. Tested against a search over a grid of distributions, and against the enumerated
distribution of a step (tests/verify/test_distributions.py).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from mars_jax.core import struct
from mars_jax.verify import Evidence, Retargeted, register
from mars_jax.verify.ranges import HARMS, nats

# HALVINGS is the number of bisection steps for `a`: 18 steps limit the error in the mass of v to 2**-18. STEPS is the
# number of Newton steps for `b` in each bisection step.
HALVINGS, STEPS = 18, 3


@register("mentored", paper="2609.30474")
@struct.dataclass(kw_only=True)
class Mentored(Retargeted):
    """Maximise acceptance under a bound on the divergence from the target.

    Mentored decoding (Tran-Thien and Nock, arXiv 2609.30474): among the distributions v with KL(p || v) of at most
    `bound` nats, the output follows the one with the highest acceptance rate sum(min(q, v)). It has the form
    v = min(max(q, a p), b p) with a <= 1 <= b, which are 1 / beta and 1 / alpha in the paper. A drafted token x is
    accepted with probability min(1, b p(x) / q(x)); otherwise a token is drawn from norm((a p - q)+). If KL(p || q) is
    within the bound, v is q. If max(q, a p) sums to less than 1 over the tokens with p > 0, the tokens with p = 0 get
    the remaining mass. The rule is lossy. At bound 0 it equals `rejection` bit for bit, and at temperature 0 it is
    exact. `lenience` uses only b, with `factor` = 1 / b. Because of the search for a and b, a step reads both
    distributions about 90 times.

    >>> from mars_jax import verify
    >>> from mars_jax.core.tree import chain
    >>> p, q = jnp.log(jnp.asarray([[[0.8, 0.2]] * 2] * 99)), jnp.log(jnp.asarray([[[0.2, 0.8]] * 2] * 99))
    >>> evidence = verify.evidence(chain(jnp.asarray([[0, 1]] * 99, jnp.int32), q), p, temperature=1.0)
    >>> accepted = jax.jit(lambda rule: verify.for_rows(rule, 99)(evidence)[0].num_accepted.sum())
    >>> [int(accepted(Mentored(bound=d))) for d in (0.0, 0.2, 0.9)]
    [22, 63, 99]
    """

    # f32[] or [B]; nats; 0 is lossless
    bound: Any = struct.setting(
        default=0.1,
        ranges=nats("a finite number of at least 0", HARMS),
        help="maximum divergence from the target at each token, in nats; 0 is lossless",
    )

    def target(self, log_p: Array, log_q: Array, evidence: Evidence) -> Array:
        p, q = jnp.exp(log_p), jnp.exp(log_q)
        is_possible = p > 0
        log_ratio = jnp.where(is_possible, log_q - log_p, 0.0)
        excluded_mass = _total(jnp.where(is_possible, 0.0, q))
        bound = self.bound[:, None, None]

        def excess_mass(a: Array) -> Array:
            # Total mass of max(q, a p) over the tokens with p > 0, minus 1. If positive, remove it from tokens with
            # q > b p; if negative, give it to excluded tokens.
            return _total(jnp.maximum(a * p - q, 0.0)) - excluded_mass

        def upper(a: Array, b: Array) -> Array:
            # The mass of q above b p is convex and decreasing in b, so Newton steps that start below the root stay
            # below it. Therefore, the mass of v is at most 1, and the bound holds after any number of steps.
            excess = excess_mass(a)

            def step(_: int, b: Array) -> Array:
                is_above = is_possible & (q > b * p)
                next_b = (_total(jnp.where(is_above, q, 0.0)) - excess) / _total(jnp.where(is_above, p, 0.0))
                return jnp.where(jnp.any(is_above, axis=-1, keepdims=True), jnp.maximum(b, next_b), b)

            return jnp.where(excess > 0, jax.lax.fori_loop(0, STEPS, step, b), jnp.inf)

        def halve(_: int, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            low, high, b = carry
            middle = (low + high) / 2
            b_of_middle = upper(middle, b)
            is_within = -_total(p * jnp.clip(log_ratio, jnp.log(middle), jnp.log(b_of_middle))) <= bound
            # b decreases as a increases, so the value of b at `high` is a lower bound for the next b.
            if_within, if_not = (low, middle, b_of_middle), (middle, high, b)
            return jax.tree.map(lambda yes, no: jnp.where(is_within, yes, no), if_within, if_not)

        ones = jnp.ones_like(excluded_mass)
        _, a, b = jax.lax.fori_loop(0, HALVINGS, halve, (jnp.zeros_like(ones), ones, ones))
        excluded_scale = jnp.maximum(-excess_mass(a), 0.0) / jnp.where(excluded_mass > 0, excluded_mass, 1.0)
        clipped_log_q = jnp.clip(log_q, log_p + jnp.log(a), log_p + jnp.log(b))
        log_v = jnp.where(is_possible, clipped_log_q, log_q + jnp.log(excluded_scale))
        return jnp.where(bound > 0, log_v, log_p)


def _total(weights: Array) -> Array:
    """Return f32[B, N, 1], the sum of weights f32[B, N, V] over the vocabulary."""
    return jnp.sum(weights, axis=-1, keepdims=True)
