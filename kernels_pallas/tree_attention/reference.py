"""Short, slow version of `tree_attention`, against which tests check all other implementations.

Tested against softmax in numpy float64 (tests/kernels/test_attention.py). Dimensions: B batch, N queries, S slots.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from kernels_pallas.tree_attention.operands import Operands


def tree_attention(operands: Operands) -> Array:
    """Compute `kernels_pallas.tree_attention` in float32, with a mask that is built slot by slot."""
    q, k, v, first, seen, positions, seen_positions, window, cap, scale, *scales, sinks = operands
    n = q.shape[1]
    if seen is None:
        seen = jnp.tril(jnp.ones((n, n), bool))[None]
    if seen_positions is None:
        seen_positions = positions

    def sees_slot(b: Array, i: Array, s: Array) -> Array:
        """Return whether query i of batch row b attends to slot s."""
        # From `first` on, slot s contains row s - first of the region. Before `first`, it contains the token at
        # position s.
        row = s - first[b]
        row_index = jnp.clip(row, 0, seen.shape[2] - 1)
        sees_row = (row < seen.shape[2]) & seen[b % seen.shape[0], i, row_index]
        position = jnp.where(row < 0, s, seen_positions[b, row_index])
        in_window = True if window is None else position > positions[b, i] - window
        return ((row < 0) | sees_row) & in_window

    sees_all = jax.vmap(jax.vmap(jax.vmap(sees_slot, (None, None, 0)), (None, 0, None)), (0, None, None))
    # The mask is bool[B, N, S].
    mask = sees_all(*(jnp.arange(size) for size in (q.shape[0], n, k.shape[1])))
    keys, values = (
        x.astype(jnp.float32) * (1 if factor is None else factor[..., None])
        for x, factor in zip((k, v), scales, strict=True)
    )
    scores = jnp.einsum("bnkgd,bskd->bnkgs", q.astype(jnp.float32), keys, precision="highest") * scale
    if cap is not None:
        scores = cap * jnp.tanh(scores / cap)
    # If a query attends to no slot, its output is zero. A softmax over equal scores would give the mean of the values
    # instead.
    mask = mask[:, :, None, None]
    scores = jnp.where(mask, scores, -1e30)
    if sinks is not None:
        # Append the sink as the last slot. Its weight is dropped below, because its value is zero.
        column = jnp.broadcast_to(sinks[None, None, :, :, None], (*scores.shape[:-1], 1))
        scores = jnp.concatenate([scores, column], axis=-1)
    weights = jnp.where(mask, jax.nn.softmax(scores, axis=-1)[..., : k.shape[1]], 0)
    return jnp.einsum("bnkgs,bskd->bnkgd", weights, values, precision="highest").astype(q.dtype)
