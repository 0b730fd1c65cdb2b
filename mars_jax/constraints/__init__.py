"""Constraints on a text: patterns, JSON schemas, choices, allow lists; and spans in which rules may relax.

A constraint is a value without a model. `compiled` makes the tables of some of them for a vocabulary, which the step
reads on the device; see `core.guide`. `spans` are where in a text a lossy rule may relax.

>>> from mars_jax import constraints
>>> constraints.regex(r"-?[0-9]+").automaton.matches("-12")
True
"""

import importlib
from typing import TYPE_CHECKING

from mars_jax.constraints.constraint import KINDS, Constraint, choice, from_fields, json_schema, regex, tokens
from mars_jax.constraints.vocabulary import Vocabulary, vocabulary

if TYPE_CHECKING:
    from mars_jax.constraints.batch_tables import compiled
    from mars_jax.core.types import Guides

__all__ = [
    "KINDS",
    "Constraint",
    "Guides",
    "Vocabulary",
    "choice",
    "compiled",
    "from_fields",
    "json_schema",
    "regex",
    "tokens",
    "vocabulary",
]

# Their modules import jax, which a flag that is checked does without.
_HOME = {"Guides": "core.types", "compiled": "constraints.batch_tables"}

if not TYPE_CHECKING:  # a type checker would take any name for one of these

    def __getattr__(name: str):
        if name not in _HOME:
            raise AttributeError(f"module 'mars_jax.constraints' has no attribute '{name}'")
        return getattr(importlib.import_module(f"mars_jax.{_HOME[name]}"), name)
