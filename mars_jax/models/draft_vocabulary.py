"""A head's own, smaller vocabulary: its tokens and logits as the target's.

Oracle: a loop over the tokens (tests/models/test_eagle.py). W draft vocabulary, V the target's.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from mars_jax.core.mesh import map_devices, vocabulary_axes


def to_target(ids: Array | None, tokens: Array) -> Array:
    """Target tokens i32[...] of draft-vocabulary tokens i32[...]; ids i32[W] says which they are, None: the same.

    >>> to_target(jnp.asarray([4, 7]), jnp.asarray([1, 0])).tolist()
    [7, 4]
    """
    return tokens if ids is None else jnp.take(ids, tokens)


def widen(ids: Array | None, vocab: int, logits: Array) -> Array:
    """Logits f32[B, N, W] of the draft vocabulary over the target's, -inf where it has no token: f32[B, N, V].

    >>> widen(jnp.asarray([2, 0]), 3, jnp.asarray([[[1.0, 5.0]]])).tolist()
    [[[5.0, -inf, 1.0]]]
    """
    if ids is None:
        return logits
    axes = vocabulary_axes(vocab)
    if not axes:
        return jnp.full((*logits.shape[:-1], vocab), -jnp.inf, logits.dtype).at[..., ids].set(logits)

    # Every device gets all W logits, and keeps those of its own part of V.
    def local(logits: Array, ids: Array) -> Array:
        size = vocab // lax.axis_size(axes)
        place = ids - lax.axis_index(axes) * size
        place = jnp.where(place < 0, size, place)  # a negative index would count from the end
        empty = jnp.full((*logits.shape[:-1], size), -jnp.inf, logits.dtype)
        return empty.at[..., place].set(logits, mode="drop")

    return map_devices(local, (P(), P()), P(None, None, axes))(logits, ids)
