"""Strict JAX semantics for the whole suite: no silent dtype or rank promotion."""

import os

# Eight CPU devices let sharding tests run anywhere; set before JAX starts its backend.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
