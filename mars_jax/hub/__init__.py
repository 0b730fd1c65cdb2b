"""Hugging Face checkpoints <-> `Pretrained`, and EAGLE heads <-> (EagleConfig, params)."""

from mars_jax.hub.conversion import convert
from mars_jax.hub.heads.eagle_files import load_eagle, save_eagle
from mars_jax.hub.load import load, outline, read_config
from mars_jax.hub.save import save

__all__ = ["convert", "load", "load_eagle", "outline", "read_config", "save", "save_eagle"]
