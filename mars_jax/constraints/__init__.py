"""Constraints on completions (patterns, JSON schemas, choices, allowed tokens), and spans that limit relaxation.

A constraint does not depend on a model. For a given vocabulary, `compiled` compiles constraints to tables, which the
decoding step reads on the device; see `core.guide`. The module `spans` defines the parts of a completion in which a
lossy rule may relax verification.

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

# These names are imported when they are first used, because their modules import jax, which is not needed to check
# flags.
_HOME = {"GuideRows": "core.types", "GuideTables": "core.types", "compiled": "constraints.batch_tables"}

if not TYPE_CHECKING:  # with `__getattr__`, a type checker would accept any name

    def __getattr__(name: str):
        if name not in _HOME:
            raise AttributeError(f"module 'mars_jax.constraints' has no attribute '{name}'")
        return getattr(importlib.import_module(f"mars_jax.{_HOME[name]}"), name)
