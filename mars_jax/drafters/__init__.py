"""Factories of drafters. A `Drafter` is a NamedTuple of pure functions; `load` makes one from its spec."""

from mars_jax.core.drafter import DraftInput
from mars_jax.core.tree import chain, last_token
from mars_jax.drafters.asked import LoadedDrafter
from mars_jax.drafters.by_name import AnyDrafter, load, loaded
from mars_jax.drafters.eagle import eagle
from mars_jax.drafters.model import language_model
from mars_jax.drafters.ngram import ngram
from mars_jax.drafters.none import none
from mars_jax.drafters.sized import SizedParams, sized
from mars_jax.drafters.tree_shapes import Dynamic

__all__ = [
    "AnyDrafter",
    "DraftInput",
    "Dynamic",
    "LoadedDrafter",
    "SizedParams",
    "chain",
    "eagle",
    "language_model",
    "last_token",
    "load",
    "loaded",
    "ngram",
    "none",
    "sized",
]
