"""Decoder-only transformers, defined by a static config, a table of weights and pure functions."""

from mars_jax.models.config import ModelConfig, Rope
from mars_jax.models.transformer import init_params, language_model

__all__ = ["ModelConfig", "Rope", "init_params", "language_model"]
