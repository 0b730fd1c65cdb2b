"""Hugging Face checkpoints <-> `Pretrained`, heads <-> (config, params)."""

from typing import TYPE_CHECKING

from mars_jax.hub.conversion import convert
from mars_jax.hub.files import is_here
from mars_jax.hub.heads.eagle_files import load_eagle, save_eagle
from mars_jax.hub.load import load, outline, read_config
from mars_jax.hub.save import save

if TYPE_CHECKING:
    from mars_jax.hub.states import restore_state, save_state

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


if not TYPE_CHECKING:  # a type checker would take any name for one of these

    def __getattr__(name: str):
        # Orbax loads with the first state, and not with the first checkpoint of weights.
        if name in ("restore_state", "save_state"):
            from mars_jax.hub import states

            return getattr(states, name)
        raise AttributeError(f"module 'mars_jax.hub' has no attribute '{name}'")
