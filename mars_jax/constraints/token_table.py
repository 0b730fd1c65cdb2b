"""Conversion of an automaton over bytes to one over tokens: the next state of every state for each token class.

S states (0 dead, 1 initial), C token classes (class 0 leads to the dead state), V vocabulary. Oracle: every token's
bytes run through the automaton one by one (tests/constraints/test_token_table.py).

Two tokens are in the same class if they lead every state to the same next state. Classes are computed byte by byte.
Token prefixes fall into few classes, so each class is composed with each byte once, regardless of the number of tokens.
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
"""Equal to `core.types.NO_TOKEN`, repeated because that module imports jax, which checking flags does not need."""
MOST_ENTRIES = 1 << 26
"""Maximum entries of a table next u16[S, C]: 128 MiB. Composing this many takes a few seconds."""
MOST_FORCED = 32
"""Maximum bytes of forced text that determine the next token of a state."""


class TokenTable(NamedTuple):
    """A constraint as an automaton over the tokens of one vocabulary."""

    next: np.ndarray  # u16[S, C]
    classes: np.ndarray  # u16[V]
    accepting: np.ndarray  # bool[S]
    forced: np.ndarray  # i32[S]; next token if the text is forced, otherwise NO_TOKEN
    strict: np.ndarray  # bool[S]; states in which rules may not relax, see `constraints.spans`

    @property
    def allowed(self) -> np.ndarray:
        """bool[S, C]; the token classes that each state allows."""
        return self.next != DEAD

    def run(self, tokens: Sequence[int], state: int = FIRST) -> int:
        """Return the state after these tokens."""
        for token in tokens:
            state = int(self.next[state, self.classes[token]])
        return state


def token_table(automaton: Automaton, vocabulary: Vocabulary) -> TokenTable:
    """Return the table of an automaton for a vocabulary.

    Raises:
      MarsError: the table would be too large, or these tokens cannot spell any text that the automaton accepts.
    """
    next, classes = _classes(automaton, vocabulary)
    alive = living(next, automaton.accepting)
    if not alive[FIRST]:
        raise MarsError(
            "the constraint matches no text that this vocabulary's tokens can say: allow other characters."
        )
    # Bytes can lead from a state to acceptance even if no sequence of whole tokens does. Remove such states.
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
    """Return next u16[S, C], and the class of every token u16[V]."""
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
    # The class of each token's first `position` bytes: a map from every state to its next state.
    token_maps = np.full(len(lengths), identity_map, np.int64)
    composed_maps: dict[int, int] = {}
    for position in range(token_bytes.shape[1]):
        unfinished = np.flatnonzero((lengths > position) & (token_maps != dead_map))
        # A prefix class and the class of the next byte determine the class of the longer prefix.
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
    # `dead_map` has number 0, so it is class 0.
    next = np.stack([state_maps[i] for i in used_maps.tolist()], axis=1)
    return next, classes.reshape(-1)[1:].astype(np.uint16)


def _forced(
    automaton: Automaton, next: np.ndarray, classes: np.ndarray, vocabulary: Vocabulary
) -> np.ndarray:
    """Return i32[S]: the tokenizer's first token for the bytes that must follow, otherwise NO_TOKEN."""
    bytes_per_class = np.bincount(automaton.classes, minlength=automaton.next.shape[1])
    is_open = automaton.next != DEAD
    # States in which exactly one byte can follow, and the text cannot end.
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
