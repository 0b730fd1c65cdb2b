"""Conversion of regular expressions to nodes, with Python's parser and the semantics of `re.fullmatch`.

Tested against `re.fullmatch` (tests/constraints/test_automaton.py).

`re._parser`, the parser of `re.compile`, is private, but its output has had the same structure since Python 2. Only
this module uses it.
"""

from __future__ import annotations

import bisect
import functools
import importlib
import re
import warnings
from collections.abc import Iterable
from typing import Any

from mars_jax.constraints import nodes
from mars_jax.constraints.nodes import Chars, Either, Node, Ranges, WorkBudget, complement, ranges_of
from mars_jax.utils.errors import MarsError, short_repr

_parser: Any = importlib.import_module("re._parser")
_REFUSED = {
    "ASSERT": "looks ahead or behind",
    "ASSERT_NOT": "looks ahead or behind",
    "GROUPREF": "refers back to a group",
    "GROUPREF_EXISTS": "refers back to a group",
    "POSSESSIVE_REPEAT": "has a possessive repeat",
    "ATOMIC_GROUP": "has an atomic group",
}


def parse_pattern(pattern: str, budget: WorkBudget | None = None) -> Node:
    """Parse a pattern that must match a whole string, and return its node.

    Args:
      pattern: regular expression in the syntax of Python's `re`.
      budget: work budget of the constraint that contains the pattern.

    Raises:
      MarsError: the pattern is not a regular expression, or no automaton can represent it.
      TooLarge: the pattern exceeds the budget.

    >>> parse_pattern("ab").parts[0].ranges
    ((97, 97),)
    """
    budget = budget or WorkBudget()
    budget.spend(len(pattern))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # ignore warnings about syntax that may change
            tree = _parser.parse(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise MarsError(
            f"the pattern {short_repr(pattern)} is not a regular expression ({error}): correct it."
        ) from None
    try:
        return _Reader(pattern, tree.state.flags, budget).all_of(list(tree))
    except RecursionError:
        raise MarsError(f"the pattern {short_repr(pattern)} is nested too deeply: simplify it.") from None


class _Reader:
    def __init__(self, pattern: str, flags: int, budget: WorkBudget):
        self._pattern, self._flags, self._budget = pattern, flags, budget

    def _refuse(self, problem: str) -> MarsError:
        return MarsError(
            f"the pattern {short_repr(self._pattern)} {problem}, which no automaton can represent: remove it."
        )

    def all_of(self, items: list[Any]) -> Node:
        # The pattern must match the whole string, so anchors at its beginning and end are redundant.
        while items and _is_anchor(items[0], "AT_BEGINNING", "AT_BEGINNING_STRING"):
            items = items[1:]
        while items and _is_anchor(items[-1], "AT_END", "AT_END_STRING"):
            items = items[:-1]
        return self.sequence(items)

    def sequence(self, items: Iterable[Any]) -> Node:
        return nodes.sequence(*(self.one(*item) for item in items))

    def one(self, op: object, argument: Any) -> Node:
        name = str(op)
        if name in _REFUSED:
            raise self._refuse(_REFUSED[name])
        if name == "AT":
            raise self._refuse("has an anchor or a word boundary inside")
        if name == "LITERAL":
            return self._chars(self._cased([(argument, argument)]))
        if name == "NOT_LITERAL":
            return self._chars(complement(self._cased([(argument, argument)])))
        if name == "ANY" and self._flags & re.DOTALL:
            return Chars(complement(()))
        if name == "ANY":
            return Chars(complement(((10, 10),)))
        if name == "IN":
            return self._chars(self._members(argument))
        if name == "BRANCH":
            return Either(tuple(self.sequence(branch) for branch in argument[1]))
        if name == "SUBPATTERN":
            # Inline flags, as in `(?i:...)`, apply only within the group.
            _, add, drop, items = argument
            return _Reader(self._pattern, (self._flags | add) & ~drop, self._budget).sequence(items)
        if name in ("MAX_REPEAT", "MIN_REPEAT"):
            # Greedy and lazy quantifiers match the same whole strings.
            least, most, items = argument
            if most >= _parser.MAXREPEAT:
                most = None
            return nodes.Repeat(self.sequence(items), least, most)
        if name == "FAILURE":
            # Python 3.13 parses `(?!)`, which matches nothing, as FAILURE.
            return Either(())
        raise self._refuse(f"has {name.lower()}")

    def _chars(self, ranges: Ranges) -> Node:
        self._budget.spend(len(ranges))
        return Chars(ranges)

    def _members(self, items: list[Any]) -> Ranges:
        is_negated, literal_ranges, category_ranges = False, [], []
        for op, argument in items:
            name = str(op)
            if name == "NEGATE":
                is_negated = True
            elif name == "LITERAL":
                literal_ranges.append((argument, argument))
            elif name == "RANGE":
                literal_ranges.append(tuple(argument))
            elif name == "CATEGORY":
                category_ranges += _category(str(argument), self._flags & re.ASCII)
            else:
                raise self._refuse(f"has {name.lower()} in a class")
        members = ranges_of([*self._cased(literal_ranges), *category_ranges])
        return complement(members) if is_negated else members

    def _cased(self, ranges: list[tuple[int, int]]) -> Ranges:
        """Add characters that differ only in case, if the pattern ignores case."""
        if not self._flags & re.IGNORECASE:
            return ranges_of(ranges)
        variants = list(ranges_of(ranges))
        codes, partners = _partners(self._flags & re.ASCII)
        for low, high in tuple(variants):
            for same in partners[bisect.bisect_left(codes, low) : bisect.bisect_right(codes, high)]:
                variants += same
        return ranges_of(variants)


def _is_anchor(item: Any, *names: str) -> bool:
    return str(item[0]) == "AT" and str(item[1]) in names


@functools.cache
def _all_characters() -> str:
    """Return a string of all code points except surrogates."""
    return "".join(map(chr, [*range(0xD800), *range(0xE000, nodes.LARGEST + 1)]))


@functools.cache
def _partners(ascii_flag: int) -> tuple[list[int], list[list[tuple[int, int]]]]:
    """Return all cased code points, and for each of them the code points that match it if `re` ignores case."""
    cased = "".join(c for c in _all_characters() if c != c.lower() or c != c.upper())
    flags = re.IGNORECASE | ascii_flag
    # A cased character has no special meaning in a pattern, so `c` needs no escape.
    pairs = [(ord(c), [(ord(same), ord(same)) for same in re.findall(c, cased, flags)]) for c in cased]
    return [code for code, _ in pairs], [same for _, same in pairs]


_LETTERS = {"DIGIT": r"\d", "SPACE": r"\s", "WORD": r"\w"}


@functools.cache
def _category(name: str, ascii_flag: int) -> list[tuple[int, int]]:
    """Return the ranges of code points that Python's `re` assigns to a character category."""
    class_escape = _LETTERS[name.removeprefix("CATEGORY_").removeprefix("UNI_").removeprefix("NOT_")]
    single_ranges = [(ord(c), ord(c)) for c in re.findall(class_escape, _all_characters(), ascii_flag)]
    ranges = ranges_of(single_ranges)
    return list(complement(ranges) if "NOT_" in name else ranges)
