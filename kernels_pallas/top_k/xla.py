"""Implementation of `top_k` with XLA operations, and the merge of the results of vocabulary parts.

Tested against `reference.top_k`. Dimensions: V vocabulary, W vocabulary parts.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax

from kernels_pallas.top_k import reference
from kernels_pallas.top_k.reference import TopKEntries, unpack

BLOCK = 64
"""Number of tokens per block; only the blocks with the largest maxima are searched. For k = 10, these blocks contain
fewer than 1,024 tokens in total. On a GPU, XLA sorts rows of up to 1,024 tokens, which is faster than the search that
it uses for longer rows."""


def top_k(logits: Array, k: int) -> TopKEntries:
    """Compute `kernels_pallas.top_k` by searching only the k blocks with the largest maxima.

    These blocks contain the k largest entries, even if there are ties: each of them has an entry that precedes all
    entries of the remaining blocks, in order of decreasing value and then increasing id.
    """
    z = logits.astype(jnp.float32)
    if z.shape[-1] < 4 * k * BLOCK:
        return reference.top_k(z, k)
    # Reshape [..., V] to [..., blocks, BLOCK].
    padding, blocks = -z.shape[-1] % BLOCK, z
    if padding:
        blocks = jnp.pad(z, [(0, 0)] * (z.ndim - 1) + [(0, padding)], constant_values=-jnp.inf)
    blocks = blocks.reshape(*z.shape[:-1], -1, BLOCK)
    # Find the blocks with the k largest maxima, i32[..., k]. They contain the k largest entries.
    _, best_blocks = lax.top_k(jnp.max(blocks, axis=-1), k)
    # Sort the blocks, so that candidates are in the order of their ids. Among equal values, the smaller id comes first.
    best_blocks = jnp.sort(best_blocks, axis=-1)
    candidates = jnp.take_along_axis(blocks, best_blocks[..., None], axis=-2, mode="promise_in_bounds")
    values, candidate = lax.top_k(candidates.reshape(*candidates.shape[:-2], -1), k)
    # Convert an index into the k * BLOCK candidates to a token id.
    block_id = jnp.take_along_axis(best_blocks, candidate // BLOCK, axis=-1, mode="promise_in_bounds")
    return TopKEntries(values, block_id * BLOCK + candidate % BLOCK, jax.nn.logsumexp(z, axis=-1))


def join(parts: Array, k: int, size: int) -> TopKEntries:
    """Merge the packed results i32[W, 2, ..., k + 1] of W parts of `size` tokens into the `top_k` of all tokens."""
    part_tops = unpack(parts, k, axis=1)  # [W, ..., k] each
    first_ids = jnp.arange(parts.shape[0], dtype=jnp.int32) * size
    ids = part_tops.ids + first_ids.reshape((-1,) + (1,) * (part_tops.ids.ndim - 1))
    # Reshape [W, ..., k] to [..., W, k], and then to [..., W * k]. The parts are in the order of their ids, so among
    # equal values the smaller id still comes first.
    values, ids = (jnp.moveaxis(x, 0, -2).reshape(*x.shape[1:-1], -1) for x in (part_tops.values, ids))
    top_values, entry_index = lax.top_k(values, k)
    ids = jnp.take_along_axis(ids, entry_index, axis=-1, mode="promise_in_bounds")
    # The logsumexp of the whole vocabulary is the logsumexp of the parts' logsumexps, [W, ...].
    return TopKEntries(top_values, ids, jax.nn.logsumexp(part_tops.logsumexp, axis=0))
