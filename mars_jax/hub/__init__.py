"""Hugging Face checkpoints <-> (LanguageModel, params), and EAGLE heads <-> (EagleConfig, params)."""

from mars_jax.hub.conversion import convert
from mars_jax.hub.heads.eagle_files import load_eagle, save_eagle
from mars_jax.hub.load import Checkpoint, load, read_config
from mars_jax.hub.save import save

__all__ = ["Checkpoint", "convert", "load", "load_eagle", "read_config", "save", "save_eagle"]
