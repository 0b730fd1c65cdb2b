"""Hugging Face checkpoints <-> (LanguageModel, params), EAGLE and Medusa heads <-> (their config, params)."""

from mars_jax.hub.heads import load_eagle, save_eagle
from mars_jax.hub.load import Checkpoint, load, read_config
from mars_jax.hub.medusa import load_medusa, save_medusa
from mars_jax.hub.save import save

__all__ = [
    "Checkpoint",
    "load",
    "load_eagle",
    "load_medusa",
    "read_config",
    "save",
    "save_eagle",
    "save_medusa",
]
