"""Rotary position embeddings (arXiv 2104.09864) and their long-context variants.

Oracle: transformers' `ROPE_INIT_FUNCTIONS`. All angles are float32: a bfloat16 angle is off by whole radians at
position 1000.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from mars_jax.models.config import Rope


def _llama3(frequency: np.ndarray, rope: Rope) -> np.ndarray:
    """Apply Llama 3.1's scaling: divide low frequencies by `factor`, keep high ones, interpolate between them."""
    wavelength = 2 * math.pi / frequency
    smooth = rope.original_max_positions / wavelength - rope.low_freq_factor
    smooth = np.clip(smooth / (rope.high_freq_factor - rope.low_freq_factor), 0.0, 1.0)
    return (1 - smooth) * frequency / rope.factor + smooth * frequency


def _yarn(frequency: np.ndarray, rope: Rope, head_dim: int) -> np.ndarray:
    """Apply YaRN (arXiv 2309.00071, section 3.2): a ramp over dimensions from extrapolation to interpolation."""

    # The dimension that makes this many rotations over the trained length.
    def dimension(rotations: float) -> float:
        turns = rope.original_max_positions / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    # Dimensions up to `low` keep their frequency, and those from `high` on are interpolated.
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # avoids a division by zero, as in transformers
    ramp = np.clip((np.arange(head_dim // 2) - low) / (high - low), 0.0, 1.0)
    return frequency / rope.factor * ramp + frequency * (1 - ramp)


def frequencies(rope: Rope, head_dim: int) -> np.ndarray:
    """Return radians per position of each rotated pair: f32[pairs], where pairs is half of the rotated dimensions.

    >>> frequencies(Rope(theta=100.0), 4).tolist()
    [1.0, 0.10000000149011612]
    """
    # Partial rotary embedding: only the first dimensions of a head rotate (`partial_rotary_factor`).
    head_dim = int(head_dim * rope.fraction)
    # Dynamic NTK scaling changes nothing up to the trained length, which is the longest text here.
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
    """Return cos and sin, f32[B, N, 1, pairs] each, of positions i32[B, N]."""
    theta = positions.astype(jnp.float32)[:, :, None, None] * frequencies(rope, head_dim)[None, None, None]
    return jnp.cos(theta) * rope.attention_factor, jnp.sin(theta) * rope.attention_factor


class Rotation(NamedTuple):
    """The rotation of queries and keys at N positions."""

    cos: Array  # f32[B, N, 1, pairs]
    sin: Array  # f32[B, N, 1, pairs]
    query_factor: Array | None  # f32[B, N, 1, 1]; None: 1


def rotation_at(positions: Array, rope: Rope | None, head_dim: int) -> Rotation | None:
    """Return the rotation at positions i32[B, N]; None if a layer has no rotary embedding."""
    if rope is None:
        return None
    query_factor = None
    if rope.query_growth:
        # Attention temperature of Ministral 3 (`llama_4_scaling_beta`): queries grow at each multiple of the trained
        # length, so that attention stays sharp in long texts.
        lengths = (positions // rope.original_max_positions).astype(jnp.float32)
        query_factor = (1 + rope.query_growth * jnp.log1p(lengths))[:, :, None, None]
    return Rotation(*angles(positions, rope, head_dim), query_factor)


def rotate(x: Array, cos: Array, sin: Array, interleaved: bool = False) -> Array:
    """Rotate the first dimensions of x [B, N, heads, head_dim]; cos and sin determine how many.

    Dimension i is paired with i + half, as in most checkpoints. With `interleaved`, neighbours are pairs. Their results
    are in the order of the first form: a product of queries and keys does not depend on the order.
    """
    x_float, unrotated = x.astype(jnp.float32), []
    if (rotated := 2 * cos.shape[-1]) < x.shape[-1]:
        x_float, *unrotated = jnp.split(x_float, [rotated], axis=-1)
    if interleaved:
        a, b = x_float[..., ::2], x_float[..., 1::2]
    else:
        a, b = jnp.split(x_float, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, *unrotated], axis=-1).astype(x.dtype)
