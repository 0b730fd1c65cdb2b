"""Loading and saving of checkpoints as `Pretrained`, and of heads as (config, params)."""

from mars_jax.hub.conversion import convert
from mars_jax.hub.files import is_here
from mars_jax.hub.heads.eagle_files import load_eagle, save_eagle
from mars_jax.hub.load import load, outline, read_config
from mars_jax.hub.save import restore_state, save, save_state

__all__ = [
    "convert",
    "is_here",
    "load",
    "load_eagle",
    "outline",
    "read_config",
    "restore_state",
    "save",
    "save_eagle",
    "save_state",
]
