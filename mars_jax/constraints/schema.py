"""JSON schemas as nodes: the texts that `json.dumps` writes of the values that a schema allows.

Source: JSON Schema 2020-12, and what of earlier drafts means the same. Oracle: `jsonschema`, the package
(tests/constraints/test_schema.py).

What a text may be is narrower than the schema where that helps a model: one way to put spaces, properties in their
order, no property that is not named. A keyword that is not known here, or not beside those that it stands beside, is
refused, and never ignored.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from mars_jax.constraints.automaton import Automaton, automaton
from mars_jax.constraints.nodes import (
    MOST_PIECES,
    NOTHING,
    Budget,
    Chars,
    Either,
    Node,
    Ranges,
    Repeat,
    Sequence,
    TooLarge,
    chars,
    complement,
    optional,
    ranges_of,
    sequence,
    shown,
    text,
)
from mars_jax.constraints.pattern import parse
from mars_jax.core.errors import MarsError

DEEPEST = 24
"""Schemas inside of schemas; a recursive one is deeper than any."""
MOST_NESTED = 100
"""Lists and objects inside of each other, in the JSON of a schema; Python reads some hundreds."""
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
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"},
    "boolean": set(),
    "null": set(),
}
_KNOWN = {"$ref", "allOf", "anyOf", "const", "enum", "type"}.union(*_OF_TYPE.values())
_PAIRS = (("properties", "additionalProperties"), ("prefixItems", "items"))
"""Keywords of which one means something else where the other stands beside it."""
_PYTHON_TYPES = {
    "object": dict, "array": list, "string": str, "integer": int, "number": (int, float), "boolean": bool,
    "null": type(None),
}  # fmt: skip
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
_DATE = rf"[1-9][0-9]{{3}}-({_MONTH_AND_DAY})"
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


def parsed(said: str) -> Any:
    """The JSON of a schema.

    Raises:
      MarsError: it is none, or nested deeper than the rest of a program could follow.

    >>> parsed('{"type": "null"}')
    {'type': 'null'}
    """
    try:
        found = json.loads(said)
    except ValueError as error:
        raise MarsError(f"the schema is not JSON ({error}): correct it.") from None
    except RecursionError:
        raise too_deep() from None
    level = [found]
    for _ in range(MOST_NESTED):
        level = [
            inner
            for one in level
            if isinstance(one, dict | list)
            for inner in (one.values() if isinstance(one, dict) else one)
        ]
        if not level:
            return found
    raise too_deep()


def too_deep() -> MarsError:
    """The sentence for JSON that no recursion follows to its end."""
    return MarsError(f"the schema has lists and objects more than {MOST_NESTED} deep: write it flatter.")


def schema_automaton(schema: Any, *, compact: bool = False) -> Automaton:
    """The automaton of a schema.

    Args:
      schema: as `parsed` gives it.
      compact: no spaces after commas and colons, as `json.dumps(..., separators=(",", ":"))`.

    Raises:
      MarsError: something in it is no schema, or cannot be held to; the message says where.

    >>> made = schema_automaton({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]})
    >>> made.matches('{"n": 12}'), made.matches("{}")
    (True, False)
    """
    writer = _Writer(schema, compact)
    try:
        return automaton(writer.value(schema, "#", 0))
    except TooLarge:
        raise MarsError(
            f"the schema has {_most_of(schema, writer.visits)}, too many for an automaton of all that it asks for: "
            "ask for less, and check the rest afterwards."
        ) from None


_COUNTED = {
    "properties": "properties in one object",
    "required": "names in one list of what is required",
    "prefixItems": "schemas in one prefixItems",
    "anyOf": "schemas in one anyOf",
    "allOf": "schemas in one allOf",
    "enum": "values in one enum",
    "type": "names in one type",
    "minItems": "items in one array",
    "maxItems": "items in one array",
    "minLength": "characters in one string",
    "maxLength": "characters in one string",
    "{": "repeats in one pattern",
}


def _most_of(schema: Any, visits: int) -> str:
    """What there is most of in a schema, for a message."""
    most, what, todo = 0, "", [("", schema)]
    while todo:
        name, one = todo.pop()
        count, unit = 0, _COUNTED.get(name, "")
        if isinstance(one, dict):
            count = len(one) if unit else 0
            todo += [
                (key, inner) for key, inner in one.items() if key not in _NOTES - {"$defs", "definitions"}
            ]
        elif isinstance(one, list):
            count = len(one) if unit else 0
            if count < MOST_PIECES:  # more is enough to say
                todo += [(name if name == "enum" else "", inner) for inner in one]
        elif isinstance(one, str) and name in ("pattern", "const", "enum", "$ref"):
            count, unit = len(one), f"characters in one {name}"
            if name == "pattern":
                todo += [("{", int(number)) for number in re.findall(r"\d{1,9}", one)]
        elif type(one) is int and unit:
            count = one
        if count > most:
            most, what = count, unit
    if visits > 2 * most:
        most, what = visits, "schemas, each $ref counted as what it stands for"
    return f"{most:,} {what}" if most < 10**15 else f"more than 10^15 {what}"


class _Writer:
    def __init__(self, root: Any, compact: bool):
        self._root = root
        self._comma, self._colon = (",", ":") if compact else (", ", ": ")
        self._separators = (self._comma, self._colon)
        self._budget = Budget()
        self._any = [self._anything(depth) for depth in range(ANY_DEPTH + 1)]
        self.visits = 0

    def value(self, schema: Any, where: str, depth: int) -> Node:
        if depth > DEEPEST:
            raise MarsError(
                f"the schema is deeper than {DEEPEST} at {where}, or refers to itself: write it out to the depth "
                "that is wanted."
            )
        given = _keywords(schema, where)
        self.visits += 1
        self._budget.spend(1 + sum(len(one) for one in given.values() if isinstance(one, dict | list)))
        _only(given, _KNOWN, "", where)
        if not given:
            return self._any[ANY_DEPTH]
        for name in ("$ref", "allOf", "anyOf"):
            if name in given:
                meant = self._meant(name, given.pop(name), where)
                return Either(tuple(self.value(_both(given, one, at), at, depth + 1) for at, one in meant))
        if "const" in given or "enum" in given:
            return self._one_of(given, where)
        kinds = _types(given.pop("type"), where) if "type" in given else [_type_of(given, where)]
        known = set().union(*(_OF_TYPE[kind] for kind in kinds))
        _only(given, known, f" beside the type {' or '.join(kinds)}", where)
        parts = []
        for kind in kinds:
            write: Callable[[dict, str, int], Node] = getattr(self, f"_{kind}")
            own = {name: one for name, one in given.items() if name in _OF_TYPE[kind]}
            parts.append(write(own, where, depth))
        return parts[0] if len(parts) == 1 else Either(tuple(parts))

    def _meant(self, name: str, value: Any, where: str) -> list[tuple[str, Any]]:
        """The schemas that a keyword offers, with where each is."""
        if name == "$ref":
            self._budget.spend(len(str(value)))
            return [(_part(value), self._found(value, where))]
        if not isinstance(value, list) or not value:
            raise MarsError(f"{name} at {where} is {shown(value)}: expected a list of schemas.")
        if name == "allOf" and len(value) > 1:
            raise MarsError(f"the allOf at {where} has {len(value):,} schemas: write them as one.")
        return [(f"{where}/{name}/{i}", one) for i, one in enumerate(value)]

    def _found(self, reference: Any, where: str) -> Any:
        found = self._root
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise MarsError(
                f"the $ref at {where} is {shown(reference)}: expected one within the schema, such as #/$defs/name."
            )
        for part in filter(None, reference[1:].split("/")):
            part = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(found, Mapping) or part not in found:
                raise MarsError(
                    f"the $ref at {where} is {shown(reference)}, and there is no such schema: correct it."
                )
            found = found[part]
        return found

    def _one_of(self, given: dict, where: str) -> Node:
        """Values that are named: those that all keywords name, of the type that stands beside them."""
        named = " and ".join(name for name in ("const", "enum") if name in given)
        _only(given, {"const", "enum", "type"}, f" beside {named}", where)
        values = given.get("enum", [given.get("const")])
        if not isinstance(values, list) or not values:
            raise MarsError(f"the enum at {where} is {shown(values)}: expected a list of values.")
        if "const" in given:
            wanted = json.dumps(given["const"], sort_keys=True)
            values = [value for value in values if json.dumps(value, sort_keys=True) == wanted]
        if "type" in given:
            kinds = _types(given["type"], where)
            values = [value for value in values if any(_is(value, kind) for kind in kinds)]
        if not values:
            raise MarsError(f"no value at {where} is of {' and '.join(given)} at once: correct one of them.")
        return Either(tuple(map(self._literal, values)))

    def _literal(self, value: Any) -> Node:
        said = json.dumps(value, ensure_ascii=False, separators=self._separators)
        self._budget.spend(len(said))
        return text(said)

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
                    f"the format at {where} is {shown(name)}: expected one of {', '.join(FORMATS)}, or a pattern."
                )
            pattern = given.get("pattern") if name is None else FORMATS[name]
            if not isinstance(pattern, str):
                raise MarsError(f"the pattern at {where} is {shown(pattern)}: expected a text.")
            return sequence(text('"'), _in_json(parse(pattern, self._budget)), text('"'))
        if most is not None and most < least:
            raise MarsError(f"maxLength at {where} is {most}, less than minLength: correct it.")
        return sequence(text('"'), Repeat(_CHARACTER, least, most), text('"'))

    def _integer(self, given: dict, where: str, depth: int) -> Node:
        low, high = _bounds(given, where)
        self._budget.spend(sum(len(str(bound)) ** 2 for bound in (low, high) if bound is not None))
        return integers(low, high, where)

    def _number(self, given: dict, where: str, depth: int) -> Node:
        rest = sequence(optional(_FRACTION), optional(_EXPONENT))
        if not given:
            return sequence(_SIGN, _WHOLE, rest)
        if given != {"minimum": 0}:
            raise MarsError(
                f"the number at {where} has {' and '.join(given)}: only a minimum of 0 can be held to; bound an "
                "integer, or leave them out."
            )
        return sequence(_WHOLE, rest)

    def _array(self, given: dict, where: str, depth: int) -> Node:
        least, most = _count(given, "minItems", where) or 0, _count(given, "maxItems", where)
        if most is not None and most < least:
            raise MarsError(f"maxItems at {where} is {most}, less than minItems: correct it.")
        named = _list(given, "prefixItems", where)
        items = given.get("items", not named)
        first = [self.value(one, f"{where}/prefixItems/{i}", depth + 1) for i, one in enumerate(named[:most])]
        if items is False or most == len(first):
            if least > len(first):
                raise MarsError(
                    f"minItems at {where} is {least}, and prefixItems and items describe {len(first)}: describe all."
                )
            return sequence(text("["), *_joined(first, self._comma), text("]"))
        item = self.value(items, f"{where}/items", depth + 1)
        begun = first or [item]
        further = Repeat(
            sequence(text(self._comma), item),
            max(least - len(begun), 0),
            None if most is None else most - len(begun),
        )
        inside = sequence(*_joined(begun, self._comma), further)
        return sequence(text("["), inside if first or least else optional(inside), text("]"))

    def _object(self, given: dict, where: str, depth: int) -> Node:
        properties, required = given.get("properties"), _list(given, "required", where)
        if properties is not None and not isinstance(properties, Mapping):
            raise MarsError(
                f"the properties at {where} are {shown(properties)}: expected an object of schemas."
            )
        further = given.get("additionalProperties")
        unknown = [name for name in required if not isinstance(name, str) or name not in (properties or ())]
        if unknown:
            raise MarsError(
                f"the object at {where} requires {shown(unknown[0])}, which no property describes: add it to "
                "properties, or leave it out."
            )
        if not properties:
            if further is False or (properties is not None and "additionalProperties" not in given):
                return text("{}")
            return self._map(self._any[ANY_DEPTH - 1] if further in (None, True) else self.value(
                further, f"{where}/additionalProperties", depth + 1))  # fmt: skip
        needed = set(required)
        pairs = [
            (
                sequence(
                    self._literal(name),
                    text(self._colon),
                    self.value(one, f"{where}/{_part(name)}", depth + 1),
                ),
                name in needed,
            )
            for name, one in properties.items()
        ]
        inside = self._members(pairs)
        return sequence(text("{"), inside if needed else optional(inside), text("}"))

    def _members(self, pairs: list[tuple[Node, bool]]) -> Node:
        """At least one of an object's, in their order; commas stand between what is there.

        The first that is there is in one half or in the other, so that n of them take n log n nodes.
        """
        if len(pairs) == 1:
            return pairs[0][0]
        half = len(pairs) // 2
        after = [(sequence(text(self._comma), pair), needed) for pair, needed in pairs[half:]]
        begun = sequence(
            self._members(pairs[:half]), *(one if needed else optional(one) for one, needed in after)
        )
        if any(needed for _, needed in pairs[:half]):
            return begun
        return Either((begun, self._members(pairs[half:])))

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


def _keywords(schema: Any, where: str) -> dict[str, Any]:
    """Of a schema, those that say what a value is."""
    if schema is True:
        return {}
    if not isinstance(schema, Mapping):
        raise MarsError(f"the schema at {where} is {shown(schema)}: expected an object.")
    return {name: one for name, one in schema.items() if name not in _NOTES}


def _both(beside: dict[str, Any], schema: Any, where: str) -> dict[str, Any]:
    """A schema with the keywords that stand beside what offers it: values are to be what both say."""
    given = _keywords(schema, where)
    for one, other in [(name, name) for name in given] + [*_PAIRS, *((b, a) for a, b in _PAIRS)]:
        if one in given and other in beside and one != "type":
            raise MarsError(
                f"the schema at {where} has {one!r} beside {other!r} of the schema around it: write them as one."
            )
    if "type" in given and "type" in beside:
        kinds, others = _types(given["type"], where), _types(beside["type"], where)
        both = [kind for kind in _OF_TYPE if _within(kind, kinds) and _within(kind, others)]
        if not both:
            raise MarsError(
                f"the schema at {where} has the type {' or '.join(kinds)} beside the type {' or '.join(others)} of "
                "the schema around it, and no value is of both: correct one of them."
            )
        given["type"] = both
    return {**beside, **given}


def _within(kind: str, kinds: list[str]) -> bool:
    return kind in kinds or (kind == "integer" and "number" in kinds)


def _only(given: Mapping[str, Any], known: set[str], beside: str, where: str) -> None:
    for name in given:
        if name not in known:
            raise MarsError(
                f"the schema at {where} has {shown(name)}, which cannot be held to{beside}: leave it out, or check "
                "it afterwards."
            )


def _types(value: Any, where: str) -> list[str]:
    kinds: list[Any] = value if isinstance(value, list) and value else [value]
    for kind in kinds:
        if not isinstance(kind, str) or kind not in _OF_TYPE:
            raise MarsError(
                f"the type at {where} is {shown(kind)}: expected one of {', '.join(sorted(_OF_TYPE))}."
            )
    return kinds


def _type_of(given: Mapping[str, Any], where: str) -> str:
    """The type that keywords speak of, where the schema names none."""
    kinds = [kind for kind, names in _OF_TYPE.items() if names & given.keys()]
    if len(kinds) != 1 and kinds != ["integer", "number"]:
        raise MarsError(f"the schema at {where} has {' and '.join(given)} and no type: give one.")
    return kinds[-1]


def _is(value: Any, kind: str) -> bool:
    """Whether a value is of a type, as JSON Schema has them: 1.0 is an integer, and true is no number.

    >>> _is(1.0, "integer"), _is(True, "integer"), _is(1, "number")
    (True, False, True)
    """
    if isinstance(value, bool):
        return kind == "boolean"
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _PYTHON_TYPES[kind])


def _part(name: Any) -> str:
    """A name as a part of a place, in messages."""
    return name if isinstance(name, str) and len(name) <= 60 else shown(name)


def _list(given: Mapping[str, Any], name: str, where: str) -> list[Any]:
    value = given.get(name, [])
    if not isinstance(value, list):
        raise MarsError(f"{name} at {where} is {shown(value)}: expected a list.")
    return value


def _count(given: Mapping[str, Any], name: str, where: str) -> int | None:
    value = given.get(name)
    if value is not None and (type(value) is not int or value < 0):
        raise MarsError(f"{name} at {where} is {shown(value)}: expected a whole number of at least 0.")
    return value


def _bounds(given: Mapping[str, Any], where: str) -> tuple[int | None, int | None]:
    def bound(name: str, exclusive: str, step: int) -> int | None:
        found = []
        for key, move in ((name, 0), (exclusive, step)):
            if key in given:
                if type(given[key]) is not int or abs(given[key]) >= 10**MOST_DIGITS:
                    raise MarsError(
                        f"{key} at {where} is {shown(given[key])}: expected a whole number of at most {MOST_DIGITS} "
                        "digits."
                    )
                found.append(given[key] + move)
        return (max if step > 0 else min)(found) if found else None

    return bound("minimum", "exclusiveMinimum", 1), bound("maximum", "exclusiveMaximum", -1)


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


@functools.lru_cache(maxsize=1024)
def _naturals(low: int, high: int | None) -> Node:
    """From low, at least 0, to high; without a bound up to 18 digits, or as many as low has."""
    high = 10 ** max(18, len(str(low))) - 1 if high is None else high
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
_ESCAPED = {
    code: text(f"\\{_SHORT[code]}" if code in _SHORT else f"\\u{code:04x}")
    for code in sorted({*range(0x20), *_SHORT})
}
"""What a JSON string does not hold as it is, as `json.dumps` writes it."""


def _in_json(node: Node) -> Node:
    """What a pattern's texts are inside of a JSON string, as `json.dumps` writes them."""
    if isinstance(node, Sequence):
        return Sequence(tuple(map(_in_json, node.parts)))
    if isinstance(node, Either):
        return Either(tuple(map(_in_json, node.parts)))
    if isinstance(node, Repeat):
        return Repeat(_in_json(node.part), node.least, node.most)
    return _char_in_json(node.ranges)


@functools.lru_cache(maxsize=1024)
def _char_in_json(ranges: Ranges) -> Node:
    parts = [said for code, said in _ESCAPED.items() if any(low <= code <= high for low, high in ranges)]
    if not parts:
        return Chars(ranges)
    plain = complement(ranges_of([*complement(ranges), *((code, code) for code in _ESCAPED)]))
    return Either((*parts, Chars(plain))) if plain else Either(tuple(parts))
