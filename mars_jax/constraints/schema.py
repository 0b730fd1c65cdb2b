"""Conversion of JSON schemas to automata, which accept JSON in the format of `json.dumps`.

Source: JSON Schema 2020-12, and keywords of earlier drafts with the same meaning. Tested against the package
`jsonschema` (tests/constraints/test_schema.py).

The automaton is stricter than the schema, which helps a model: it allows only one way to place white space, requires
properties in the schema's order, and allows no properties that the schema does not list. Unknown keywords and
unsupported combinations of keywords raise an error and are never ignored.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from mars_jax.constraints import json_text
from mars_jax.constraints.automaton import Automaton, automaton
from mars_jax.constraints.nodes import Either, Node, Repeat, WorkBudget, optional, sequence, text
from mars_jax.constraints.pattern import parse_pattern
from mars_jax.utils.errors import MarsError, short_repr
from mars_jax.utils.types import JsonObject

DEEPEST = 24
"""Maximum depth of nested schemas. A recursive schema always exceeds this limit."""
MOST_NESTED = 100
"""Maximum depth of nested lists and objects in the JSON of a schema. Python can parse a few hundred levels."""
MOST_DIGITS = 100
"""Maximum number of digits in the bounds of an integer. The number of nodes is quadratic in the number of digits."""
ANY_DEPTH = 2
"""Maximum depth of nested objects and arrays in a value that may be any JSON value."""

_NOTES = {
    "title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly",
    "$schema", "$id", "$comment", "$defs", "definitions", "$anchor",
}  # fmt: skip
_LOWS, _HIGHS = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_OF_TYPE = {
    "object": {"properties", "required", "additionalProperties"},
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "string": {"minLength", "maxLength", "pattern", "format"},
    "integer": {*_LOWS, *_HIGHS},
    "number": {*_LOWS, *_HIGHS},
    "boolean": set(),
    "null": set(),
}
_KNOWN = {"$ref", "allOf", "anyOf", "const", "enum", "type"}.union(*_OF_TYPE.values())
_PAIRS = (("properties", "additionalProperties"), ("prefixItems", "items"))
"""Pairs of keywords whose meanings depend on each other."""
_PYTHON_TYPES = {
    "object": dict, "array": list, "string": str, "integer": int, "number": (int, float), "boolean": bool,
    "null": type(None),
}  # fmt: skip


def _types(value: Any) -> list[str]:
    return value if isinstance(value, list) else [value]


def _is_filled(value: object) -> bool:
    return isinstance(value, list) and len(value) > 0


_COUNT = (lambda value: value is None or (type(value) is int and value >= 0), "a whole number of at least 0")
_VALUES: dict[str, tuple[Callable[[object], bool], str]] = {
    "$ref": (
        lambda value: isinstance(value, str) and value.startswith("#"),
        "one within the schema, such as #/$defs/name",
    ),
    "type": (
        lambda value: (
            value != [] and all(isinstance(kind, str) and kind in _OF_TYPE for kind in _types(value))
        ),
        f"one of {', '.join(sorted(_OF_TYPE))}, or a list of them",
    ),
    "enum": (_is_filled, "a list of values"),
    "anyOf": (_is_filled, "a list of schemas"),
    "allOf": (_is_filled, "a list of schemas"),
    "properties": (lambda value: isinstance(value, Mapping | None), "an object of schemas"),
    "required": (lambda value: isinstance(value, list), "a list of names"),
    "prefixItems": (lambda value: isinstance(value, list), "a list of schemas"),
    "minItems": _COUNT,
    "maxItems": _COUNT,
    "minLength": _COUNT,
    "maxLength": _COUNT,
    "pattern": (lambda value: isinstance(value, str), "a string"),
    "format": (
        lambda value: isinstance(value, str) and value in json_text.FORMATS,
        f"one of {', '.join(json_text.FORMATS)}, or a pattern",
    ),
}
"""For each keyword, a function that checks its value, and a description of valid values for messages."""


def parsed(schema_text: str) -> Any:
    """Parse the JSON of a schema.

    Raises:
      MarsError: the text is not JSON, or is nested too deeply.

    >>> parsed('{"type": "null"}')
    {'type': 'null'}
    """
    try:
        schema_value = json.loads(schema_text)
    except ValueError as error:
        raise MarsError(f"the schema is not JSON ({error}): correct it.") from None
    except RecursionError:
        raise too_deep() from None
    # Count the levels with a loop, because recursion would fail for deep input.
    level_parts = [schema_value]
    for _ in range(MOST_NESTED):
        containers = [part for part in level_parts if isinstance(part, list)]
        containers += [part.values() for part in level_parts if isinstance(part, dict)]
        level_parts = [item for items in containers for item in items]
        if not level_parts:
            return schema_value
    raise too_deep()


def too_deep() -> MarsError:
    """Return the error for JSON that is nested too deeply."""
    return MarsError(f"the schema has lists and objects more than {MOST_NESTED} deep: write it flatter.")


def schema_automaton(schema: object, *, compact: bool = False) -> Automaton:
    """Compile a schema to an automaton over bytes.

    Args:
      schema: a schema, as returned by `parsed`.
      compact: if True, spaces after commas and colons are not allowed, as in `json.dumps(..., separators=(",", ":"))`.

    Raises:
      MarsError: a part of the schema is invalid or cannot be enforced. The message contains its location.

    >>> made = schema_automaton({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]})
    >>> made.matches('{"n": 12}'), made.matches("{}")
    (True, False)
    """
    return automaton(_Writer(schema, compact).value(schema, "#", 0))


class _Writer:
    def __init__(self, root: object, compact: bool):
        self._root = root
        self._separators = (",", ":") if compact else (", ", ": ")
        self._comma, self._colon = map(text, self._separators)
        self._budget = WorkBudget()
        self._any = [self._anything(depth) for depth in range(ANY_DEPTH + 1)]

    def value(self, schema: object, where: str, depth: int) -> Node:
        """Return the node for the values that a schema allows; `where` is its location for messages."""
        if depth > DEEPEST:
            raise MarsError(
                f"the schema is deeper than {DEEPEST} at {where}, or refers to itself: write it out to the "
                "required depth."
            )
        keywords = _keywords(schema, where)
        self._budget.spend(
            1 + sum(len(value) for value in keywords.values() if isinstance(value, dict | list))
        )
        _only(keywords, _KNOWN, "", where)
        if not keywords:
            return self._any[ANY_DEPTH]
        for name in ("$ref", "allOf", "anyOf"):
            if name in keywords:
                # The other keywords of the schema apply to every alternative.
                alternatives = self._alternatives(name, keywords.pop(name), where)
                return Either(
                    tuple(
                        self.value(_both(keywords, alternative, location), location, depth + 1)
                        for location, alternative in alternatives
                    )
                )
        if "const" in keywords or "enum" in keywords:
            return self._one_of(keywords, where)
        kinds = _types(keywords.pop("type", None) or _type_of(keywords, where))
        allowed_names = set().union(*(_OF_TYPE[kind] for kind in kinds))
        _only(keywords, allowed_names, f" next to the type {' or '.join(kinds)}", where)
        type_nodes = []
        for kind in kinds:
            write: Callable[[JsonObject, str, int], Node] = getattr(self, f"_{kind}")
            type_keywords = {name: content for name, content in keywords.items() if name in _OF_TYPE[kind]}
            type_nodes.append(write(type_keywords, where, depth))
        return type_nodes[0] if len(type_nodes) == 1 else Either(tuple(type_nodes))

    def _alternatives(self, name: str, value: Any, where: str) -> list[tuple[str, object]]:
        """Return the alternatives of a keyword as (location, schema) pairs."""
        if name == "$ref":
            self._budget.spend(len(value))
            return [(_part(value), self._referenced(value, where))]
        if name == "allOf" and len(value) > 1:
            raise MarsError(f"the allOf at {where} has {len(value):,} schemas: write them as one.")
        return [(f"{where}/{name}/{i}", subschema) for i, subschema in enumerate(value)]

    def _referenced(self, reference: str, where: str) -> object:
        subschema = self._root
        for part in filter(None, reference[1:].split("/")):
            # In a JSON pointer, ~1 stands for / and ~0 for ~. Decode ~1 first, so that ~01 becomes ~1 (RFC 6901).
            part = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(subschema, Mapping) or part not in subschema:
                raise MarsError(
                    f"the $ref at {where} is {short_repr(reference)}, and there is no such schema: correct it."
                )
            subschema = subschema[part]
        return subschema

    def _one_of(self, keywords: JsonObject, where: str) -> Node:
        """Return the node for the values that `const`, `enum` and `type` all allow."""
        listing_keywords = " and ".join(name for name in ("const", "enum") if name in keywords)
        _only(keywords, {"const", "enum", "type"}, f" next to {listing_keywords}", where)
        values = keywords.get("enum", [keywords.get("const")])
        if "const" in keywords:
            # Compare the values as JSON, because 1 == True and 1 == 1.0 in Python.
            const_json = json.dumps(keywords["const"], sort_keys=True)
            values = [value for value in values if json.dumps(value, sort_keys=True) == const_json]
        if "type" in keywords:
            values = [value for value in values if any(_is(value, kind) for kind in _types(keywords["type"]))]
        if not values:
            raise MarsError(f"no value at {where} satisfies {' and '.join(keywords)}: correct one of them.")
        return Either(tuple(map(self._literal, values)))

    def _literal(self, value: Any) -> Node:
        literal_json = json.dumps(value, ensure_ascii=False, separators=self._separators)
        self._budget.spend(len(literal_json))
        return text(literal_json)

    def _boolean(self, keywords: JsonObject, where: str, depth: int) -> Node:
        return json_text.BOOLEAN

    def _null(self, keywords: JsonObject, where: str, depth: int) -> Node:
        return json_text.NULL

    def _string(self, keywords: JsonObject, where: str, depth: int) -> Node:
        if "pattern" not in keywords and "format" not in keywords:
            return json_text.string(*_least_and_most(keywords, "Length", where))
        if len(keywords) > 1:
            raise MarsError(
                f"the string at {where} has {' and '.join(sorted(keywords))}: give only one of them, since they "
                "cannot be enforced together."
            )
        pattern = json_text.FORMATS.get(keywords.get("format", ""), str(keywords.get("pattern")))
        return sequence(text('"'), json_text.in_string(parse_pattern(pattern, self._budget)), text('"'))

    def _integer(self, keywords: JsonObject, where: str, depth: int) -> Node:
        for name, bound in keywords.items():
            if type(bound) is not int or abs(bound) >= 10**MOST_DIGITS:
                raise _unexpected(name, bound, where, f"a whole number of at most {MOST_DIGITS} digits")
        # Convert all bounds to inclusive ones: `i` is 1 if the keyword is exclusive, otherwise 0.
        low = max((keywords[name] + i for i, name in enumerate(_LOWS) if name in keywords), default=None)
        high = min((keywords[name] - i for i, name in enumerate(_HIGHS) if name in keywords), default=None)
        if low is not None and high is not None and low > high:
            raise MarsError(f"the integer at {where} is from {low} to {high}: correct the bounds.")
        self._budget.spend(sum(len(str(bound)) ** 2 for bound in (low, high) if bound is not None))
        return json_text.integers(low, high)

    def _number(self, keywords: JsonObject, where: str, depth: int) -> Node:
        if keywords not in ({}, {"minimum": 0}):
            raise MarsError(
                f"the number at {where} has {' and '.join(keywords)}: only a minimum of 0 can be enforced; bound an "
                "integer, or leave them out."
            )
        return json_text.POSITIVE_NUMBER if keywords else json_text.NUMBER

    def _array(self, keywords: JsonObject, where: str, depth: int) -> Node:
        least, maximum = _least_and_most(keywords, "Items", where)
        prefix_schemas = keywords.get("prefixItems", [])
        # An array with `prefixItems` has no further items unless `items` is given.
        item_schema = keywords.get("items", not prefix_schemas)
        first = [
            self.value(prefix_schema, f"{where}/prefixItems/{i}", depth + 1)
            for i, prefix_schema in enumerate(prefix_schemas[:maximum])
        ]
        if item_schema is False or maximum == len(first):
            if least > len(first):
                raise MarsError(
                    f"minItems at {where} is {least}, and prefixItems and items describe {len(first)}: describe all."
                )
            return sequence(text("["), *self._separated(first), text("]"))
        # The items of `prefixItems` come first, then any further items. The array may be empty if there are neither
        # `prefixItems` nor a minimum.
        item_node = self.value(item_schema, f"{where}/items", depth + 1)
        leading_nodes = first or [item_node]
        if maximum is not None:
            maximum -= len(leading_nodes)
        later_items = Repeat(self._after_comma(item_node), max(least - len(leading_nodes), 0), maximum)
        contents = sequence(*self._separated(leading_nodes), later_items)
        if not first and not least:
            contents = optional(contents)
        return sequence(text("["), contents, text("]"))

    def _object(self, keywords: JsonObject, where: str, depth: int) -> Node:
        properties, required = keywords.get("properties"), keywords.get("required", [])
        for name in required:
            if not isinstance(name, str) or name not in (properties or ()):
                raise MarsError(
                    f"the object at {where} requires {short_repr(name)}, which no property describes: add it to "
                    "properties, or leave it out."
                )
        if not properties:
            # By default, any properties are allowed if the schema has no `properties`, and none if its `properties` is
            # empty.
            extra_schema = keywords.get("additionalProperties", properties is None)
            if extra_schema is False:
                return text("{}")
            if extra_schema in (None, True):
                return self._map(self._any[ANY_DEPTH - 1])
            return self._map(self.value(extra_schema, f"{where}/additionalProperties", depth + 1))
        required_names = set(required)
        member_pairs = []
        for name, property_schema in properties.items():
            value = self.value(property_schema, f"{where}/{_part(name)}", depth + 1)
            member_pairs.append((sequence(self._literal(name), self._colon, value), name in required_names))
        members = self._members(member_pairs)
        if not required_names:
            members = optional(members)
        return sequence(text("{"), members, text("}"))

    def _members(self, pairs: list[tuple[Node, bool]]) -> Node:
        """Return the node for one or more members of an object, in order and separated by commas.

        The first member that is present is either in the first half of `pairs` or in the second half. Recursion on the
        two halves needs on the order of n log n nodes for n members.
        """
        if len(pairs) == 1:
            return pairs[0][0]
        first_half, second_half = pairs[: len(pairs) // 2], pairs[len(pairs) // 2 :]
        later_members = [(self._after_comma(pair), needed) for pair, needed in second_half]
        from_first_half = sequence(
            self._members(first_half),
            *(member if needed else optional(member) for member, needed in later_members),
        )
        if any(needed for _, needed in first_half):
            return from_first_half
        return Either((from_first_half, self._members(second_half)))

    def _map(self, value: Node) -> Node:
        member = sequence(json_text.string(), self._colon, value)
        return sequence(text("{"), optional(self._some(member)), text("}"))

    def _anything(self, depth: int) -> Node:
        """Return the node for any JSON value with at most `depth` levels of nested objects and arrays."""
        options = [json_text.string(), json_text.NUMBER, json_text.BOOLEAN, json_text.NULL]
        if depth:
            inner = self._anything(depth - 1)
            options += [sequence(text("["), optional(self._some(inner)), text("]")), self._map(inner)]
        return Either(tuple(options))

    def _some(self, part: Node) -> Node:
        """Return the node for one or more repetitions of a part, separated by commas."""
        return sequence(part, Repeat(self._after_comma(part), 0, None))

    def _separated(self, parts: list[Node]) -> list[Node]:
        return [*parts[:1], *map(self._after_comma, parts[1:])]

    def _after_comma(self, part: Node) -> Node:
        return sequence(self._comma, part)


def _keywords(schema: object, where: str) -> JsonObject:
    """Check the keywords of a schema, and return those that constrain a value."""
    if schema is True:
        return {}
    if not isinstance(schema, Mapping):
        raise MarsError(f"the schema at {where} is {short_repr(schema)}: expected an object.")
    keywords = {name: content for name, content in schema.items() if name not in _NOTES}
    for name in keywords.keys() & _VALUES.keys():
        is_valid, expected = _VALUES[name]
        if not is_valid(keywords[name]):
            raise _unexpected(name, keywords[name], where, expected)
    return keywords


def _unexpected(name: str, value: object, where: str, expected: str) -> MarsError:
    return MarsError(f"{name} at {where} is {short_repr(value)}: expected {expected}.")


def _both(beside: JsonObject, schema: object, where: str) -> JsonObject:
    """Merge a schema with `beside`, the keywords next to the `$ref`, `allOf` or `anyOf` that includes the schema."""
    keywords = _keywords(schema, where)
    # Values must satisfy both schemas. If a keyword occurs in both, its two values would have to be intersected, which
    # is only supported for `type`, below.
    for key, partner in [(name, name) for name in keywords] + [*_PAIRS, *((b, a) for a, b in _PAIRS)]:
        if key in keywords and partner in beside and key != "type":
            raise MarsError(
                f"the schema at {where} has {key!r} next to {partner!r} of the schema around it: write them as one."
            )
    if "type" in keywords and "type" in beside:
        # An integer is valid for both "integer" and "number".
        kinds, outer = _types(keywords["type"]), _types(beside["type"])
        shared_types = [kind for kind in _OF_TYPE if _within(kind, kinds) and _within(kind, outer)]
        if not shared_types:
            raise MarsError(
                f"the schema at {where} has the type {' or '.join(kinds)} next to the type {' or '.join(outer)} of "
                "the schema around it, and no value is of both: correct one of them."
            )
        keywords["type"] = shared_types
    return {**beside, **keywords}


def _within(kind: str, kinds: list[str]) -> bool:
    return kind in kinds or (kind == "integer" and "number" in kinds)


def _only(keywords: JsonObject, allowed: set[str], beside: str, where: str) -> None:
    for name in keywords:
        if name not in allowed:
            raise MarsError(
                f"the schema at {where} has {short_repr(name)}, which cannot be enforced{beside}: leave it out, or "
                "check it afterwards."
            )


def _type_of(keywords: JsonObject, where: str) -> str:
    """Infer the type of values from the keywords of a schema without `type`."""
    kinds = [kind for kind, names in _OF_TYPE.items() if names & keywords.keys()]
    if len(kinds) != 1 and kinds != ["integer", "number"]:
        raise MarsError(f"the schema at {where} has {' and '.join(keywords)} and no type: give one.")
    return kinds[-1]


def _is(value: object, kind: str) -> bool:
    """Return True if a value has this type in JSON Schema, where 1.0 is an integer and true is not a number.

    >>> _is(1.0, "integer"), _is(True, "integer"), _is(1, "number")
    (True, False, True)
    """
    if isinstance(value, bool):
        return kind == "boolean"
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _PYTHON_TYPES[kind])


def _part(name: object) -> str:
    """Return a name as a part of a location, shortened for messages."""
    return name if isinstance(name, str) and len(name) <= 60 else short_repr(name)


def _least_and_most(keywords: JsonObject, unit: str, where: str) -> tuple[int, int | None]:
    least, maximum = keywords.get(f"min{unit}") or 0, keywords.get(f"max{unit}")
    if maximum is not None and maximum < least:
        raise MarsError(f"max{unit} at {where} is {maximum}, less than min{unit}: correct it.")
    return least, maximum
