"""Attention over the key-value cache, accumulated in float32.

Oracle: `attend_all`, which scores every slot, and transformers' `eager_attention_forward`. B batch, N tokens,
S cache slots, K key-value heads, G query heads per key-value head, D head dimension.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax

from mars_jax.models.layers import soft_cap

BLOCK = 128
"""Slots scored at a time on CPU: small enough that a block stays in its caches."""
WIDE_BLOCK = 1024
"""Slots scored at a time elsewhere, in buffers of more than two such blocks: reading one takes longer than a turn
of the loop costs."""

_LOWEST = float(jnp.finfo(jnp.float32).min)


def attend(
    q: Array,
    k: Array,
    v: Array,
    mask: Array,
    live: Array,
    *,
    scale: float | None = None,
    cap: float | None = None,
) -> Array:
    """Grouped-query attention.

    Its cost follows `live` and not the length of the buffer, in blocks.

    Args:
      q: [B, N, K, G, D].
      k: [B, S, K, D]; the cache as it is stored, since any other layout makes XLA copy the whole of it. Its dtype
        may be wider than q's.
      v: [B, S, K, D].
      mask: bool[B, N, S]. A query that sees nothing gets zeros.
      live: i32[]; `mask[:, :, live:]` is False everywhere.
      scale: scores are multiplied by it; None is D ** -0.5.
      cap: `layers.soft_cap` of the scores, before the mask; None leaves them.

    Returns:
      [B, N, K, G, D] in q's dtype.
    """
    on_cpu = functools.partial(_attend_blocks, scale=scale, cap=cap)
    elsewhere = functools.partial(attend_all, scale=scale, cap=cap)
    if k.shape[1] > 2 * WIDE_BLOCK:
        elsewhere = functools.partial(_attend_blocks, scale=scale, cap=cap, block=WIDE_BLOCK)
    return lax.platform_dependent(q, k, v, mask, live, cpu=on_cpu, default=elsewhere)


def _scores(q: Array, k: Array, mask: Array, scale: float | None, cap: float | None) -> Array:
    """f32[B, K, G, N, S]; -inf where the mask is False."""
    q = q.astype(k.dtype)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    scores = jnp.einsum("bnkgd,bskd->bkgns", q, k, preferred_element_type=jnp.float32) * factor
    if cap is not None:
        scores = soft_cap(scores, cap)
    return jnp.where(mask[:, None, None], scores, -jnp.inf)


def _mix(weights: Array, v: Array) -> Array:
    """weights f32[B, K, G, N, S] -> f32[B, K, G, N, D]."""
    return jnp.einsum("bkgns,bskd->bkgnd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)


def _finish(mixed: Array, total: Array, dtype) -> Array:
    """Normalise after the product: N * D divisions instead of N * S."""
    mixed = mixed / jnp.where(total == 0, 1.0, total)[..., None]
    return jnp.transpose(mixed, (0, 3, 1, 2, 4)).astype(dtype)


def attend_all(
    q: Array,
    k: Array,
    v: Array,
    mask: Array,
    live: Array,
    *,
    scale: float | None = None,
    cap: float | None = None,
) -> Array:
    """`attend` over every slot at once; `live` is not needed."""
    del live
    scores = _scores(q, k, mask, scale, cap)
    top = lax.stop_gradient(jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), _LOWEST))
    weights = jnp.exp(scores - top)
    return _finish(_mix(weights, v), jnp.sum(weights, axis=-1), q.dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(5, 6, 7))
def _attend_blocks(
    q: Array,
    k: Array,
    v: Array,
    mask: Array,
    live: Array,
    scale: float | None = None,
    cap: float | None = None,
    block: int = BLOCK,
) -> Array:
    """`attend` block by block up to `live`, with a running maximum and sum (1805.02867, algorithm 3)."""
    batch, n, heads, group, dim = q.shape
    slots = k.shape[1]
    size = min(block, slots)

    def body(i, carry):
        top, total, mixed = carry
        # The last block slides back to stay inside the buffer; what it would count twice is masked.
        first = jnp.minimum(i * size, slots - size)
        fresh = first + jnp.arange(size, dtype=jnp.int32) >= i * size
        seen = lax.dynamic_slice_in_dim(mask, first, size, axis=2) & fresh[None, None]
        scores = _scores(q, lax.dynamic_slice_in_dim(k, first, size, axis=1), seen, scale, cap)
        higher = jnp.maximum(top, jnp.max(scores, axis=-1))
        weights, shrink = jnp.exp(scores - higher[..., None]), jnp.exp(top - higher)
        mixed = mixed * shrink[..., None] + _mix(weights, lax.dynamic_slice_in_dim(v, first, size, axis=1))
        return higher, total * shrink + jnp.sum(weights, axis=-1), mixed

    rows = (batch, heads, group, n)
    zeros = jnp.zeros(rows, jnp.float32)
    carry = (jnp.full(rows, _LOWEST, jnp.float32), zeros, jnp.zeros((*rows, dim), jnp.float32))
    count = (live.astype(jnp.int32) + size - 1) // size
    _, total, mixed = lax.fori_loop(0, count, body, carry)
    return _finish(mixed, total, q.dtype)


@_attend_blocks.defjvp
def _attend_blocks_jvp(scale, cap, block, primals, tangents):
    # A loop of unknown length has no reverse mode; the value is the same, so differentiate the plain form.
    return jax.jvp(functools.partial(attend_all, scale=scale, cap=cap), primals, tangents)
