"""Compilation of nodes to a deterministic automaton over UTF-8 bytes, minimised if that is cheap.

S states; state 0 is dead and state 1 is the initial state. Oracle: `re.fullmatch`
(tests/constraints/test_automaton.py).

Sources: Thompson's construction, the subset construction, and Moore's minimisation, as in Hopcroft, Motwani and
Ullman, "Introduction to Automata Theory", chapters 3 and 4; ranges of UTF-8 as in Russ Cox, "Regular Expression
Matching in the Wild".
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from mars_jax.constraints.nodes import Chars, Either, Node, Ranges, Repeat, Sequence, TooLarge, WorkBudget
from mars_jax.utils.errors import MarsError

DEAD, FIRST = 0, 1
MOST_STATES = 32_000
"""Maximum states of an automaton: state numbers are u16, and all constraints of a batch share them."""
_MOST_STEPS = 5_000_000
"""Maximum steps of the subset construction, which also bounds the total size of the sets."""
_MINIMISED = 6_000
_ROUNDS = 400

Bytes = tuple[tuple[int, int], ...]
"""A sequence of byte ranges, one for each byte."""


class Automaton(NamedTuple):
    """A deterministic automaton over bytes. `next[DEAD]` is DEAD; every other state can reach an accepting state."""

    next: np.ndarray  # i32[S, K]; next state by byte class
    classes: np.ndarray  # u8[256]; class of every byte
    accepting: np.ndarray  # bool[S]

    def run(self, data: bytes, state: int = FIRST) -> int:
        """Return the state after these bytes."""
        for byte in data:
            state = int(self.next[state, self.classes[byte]])
        return state

    def matches(self, text: str) -> bool:
        """Return whether the automaton accepts the whole text."""
        return bool(self.accepting[self.run(text.encode())])

    def begins(self, data: bytes) -> bool:
        """Return whether some accepted text begins with these bytes."""
        return self.run(data) != DEAD


@functools.lru_cache(maxsize=4096)
def utf8(ranges: Ranges) -> tuple[Bytes, ...]:
    """Return the UTF-8 encodings of code points as sequences of byte ranges.

    >>> utf8(((97, 122), (0x7f, 0x80)))
    (((97, 122),), ((127, 127),), ((194, 194), (128, 128)))
    """
    sequences: list[Bytes] = []
    for low, high in ranges:
        # A character takes one to four bytes. Divide each range where this number changes.
        for first, last in ((0, 0x7F), (0x80, 0x7FF), (0x800, 0xFFFF), (0x10000, 0x10FFFF)):
            if max(low, first) <= min(high, last):
                sequences += _split(chr(max(low, first)).encode(), chr(min(high, last)).encode())
    return tuple(sequences)


def _split(low: bytes, high: bytes) -> list[Bytes]:
    """Return byte-range sequences for all encodings from `low` to `high`, which have equal lengths."""
    lowest, highest = b"\x80" * (len(low) - 1), b"\xbf" * (len(low) - 1)
    # All continuation bytes are free: one sequence covers the range.
    if low[1:] == lowest and high[1:] == highest:
        return [((low[0], high[0]), *(((0x80, 0xBF),) * len(lowest)))]
    if low[0] == high[0]:
        return [((low[0], low[0]), *following) for following in _split(low[1:], high[1:])]
    # Divide at a lead byte: the first part ends with the highest continuation bytes, the second begins with the lowest.
    last = high[0] - 1 if low[1:] == lowest else low[0]
    return [*_split(low, bytes([last]) + highest), *_split(bytes([last + 1]) + lowest, high)]


class _Pieces:
    """A nondeterministic automaton under construction."""

    def __init__(self):
        self._budget = WorkBudget()
        self.free: list[list[int]] = []  # epsilon steps
        self.byte: list[list[tuple[int, int, int]]] = []  # (low, high, to)

    def state(self) -> int:
        self._budget.spend(1)
        self.free.append([])
        self.byte.append([])
        return len(self.free) - 1

    def add(self, node: Node, start: int) -> int:
        """Add a node that begins in `start`; return the state in which it ends."""
        if isinstance(node, Chars):
            end = self.state()
            # Sequences with the same suffix share the states of that suffix.
            ends: dict[Bytes, int] = {(): end}
            for sequence in utf8(node.ranges):
                self._tail(sequence, start, ends)
            return end
        if isinstance(node, Sequence):
            for part in node.parts:
                start = self.add(part, start)
            return start
        if isinstance(node, Either):
            end = self.state()
            for part in node.parts:
                # A branch begins in a separate state, so that a loop in it does not lead into the other branches.
                begin = self.state()
                self.free[start].append(begin)
                self.free[self.add(part, begin)].append(end)
            return end
        assert isinstance(node, Repeat)
        return self._repeat(node, start)

    def _repeat(self, node: Repeat, start: int) -> int:
        if not _is_nonempty(node.part):
            return start  # repetitions of the empty string need no states
        for _ in range(node.least):
            start = self.add(node.part, start)
        if node.most is None:
            loop = self.state()
            self.free[start].append(loop)
            self.free[self.add(node.part, loop)].append(loop)
            # Leave the loop through a separate state, so that no later node can lead back into it.
            end = self.state()
            self.free[loop].append(end)
            return end
        end = self.state()
        # Each of these repetitions can be skipped by a step from its start to the end.
        for _ in range(node.most - node.least):
            self.free[start].append(end)
            start = self.add(node.part, start)
        self.free[start].append(end)
        return end

    def _tail(self, sequence: Bytes, start: int, ends: dict[Bytes, int]) -> None:
        remainder = sequence[1:]
        if remainder not in ends:
            ends[remainder] = self.state()
            self._tail(remainder, ends[remainder], ends)
        low, high = sequence[0]
        self.byte[start].append((low, high, ends[remainder]))


def _is_nonempty(node: Node) -> bool:
    """Return whether a node is anything but the empty string. Repeating the empty string leaves it empty.

    >>> _is_nonempty(Repeat(Sequence(()), 9, None)), _is_nonempty(Either(()))
    (False, True)
    """
    if isinstance(node, Sequence):
        return any(map(_is_nonempty, node.parts))
    if isinstance(node, Repeat):
        return node.most != 0 and _is_nonempty(node.part)
    return True


def automaton(node: Node) -> Automaton:
    """Return the deterministic automaton for a node.

    Raises:
      TooLarge: the automaton has too many states.
      MarsError: the automaton accepts no string.

    >>> from mars_jax.constraints.pattern import parse_pattern
    >>> made = automaton(parse_pattern("ab*"))
    >>> made.matches("abb"), made.matches("ba"), len(made.accepting)
    (True, False, 3)
    """
    pieces = _Pieces()
    first = pieces.state()
    last = pieces.add(node, first)
    # Bytes between two neighbouring ends of ranges lead from every state to the same states: they form one class.
    edges = {0, 256}
    for steps in pieces.byte:
        for low, high, _ in steps:
            edges |= {low, high + 1}
    bounds = sorted(edges)
    classes = np.searchsorted(bounds, np.arange(256), side="right").astype(np.int32) - 1
    return _trimmed(*_subsets(pieces, first, last, classes, len(bounds) - 1), classes)


def _subsets(
    pieces: _Pieces, first: int, last: int, classes: np.ndarray, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """Run the subset construction: return next i32[S, K] and accepting bool[S]."""
    by_class = [
        [(int(classes[low]), int(classes[high]) + 1, to) for low, high, to in steps] for steps in pieces.byte
    ]

    budget = WorkBudget(_MOST_STEPS, "steps from state to state")

    def closed(states: frozenset[int]) -> frozenset[int]:
        """Return the epsilon closure of `states`, without states that have no byte steps and are not `last`."""
        reached_states, todo = set(states), list(states)
        while todo:
            for following in pieces.free[todo.pop()]:
                if following not in reached_states:
                    reached_states.add(following)
                    todo.append(following)
        budget.spend(len(reached_states))
        return frozenset(s for s in reached_states if by_class[s] or s == last)

    start = closed(frozenset([first]))
    # A constraint that matches nothing has an empty start, which is DEAD.
    ids = {start: FIRST, frozenset(): DEAD}
    state_of: dict[frozenset[int], int] = {}  # ids by the set of states before its closure
    todo = [start]
    rows = [[DEAD] * count, [DEAD] * count]
    accepting = [False, last in start]
    for subset in todo:
        to: list[set[int]] = [set() for _ in range(count)]
        for state in subset:
            for low, high, following in by_class[state]:
                budget.spend(high - low)
                for kind in range(low, high):
                    to[kind].add(following)
        row = rows[ids[subset]]
        for kind, successors in enumerate(map(frozenset, to)):
            if not successors:
                continue
            if successors not in state_of:
                reached = closed(successors)
                if reached not in ids:
                    if len(rows) >= MOST_STATES:
                        raise TooLarge(f"more than {MOST_STATES:,} states")
                    ids[reached] = len(rows)
                    rows.append([DEAD] * count)
                    accepting.append(last in reached)
                    todo.append(reached)
                state_of[successors] = ids[reached]
            row[kind] = state_of[successors]
    return np.asarray(rows, np.int32), np.asarray(accepting, bool)


def _trimmed(next: np.ndarray, accepting: np.ndarray, classes: np.ndarray) -> Automaton:
    """Remove states that cannot reach acceptance; merge equivalent states and equivalent byte classes."""
    alive = living(next, accepting)
    if not alive[FIRST]:
        raise MarsError("the constraint matches no text at all: correct it.")
    next = np.where(alive[next], next, DEAD)
    next[~alive] = DEAD
    label = _alike(next, accepting, alive)
    # The first state of each label represents it; states 0 and 1 keep their numbers.
    order, first = np.unique(label, return_index=True)
    ranked = [label[DEAD], label[FIRST]]
    ranked += [state_label for state_label in order[np.argsort(first)].tolist() if state_label not in ranked]
    number = np.zeros(int(order.max()) + 1, np.int32)
    number[ranked] = np.arange(len(ranked))
    representative = np.zeros(len(ranked), np.int64)
    representative[number[order]] = first
    merged = number[label[next[representative]]]
    # Byte classes with equal columns lead every state to the same states.
    columns, kind = np.unique(merged, axis=1, return_inverse=True)
    return Automaton(
        next=columns.astype(np.int32),
        classes=kind.reshape(-1)[classes].astype(np.uint8),
        accepting=accepting[representative],
    )


def living(next: np.ndarray, accepting: np.ndarray) -> np.ndarray:
    """Return bool[S]: the states that can reach an accepting state."""
    # Search backwards from the accepting states, over edges sorted by their targets.
    alive = accepting.copy()
    sources, targets = np.repeat(np.arange(len(next)), next.shape[1]), next.reshape(-1)
    order = np.argsort(targets, kind="stable")
    sources, first = sources[order], np.searchsorted(targets[order], np.arange(len(next) + 1))
    todo = np.flatnonzero(alive).tolist()
    while todo:
        state = todo.pop()
        for source in sources[first[state] : first[state + 1]].tolist():
            if not alive[source]:
                alive[source] = True
                todo.append(source)
    alive[DEAD] = False
    return alive


def _alike(next: np.ndarray, accepting: np.ndarray, alive: np.ndarray) -> np.ndarray:
    """Return labels i64[S], equal for equivalent states if they are cheap to find."""
    states = np.where(alive, np.arange(len(next)), DEAD)
    if len(next) > _MINIMISED:
        return states
    # Three labels at first: 0 for dead states, 2 for accepting ones, 1 for all others.
    label = accepting.astype(np.int64) + alive
    count = len(np.unique(label))
    for _ in range(_ROUNDS):
        # Two states remain equivalent if their labels and the labels of their next states are equal. The keys are
        # compared as bytes, which is faster than `np.unique` over an axis.
        keys = np.concatenate([label[:, None], label[next]], axis=1).astype(np.int32)
        rows = np.ascontiguousarray(keys).view(np.dtype((np.void, keys.shape[1] * 4))).reshape(-1)
        label = np.unique(rows, return_inverse=True)[1].reshape(-1)
        if (label_count := int(label.max()) + 1) == count:
            return label
        count = label_count
    # States with one label may still differ after the last round, so each living state keeps its own label.
    return states
