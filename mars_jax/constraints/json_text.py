"""Nodes for JSON values in the format of `json.dumps`, with bounds on numbers and formats for strings.

Tested against `json` and `jsonschema` (tests/constraints/test_schema.py).
"""

from __future__ import annotations

import functools

from mars_jax.constraints import nodes
from mars_jax.constraints.nodes import Chars, Either, Node, Repeat, ranges_of, sequence, text
from mars_jax.constraints.pattern import parse_pattern

# Allow \u with four digits except for surrogates, because JSON counts a surrogate pair as one character but a pattern
# would count two.
_CHARACTER = parse_pattern(
    r'[^\x00-\x1f"\\]|\\["\\/bfnrt]|\\u([0-9a-cA-CefEF][0-9a-fA-F]|[dD][0-7])[0-9a-fA-F]{2}'
)
_DIGIT = parse_pattern("[0-9]")
_POSITIVE = r"(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?([eE][+\-]?[0-9]{1,2})?"
BOOLEAN, NULL = parse_pattern("true|false"), parse_pattern("null")
NUMBER, POSITIVE_NUMBER = parse_pattern(f"-?{_POSITIVE}"), parse_pattern(_POSITIVE)

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
"""Regular expressions for string formats, keyed by their names in JSON Schema."""


def string(least: int = 0, most: int | None = None) -> Node:
    """Return the node for a JSON string of `least` to `most` characters, without a maximum if `most` is None."""
    return sequence(text('"'), Repeat(_CHARACTER, least, most), text('"'))


def integers(low: int | None, high: int | None) -> Node:
    """Return the node for the integers from `low` to `high` in JSON; None means no limit.

    >>> from mars_jax.constraints.automaton import automaton
    >>> made = automaton(integers(-3, 120))
    >>> [n for n in range(-200, 200) if made.matches(str(n))] == list(range(-3, 121))
    True
    """
    # A negative number consists of a minus sign and its absolute value, which is at most -low.
    alternatives: list[Node] = []
    if high is None or high >= 0:
        alternatives.append(_naturals(max(low or 0, 0), high))
    if low is None or low < 0:
        # Exclude -0: the absolute value is at least 1, or at least -high if `high` is negative.
        min_absolute = max(1, -(high or 0))
        alternatives.append(sequence(text("-"), _naturals(min_absolute, low and -low)))
    return Either(tuple(alternatives))


@functools.lru_cache(maxsize=1024)
def _naturals(low: int, high: int | None) -> Node:
    """Return the node for the integers from `low` >= 0 to `high`; None: at most 18 digits, or as many as `low` has."""
    if high is None:
        high = 10 ** max(18, len(str(low))) - 1
    alternatives: list[Node] = []
    for digits in range(len(str(low)), len(str(high)) + 1):
        alternatives.append(_same_length(str(low), str(min(high, 10**digits - 1))))
        low = 10**digits
    return Either(tuple(alternatives))


def _same_length(low: str, high: str) -> Node:
    """Return the node for the numbers from `low` to `high`, two strings with the same number of digits."""
    if set(low) <= {"0"} and set(high) <= {"9"}:
        return Repeat(_DIGIT, len(low), len(low))
    # Split by the leading digit. If it is strictly between the leading digits of the bounds, the other digits may have
    # any value.
    zeros, nines = "0" * (len(low) - 1), "9" * (len(low) - 1)
    first_code, last_code = ord(low[0]), ord(high[0])
    if first_code == last_code:
        cases = [(first_code, first_code, low[1:], high[1:])]
    else:
        cases = [
            (first_code, first_code, low[1:], nines),
            (first_code + 1, last_code - 1, zeros, nines),
            (last_code, last_code, zeros, high[1:]),
        ]
    return Either(
        tuple(sequence(Chars(((a, b),)), _same_length(*bounds)) for a, b, *bounds in cases if a <= b)
    )


_SHORT = {0x08: "b", 0x0C: "f", 0x0A: "n", 0x0D: "r", 0x09: "t", 0x22: '"', 0x5C: "\\"}
_ESCAPED = {code: text(f"\\u{code:04x}") for code in range(0x20)}
_ESCAPED |= {code: text(f"\\{letter}") for code, letter in _SHORT.items()}
"""Nodes for the characters that a JSON string must escape, as in `json.dumps`."""


def in_string(node: Node) -> Node:
    """Return the node for a pattern's matches as they appear in a JSON string, escaped as by `json.dumps`."""
    if isinstance(node, Chars):
        return _char_in_string(node.ranges)
    if isinstance(node, Repeat):
        return node._replace(part=in_string(node.part))
    return node._replace(parts=tuple(map(in_string, node.parts)))


@functools.lru_cache(maxsize=1024)
def _char_in_string(ranges: nodes.Ranges) -> Node:
    parts = [escape for code, escape in _ESCAPED.items() if any(low <= code <= high for low, high in ranges)]
    if not parts:
        return Chars(ranges)
    # The characters in `ranges` that need no escape.
    unescaped = nodes.complement(ranges_of([*nodes.complement(ranges), *((code, code) for code in _ESCAPED)]))
    return Either((*parts, Chars(unescaped)))
