"""Spans of text between an opening and a closing string, which determine the tokens that a lossy rule may relax.

Dimensions: S states. Tested against a text search in Python (tests/constraints/test_token_table.py).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable

import numpy as np

from mars_jax.constraints.automaton import FIRST, Automaton
from mars_jax.constraints.token_table import NO_TOKEN, TokenTable, token_table
from mars_jax.constraints.vocabulary import Vocabulary
from mars_jax.utils.errors import MarsError, check_text, check_type

NAMED = {
    "think": ("<think>", "</think>"),
    "code": ("```", "```"),
    "tool": ("<tool_call>", "</tool_call>"),
}
"""Opening and closing strings of spans, by name. The span `json` extends from a bracket to its closing bracket."""
DEEPEST_JSON = 32
_BETWEEN = "..."


@dataclasses.dataclass(frozen=True)
class _Tags:
    """Tracker of a span between two strings. Its state is (inside the span, bytes read of the next string)."""

    opening: bytes
    closing: bytes

    @property
    def bytes(self) -> bytes:
        """The bytes that the tracker distinguishes. All other bytes are equivalent."""
        return self.opening + self.closing

    def step(self, state: tuple[int, int], byte: int) -> tuple[int, int]:
        inside, num_read = state
        tag = {0: self.opening, 1: self.closing}[inside]
        read_bytes = tag[:num_read] + bytes([byte])
        # The length of the longest suffix of `read_bytes` that is a prefix of the next string.
        num_read = next(
            n for n in range(len(read_bytes), -1, -1) if tag.startswith(read_bytes[len(read_bytes) - n :])
        )
        return (1 - inside, 0) if num_read == len(tag) else (inside, num_read)


@dataclasses.dataclass(frozen=True)
class _Json:
    """Tracker of JSON. Its state is (depth, mode): mode 0 outside of strings, 1 in a string, 2 after a backslash."""

    bytes: bytes = b'{}[]"\\'

    def step(self, state: tuple[int, int], byte: int) -> tuple[int, int]:
        depth, mode = state
        if mode == 2:
            return depth, 1
        if mode == 1:
            return depth, {ord('"'): 0, ord("\\"): 2}.get(byte, 1)
        if byte in b"{[":
            # Deeper brackets are not counted, so that the number of states is finite.
            return min(depth + 1, DEEPEST_JSON), 0
        if byte in b"}]":
            return max(depth - 1, 0), 0
        # A quotation mark outside of all brackets does not begin a JSON string.
        return depth, int(depth > 0 and byte == ord('"'))


@functools.cache
def _tracker(name: str) -> _Tags | _Json:
    if name == "json":
        return _Json()
    opening, _, closing = name.partition(_BETWEEN)
    opening, closing = NAMED.get(name, (opening, closing))
    if not opening or not closing:
        raise MarsError(
            f"the span is {name!r}: expected {', '.join(NAMED)}, json, or an opening and a closing string, as in "
            f"'<plan>{_BETWEEN}</plan>'."
        )
    return _Tags(opening.encode(), closing.encode())


def checked_spans(spans: str | Iterable[str]) -> tuple[str, ...]:
    """Check one or several spans, and return them as a tuple.

    Raises:
      MarsError: an entry is not a valid span.

    >>> checked_spans("think"), checked_spans(["<a>...</a>", "json"])
    (('think',), ('<a>...</a>', 'json'))
    """
    check_type("the span", spans, (str, list, tuple), "a string or a list of strings")
    if isinstance(spans, str):
        spans = (spans,)
    for name in spans:
        check_text("the span", name)
        _tracker(name)
    return tuple(spans)


@dataclasses.dataclass(frozen=True)
class Spans:
    """Spans for lossy rules, which relax only inside `relax_in` (anywhere if empty) and never inside `strict_in`."""

    relax_in: tuple[str, ...] = ()
    strict_in: tuple[str, ...] = ()

    @functools.cached_property
    def followed(self) -> tuple[Automaton, np.ndarray]:
        """An automaton over bytes that accepts every text, and bool[S], True for its strict states."""
        names = (*self.relax_in, *self.strict_in)
        trackers = [_tracker(name) for name in names]
        tag_bytes = sorted(set(b"".join(t.bytes for t in trackers)))
        classes = np.zeros(256, np.uint8)
        classes[tag_bytes] = np.arange(1, len(tag_bytes) + 1)
        other_byte = next(b for b in range(256) if b not in tag_bytes)
        # Build the product automaton of the trackers, starting from its initial state. Class 0 contains all bytes that
        # no tracker distinguishes.
        start = ((0, 0),) * len(trackers)
        state_ids, todo, next_rows = {start: FIRST}, [start], [[0] * (len(tag_bytes) + 1)]
        for states in todo:
            next_row = []
            for byte in (other_byte, *tag_bytes):
                next_states = tuple(t.step(s, byte) for t, s in zip(trackers, states, strict=True))
                if next_states not in state_ids:
                    state_ids[next_states] = len(state_ids) + 1
                    todo.append(next_states)
                next_row.append(state_ids[next_states])
            next_rows.append(next_row)
        is_inside = np.asarray([[False] * len(names)] + [[s[0] > 0 for s in states] for states in todo])
        in_relaxed, in_strict = is_inside[:, : len(self.relax_in)], is_inside[:, len(self.relax_in) :]
        is_strict = in_strict.any(axis=1)
        if self.relax_in:
            is_strict |= ~in_relaxed.any(axis=1)
        accepting = np.arange(len(next_rows)) > 0
        return Automaton(np.asarray(next_rows, np.int32), classes, accepting), np.asarray(is_strict, bool)

    def table(self, vocabulary: Vocabulary) -> TokenTable:
        """Return the table for a vocabulary. The text of a special token is its name."""
        return _table(self, vocabulary)


@functools.lru_cache(maxsize=16)
def _table(spans: Spans, vocabulary: Vocabulary) -> TokenTable:
    automaton, strict = spans.followed
    byte_table = token_table(automaton, vocabulary.with_marks())
    next = byte_table.next.copy()
    next[:, 0] = np.arange(len(next))  # a token without text does not change the state
    return byte_table._replace(next=next, strict=strict, forced=np.full(len(next), NO_TOKEN, np.int32))
