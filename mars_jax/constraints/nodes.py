"""Nodes of regular expressions over code points. Each node describes a set of strings. Tested against Python's `re`."""

from __future__ import annotations

from typing import NamedTuple, Union

from mars_jax.utils.errors import MarsError, short_repr

MOST_PIECES = 150_000
"""Maximum number of pieces of a constraint: parts of a schema or pattern, or automaton states before minimisation."""
LARGEST = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)
Ranges = tuple[tuple[int, int], ...]
"""A set of code points, as sorted and non-adjacent ranges with inclusive ends."""


class TooLarge(MarsError):
    """Error for a constraint that is too large."""

    def __init__(self, why: str):
        super().__init__(
            f"the constraint is too large ({why}): lower the bounds of its repeats, or divide it into several requests."
        )


class WorkBudget:
    """Limit on the work for one constraint, so that a large constraint does not take forever."""

    def __init__(self, limit: int = MOST_PIECES, unit: str = "pieces"):
        self._limit, self._unit, self._spent = limit, unit, 0

    def spend(self, count: int) -> None:
        """Deduct `count` units from the budget before doing the work.

        Raises:
          TooLarge: the budget is exhausted.
        """
        self._spent += count
        if self._spent > self._limit:
            raise TooLarge(f"more than {self._limit:,} {self._unit}")


class Chars(NamedTuple):
    """One character from any of these ranges."""

    ranges: Ranges


class Sequence(NamedTuple):
    """A concatenation of parts."""

    parts: tuple[Node, ...]


class Either(NamedTuple):
    """An alternation of parts."""

    parts: tuple[Node, ...]


class Repeat(NamedTuple):
    """A part that is repeated `least` to `most` times; None means no maximum."""

    part: Node
    least: int
    most: int | None


Node = Union[Chars, Sequence, Either, Repeat]  # noqa: UP007, because annotations above refer to it


def ranges_of(parts: list[tuple[int, int]]) -> Ranges:
    """Sort and merge ranges of code points, and remove surrogates, which valid text cannot contain.

    >>> ranges_of([(98, 99), (97, 97), (120, 122)])
    ((97, 99), (120, 122))
    """
    first_surrogate, last_surrogate = _SURROGATES
    # Split each range into the parts below and above the surrogates. The next step drops empty parts.
    parts = [(low, min(high, first_surrogate - 1)) for low, high in parts] + [
        (max(low, last_surrogate + 1), high) for low, high in parts
    ]
    merged: list[tuple[int, int]] = []
    for low, high in sorted((low, high) for low, high in parts if low <= high):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], high))
        else:
            merged.append((low, high))
    return tuple(merged)


def complement(ranges: Ranges) -> Ranges:
    """Return all code points that are not in `ranges`, except surrogates.

    >>> complement(((0, 9), (11, LARGEST)))
    ((10, 10),)
    """
    ends = [-1, *(high for _, high in ranges)]
    starts = [*(low for low, _ in ranges), LARGEST + 1]
    return ranges_of([(a + 1, b - 1) for a, b in zip(ends, starts, strict=True) if a + 1 <= b - 1])


def text(literal: str) -> Node:
    """Return the node for a literal string.

    Raises:
      MarsError: the string contains a surrogate and cannot be encoded as UTF-8.
    """
    codes = [ord(c) for c in literal]
    if any(_SURROGATES[0] <= code <= _SURROGATES[1] for code in codes):
        raise MarsError(f"the text {short_repr(literal)} is not valid Unicode: give it as UTF-8.")
    return Sequence(tuple(Chars(((code, code),)) for code in codes))


def optional(part: Node) -> Node:
    """Return the node for a part that may be absent."""
    return Repeat(part, 0, 1)


def sequence(*parts: Node) -> Node:
    """Return the node for the concatenation of some parts."""
    return Sequence(parts)
