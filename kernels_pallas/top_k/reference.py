"""Reference implementation of `top_k` with `jax.lax.top_k`, and the packed format of its result for an all-gather.

On a TPU, `jax.lax.top_k` is a full sort, which compiles slowly; on a CPU, it is a scalar loop.

Tested against direct calls to `jax.lax.top_k` and `jax.nn.logsumexp` (tests/kernels/test_top_k.py).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from kernels_pallas.common import bits


class TopKEntries(NamedTuple):
    """The k largest entries of each row, by decreasing value and then increasing id, and the logsumexp of the row."""

    values: Array  # f32[..., k]; largest logits, in descending order
    ids: Array  # i32[..., k]; token ids of `values`
    logsumexp: Array  # f32[...]; logsumexp of the whole row


def top_k(logits: Array, k: int) -> TopKEntries:
    """Compute `kernels_pallas.top_k` with `jax.lax.top_k`."""
    z = logits.astype(jnp.float32)
    return TopKEntries(*lax.top_k(z, k), jax.nn.logsumexp(z, axis=-1))


def pack(entries: TopKEntries, k: int) -> Array:
    """Pack the entries into i32[2, ..., k + 1]: the bits of the k values and of the logsumexp, and the ids.

    Floats are packed as integers, so that no device changes their bits. If there are fewer than k tokens, the remaining
    values are -inf.
    """

    # Pad x to [..., k].
    def padded(x: Array, fill: float) -> Array:
        return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, k - x.shape[-1])], constant_values=fill)

    # Append the logsumexp to the values, and 0 to the ids.
    log_sum_exp = entries.logsumexp[..., None]
    values = jnp.concatenate([padded(entries.values, -jnp.inf), log_sum_exp], axis=-1)
    ids = jnp.concatenate([padded(entries.ids, 0), jnp.zeros_like(bits(log_sum_exp))], axis=-1)
    return jnp.stack([bits(values), ids])


def unpack(packed: Array, k: int, axis: int = 0) -> TopKEntries:
    """Unpack the result of `pack`. `axis` is the dimension of size two."""
    values, ids = (lax.index_in_dim(packed, i, axis, keepdims=False) for i in (0, 1))
    values = lax.bitcast_convert_type(values, jnp.float32)
    return TopKEntries(values[..., :k], ids[..., :k], values[..., k])
