"""Construction of the tables that the decoding step reads, from the constraints of a batch.

The sizes of the tables are rounded up to powers of two, so that different constraints of similar sizes do not trigger
recompilation of the step. Dimensions: S states, C classes, G groups, R bit rows, W words, V vocabulary. Tests:
tests/core/test_guide.py.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from mars_jax.constraints.automaton import FIRST
from mars_jax.constraints.constraint import Constraint
from mars_jax.constraints.nodes import TooLarge
from mars_jax.constraints.token_table import TokenTable
from mars_jax.constraints.vocabulary import Vocabulary
from mars_jax.core.guide import BITS, DEAD, FREE
from mars_jax.core.types import NO_TOKEN, Tables, Tracked

MOST_BYTES = 1 << 30
"""Maximum size in bytes, on each device, of the token masks of a batch's constraints."""


class Compiled(NamedTuple):
    """Constraints compiled to tables that the decoding step reads."""

    tables: Tables  # for `Params.guides`
    starts: dict[Hashable, tuple[int, int]]  # (initial state, group) of each table, keyed as in `join_tables`

    def rows(self, keys: Sequence[Hashable], states: Sequence[int] | None = None) -> Tracked:
        """Return the initial states and groups of a batch's rows, for `Controls.guides`.

        Args:
          keys: for each row, a constraint or another key of `starts`, or None for no constraint.
          states: the state in which each row begins, numbered as in the row's own table. Default: its initial state.
        """
        start_states, row_groups = np.full(len(keys), FREE, np.int32), np.zeros(len(keys), np.int32)
        for row, key in enumerate(keys):
            if key is not None:
                start_states[row], row_groups[row] = self.starts[key]
                if states is not None:
                    start_states[row] += states[row] - FIRST
        return Tracked(start=jnp.asarray(start_states), group=jnp.asarray(row_groups))


def compiled(constraints: Sequence[Constraint | None], vocabulary: Vocabulary) -> Compiled:
    """Compile each distinct constraint once, and join their tables into one.

    Args:
      constraints: one constraint per row, or None for a row without a constraint.
      vocabulary: the vocabulary of the model's tokenizer.

    Raises:
      MarsError: a constraint has no table (see `Constraint.table`), or the combined table would be too large.

    >>> voc = Vocabulary(tokens=(None, b"a", b"b", b"ab"))
    >>> made = compiled([Constraint("regex", "ab+"), None], voc)
    >>> made.rows([Constraint("regex", "ab+"), None]).group.tolist()
    [1, 0]
    """
    distinct_constraints = dict.fromkeys(constraint for constraint in constraints if constraint is not None)
    return _compiled(tuple(distinct_constraints), vocabulary)


@functools.lru_cache(maxsize=8)
def _compiled(constraints: tuple[Constraint, ...], vocabulary: Vocabulary) -> Compiled:
    tables: dict[Hashable, TokenTable] = {c: c.table(vocabulary) for c in constraints}
    return join_tables(tables, len(vocabulary.tokens))


def join_tables(tables: Mapping[Hashable, TokenTable], vocab: int) -> Compiled:
    """Join several tables into one. State 0 of each table becomes DEAD, and the other states are renumbered.

    Raises:
      MarsError: the combined table would be too large.
    """
    num_states = 2 + sum(len(t.next) - 1 for t in tables.values())
    if num_states > 1 << 16:
        raise TooLarge(f"{num_states:,} states of all constraints together, with room for {1 << 16:,}")
    padded_states = _bucket(num_states, 128)
    padded_classes = _bucket(max((t.next.shape[1] for t in tables.values()), default=1), 32)
    padded_groups = _bucket(len(tables) + 1, 4)
    next = np.full((padded_states, padded_classes), DEAD, np.uint16)
    # Rows without a constraint stay in the state FREE and use group 0.
    next[FREE] = FREE
    classes = np.zeros((padded_groups, vocab), np.uint16)
    row_of_state = np.zeros(padded_states, np.int32)
    accepting, closed, strict = (np.zeros(padded_states, bool) for _ in range(3))
    forced = np.full(padded_states, NO_TOKEN, np.int32)
    accepting[FREE] = True
    bit_rows = {_bit_row(np.ones(vocab, bool)): 0}  # index of each distinct bit row; row 0 allows every token
    starts: dict[Hashable, tuple[int, int]] = {}
    offset = 2
    for group, (key, table) in enumerate(tables.items(), start=1):
        num_table_states, num_classes = table.next.shape
        state_slice = slice(offset, offset + num_table_states - 1)
        # State s of the table becomes state s + offset - 1.
        moved = np.where(table.next == 0, DEAD, table.next.astype(np.int64) + offset - 1).astype(np.uint16)
        next[state_slice, :num_classes] = moved[1:]
        classes[group] = table.classes
        accepting[state_slice] = table.accepting[1:]
        strict[state_slice] = table.strict[1:]
        forced[state_slice] = table.forced[1:]
        # In a closed state the output may end and no further token is allowed, so the row ends.
        closed[state_slice] = (table.accepting & ~table.allowed.any(axis=1))[1:]
        # States with the same allowed tokens share a row of bits.
        patterns, pattern_of_state = np.unique(table.allowed[1:], axis=0, return_inverse=True)
        row_numbers = []
        for pattern in patterns:
            row_numbers.append(bit_rows.setdefault(_bit_row(pattern[table.classes]), len(bit_rows)))
            if len(bit_rows) * vocab // 8 > MOST_BYTES:
                raise TooLarge("its states allow too many different sets of tokens")
        row_of_state[state_slice] = np.asarray(row_numbers, np.int32)[pattern_of_state.reshape(-1)]
        starts[key] = (offset - 1 + FIRST, group)
        offset += num_table_states - 1
    bits = np.frombuffer(b"".join(bit_rows), np.uint32).reshape(len(bit_rows), -1)
    padded_bits = np.pad(bits, ((0, _bucket(len(bits), 32) - len(bits)), (0, 0)))
    batch_tables = Tables(
        next=jnp.asarray(next),
        classes=jnp.asarray(classes),
        bits=jnp.asarray(padded_bits),
        rows=jnp.asarray(row_of_state),
        forced=jnp.asarray(forced),
        accepting=jnp.asarray(accepting),
        closed=jnp.asarray(closed),
        strict=jnp.asarray(strict),
    )
    return Compiled(batch_tables, starts)


def _bucket(count: int, least: int) -> int:
    while least < count:
        least *= 2
    return least


def _bit_row(allowed: np.ndarray) -> bytes:
    """Pack a row bool[V] of token flags into bits, where bit k of word j represents token k W + j."""
    width = math.ceil(len(allowed) / BITS)
    padded_allowed = np.zeros(BITS * width, bool)
    padded_allowed[: len(allowed)] = allowed
    octets = np.packbits(padded_allowed.reshape(BITS, width), axis=0, bitorder="little")
    return np.ascontiguousarray(octets.T).tobytes()
