"""Hugging Face checkpoints <-> (LanguageModel, params)."""

from mars_jax.hub.load import Checkpoint, load, read_config
from mars_jax.hub.save import save

__all__ = ["Checkpoint", "load", "read_config", "save"]
