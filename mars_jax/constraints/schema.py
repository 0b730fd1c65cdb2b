"""JSON schemas as nodes, which match the output of `json.dumps` for the values that a schema allows.

Source: JSON Schema 2020-12, and keywords of earlier drafts with the same meaning. Oracle: the `jsonschema` package
(tests/constraints/test_schema.py).

The automaton is stricter than the schema if that helps a model: it allows one form of white space, properties only in
the schema's order, and no properties that the schema does not list. An unknown keyword, or an unsupported combination
of keywords, raises an error and is never ignored.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from mars_jax.constraints.automaton import Automaton, automaton
from mars_jax.constraints.json_text import (
    BOOLEAN,
    FORMATS,
    NULL,
    NUMBER,
    POSITIVE_NUMBER,
    in_string,
    integers,
    string,
)
from mars_jax.constraints.nodes import (
    Either,
    Node,
    Repeat,
    WorkBudget,
    optional,
    sequence,
    text,
)
from mars_jax.constraints.pattern import parse_pattern
from mars_jax.utils.errors import MarsError, short_repr

DEEPEST = 24
"""Maximum depth of nested schemas. A recursive schema exceeds every limit."""
MOST_NESTED = 100
"""Maximum depth of nested lists and objects in a schema's JSON; Python can parse a few hundred levels."""
MOST_DIGITS = 100
"""Maximum digits of an integer's bounds; the number of nodes is quadratic in the number of digits."""
ANY_DEPTH = 2
"""Maximum depth of nested objects and arrays in a value that the schema does not describe."""

_NOTES = {
    "title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly",
    "$schema", "$id", "$comment", "$defs", "definitions", "$anchor",
}  # fmt: skip
_OF_TYPE = {
    "object": {"properties", "required", "additionalProperties"},
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "string": {"minLength", "maxLength", "pattern", "format"},
    "integer": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"},
    "boolean": set(),
    "null": set(),
}
_KNOWN = {"$ref", "allOf", "anyOf", "const", "enum", "type"}.union(*_OF_TYPE.values())
_PAIRS = (("properties", "additionalProperties"), ("prefixItems", "items"))
"""Pairs of keywords that change each other's meaning."""
_PYTHON_TYPES = {
    "object": dict, "array": list, "string": str, "integer": int, "number": (int, float), "boolean": bool,
    "null": type(None),
}  # fmt: skip


def _types(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _is_type(value: Any) -> bool:
    return value != [] and all(isinstance(kind, str) and kind in _OF_TYPE for kind in _types(value))


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _is_count(value: Any) -> bool:
    return value is None or (type(value) is int and value >= 0)


_VALUES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "$ref": (
        lambda value: isinstance(value, str) and value.startswith("#"),
        "one within the schema, such as #/$defs/name",
    ),
    "type": (_is_type, f"one of {', '.join(sorted(_OF_TYPE))}, or a list of them"),
    "enum": (lambda value: _is_list(value) and value != [], "a list of values"),
    "properties": (lambda value: value is None or isinstance(value, Mapping), "an object of schemas"),
    "required": (_is_list, "a list of names"),
    "prefixItems": (_is_list, "a list of schemas"),
    "pattern": (lambda value: isinstance(value, str), "a text"),
    "format": (
        lambda value: isinstance(value, str) and value in FORMATS,
        f"one of {', '.join(FORMATS)}, or a pattern",
    ),
}
for _name in ("anyOf", "allOf"):
    _VALUES[_name] = (lambda value: _is_list(value) and value != [], "a list of schemas")
for _name in ("minItems", "maxItems", "minLength", "maxLength"):
    _VALUES[_name] = (_is_count, "a whole number of at least 0")
"""Checks of keyword values, and the expected values for messages."""


def parsed(said: str) -> Any:
    """Parse the JSON of a schema.

    Raises:
      MarsError: not JSON, or nested too deeply to be processed recursively.

    >>> parsed('{"type": "null"}')
    {'type': 'null'}
    """
    try:
        value = json.loads(said)
    except ValueError as error:
        raise MarsError(f"the schema is not JSON ({error}): correct it.") from None
    except RecursionError:
        raise too_deep() from None
    level = [value]
    for _ in range(MOST_NESTED):
        level = [
            inner
            for container in level
            if isinstance(container, dict | list)
            for inner in (container.values() if isinstance(container, dict) else container)
        ]
        if not level:
            return value
    raise too_deep()


def too_deep() -> MarsError:
    """Return the error for JSON that is nested too deeply."""
    return MarsError(f"the schema has lists and objects more than {MOST_NESTED} deep: write it flatter.")


def schema_automaton(schema: Any, *, compact: bool = False) -> Automaton:
    """Return the automaton for a schema.

    Args:
      schema: a schema from `parsed`.
      compact: no spaces after commas and colons, as in `json.dumps(..., separators=(",", ":"))`.

    Raises:
      MarsError: a part of the schema is invalid or cannot be enforced; the message gives the location.

    >>> made = schema_automaton({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]})
    >>> made.matches('{"n": 12}'), made.matches("{}")
    (True, False)
    """
    return automaton(_Writer(schema, compact).value(schema, "#", 0))


class _Writer:
    def __init__(self, root: Any, compact: bool):
        self._root = root
        self._separators = (",", ":") if compact else (", ", ": ")
        self._comma, self._colon = map(text, self._separators)
        self._budget = WorkBudget()
        self._any = [self._anything(depth) for depth in range(ANY_DEPTH + 1)]

    def value(self, schema: Any, where: str, depth: int) -> Node:
        if depth > DEEPEST:
            raise MarsError(
                f"the schema is deeper than {DEEPEST} at {where}, or refers to itself: write it out to the depth "
                "that is wanted."
            )
        keywords = _keywords(schema, where)
        self._budget.spend(
            1 + sum(len(content) for content in keywords.values() if isinstance(content, dict | list))
        )
        _only(keywords, _KNOWN, "", where)
        if not keywords:
            return self._any[ANY_DEPTH]
        for name in ("$ref", "allOf", "anyOf"):
            if name in keywords:
                meant = self._meant(name, keywords.pop(name), where)
                return Either(
                    tuple(
                        self.value(_both(keywords, content, location), location, depth + 1)
                        for location, content in meant
                    )
                )
        if "const" in keywords or "enum" in keywords:
            return self._one_of(keywords, where)
        kinds = _types(keywords.pop("type")) if "type" in keywords else [_type_of(keywords, where)]
        allowed_names = set().union(*(_OF_TYPE[kind] for kind in kinds))
        _only(keywords, allowed_names, f" beside the type {' or '.join(kinds)}", where)
        parts = []
        for kind in kinds:
            write: Callable[[dict, str, int], Node] = getattr(self, f"_{kind}")
            type_keywords = {name: content for name, content in keywords.items() if name in _OF_TYPE[kind]}
            parts.append(write(type_keywords, where, depth))
        return parts[0] if len(parts) == 1 else Either(tuple(parts))

    def _meant(self, name: str, value: Any, where: str) -> list[tuple[str, Any]]:
        """Return the alternatives of a keyword as (location, schema) pairs."""
        if name == "$ref":
            self._budget.spend(len(value))
            return [(_part(value), self._found(value, where))]
        if name == "allOf" and len(value) > 1:
            raise MarsError(f"the allOf at {where} has {len(value):,} schemas: write them as one.")
        return [(f"{where}/{name}/{i}", subschema) for i, subschema in enumerate(value)]

    def _found(self, reference: str, where: str) -> Any:
        target = self._root
        for part in filter(None, reference[1:].split("/")):
            part = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(target, Mapping) or part not in target:
                raise MarsError(
                    f"the $ref at {where} is {short_repr(reference)}, and there is no such schema: correct it."
                )
            target = target[part]
        return target

    def _one_of(self, given: dict, where: str) -> Node:
        """Return the node for listed values: those that const, enum and type all allow."""
        named = " and ".join(name for name in ("const", "enum") if name in given)
        _only(given, {"const", "enum", "type"}, f" beside {named}", where)
        values = given.get("enum", [given.get("const")])
        if "const" in given:
            const_json = json.dumps(given["const"], sort_keys=True)
            values = [value for value in values if json.dumps(value, sort_keys=True) == const_json]
        if "type" in given:
            values = [value for value in values if any(_is(value, kind) for kind in _types(given["type"]))]
        if not values:
            raise MarsError(f"no value at {where} is of {' and '.join(given)} at once: correct one of them.")
        return Either(tuple(map(self._literal, values)))

    def _literal(self, value: Any) -> Node:
        literal_json = json.dumps(value, ensure_ascii=False, separators=self._separators)
        self._budget.spend(len(literal_json))
        return text(literal_json)

    def _boolean(self, given: dict, where: str, depth: int) -> Node:
        return BOOLEAN

    def _null(self, given: dict, where: str, depth: int) -> Node:
        return NULL

    def _string(self, given: dict, where: str, depth: int) -> Node:
        if "pattern" not in given and "format" not in given:
            return string(*_least_and_most(given, "Length", where))
        if len(given) > 1:
            raise MarsError(
                f"the string at {where} has {' and '.join(sorted(given))}: give one of them, since a text cannot "
                "be held to both."
            )
        pattern = given["pattern"] if "pattern" in given else FORMATS[given["format"]]
        return sequence(text('"'), in_string(parse_pattern(pattern, self._budget)), text('"'))

    def _integer(self, given: dict, where: str, depth: int) -> Node:
        for name, bound in given.items():
            if type(bound) is not int or abs(bound) >= 10**MOST_DIGITS:
                raise _unexpected(name, bound, where, f"a whole number of at most {MOST_DIGITS} digits")
        lows = [given[name] + i for i, name in enumerate(("minimum", "exclusiveMinimum")) if name in given]
        highs = [given[name] - i for i, name in enumerate(("maximum", "exclusiveMaximum")) if name in given]
        low, high = max(lows, default=None), min(highs, default=None)
        if low is not None and high is not None and low > high:
            raise MarsError(f"the integer at {where} is from {low} to {high}: correct the bounds.")
        self._budget.spend(sum(len(str(bound)) ** 2 for bound in (low, high) if bound is not None))
        return integers(low, high)

    def _number(self, given: dict, where: str, depth: int) -> Node:
        if given not in ({}, {"minimum": 0}):
            raise MarsError(
                f"the number at {where} has {' and '.join(given)}: only a minimum of 0 can be held to; bound an "
                "integer, or leave them out."
            )
        return POSITIVE_NUMBER if given else NUMBER

    def _array(self, given: dict, where: str, depth: int) -> Node:
        least, maximum = _least_and_most(given, "Items", where)
        named = given.get("prefixItems", [])
        items = given.get("items", not named)
        first = [
            self.value(prefix_schema, f"{where}/prefixItems/{i}", depth + 1)
            for i, prefix_schema in enumerate(named[:maximum])
        ]
        if items is False or maximum == len(first):
            if least > len(first):
                raise MarsError(
                    f"minItems at {where} is {least}, and prefixItems and items describe {len(first)}: describe all."
                )
            return sequence(text("["), *self._separated(first), text("]"))
        item = self.value(items, f"{where}/items", depth + 1)
        begun = first or [item]
        maximum = None if maximum is None else maximum - len(begun)
        further = Repeat(self._after_comma(item), max(least - len(begun), 0), maximum)
        inside = sequence(*self._separated(begun), further)
        return sequence(text("["), inside if first or least else optional(inside), text("]"))

    def _object(self, given: dict, where: str, depth: int) -> Node:
        properties, required = given.get("properties"), given.get("required", [])
        for name in required:
            if not isinstance(name, str) or name not in (properties or ()):
                raise MarsError(
                    f"the object at {where} requires {short_repr(name)}, which no property describes: add it to "
                    "properties, or leave it out."
                )
        if not properties:
            further = given.get("additionalProperties", properties is None)
            if further is False:
                return text("{}")
            if further in (None, True):
                return self._map(self._any[ANY_DEPTH - 1])
            return self._map(self.value(further, f"{where}/additionalProperties", depth + 1))
        needed = set(required)
        pairs = []
        for name, property_schema in properties.items():
            value = self.value(property_schema, f"{where}/{_part(name)}", depth + 1)
            pairs.append((sequence(self._literal(name), self._colon, value), name in needed))
        inside = self._members(pairs)
        return sequence(text("{"), inside if needed else optional(inside), text("}"))

    def _members(self, pairs: list[tuple[Node, bool]]) -> Node:
        """Return the node for one or more of an object's members, in order and separated by commas.

        The first member that is present is in the first or in the second half. Splitting by halves needs n log n nodes
        for n members.
        """
        if len(pairs) == 1:
            return pairs[0][0]
        first, second = pairs[: len(pairs) // 2], pairs[len(pairs) // 2 :]
        later_members = [(self._after_comma(pair), needed) for pair, needed in second]
        begun = sequence(
            self._members(first),
            *(member if needed else optional(member) for member, needed in later_members),
        )
        if any(needed for _, needed in first):
            return begun
        return Either((begun, self._members(second)))

    def _map(self, value: Node) -> Node:
        pair = sequence(string(), self._colon, value)
        return sequence(text("{"), optional(self._some(pair)), text("}"))

    def _anything(self, depth: int) -> Node:
        """Return the node for any value, with objects and arrays nested up to `depth`."""
        simple = [string(), NUMBER, BOOLEAN, NULL]
        if depth:
            inner = self._anything(depth - 1)
            simple += [sequence(text("["), optional(self._some(inner)), text("]")), self._map(inner)]
        return Either(tuple(simple))

    def _some(self, part: Node) -> Node:
        """Return the node for one or more parts separated by commas."""
        return sequence(part, Repeat(self._after_comma(part), 0, None))

    def _separated(self, parts: list[Node]) -> list[Node]:
        return [*parts[:1], *map(self._after_comma, parts[1:])]

    def _after_comma(self, part: Node) -> Node:
        return sequence(self._comma, part)


def _keywords(schema: Any, where: str) -> dict[str, Any]:
    """Return the keywords of a schema that constrain a value, after checking their values."""
    if schema is True:
        return {}
    if not isinstance(schema, Mapping):
        raise MarsError(f"the schema at {where} is {short_repr(schema)}: expected an object.")
    keywords = {name: content for name, content in schema.items() if name not in _NOTES}
    for name in keywords.keys() & _VALUES.keys():
        holds, expected = _VALUES[name]
        if not holds(keywords[name]):
            raise _unexpected(name, keywords[name], where, expected)
    return keywords


def _unexpected(name: str, value: Any, where: str, expected: str) -> MarsError:
    return MarsError(f"{name} at {where} is {short_repr(value)}: expected {expected}.")


def _both(beside: dict[str, Any], schema: Any, where: str) -> dict[str, Any]:
    """Merge a schema with the keywords next to its reference or list (`beside`): values must satisfy both."""
    keywords = _keywords(schema, where)
    for key, partner in [(name, name) for name in keywords] + [*_PAIRS, *((b, a) for a, b in _PAIRS)]:
        if key in keywords and partner in beside and key != "type":
            raise MarsError(
                f"the schema at {where} has {key!r} beside {partner!r} of the schema around it: write them as one."
            )
    if "type" in keywords and "type" in beside:
        kinds, outer = _types(keywords["type"]), _types(beside["type"])
        both = [kind for kind in _OF_TYPE if _within(kind, kinds) and _within(kind, outer)]
        if not both:
            raise MarsError(
                f"the schema at {where} has the type {' or '.join(kinds)} beside the type {' or '.join(outer)} of "
                "the schema around it, and no value is of both: correct one of them."
            )
        keywords["type"] = both
    return {**beside, **keywords}


def _within(kind: str, kinds: list[str]) -> bool:
    return kind in kinds or (kind == "integer" and "number" in kinds)


def _only(given: Mapping[str, Any], known: set[str], beside: str, where: str) -> None:
    for name in given:
        if name not in known:
            raise MarsError(
                f"the schema at {where} has {short_repr(name)}, which cannot be held to{beside}: leave it out, or "
                "check it afterwards."
            )


def _type_of(given: Mapping[str, Any], where: str) -> str:
    """Infer the type of a schema without a type from its keywords."""
    kinds = [kind for kind, names in _OF_TYPE.items() if names & given.keys()]
    if len(kinds) != 1 and kinds != ["integer", "number"]:
        raise MarsError(f"the schema at {where} has {' and '.join(given)} and no type: give one.")
    return kinds[-1]


def _is(value: Any, kind: str) -> bool:
    """Return whether a value has a JSON Schema type: 1.0 is an integer, and true is not a number.

    >>> _is(1.0, "integer"), _is(True, "integer"), _is(1, "number")
    (True, False, True)
    """
    if isinstance(value, bool):
        return kind == "boolean"
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _PYTHON_TYPES[kind])


def _part(name: Any) -> str:
    """Return a name as part of a location in messages."""
    return name if isinstance(name, str) and len(name) <= 60 else short_repr(name)


def _least_and_most(given: Mapping[str, Any], what: str, where: str) -> tuple[int, int | None]:
    least, maximum = given.get(f"min{what}") or 0, given.get(f"max{what}")
    if maximum is not None and maximum < least:
        raise MarsError(f"max{what} at {where} is {maximum}, less than min{what}: correct it.")
    return least, maximum
