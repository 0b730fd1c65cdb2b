"""The lowered text of a kernel operation."""

from __future__ import annotations

import jax
import jax.numpy as jnp

LOGITS = jax.ShapeDtypeStruct((8, 8, 128256), jnp.float32)


def lowered(function, *arguments, platform):
    return jax.jit(function).trace(*arguments).lower(lowering_platforms=(platform,)).as_text()
