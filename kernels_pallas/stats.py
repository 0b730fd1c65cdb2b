"""The statistics that a margin-aware rule needs of a vocabulary, and the merge of two parts of one.

V vocabulary; `...` stands for any leading dimensions. Oracle: numpy sorting in tests/kernels/test_margin.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

NO_ID = -1
"""Id of a missing entry: the second of a vocabulary of one token, or both of an empty one."""
LAST_ID = 2**31 - 1
"""Replaces NO_ID in comparisons of ids, so that a missing entry loses every tie."""
LOWEST = -3.4028234663852886e38
"""The lowest finite float32. Rows of -inf subtract it before exp, because subtracting -inf would give NaN."""


class MarginStats(NamedTuple):
    """The two largest entries of a row, in the order (larger value, then smaller id).

    `-inf` entries count like any other, so `0 <= id < V` holds for every row of two tokens or more, even if all but one
    token or all tokens are masked. For a row with a NaN or `+inf` the values are unspecified.
    """

    top1: Array  # f32[...]; the largest value
    id1: Array  # i32[...]; its index
    top2: Array  # f32[...]; the second largest value; -inf if V == 1
    id2: Array  # i32[...]; its index; NO_ID if V == 1
    logsumexp: Array | None = None  # f32[...]; None if not requested; -inf for a row of -inf


def dtypes(*, logsumexp: bool) -> list[jnp.dtype]:
    """Return the dtypes of the fields in order, with or without the last, for a kernel's outputs.

    >>> len(dtypes(logsumexp=False))
    4
    """
    largest_two = [jnp.float32, jnp.int32, jnp.float32, jnp.int32]
    return [jnp.dtype(x) for x in ([*largest_two, jnp.float32] if logsumexp else largest_two)]


def bits(x: Array) -> Array:
    """Reinterpret f32[...] or i32[...] as i32[...] with the same bits.

    Floats are stored as integers because a small id stored as a float is denormal and may be flushed to 0.
    """
    return lax.bitcast_convert_type(x, jnp.int32)


def from_bits(columns: Sequence[Array]) -> MarginStats:
    """Make statistics from the `bits` of their fields, i32[...] each."""
    field_dtypes = dtypes(logsumexp=len(columns) == 5)
    return MarginStats(*(lax.bitcast_convert_type(x, d) for x, d in zip(columns, field_dtypes, strict=True)))


def empty(shape: tuple[int, ...], *, logsumexp: bool = False) -> MarginStats:
    """Return the statistics of zero tokens: `merge(empty(...), s) == s`.

    >>> empty(()).id1.tolist()
    -1
    """
    low, no_id = jnp.full(shape, -jnp.inf, jnp.float32), jnp.full(shape, NO_ID, jnp.int32)
    return MarginStats(low, no_id, low, no_id, low if logsumexp else None)


def merge(a: MarginStats, b: MarginStats) -> MarginStats:
    """Merge the statistics of two disjoint sets of tokens. Associative and commutative, with the identity `empty`.

    Ids must be ids of the whole vocabulary. The result has a logsumexp if both sides have one.

    >>> left, right = empty(()), MarginStats(*(jnp.asarray(x) for x in (2.0, 5, 1.0, 7)))
    >>> merge(left, right).id2.tolist()
    7
    """
    # The leader of one side is the first of both.
    a_leads = _before(a.top1, a.id1, b.top1, b.id1)
    top1, id1 = jnp.where(a_leads, a.top1, b.top1), jnp.where(a_leads, a.id1, b.id1)
    # The second is either the leader's second or the other side's first.
    za, ia = jnp.where(a_leads, a.top2, a.top1), jnp.where(a_leads, a.id2, a.id1)
    zb, ib = jnp.where(a_leads, b.top1, b.top2), jnp.where(a_leads, b.id1, b.id2)
    a_second = _before(za, ia, zb, ib)
    total = None
    if a.logsumexp is not None and b.logsumexp is not None:
        total = jnp.logaddexp(a.logsumexp, b.logsumexp)
    return MarginStats(top1, id1, jnp.where(a_second, za, zb), jnp.where(a_second, ia, ib), total)


def _before(za: Array, ia: Array, zb: Array, ib: Array) -> Array:
    """Return where entry a precedes entry b: larger value, then smaller id; a missing entry comes last."""
    ia, ib = jnp.where(ia < 0, LAST_ID, ia), jnp.where(ib < 0, LAST_ID, ib)
    return (za > zb) | ((za == zb) & (ia < ib))


def close(top1: Array, id1: Array, top2: Array, id2: Array, vocab: int) -> tuple[Array, Array]:
    """Complete the ids `(id1, id2)`, i32 of the same shape, of a fold that skips `-inf` entries.

    If `top2` is -inf, every token but `id1` is -inf, so the second is the smallest id other than `id1`, without a
    search. Uses only comparisons and selects, so it also runs inside kernels.
    """
    # In a row of -inf, token 0 comes first by its id.
    id1 = jnp.where(top1 == -jnp.inf, 0, id1)
    if vocab == 1:
        return id1, jnp.full_like(id2, NO_ID)
    return id1, jnp.where(top2 == -jnp.inf, jnp.where(id1 == 0, 1, 0), id2)
