"""Temperature, and the filters top-k, top-p and min-p as thresholds on the logits, found without a sort.

B batch, N nodes, V vocabulary. Oracles: the transformers warpers and the sorting reference in
tests/core/test_sampling.py.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from mars_jax.core.types import Controls

_NEG_INF_ORDER = -2139095041  # _to_order(-inf)


def warp(z: Array, controls: Controls, active: Array) -> Array:
    """`sampling.process` for rows with a positive temperature; `active` bool[B] names them."""
    vocab = z.shape[-1]
    top = jnp.max(z, axis=-1, keepdims=True)
    # Shifting before dividing keeps a small temperature from turning the largest logit into inf.
    assert controls.temperature is not None  # or no row draws
    temperature = jnp.where(active, controls.temperature, 1.0)[:, None, None]
    scaled = (z - top) / temperature

    use_k = active & (controls.top_k > 0) & (controls.top_k < vocab)
    use_p = active & (controls.top_p < 1)
    use_min = active & (controls.min_p > 0)
    # Each filter is a threshold on the raw logit z, whose order temperature keeps. Top-p reads what top-k has left.
    scaled = jax.lax.cond(
        jnp.any(use_k),
        lambda: jnp.where(_top_k_kept(z, top, controls.top_k, use_k), scaled, -jnp.inf),
        lambda: scaled,
    )
    scaled = jax.lax.cond(
        jnp.any(use_p),
        lambda: jnp.where(_top_p_kept(z, top, jnp.exp(scaled), controls.top_p, use_p), scaled, -jnp.inf),
        lambda: scaled,
    )
    # The largest scaled logit is 0, so min-p * max(p) is log(min_p) here.
    floor = jnp.where(use_min, jnp.log(controls.min_p), -jnp.inf)[:, None, None]
    return jnp.where(scaled >= floor, scaled, -jnp.inf)


def _top_k_kept(z: Array, top: Array, top_k: Array, use: Array) -> Array:
    """bool[B, N, V]: z >= the top_k-th largest; everything in rows that do not use it."""
    k = top_k[:, None]

    def keeps_enough(threshold: Array) -> Array:
        return jnp.sum(z >= threshold[..., None], axis=-1, dtype=jnp.int32) >= k

    # The largest threshold that keeps k tokens is the k-th largest logit. One float above the largest logit keeps none.
    low, _ = _bisect(keeps_enough, _to_order(top[..., 0]) + 1, use)
    return (z >= _from_order(low)[..., None]) | ~use[:, None, None]


def _top_p_kept(z: Array, top: Array, weights: Array, top_p: Array, use: Array) -> Array:
    """bool[B, N, V]: less than top_p of the mass is strictly above z; everything in rows that do not use
    it.

    A masked sum is monotone in its mask also after rounding, so that bisection on it is exact.
    """
    wanted = top_p[:, None] * jnp.sum(weights, axis=-1)

    def mass_reached(threshold: Array) -> Array:
        return jnp.sum(jnp.where(z > threshold[..., None], weights, 0.0), axis=-1) >= wanted

    # The lowest threshold above which less than top_p of the mass is. Nothing is above the largest logit.
    _, high = _bisect(mass_reached, _to_order(top[..., 0]), use)
    return (z >= _from_order(high)[..., None]) | ~use[:, None, None]


def _bisect(holds, high: Array, use: Array) -> tuple[Array, Array]:
    """Neighbouring floats, as orders i32[B, N], between which the decreasing predicate `holds` turns false.

    It holds at -inf and fails at `high`. Halving the 2**32 orders takes 32 passes over the vocabulary at
    most: exact, and several times cheaper than a sort of it.
    """
    # Rows that do not use the filter begin with an empty interval, and are done before the first pass.
    low = jnp.where(use[:, None], jnp.full_like(high, _NEG_INF_ORDER), high)

    def middle(low, high):
        return (low & high) + ((low ^ high) >> 1)  # floor of the mean, without overflow

    def unfinished(bounds):
        low, high = bounds
        return jnp.any(middle(low, high) != low)

    def halve(bounds):
        low, high = bounds
        mid = middle(low, high)
        up = holds(_from_order(mid))
        # In a row that is done `mid` is `low`, and neither bound moves past the other.
        return jnp.where(up, mid, low), jnp.where(up, high, jnp.maximum(mid, low))

    return jax.lax.while_loop(unfinished, halve, (low, high))


def _to_order(x: Array) -> Array:
    """f32 -> i32 with the same order."""
    # The bits of positive floats are ordered as integers. Those of negative ones are ordered the other way round, and
    # flipping all but the sign turns them.
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _from_order(order: Array) -> Array:
    return jax.lax.bitcast_convert_type(jnp.where(order < 0, order ^ 0x7FFFFFFF, order), jnp.float32)
