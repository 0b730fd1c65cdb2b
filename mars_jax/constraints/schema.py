"""JSON schemas as nodes: the texts that `json.dumps` writes of the values that a schema allows.

Source: JSON Schema 2020-12, and what of earlier drafts means the same. Oracle: `jsonschema`, the package
(tests/constraints/test_schema.py).

What a text may be is narrower than the schema where that helps a model: one way to put spaces, properties in their
order, no property that is not named. A keyword that is not known here is refused, and never ignored.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from mars_jax.constraints.nodes import (
    NOTHING,
    Chars,
    Either,
    Node,
    Repeat,
    Sequence,
    chars,
    complement,
    optional,
    ranges_of,
    sequence,
    text,
)
from mars_jax.constraints.pattern import parse
from mars_jax.core.errors import MarsError

DEEPEST = 24
"""Schemas inside of schemas; a recursive one is deeper than any."""
MOST_DIGITS = 100
"""Of the bounds of an integer, whose nodes are as many as the square of its digits."""
ANY_DEPTH = 2
"""Objects and arrays inside of each other, in a value of which the schema says nothing."""

_NOTES = {
    "title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly",
    "$schema", "$id", "$comment", "$defs", "definitions", "$anchor",
}  # fmt: skip
_OF_TYPE = {
    "object": {"properties", "required", "additionalProperties"},
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "string": {"minLength", "maxLength", "pattern", "format"},
    "integer": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"},
    "number": {"minimum", "exclusiveMinimum"},
    "boolean": set(),
    "null": set(),
}
_HEX = chars("0-9a-fA-F")
_PLAIN = complement(ranges_of([(0, 0x1F), (0x22, 0x22), (0x5C, 0x5C)]))
# \u with four digits, but no half of a pair: a pair is one character to JSON and would be two here.
_ESCAPED_CODE = sequence(
    text("\\u"),
    Either((sequence(chars("0-9a-cA-CefEF"), _HEX), sequence(chars("dD"), chars("0-7")))),
    _HEX,
    _HEX,
)
_CHARACTER = Either((Chars(_PLAIN), sequence(text("\\"), chars('"\\/bfnrt')), _ESCAPED_CODE))
_DIGIT = chars("0-9")
_WHOLE = Either((text("0"), sequence(chars("1-9"), Repeat(_DIGIT, 0, 17))))
_FRACTION = sequence(text("."), Repeat(_DIGIT, 1, 17))
_EXPONENT = sequence(chars("eE"), optional(chars("+-")), Repeat(_DIGIT, 1, 2))
_SIGN = optional(text("-"))
_MONTH_AND_DAY = (
    r"(0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8])"
)
_DATE = rf"[0-9]{{4}}-({_MONTH_AND_DAY})"
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?(Z|[+\-]([01][0-9]|2[0-3]):[0-5][0-9])"
_OCTET = r"(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"({_DATE})T({_TIME})",
    "uuid": r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    "ipv4": rf"({_OCTET}\.){{3}}{_OCTET}",
    "email": r"[a-z0-9._+\-]{1,40}@[a-z0-9]([a-z0-9\-]{0,30}[a-z0-9])?(\.[a-z]{2,12}){1,3}",
}
"""Of strings, by their names in JSON Schema."""


def schema_nodes(schema: Any, *, compact: bool = False) -> Node:
    """The nodes of a schema.

    Args:
      schema: as `json.load` reads it.
      compact: no spaces after commas and colons, as `json.dumps(..., separators=(",", ":"))`.

    Raises:
      MarsError: something in it is no schema, or cannot be held to; the message says where.

    >>> from mars_jax.constraints.automaton import automaton
    >>> made = automaton(schema_nodes({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}))
    >>> made.matches('{"n": 12}'), made.matches("{}")
    (True, False)
    """
    return _Writer(schema, compact).value(schema, "#", 0)


class _Writer:
    def __init__(self, root: Any, compact: bool):
        self._root = root
        self._comma, self._colon = (",", ":") if compact else (", ", ": ")
        self._separators = (self._comma, self._colon)

    def value(self, schema: Any, where: str, depth: int) -> Node:
        if depth > DEEPEST:
            raise MarsError(
                f"the schema is deeper than {DEEPEST} at {where}, or refers to itself: write it out to the depth "
                "that is wanted."
            )
        if schema is True or schema == {}:
            return self._anything(ANY_DEPTH)
        if not isinstance(schema, Mapping):
            raise MarsError(f"the schema at {where} is {schema!r}: expected an object.")
        given = {name: one for name, one in schema.items() if name not in _NOTES}
        if "$ref" in given:
            _only(given, {"$ref"}, where)
            return self.value(self._found(given["$ref"], where), str(given["$ref"]), depth + 1)
        if "const" in given or "enum" in given:
            _only(given, {"const", "enum", "type"}, where)
            values = [given["const"]] if "const" in given else given["enum"]
            if not isinstance(values, list) or not values:
                raise MarsError(f"the enum at {where} is {values!r}: expected a list of values.")
            return Either(tuple(map(self._literal, values)))
        if "anyOf" in given:
            _only(given, {"anyOf", "type"}, where)
            return self._any_of(given["anyOf"], where, depth)
        if "allOf" in given and len(listed := _list(given, "allOf", where)) == 1:
            _only(given, {"allOf"}, where)
            return self.value(listed[0], f"{where}/allOf/0", depth + 1)
        kinds = given.pop("type", None) or _kinds_of(given, where)
        kinds = kinds if isinstance(kinds, list) else [kinds]
        for kind in kinds:
            if not isinstance(kind, str) or kind not in _OF_TYPE:
                raise MarsError(
                    f"the type at {where} is {kind!r}: expected one of {', '.join(sorted(_OF_TYPE))}."
                )
        known = set().union(*(_OF_TYPE[kind] for kind in kinds))
        _only(given, known, where)
        parts = []
        for kind in kinds:
            write: Callable[[dict, str, int], Node] = getattr(self, f"_{kind}")
            own = {name: one for name, one in given.items() if name in _OF_TYPE[kind]}
            parts.append(write(own, where, depth))
        return parts[0] if len(parts) == 1 else Either(tuple(parts))

    def _found(self, reference: Any, where: str) -> Any:
        found = self._root
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise MarsError(
                f"the $ref at {where} is {reference!r}: expected one within the schema, such as #/$defs/name."
            )
        for part in filter(None, reference[1:].split("/")):
            part = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(found, Mapping) or part not in found:
                raise MarsError(
                    f"the $ref at {where} is {reference!r}, and there is no such schema: correct it."
                )
            found = found[part]
        return found

    def _any_of(self, options: Any, where: str, depth: int) -> Node:
        if not isinstance(options, list) or not options:
            raise MarsError(f"anyOf at {where} is {options!r}: expected a list of schemas.")
        return Either(tuple(self.value(o, f"{where}/anyOf/{i}", depth + 1) for i, o in enumerate(options)))

    def _literal(self, value: Any) -> Node:
        return text(json.dumps(value, ensure_ascii=False, separators=self._separators))

    def _boolean(self, given: dict, where: str, depth: int) -> Node:
        return Either((text("true"), text("false")))

    def _null(self, given: dict, where: str, depth: int) -> Node:
        return text("null")

    def _string(self, given: dict, where: str, depth: int) -> Node:
        least, most = _count(given, "minLength", where) or 0, _count(given, "maxLength", where)
        if "pattern" in given or "format" in given:
            if len(given) > 1:
                raise MarsError(
                    f"the string at {where} has {' and '.join(sorted(given))}: give one of them, since a text cannot "
                    "be held to both."
                )
            name = given.get("format")
            if name is not None and (not isinstance(name, str) or name not in FORMATS):
                raise MarsError(
                    f"the format at {where} is {name!r}: expected one of {', '.join(FORMATS)}, or a pattern."
                )
            pattern = given.get("pattern") if name is None else FORMATS[name]
            if not isinstance(pattern, str):
                raise MarsError(f"the pattern at {where} is {pattern!r}: expected a text.")
            return sequence(text('"'), _in_json(parse(pattern)), text('"'))
        if most is not None and most < least:
            raise MarsError(f"maxLength at {where} is {most}, less than minLength: correct it.")
        return sequence(text('"'), Repeat(_CHARACTER, least, most), text('"'))

    def _integer(self, given: dict, where: str, depth: int) -> Node:
        low, high = _bounds(given, where)
        return integers(low, high, where)

    def _number(self, given: dict, where: str, depth: int) -> Node:
        rest = sequence(optional(_FRACTION), optional(_EXPONENT))
        if not given:
            return sequence(_SIGN, _WHOLE, rest)
        if given != {"minimum": 0}:
            raise MarsError(
                f"the number at {where} has bounds: only a minimum of 0 can be held to; bound an integer, or leave "
                "them out."
            )
        return sequence(_WHOLE, rest)

    def _array(self, given: dict, where: str, depth: int) -> Node:
        first = _list(given, "prefixItems", where)
        least, most = _count(given, "minItems", where) or 0, _count(given, "maxItems", where)
        parts = [self.value(one, f"{where}/prefixItems/{i}", depth + 1) for i, one in enumerate(first)]
        items = given.get("items", not first)
        if parts:
            if (items is not False and "items" in given) or least not in (0, len(parts)):
                raise MarsError(
                    f"the array at {where} has prefixItems: give items as false, and no other number of items."
                )
            return sequence(text("["), *_joined(parts, self._comma), text("]"))
        if most is not None and most < max(least, 0):
            raise MarsError(f"maxItems at {where} is {most}, less than minItems: correct it.")
        if items is False or most == 0:
            return text("[]")
        item = self.value(items, f"{where}/items", depth + 1)
        further = Repeat(
            sequence(text(self._comma), item), max(least - 1, 0), None if most is None else most - 1
        )
        inside = sequence(item, further)
        return sequence(text("["), inside if least else optional(inside), text("]"))

    def _object(self, given: dict, where: str, depth: int) -> Node:
        properties, required = given.get("properties"), _list(given, "required", where)
        if properties is not None and not isinstance(properties, Mapping):
            raise MarsError(f"the properties at {where} are {properties!r}: expected an object of schemas.")
        further = given.get("additionalProperties")
        unknown = [name for name in required if not isinstance(name, str) or name not in (properties or ())]
        if unknown:
            raise MarsError(
                f"the object at {where} requires {unknown[0]!r}, which no property describes: add it to properties, "
                "or leave it out."
            )
        if not properties:
            if further is False or (properties is not None and "additionalProperties" not in given):
                return text("{}")
            return self._map(self._anything(ANY_DEPTH - 1) if further in (None, True) else self.value(
                further, f"{where}/additionalProperties", depth + 1))  # fmt: skip
        pairs = [
            (
                sequence(
                    self._literal(name), text(self._colon), self.value(one, f"{where}/{name}", depth + 1)
                ),
                name in required,
            )
            for name, one in properties.items()
        ]
        return sequence(text("{"), self._members(pairs), text("}"))

    def _members(self, pairs: list[tuple[Node, bool]]) -> Node:
        """Those of an object in their order, some of which may be left out; commas stand between what is there."""

        def after(i: int) -> Node:
            made: Node = NOTHING
            for pair, needed in reversed(pairs[i:]):
                one = sequence(text(self._comma), pair)
                made = sequence(one if needed else optional(one), made)
            return made

        options: list[Node] = []
        for i, (pair, needed) in enumerate(pairs):  # the first that is there
            options.append(sequence(pair, after(i + 1)))
            if needed:
                return Either(tuple(options))
        return Either((*options, NOTHING))

    def _map(self, value: Node) -> Node:
        pair = sequence(text('"'), Repeat(_CHARACTER, 0, None), text(f'"{self._colon}'), value)
        inside = sequence(pair, Repeat(sequence(text(self._comma), pair), 0, None))
        return sequence(text("{"), optional(inside), text("}"))

    def _anything(self, depth: int) -> Node:
        """Any value, of objects and arrays to a depth."""
        simple: list[Node] = [
            self._string({}, "", 0), self._number({}, "", 0), self._boolean({}, "", 0), self._null({}, "", 0)
        ]  # fmt: skip
        if depth:
            inner = self._anything(depth - 1)
            inside = sequence(inner, Repeat(sequence(text(self._comma), inner), 0, None))
            simple += [sequence(text("["), optional(inside), text("]")), self._map(inner)]
        return Either(tuple(simple))


def _only(given: Mapping[str, Any], known: set[str], where: str) -> None:
    for name in given:
        if name not in known:
            raise MarsError(
                f"the schema at {where} has {name!r}, which cannot be held to there: leave it out, or check it "
                "afterwards."
            )


def _kinds_of(given: Mapping[str, Any], where: str) -> list[str]:
    """The types that keywords speak of, where the schema names none."""
    kinds = [kind for kind, names in _OF_TYPE.items() if names & given.keys()]
    if len(kinds) != 1 and set(kinds) != {"integer", "number"}:
        raise MarsError(f"the schema at {where} has no type: give one.")
    return kinds[-1:]


def _list(given: Mapping[str, Any], name: str, where: str) -> list[Any]:
    value = given.get(name, [])
    if not isinstance(value, list):
        raise MarsError(f"{name} at {where} is {value!r}: expected a list.")
    return value


def _count(given: Mapping[str, Any], name: str, where: str) -> int | None:
    value = given.get(name)
    if value is not None and (type(value) is not int or value < 0):
        raise MarsError(f"{name} at {where} is {value!r}: expected a whole number of at least 0.")
    return value


def _bounds(given: Mapping[str, Any], where: str) -> tuple[int | None, int | None]:
    def bound(name: str, exclusive: str, step: int) -> int | None:
        found = []
        for key, move in ((name, 0), (exclusive, step)):
            if key in given:
                if type(given[key]) is not int or abs(given[key]) >= 10**MOST_DIGITS:
                    raise MarsError(
                        f"{key} at {where} is {_shown(given[key])}: expected a whole number of at most {MOST_DIGITS} "
                        "digits."
                    )
                found.append(given[key] + move)
        return (max if step > 0 else min)(found) if found else None

    return bound("minimum", "exclusiveMinimum", 1), bound("maximum", "exclusiveMaximum", -1)


def _shown(value: Any) -> str:
    """A value in a message. Of numbers with thousands of digits Python writes none."""
    return (
        f"a number of {value.bit_length()} bits"
        if type(value) is int and value.bit_length() > 999
        else repr(value)
    )


def integers(low: int | None, high: int | None, where: str = "#") -> Node:
    """Whole numbers from low to high, as JSON writes them; None is no bound.

    >>> from mars_jax.constraints.automaton import automaton
    >>> made = automaton(integers(-3, 120))
    >>> [n for n in range(-200, 200) if made.matches(str(n))] == list(range(-3, 121))
    True
    """
    if low is not None and high is not None and low > high:
        raise MarsError(f"the integer at {where} is from {low} to {high}: correct the bounds.")
    parts: list[Node] = []
    if high is None or high >= 0:
        parts.append(_naturals(max(low or 0, 0) if low is not None else 0, high))
    if low is None or low < 0:
        least = 1 if high is None or high >= 0 else -high
        parts.append(sequence(text("-"), _naturals(least, None if low is None else -low)))
    return Either(tuple(parts))


def _naturals(low: int, high: int | None) -> Node:
    """From low, at least 0, to high; without a bound up to 18 digits."""
    high = 10**18 - 1 if high is None else high
    parts: list[Node] = []
    for digits in range(len(str(low)), len(str(high)) + 1):
        first, last = max(low, 10 ** (digits - 1) if digits > 1 else 0), min(high, 10**digits - 1)
        parts.append(_same_length(str(first), str(last)))
    return Either(tuple(parts))


def _same_length(low: str, high: str) -> Node:
    if not low:
        return NOTHING
    if set(low) == {"0"} and set(high) == {"9"}:
        return Repeat(_DIGIT, len(low), len(low))
    if low[0] == high[0]:
        return sequence(text(low[0]), _same_length(low[1:], high[1:]))
    rest = len(low) - 1
    first, last, parts = int(low[0]), int(high[0]), []
    if set(low[1:]) > {"0"} or (rest and set(low[1:]) != {"0"}):
        parts.append(sequence(text(low[0]), _same_length(low[1:], "9" * rest)))
        first += 1
    end: list[Node] = []
    if rest and set(high[1:]) != {"9"}:
        end = [sequence(text(high[0]), _same_length("0" * rest, high[1:]))]
        last -= 1
    if first <= last:
        parts.append(sequence(chars(f"{first}-{last}"), Repeat(_DIGIT, rest, rest)))
    return Either((*parts, *end))


def _joined(parts: list[Node], comma: str) -> list[Node]:
    made: list[Node] = []
    for part in parts:
        made += [text(comma), part] if made else [part]
    return made


_SHORT = {0x08: "b", 0x0C: "f", 0x0A: "n", 0x0D: "r", 0x09: "t", 0x22: '"', 0x5C: "\\"}


def _in_json(node: Node) -> Node:
    """What a pattern's texts are inside of a JSON string, as `json.dumps` writes them."""
    if isinstance(node, Sequence):
        return Sequence(tuple(map(_in_json, node.parts)))
    if isinstance(node, Either):
        return Either(tuple(map(_in_json, node.parts)))
    if isinstance(node, Repeat):
        return Repeat(_in_json(node.part), node.least, node.most)
    parts: list[Node] = []
    plain: list[tuple[int, int]] = []
    for low, high in node.ranges:
        for code in range(low, min(high, 0x5C) + 1):
            if code in _SHORT:
                parts.append(text("\\" + _SHORT[code]))
            elif code < 0x20:
                parts.append(text(f"\\u{code:04x}"))
            else:
                plain.append((code, code))
        if high > 0x5C:
            plain.append((max(low, 0x5D), high))
    if plain:
        parts.append(Chars(ranges_of(plain)))
    return Either(tuple(parts))
