"""Compilation of regular expressions, given as nodes, to deterministic automata over UTF-8 bytes.

State 0 is dead, and state 1 is the initial state. Small automata are minimised. Dimensions: S states, K byte classes.
Tested against `re.fullmatch` (tests/constraints/test_automaton.py).

Sources: Thompson's construction, the subset construction and Moore's minimisation as in Hopcroft, Motwani and Ullman,
"Introduction to Automata Theory", chapters 3 and 4. UTF-8 ranges as in Russ Cox, "Regular Expression Matching in the
Wild".
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from mars_jax.constraints.nodes import Chars, Either, Node, Ranges, Repeat, Sequence, TooLarge, WorkBudget
from mars_jax.utils.errors import MarsError

DEAD, FIRST = 0, 1
MOST_STATES = 32_000
"""Maximum number of states of an automaton. State numbers are u16, and all constraints of a batch share this range."""
_MOST_STEPS = 5_000_000
"""Maximum number of steps of the subset construction. It also limits the total size of the subsets."""
_MINIMISED = 6_000
_ROUNDS = 400

Bytes = tuple[tuple[int, int], ...]
"""Ranges (lowest, highest) of consecutive bytes, one range per byte."""


class Automaton(NamedTuple):
    """A deterministic automaton over bytes. An accepting state can be reached from every state except DEAD."""

    next: np.ndarray  # i32[S, K]; next state for each class of bytes
    classes: np.ndarray  # u8[256]; class of each byte
    accepting: np.ndarray  # bool[S]; True if the text may end in this state

    def run(self, data: bytes, state: int = FIRST) -> int:
        """Return the state after reading some bytes."""
        for byte in data:
            state = int(self.next[state, self.classes[byte]])
        return state

    def matches(self, text: str) -> bool:
        """Return True if the automaton accepts the whole text."""
        return bool(self.accepting[self.run(text.encode())])

    def begins(self, data: bytes) -> bool:
        """Return True if some accepted text begins with these bytes."""
        return self.run(data) != DEAD


@functools.lru_cache(maxsize=4096)
def utf8(ranges: Ranges) -> tuple[Bytes, ...]:
    """Return the UTF-8 encodings of ranges of code points, as sequences of byte ranges.

    >>> utf8(((97, 122), (0x7f, 0x80)))
    (((97, 122),), ((127, 127),), ((194, 194), (128, 128)))
    """
    sequences: list[Bytes] = []
    for low, high in ranges:
        # A character has one to four bytes. Split each range at the code points at which this number changes.
        for length_low, length_high in ((0, 0x7F), (0x80, 0x7FF), (0x800, 0xFFFF), (0x10000, 0x10FFFF)):
            if max(low, length_low) <= min(high, length_high):
                sequences += _split(chr(max(low, length_low)).encode(), chr(min(high, length_high)).encode())
    return tuple(sequences)


def _split(low: bytes, high: bytes) -> list[Bytes]:
    """Return sequences of byte ranges for all encodings from `low` to `high`, which must have the same length."""
    lowest, highest = b"\x80" * (len(low) - 1), b"\xbf" * (len(low) - 1)
    # If all values of the continuation bytes are included, one sequence is sufficient.
    if low[1:] == lowest and high[1:] == highest:
        return [((low[0], high[0]), *(((0x80, 0xBF),) * len(lowest)))]
    if low[0] == high[0]:
        return [((low[0], low[0]), *suffix) for suffix in _split(low[1:], high[1:])]
    # Split at a lead byte. The first part ends with the highest continuation bytes, and the second begins with the
    # lowest.
    last_lead = high[0] - 1 if low[1:] == lowest else low[0]
    return [*_split(low, bytes([last_lead]) + highest), *_split(bytes([last_lead + 1]) + lowest, high)]


class _Pieces:
    """A nondeterministic automaton that is built from nodes."""

    def __init__(self):
        self._budget = WorkBudget()
        self.free: list[list[int]] = []  # epsilon transitions of each state
        self.byte: list[list[tuple[int, int, int]]] = []  # (lowest byte, highest byte, next state)

    def state(self) -> int:
        self._budget.spend(1)
        self.free.append([])
        self.byte.append([])
        return len(self.free) - 1

    def add(self, node: Node, start: int) -> int:
        """Add the states of a node that begins in the state `start`, and return the state in which the node ends."""
        if isinstance(node, Chars):
            end = self.state()
            # Byte sequences with the same suffix share the states of this suffix.
            suffix_ends: dict[Bytes, int] = {(): end}
            for sequence in utf8(node.ranges):
                self._tail(sequence, start, suffix_ends)
            return end
        if isinstance(node, Sequence):
            for part in node.parts:
                start = self.add(part, start)
            return start
        if isinstance(node, Either):
            end = self.state()
            for part in node.parts:
                # Each branch begins in a separate state, so that a loop in one branch does not lead to the other
                # branches.
                begin = self.state()
                self.free[start].append(begin)
                self.free[self.add(part, begin)].append(end)
            return end
        assert isinstance(node, Repeat)
        return self._repeat(node, start)

    def _repeat(self, node: Repeat, start: int) -> int:
        if not _is_nonempty(node.part):
            return start  # repeating the empty string needs no states
        for _ in range(node.least):
            start = self.add(node.part, start)
        if node.most is None:
            loop = self.state()
            self.free[start].append(loop)
            self.free[self.add(node.part, loop)].append(loop)
            # Leave the loop through a separate state, so that later nodes cannot lead back into the loop.
            end = self.state()
            self.free[loop].append(end)
            return end
        end = self.state()
        # A transition from the start of each optional repetition to `end` skips all remaining repetitions.
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
    """Return False if a node matches only the empty string, and True otherwise.

    >>> _is_nonempty(Repeat(Sequence(()), 9, None)), _is_nonempty(Either(()))
    (False, True)
    """
    if isinstance(node, Sequence):
        return any(map(_is_nonempty, node.parts))
    if isinstance(node, Repeat):
        return node.most != 0 and _is_nonempty(node.part)
    return True


def automaton(node: Node) -> Automaton:
    """Compile a node to a deterministic automaton.

    Raises:
      TooLarge: the automaton has too many states.
      MarsError: the automaton accepts no string.

    >>> from mars_jax.constraints.pattern import parse_pattern
    >>> made = automaton(parse_pattern("ab*"))
    >>> made.matches("abb"), made.matches("ba"), len(made.accepting)
    (True, False, 3)
    """
    pieces = _Pieces()
    start_state = pieces.state()
    end_state = pieces.add(node, start_state)
    # All bytes between two adjacent range boundaries lead to the same states, so they form one class.
    range_ends = {0, 256}
    for byte_steps in pieces.byte:
        for low, high, _ in byte_steps:
            range_ends |= {low, high + 1}
    class_bounds = sorted(range_ends)
    classes = np.searchsorted(class_bounds, np.arange(256), side="right").astype(np.int32) - 1
    return _trimmed(*_subsets(pieces, start_state, end_state, classes, len(class_bounds) - 1), classes)


def _subsets(
    pieces: _Pieces, first: int, last: int, classes: np.ndarray, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """Run the subset construction, and return the transitions i32[S, K] and the accepting states bool[S]."""
    class_steps = [
        [(int(classes[low]), int(classes[high]) + 1, to) for low, high, to in steps] for steps in pieces.byte
    ]

    budget = WorkBudget(_MOST_STEPS, "steps from state to state")

    def closed(states: frozenset[int]) -> frozenset[int]:
        """Return the epsilon closure of some states, limited to `last` and the states that have byte transitions."""
        reached_states, todo = set(states), list(states)
        while todo:
            for next_state in pieces.free[todo.pop()]:
                if next_state not in reached_states:
                    reached_states.add(next_state)
                    todo.append(next_state)
        budget.spend(len(reached_states))
        return frozenset(s for s in reached_states if class_steps[s] or s == last)

    start_set = closed(frozenset([first]))
    # The empty set is the state DEAD. It is also the initial set of a constraint that matches nothing.
    set_ids = {start_set: FIRST, frozenset(): DEAD}
    state_of: dict[frozenset[int], int] = {}  # maps a set to the state number of its closure
    todo = [start_set]
    next_rows = [[DEAD] * count, [DEAD] * count]
    accepting = [False, last in start_set]
    for subset in todo:
        to: list[set[int]] = [set() for _ in range(count)]
        for state in subset:
            for low, high, next_state in class_steps[state]:
                budget.spend(high - low)
                for byte_class in range(low, high):
                    to[byte_class].add(next_state)
        next_row = next_rows[set_ids[subset]]
        for byte_class, successors in enumerate(map(frozenset, to)):
            if not successors:
                continue
            if successors not in state_of:
                reached_set = closed(successors)
                if reached_set not in set_ids:
                    if len(next_rows) >= MOST_STATES:
                        raise TooLarge(f"more than {MOST_STATES:,} states")
                    set_ids[reached_set] = len(next_rows)
                    next_rows.append([DEAD] * count)
                    accepting.append(last in reached_set)
                    todo.append(reached_set)
                state_of[successors] = set_ids[reached_set]
            next_row[byte_class] = state_of[successors]
    return np.asarray(next_rows, np.int32), np.asarray(accepting, bool)


def _trimmed(next: np.ndarray, accepting: np.ndarray, classes: np.ndarray) -> Automaton:
    """Remove states that cannot reach an accepting state, and merge equivalent states and equivalent byte classes."""
    alive = living(next, accepting)
    if not alive[FIRST]:
        raise MarsError("the constraint matches no text at all: correct it.")
    next = np.where(alive[next], next, DEAD)
    next[~alive] = DEAD
    labels = _alike(next, accepting, alive)
    # The first state with each label represents all states with this label. Number the labels in the order of these
    # states, so that states 0 and 1 keep their numbers.
    _, first_states, labels = np.unique(labels, return_index=True, return_inverse=True)
    label_order = np.argsort(first_states)
    representatives = first_states[label_order]
    merged_next = np.argsort(label_order)[labels.reshape(-1)[next[representatives]]]
    # Byte classes with identical columns are equivalent.
    class_columns, column_of_class = np.unique(merged_next, axis=1, return_inverse=True)
    return Automaton(
        next=class_columns.astype(np.int32),
        classes=column_of_class.reshape(-1)[classes].astype(np.uint8),
        accepting=accepting[representatives],
    )


def living(next: np.ndarray, accepting: np.ndarray) -> np.ndarray:
    """Return bool[S], True for states from which an accepting state can be reached."""
    # Search backwards from the accepting states, along transitions that are sorted by their targets.
    alive = accepting.copy()
    sources, targets = np.repeat(np.arange(len(next)), next.shape[1]), next.reshape(-1)
    by_target = np.argsort(targets, kind="stable")
    sources, first_edges = sources[by_target], np.searchsorted(targets[by_target], np.arange(len(next) + 1))
    todo = np.flatnonzero(alive).tolist()
    while todo:
        state = todo.pop()
        for source in sources[first_edges[state] : first_edges[state + 1]].tolist():
            if not alive[source]:
                alive[source] = True
                todo.append(source)
    alive[DEAD] = False
    return alive


def _alike(next: np.ndarray, accepting: np.ndarray, alive: np.ndarray) -> np.ndarray:
    """Return a label for each state, i64[S]. In small automata, equivalent states have the same label."""
    state_labels = np.where(alive, np.arange(len(next)), DEAD)
    if len(next) > _MINIMISED:
        return state_labels
    # Start with three labels: 0 for dead states, 2 for accepting states and 1 for all others.
    labels = accepting.astype(np.int64) + alive
    num_labels = len(np.unique(labels))
    for _ in range(_ROUNDS):
        # Two states remain equivalent if they have the same label and their next states have the same labels. Compare
        # the keys as bytes, which is faster than `np.unique` over an axis.
        keys = np.concatenate([labels[:, None], labels[next]], axis=1).astype(np.int32)
        key_bytes = np.ascontiguousarray(keys).view(np.dtype((np.void, keys.shape[1] * 4))).reshape(-1)
        labels = np.unique(key_bytes, return_inverse=True)[1].reshape(-1)
        if (new_num_labels := int(labels.max()) + 1) == num_labels:
            return labels
        num_labels = new_num_labels
    # States with the same label may still differ after the last round, so use a separate label for each state.
    return state_labels
