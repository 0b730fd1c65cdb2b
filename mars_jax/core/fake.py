"""A language model without weights for tests. Its logits are a hash of the visible tokens.

The hash covers the tokens and positions *in the cache* that a node may attend to. A wrong mask, position, slot or
rollback therefore changes the logits. The idea of a fake model that makes tests exact comes from mctx.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import Array

from mars_jax.core.cache import write_slots
from mars_jax.core.types import ForwardOutput, KVCache, LanguageModel, PyTree, Visible


def _mix(x: Array) -> Array:
    """Hash u32 values bijectively, with the finalizer of MurmurHash3 (public domain)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


@functools.lru_cache
def hash_model(*, vocab_size: int, seed: int = 0, scale: float = 2.0, agree: float = 0.0) -> LanguageModel:
    """Return a model whose logits depend on every visible token and position.

    Args:
      vocab_size: V, the size of the vocabulary.
      seed: selects the hash function, so that models with different seeds disagree.
      scale: half the range of the logits, which are roughly uniform in `[0, 2 * scale)`.
      agree: weight in [0, 1] of a component of the logits that is the same for all seeds. If the weight is high, one
        such model accepts many of the tokens that another drafts, just as a real target accepts many of its draft
        model's tokens.

    >>> hash_model(vocab_size=7).vocab_size
    7
    """

    def init_cache(batch: int, slots: int) -> KVCache:
        shape = (batch, slots, 1, 1)
        return KVCache(k=(jnp.zeros(shape, jnp.int32),), v=(jnp.zeros(shape, jnp.int32),))

    def forward(params: PyTree, tokens: Array, visible: Visible, cache: KVCache) -> ForwardOutput:
        # A slot's "key" is its token and its "value" is its position.
        positions = visible.positions
        k = write_slots(cache.k[0], tokens[:, :, None, None], visible.slot)
        v = write_slots(cache.v[0], positions[:, :, None, None], visible.slot)
        mask = visible.dense(cache.slots)
        cached_token = k[:, None, :, 0, 0].astype(jnp.uint32)
        cached_position = v[:, None, :, 0, 0].astype(jnp.uint32)
        slot_hash = _mix(cached_token * jnp.uint32(2654435761) ^ _mix(cached_position + jnp.uint32(1)))
        # Sums of u32 wrap around, so the sum over the visible slots does not depend on their order.
        hash_sum = jnp.sum(jnp.where(mask, slot_hash, jnp.uint32(0)), axis=2, dtype=jnp.uint32)
        hidden = _mix(hash_sum ^ _mix(positions.astype(jnp.uint32)))[:, :, None]
        return ForwardOutput(hidden=hidden, features=(), cache=KVCache(k=(k,), v=(v,)))

    def unembed(params: PyTree, hidden: Array) -> Array:
        ids = jnp.arange(vocab_size, dtype=jnp.uint32)[None, None]

        def noise(salt: int) -> Array:
            bits = _mix(hidden ^ _mix(ids * jnp.uint32(0x9E3779B9) + jnp.uint32(salt)))
            # Keep the upper 24 bits, which float32 represents exactly; they are uniform in [0, 2**24).
            return (bits >> 8).astype(jnp.float32) * jnp.float32(2 * scale / 2**24)

        return agree * noise(0) + (1 - agree) * noise(seed + 1)

    return LanguageModel(init_cache=init_cache, forward=forward, unembed=unembed, vocab_size=vocab_size)
