"""Drafters, which propose draft tokens for the target to verify.

A `Drafter` consists of pure functions and contains no weights. `load` builds a drafter and its weights from a spec such
as `eagle:PATH`.
"""

from mars_jax.core.drafter import DraftInput
from mars_jax.core.tree import chain, last_token
from mars_jax.drafters.asked import LoadedDrafter
from mars_jax.drafters.by_name import AnyDrafter, load, loaded
from mars_jax.drafters.eagle import eagle
from mars_jax.drafters.model import language_model
from mars_jax.drafters.mtp import mtp
from mars_jax.drafters.ngram import ngram
from mars_jax.drafters.none import none
from mars_jax.drafters.registry import (
    HEAD_EMBED,
    DraftDefinition,
    DraftSpec,
    definition,
    definitions,
    draft_words,
    drafters_that,
    names_that,
    parse_draft,
    register,
)
from mars_jax.drafters.sized import SizedParams, sized
from mars_jax.drafters.tree_shapes import Dynamic, parse_tree

__all__ = [
    "HEAD_EMBED",
    "AnyDrafter",
    "DraftDefinition",
    "DraftInput",
    "DraftSpec",
    "Dynamic",
    "LoadedDrafter",
    "SizedParams",
    "chain",
    "definition",
    "definitions",
    "draft_words",
    "drafters_that",
    "eagle",
    "language_model",
    "last_token",
    "load",
    "loaded",
    "mtp",
    "names_that",
    "ngram",
    "none",
    "parse_draft",
    "parse_tree",
    "register",
    "sized",
]
