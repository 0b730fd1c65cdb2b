"""Rotary position embeddings (arXiv 2104.09864) and their long-context variants.

All angles are float32, because a bfloat16 angle is off by whole radians at position 1000. Tested against transformers'
`ROPE_INIT_FUNCTIONS`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from mars_jax.models.config import Rope


def _llama3(frequency: np.ndarray, rope: Rope) -> np.ndarray:
    """Apply Llama 3.1's scaling: divide low frequencies by `factor` and leave high ones unchanged.

    Frequencies in between are interpolated.
    """
    wavelength = 2 * math.pi / frequency
    smooth = rope.original_max_positions / wavelength - rope.low_freq_factor
    smooth = np.clip(smooth / (rope.high_freq_factor - rope.low_freq_factor), 0.0, 1.0)
    return (1 - smooth) * frequency / rope.factor + smooth * frequency


def _yarn(frequency: np.ndarray, rope: Rope, head_dim: int) -> np.ndarray:
    """Apply YaRN (arXiv 2309.00071, section 3.2): divide low frequencies by `factor` and leave high ones unchanged.

    Frequencies in between are interpolated linearly.
    """

    # Compute the dimension whose angle makes this many full turns over the trained length.
    def dimension(rotations: float) -> float:
        positions_per_radian = rope.original_max_positions / (rotations * 2 * math.pi)
        return head_dim * math.log(positions_per_radian) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    # Dimensions up to `low` keep their frequencies. Frequencies of dimensions from `high` on are divided by `factor`.
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # avoids a division by zero, as in transformers
    ramp = np.clip((np.arange(head_dim // 2) - low) / (high - low), 0.0, 1.0)
    return frequency / rope.factor * ramp + frequency * (1 - ramp)


def frequencies(rope: Rope, head_dim: int) -> np.ndarray:
    """Return f32[pairs], the rotation per position, in radians, of each pair of rotated dimensions.

    >>> frequencies(Rope(theta=100.0), 4).tolist()
    [1.0, 0.10000000149011612]
    """
    # Partial rotary embedding: rotate only the first dimensions of a head (`partial_rotary_factor`).
    head_dim = int(head_dim * rope.fraction)
    # The kind "dynamic" (NTK) needs no code: it only changes frequencies beyond `max_positions` (see `Rope`).
    frequency = 1.0 / rope.theta ** (np.arange(0, head_dim, 2) / head_dim)
    if rope.kind == "linear":
        frequency = frequency / rope.factor
    elif rope.kind == "llama3":
        frequency = _llama3(frequency, rope)
    elif rope.kind == "yarn":
        frequency = _yarn(frequency, rope, head_dim)
    elif rope.kind == "longrope":
        frequency = frequency / np.asarray(rope.divisors)  # `short_factor` or `long_factor`
    return frequency.astype(np.float32)


def angles(positions: Array, rope: Rope, head_dim: int) -> tuple[Array, Array]:
    """Compute the cosines and sines, f32[B, N, 1, pairs] each, of the rotation angles at positions i32[B, N]."""
    theta = positions.astype(jnp.float32)[:, :, None, None] * frequencies(rope, head_dim)[None, None, None]
    return jnp.cos(theta) * rope.attention_factor, jnp.sin(theta) * rope.attention_factor


class Rotation(NamedTuple):
    """Rotation of queries and keys at N positions per row."""

    cos: Array  # f32[B, N, 1, pairs]
    sin: Array  # f32[B, N, 1, pairs]
    query_factor: Array | None  # f32[B, N, 1, 1]; factor by which queries are multiplied; None: 1


def rotation_at(positions: Array, rope: Rope | None, head_dim: int) -> Rotation | None:
    """Return the rotation at positions i32[B, N], or None for a layer without rotary embedding (`rope` is None)."""
    if rope is None:
        return None
    query_factor = None
    if rope.query_growth:
        # Attention temperature of Ministral 3 (`llama_4_scaling_beta`): scale up the queries at each multiple of the
        # trained length, so that attention stays sharp in long contexts.
        lengths = (positions // rope.original_max_positions).astype(jnp.float32)
        query_factor = (1 + rope.query_growth * jnp.log1p(lengths))[:, :, None, None]
    return Rotation(*angles(positions, rope, head_dim), query_factor)


def rotate(x: Array, cos: Array, sin: Array, interleaved: bool = False) -> Array:
    """Apply the rotary embedding to the first 2 * pairs dimensions of x [B, N, heads, head_dim].

    Args:
      x: queries or keys.
      cos, sin: [B, N, 1, pairs]; see `angles`.
      interleaved: rotate pairs of adjacent dimensions, and move the first dimensions of all pairs before the second
        ones. The dot product of a query and a key does not depend on this order. If False, pair dimension i with i +
        half, as in most checkpoints.
    """
    x_float, unrotated = x.astype(jnp.float32), []
    if (rotated := 2 * cos.shape[-1]) < x.shape[-1]:
        x_float, *unrotated = jnp.split(x_float, [rotated], axis=-1)
    if interleaved:
        a, b = x_float[..., ::2], x_float[..., 1::2]
    else:
        a, b = jnp.split(x_float, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, *unrotated], axis=-1).astype(x.dtype)
