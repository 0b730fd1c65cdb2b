"""Joined tables of a batch's constraints, in the form that the step reads. Oracle: tests/core/test_guide.py.

S states, C classes, G groups, R bit rows, W words, V vocabulary. Sizes grow in powers of two, so that different
constraints of similar sizes do not trigger recompilation of the step.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from mars_jax.constraints.automaton import FIRST
from mars_jax.constraints.constraint import Constraint, without_relax
from mars_jax.constraints.nodes import TooLarge
from mars_jax.constraints.token_table import TokenTable
from mars_jax.constraints.vocabulary import Vocabulary
from mars_jax.core.guide import BITS, DEAD, FREE
from mars_jax.core.types import NO_TOKEN, Tables, Tracked

MOST_BYTES = 1 << 30
"""Maximum bytes per device for the token masks of a batch's constraints."""


class Compiled(NamedTuple):
    """Constraints in the form that the step reads."""

    tables: Tables  # for `Params.guides`
    starts: dict[Any, tuple[int, int]]  # first state and group of each table, by constraint or other key

    def rows(self, chosen: Sequence[Any], after: Sequence[int] | None = None) -> Tracked:
        """Return the initial states of a batch's rows.

        Args:
          chosen: for each row a constraint, or another key of `starts`; None: no constraint.
          after: for each row the state of its table to begin in; default: the initial state.
        """
        row_starts = []
        for i, row_key in enumerate(chosen):
            key = without_relax(row_key) if isinstance(row_key, Constraint) else row_key
            state, group = (FREE, 0) if key is None else self.starts[key]
            row_starts.append((state + (0 if after is None or key is None else after[i] - FIRST), group))
        return Tracked(
            start=jnp.asarray([state for state, _ in row_starts], jnp.int32),
            group=jnp.asarray([group for _, group in row_starts], jnp.int32),
        )


def compiled(
    constraints: Sequence[Constraint | None], vocabulary: Vocabulary, *, forced: bool = True
) -> Compiled:
    """Compile each distinct constraint once and join the tables. The keys of `Compiled.starts` have `relax` unset.

    Args:
      constraints: one per row; None: a row without a constraint.
      vocabulary: vocabulary of the model's tokenizer.
      forced: record forced tokens, which drafters without a model fill in.

    Raises:
      MarsError: as for `Constraint.table`, or the tables together are too large.

    >>> voc = Vocabulary(tokens=(None, b"a", b"b", b"ab"))
    >>> made = compiled([Constraint("regex", "ab+"), None], voc)
    >>> made.rows([Constraint("regex", "ab+"), None]).group.tolist()
    [1, 0]
    """
    different = dict.fromkeys(
        without_relax(constraint) for constraint in constraints if constraint is not None
    )
    return _compiled(tuple(different), vocabulary, forced)


@functools.lru_cache(maxsize=8)
def _compiled(constraints: tuple[Constraint, ...], vocabulary: Vocabulary, forced: bool) -> Compiled:
    tables = {constraint: constraint.table(vocabulary) for constraint in constraints}
    if not forced:
        tables = {
            constraint: t._replace(forced=np.full_like(t.forced, NO_TOKEN))
            for constraint, t in tables.items()
        }
    return join_tables(tables, len(vocabulary.tokens))


def join_tables(tables: dict[Any, TokenTable], vocab: int) -> Compiled:
    """Join several tables into one. State 0 of each table becomes DEAD; the others are numbered consecutively.

    Raises:
      MarsError: the tables together are too large.
    """
    states = 2 + sum(len(t.next) - 1 for t in tables.values())
    if states > 1 << 16:
        raise TooLarge(f"{states:,} states of all constraints together, and there is room for {1 << 16:,}")
    size = _bucket(states, 128)
    kinds = _bucket(max((t.next.shape[1] for t in tables.values()), default=1), 32)
    groups = _bucket(len(tables) + 1, 4)
    next = np.full((size, kinds), DEAD, np.uint16)
    next[FREE] = FREE
    classes = np.zeros((groups, vocab), np.uint16)
    rows = np.zeros(size, np.int32)
    accepting, closed, strict = (np.zeros(size, bool) for _ in range(3))
    forced = np.full(size, NO_TOKEN, np.int32)
    accepting[FREE] = True
    bits = _Bits(vocab)
    starts, offset = {}, 2
    for group, (key, table) in enumerate(tables.items(), start=1):
        count, width = table.next.shape
        states_slice = slice(offset, offset + count - 1)
        # State s of the table becomes state s + offset - 1.
        moved = np.where(table.next == 0, DEAD, table.next.astype(np.int64) + offset - 1).astype(np.uint16)
        next[states_slice, :width] = moved[1:]
        classes[group] = table.classes
        accepting[states_slice], strict[states_slice], forced[states_slice] = (
            table.accepting[1:],
            table.strict[1:],
            table.forced[1:],
        )
        closed[states_slice] = (table.accepting & ~table.allowed.any(axis=1))[1:]
        patterns, of_state = np.unique(table.allowed[1:], axis=0, return_inverse=True)
        numbers = np.asarray([bits.add(pattern[table.classes]) for pattern in patterns], np.int32)
        rows[states_slice] = numbers[of_state.reshape(-1)]
        starts[key] = (offset - 1 + FIRST, group)
        offset += count - 1
    batch_tables = Tables(
        next=jnp.asarray(next),
        classes=jnp.asarray(classes),
        bits=jnp.asarray(bits.padded()),
        rows=jnp.asarray(rows),
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


class _Bits:
    """Deduplicated rows of bits; row 0 allows every token."""

    def __init__(self, vocab: int):
        self._vocab, self._width = vocab, -(-vocab // BITS)
        self._rows: list[np.ndarray] = []
        self._known: dict[bytes, int] = {}
        self.add(np.ones(vocab, bool))

    def add(self, allowed: np.ndarray) -> int:
        """Return the number of a row bool[V]; add it if it is new."""
        padded = np.zeros(BITS * self._width, bool)
        padded[: self._vocab] = allowed
        # Bit k of word j is token k W + j.
        octets = np.packbits(padded.reshape(BITS, self._width), axis=0, bitorder="little")
        row = np.ascontiguousarray(octets.T).view("<u4").reshape(-1)
        key = row.tobytes()
        if key not in self._known:
            if (len(self._rows) + 1) * row.nbytes > MOST_BYTES:
                raise TooLarge("its states allow too many different sets of tokens")
            self._known[key] = len(self._rows)
            self._rows.append(row)
        return self._known[key]

    def padded(self) -> np.ndarray:
        padded_rows = np.zeros((_bucket(len(self._rows), 32), self._width), np.uint32)
        padded_rows[: len(self._rows)] = self._rows
        return padded_rows
