"""Decoder-only transformers: one static config, one table of weights, pure functions."""

from mars_jax.models.config import ModelConfig, Rope
from mars_jax.models.transformer import init_params, language_model

__all__ = ["ModelConfig", "Rope", "init_params", "language_model"]
