"""Constraints on a completion: patterns, JSON schemas, choices, allow lists; and spans that limit relaxation.

A constraint does not depend on a model. `compiled` compiles constraints for a vocabulary into tables, which the step
reads on the device; see `core.guide`. `spans` define the parts of a completion that a lossy rule may relax.

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
    from mars_jax.core.types import GuideRows, GuideTables

__all__ = [
    "KINDS",
    "Constraint",
    "GuideRows",
    "GuideTables",
    "Vocabulary",
    "choice",
    "compiled",
    "from_fields",
    "json_schema",
    "regex",
    "tokens",
    "vocabulary",
]

# Imported on first access, because their modules import jax, which checking a flag does not need.
_HOME = {"GuideRows": "core.types", "GuideTables": "core.types", "compiled": "constraints.batch_tables"}

if not TYPE_CHECKING:  # with a module `__getattr__` a type checker accepts any name

    def __getattr__(name: str):
        if name not in _HOME:
            raise AttributeError(f"module 'mars_jax.constraints' has no attribute '{name}'")
        return getattr(importlib.import_module(f"mars_jax.{_HOME[name]}"), name)
