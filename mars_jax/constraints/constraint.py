"""Output constraints that do not depend on a model. Tested against `re` and `jsonschema`."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from mars_jax.constraints.automaton import FIRST, Automaton, automaton
from mars_jax.constraints.nodes import Either, text
from mars_jax.constraints.pattern import parse_pattern
from mars_jax.constraints.schema import parsed, schema_automaton, too_deep
from mars_jax.constraints.token_table import NO_TOKEN, TokenTable, token_table
from mars_jax.constraints.vocabulary import Vocabulary
from mars_jax.utils.errors import MarsError, check_type, short_repr
from mars_jax.utils.limits import JSON_BYTES
from mars_jax.utils.paths import read_text
from mars_jax.utils.types import JsonObject


@dataclasses.dataclass(frozen=True)
class Constraint:
    """A hashable constraint on a completion, created by `regex`, `json_schema`, `choice` or `tokens`."""

    kind: str
    content: Any  # a string, a tuple of strings or a tuple of token ids, depending on `kind`
    compact: bool = False
    # True if lossy rules may relax constrained tokens. Not compared, because a constraint's tables do not depend on it.
    relax: bool = dataclasses.field(default=False, compare=False)

    def relaxed(self) -> Constraint:
        """Return a copy that lets lossy rules relax constrained tokens. The output still satisfies the constraint."""
        return dataclasses.replace(self, relax=True)

    @property
    def automaton(self) -> Automaton:
        """The automaton over the bytes of a completion. Constraints of the kind `tokens` have no automaton.

        Raises:
          MarsError: the constraint is invalid, as described for the function that creates it, or its kind is `tokens`.
        """
        return _automaton(self)

    def table(self, vocabulary: Vocabulary) -> TokenTable:
        """Compile the constraint to a table for a vocabulary.

        Raises:
          MarsError: the tokens of the vocabulary cannot spell any text that the constraint allows, or the table would
            be too large.
        """
        return _table(self, vocabulary)

    def as_json(self) -> JsonObject:
        """Return the constraint as JSON for reports, under the key that prompts files use."""
        content = self.content
        if self.kind == "json_schema":
            content = json.loads(content)
        elif isinstance(content, tuple):
            content = list(content)
        return {self.kind: content}


@functools.lru_cache(maxsize=64)
def _automaton(constraint: Constraint) -> Automaton:
    kind, content = constraint.kind, constraint.content
    if kind == "regex":
        return automaton(parse_pattern(content))
    if kind == "json_schema":
        return schema_automaton(json.loads(content), compact=constraint.compact)
    if kind == "choice":
        return automaton(Either(tuple(map(text, content))))
    raise MarsError("a constraint on tokens has no automaton over bytes: use its table.")


@functools.lru_cache(maxsize=64)
def _table(constraint: Constraint, vocabulary: Vocabulary) -> TokenTable:
    if constraint.kind == "tokens":
        return _allow_list(constraint.content, len(vocabulary.tokens))
    return token_table(constraint.automaton, vocabulary)


def _allow_list(ids: tuple[int, ...], size: int) -> TokenTable:
    bad_ids = [i for i in ids if i >= size]
    if bad_ids:
        raise MarsError(f"the constraint allows the token {bad_ids[0]}, and there are {size}: leave it out.")
    token_classes = np.zeros(size, np.uint16)
    token_classes[list(ids)] = 1
    # State 0 is dead. State 1 is accepting, and the allowed tokens (class 1) lead back to it.
    return TokenTable(
        next=np.asarray([[0, 0], [0, FIRST]], np.uint16),
        classes=token_classes,
        accepting=np.asarray([False, True]),
        forced=np.full(2, NO_TOKEN, np.int32),
        strict=np.zeros(2, bool),
    )


def _checked(constraint: Constraint) -> Constraint:
    """Return the constraint after building its automaton, so that errors are raised when a constraint is created."""
    constraint.automaton  # noqa: B018
    return constraint


def regex(pattern: str) -> Constraint:
    """Return a constraint that allows only completions that fully match a regular expression, as in `re.fullmatch`.

    Args:
      pattern: pattern in the syntax of Python's `re`. It must not contain look-around, back-references or inner
        anchors.

    Raises:
      MarsError: the pattern is not a regular expression, contains an unsupported construct, or needs an automaton that
        is too large.

    >>> regex(r"[0-9]{4}-[0-9]{2}").automaton.matches("2026-11")
    True
    """
    check_type("the pattern", pattern, str, "a string")
    return _checked(Constraint("regex", pattern))


def json_schema(
    schema: Mapping[str, object] | str | os.PathLike[str], *, compact: bool = False
) -> Constraint:
    """Return a constraint that allows only values that match a JSON schema, formatted as `json.dumps` writes them.

    Args:
      schema: the schema as an object, as JSON, or as the path of a JSON file. Properties are written in the schema's
        order.
      compact: if True, spaces after commas and colons are not allowed.

    Raises:
      MarsError: the argument is not a schema, or the schema contains a keyword that an automaton cannot enforce.

    >>> json_schema({"enum": [1, "a"]}).automaton.matches('"a"')
    True
    """
    is_text = isinstance(schema, str | os.PathLike)
    schema_text = os.fspath(schema) if is_text else _written(schema)
    # The JSON of a schema is `true` or begins with a brace. Every other string is a path.
    if is_text and not schema_text.lstrip().startswith("{") and schema_text.strip() != "true":
        try:
            schema_text = read_text(schema_text, JSON_BYTES)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8"
            raise MarsError(
                f"the schema '{schema_text}' cannot be read ({reason}): give a file that holds JSON."
            ) from None
    schema_value = parsed(schema_text)
    if not isinstance(schema_value, dict) and schema_value is not True:
        raise MarsError(f"the schema is {short_repr(schema_value)}: expected a JSON object.")
    return _checked(Constraint("json_schema", _written(schema_value), compact))


def _written(schema: object) -> str:
    try:
        return json.dumps(schema, allow_nan=False)
    # JSON cannot represent the object or a number in it, such as NaN.
    except (TypeError, ValueError) as error:
        raise MarsError(f"the schema cannot be written as JSON ({error}): correct it.") from None
    except RecursionError:
        raise too_deep() from None


def _listed(values: Iterable[Any]) -> tuple[Any, ...]:
    """Return the entries of an iterable, or () for any other value, such as an array without dimensions."""
    try:
        return tuple(values)
    except TypeError:
        return ()


def choice(texts: Iterable[str]) -> Constraint:
    """Return a constraint that allows only these strings.

    Raises:
      MarsError: there are no strings or too many, or a string is empty or not valid Unicode.

    >>> choice(["yes", "no"]).automaton.matches("no")
    True
    """
    choices = _listed(texts)
    if isinstance(texts, str) or not choices or not all(isinstance(item, str) and item for item in choices):
        raise MarsError(f"the choice is {short_repr(texts)}: expected a list of non-empty texts.")
    return _checked(Constraint("choice", tuple(dict.fromkeys(choices))))


def tokens(ids: Iterable[int]) -> Constraint:
    """Return a constraint that allows only these tokens, any number of times. Stop tokens end the completion as usual.

    Raises:
      MarsError: there are no tokens, or an entry is not a token id.

    >>> tokens([5, 7]).content
    (5, 7)
    """
    listed_ids = _listed(ids)
    if (
        isinstance(ids, bytes | Mapping)
        or not listed_ids
        or not all(isinstance(i, int | np.integer) and not isinstance(i, bool) and i >= 0 for i in listed_ids)
    ):
        raise MarsError(f"the tokens are {short_repr(ids)}: expected token ids, whole numbers of at least 0.")
    return Constraint("tokens", tuple(sorted({int(i) for i in listed_ids})))


_FACTORIES: dict[str, Callable[[Any], Constraint]] = {
    "regex": regex,
    "json_schema": json_schema,
    "choice": choice,
    "tokens": tokens,
}
KINDS = tuple(_FACTORIES)


def from_fields(fields: Mapping[str, object]) -> Constraint | None:
    """Return the constraint that the fields of a request define, or None. At most one field may be in `KINDS`.

    Raises:
      MarsError: the fields define two constraints, or an invalid constraint.

    >>> from_fields({"regex": "a+"}).kind, from_fields({})
    ('regex', None)
    """
    check_type("the constraints", fields, Mapping, "values by name")
    kinds = [kind for kind in KINDS if fields.get(kind) is not None]
    if len(kinds) > 1:
        raise MarsError(
            f"{kinds[0]} and {kinds[1]} are both given: a completion has only one, so remove one."
        )
    return next((_FACTORIES[kind](fields[kind]) for kind in kinds), None)
