"""Constraints on a text: patterns, JSON schemas, choices, allow lists; and spans in which rules may relax.

A constraint is a value without a model. `compiled` makes the tables of some of them for a vocabulary, which the step
reads on the device; see `core.guide`. `spans` are where in a text a lossy rule may relax.

>>> from mars_jax import constraints
>>> constraints.regex(r"-?[0-9]+").automaton.matches("-12")
True
"""

from mars_jax.constraints.constraint import KINDS, Constraint, choice, from_fields, json_schema, regex, tokens
from mars_jax.constraints.vocabulary import Vocabulary, vocabulary

__all__ = [
    "KINDS",
    "Constraint",
    "Vocabulary",
    "choice",
    "from_fields",
    "json_schema",
    "regex",
    "tokens",
    "vocabulary",
]
