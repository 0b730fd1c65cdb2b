"""Conversion of an automaton over bytes to an automaton over the tokens of a vocabulary.

State 0 is dead, and state 1 is the initial state. Tokens of class 0 lead to the dead state. Dimensions: S states, C
token classes, V vocabulary. Tested against an automaton that reads the bytes of every token one by one
(tests/constraints/test_token_table.py).

Two tokens are in the same class if they lead from every state to the same next state. Classes are computed byte by
byte. The prefixes of tokens fall into few classes, so each class is combined with each next byte only once, regardless
of the number of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mars_jax.constraints.automaton import DEAD, FIRST, Automaton, living
from mars_jax.constraints.nodes import TooLarge
from mars_jax.constraints.vocabulary import Vocabulary
from mars_jax.utils.errors import MarsError

NO_TOKEN = -1
"""The same as `core.types.NO_TOKEN`. It is repeated here because that module imports jax, which is not needed to check
flags."""
MOST_ENTRIES = 1 << 26
"""Maximum number of entries of a table `next` u16[S, C]. A table of this size takes 128 MiB. Computing so many entries
takes a few seconds."""
MOST_FORCED = 32
"""Maximum number of bytes of forced text that are read to determine the next token of a state."""


class TokenTable(NamedTuple):
    """A constraint as an automaton over the tokens of one vocabulary."""

    next: np.ndarray  # u16[S, C]; next state for each class of tokens
    classes: np.ndarray  # u16[V]; class of each token
    accepting: np.ndarray  # bool[S]; True if the text may end in this state
    forced: np.ndarray  # i32[S]; first token of the text that must follow, or NO_TOKEN if no text is forced
    strict: np.ndarray  # bool[S]; True if verification in this state is strict; see `constraints.spans`

    @property
    def allowed(self) -> np.ndarray:
        """bool[S, C], True if a state allows a class of tokens."""
        return self.next != DEAD

    def run(self, tokens: Sequence[int], state: int = FIRST) -> int:
        """Return the state after reading some tokens."""
        for token in tokens:
            state = int(self.next[state, self.classes[token]])
        return state


def token_table(automaton: Automaton, vocabulary: Vocabulary) -> TokenTable:
    """Convert an automaton over bytes to a table for a vocabulary.

    Raises:
      MarsError: the table would be too large, or the tokens of the vocabulary cannot spell any text that the automaton
        accepts.
    """
    next, classes = _classes(automaton, vocabulary)
    alive = living(next, automaton.accepting)
    if not alive[FIRST]:
        raise MarsError(
            "the constraint matches no text that this vocabulary's tokens can spell: allow other characters."
        )
    # Remove states from which some bytes, but no sequence of tokens, lead to an accepting state.
    if not alive[1:].all():
        next = np.where(alive[next], next, DEAD).astype(np.uint16)
        next[~alive] = DEAD
    return TokenTable(
        next=next,
        classes=classes,
        accepting=automaton.accepting & alive,
        forced=_forced(automaton, next, classes, vocabulary),
        strict=np.zeros(len(next), bool),
    )


def _classes(automaton: Automaton, vocabulary: Vocabulary) -> tuple[np.ndarray, np.ndarray]:
    """Compute the next state of every state for each class of tokens, u16[S, C], and the class of every token,
    u16[V]."""
    num_states, num_classes = automaton.next.shape
    byte_next = np.ascontiguousarray(automaton.next.T).astype(np.uint16)  # [K, S]
    token_bytes, lengths = vocabulary.bytes_and_lengths
    map_numbers: dict[bytes, int] = {}
    state_maps: list[np.ndarray] = []

    def number(state_map: np.ndarray) -> int:
        key = state_map.tobytes()
        if key not in map_numbers:
            if (len(state_maps) + 1) * num_states > MOST_ENTRIES:
                raise TooLarge(f"{num_states:,} states and more than {len(state_maps):,} classes of tokens")
            map_numbers[key] = len(state_maps)
            state_maps.append(state_map)
        return map_numbers[key]

    dead_map = number(np.zeros(num_states, np.uint16))
    identity_map = number(np.arange(num_states, dtype=np.uint16))
    # The class of each token's first `position` bytes. A class is a map from every state to its next state.
    token_maps = np.full(len(lengths), identity_map, np.int64)
    composed_maps: dict[int, int] = {}
    for position in range(token_bytes.shape[1]):
        unfinished = np.flatnonzero((lengths > position) & (token_maps != dead_map))
        # The class of a prefix and the class of the next byte determine the class of the longer prefix.
        pairs = token_maps[unfinished] * num_classes + automaton.classes[token_bytes[unfinished, position]]
        unique_pairs, pair_index = np.unique(pairs, return_inverse=True)
        pair_maps = np.empty(len(unique_pairs), np.int64)
        for i, pair in enumerate(unique_pairs.tolist()):
            if pair not in composed_maps:
                previous, byte_class = divmod(pair, num_classes)
                composed_maps[pair] = number(byte_next[byte_class][state_maps[previous]])
            pair_maps[i] = composed_maps[pair]
        token_maps[unfinished] = pair_maps[pair_index.reshape(-1)]
    token_maps[lengths == 0] = dead_map
    used_maps, classes = np.unique(np.concatenate([[dead_map], token_maps]), return_inverse=True)
    # `dead_map` is map 0, so it becomes class 0.
    next = np.stack([state_maps[i] for i in used_maps.tolist()], axis=1)
    return next, classes.reshape(-1)[1:].astype(np.uint16)


def _forced(
    automaton: Automaton, next: np.ndarray, classes: np.ndarray, vocabulary: Vocabulary
) -> np.ndarray:
    """Return the first token of the text that must follow each state, i32[S], or NO_TOKEN if no text is forced."""
    bytes_per_class = np.bincount(automaton.classes, minlength=automaton.next.shape[1])
    is_open = automaton.next != DEAD
    # True for states in which exactly one byte can follow and the text cannot end.
    is_single = (is_open @ bytes_per_class == 1) & ~automaton.accepting
    byte_of_class = np.zeros(automaton.next.shape[1], np.int64)
    byte_of_class[automaton.classes] = np.arange(256)
    next_class = np.argmax(is_open, axis=1)
    forced_tokens = np.full(len(next), NO_TOKEN, np.int32)
    first_tokens: dict[bytes, int] = {}
    for start_state in np.flatnonzero(is_single).tolist():
        state, forced_bytes = start_state, bytearray()
        while is_single[state] and len(forced_bytes) < MOST_FORCED:
            forced_bytes.append(int(byte_of_class[next_class[state]]))
            state = int(automaton.next[state, next_class[state]])
        key = bytes(forced_bytes)
        if key not in first_tokens:
            first_tokens[key], *_ = [*vocabulary.spell(key), NO_TOKEN]
        token = first_tokens[key]
        if token != NO_TOKEN and next[start_state, classes[token]] != DEAD:
            forced_tokens[start_state] = token
    return forced_tokens
