"""The stop-token test that guards relaxation."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from mars_jax.core.types import Controls


def is_stop(tokens: Array, controls: Controls) -> Array:
    """bool[B, ...]: tokens i32[B, ...] among the row's stop tokens; NO_TOKEN never is."""
    stops = controls.stop_tokens.reshape(tokens.shape[:1] + (1,) * (tokens.ndim - 1) + (-1,))
    return jnp.any(tokens[..., None] == stops, axis=-1) & (tokens >= 0)
