"""Kernel operations as functions to lower, and their lowered text."""

import functools

import jax
import jax.numpy as jnp

from kernels_pallas import AcceptControls, margin_accept, margin_stats

LOGITS = jax.ShapeDtypeStruct((8, 8, 128256), jnp.float32)


def lowered(function, *arguments, platform):
    return jax.jit(function).trace(*arguments).lower(lowering_platforms=(platform,)).as_text()


def acceptance(**options):
    """Return `margin_accept` and the shapes of its arguments."""
    i32, row = jax.ShapeDtypeStruct((8, 8), jnp.int32), jax.ShapeDtypeStruct((8,), jnp.int32)
    controls = AcceptControls(
        jax.ShapeDtypeStruct((8,), jnp.float32), jax.ShapeDtypeStruct((8,), bool), row, i32
    )
    return functools.partial(margin_accept, max_depth=7, **options), (LOGITS, i32, i32, None, controls)


def statistics(dtype=jnp.float32, **options):
    """Return `margin_stats` and the shape of its argument."""
    return functools.partial(margin_stats, **options), (jax.ShapeDtypeStruct(LOGITS.shape, dtype),)
