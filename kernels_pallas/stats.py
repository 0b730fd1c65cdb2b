"""The statistics that a margin-aware rule needs of a vocabulary, and the merge of two parts of one.

V vocabulary; `...` stands for any leading dimensions. Oracle: numpy sorting in tests/kernels/test_margin.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

NO_ID = -1
"""Id of an entry that does not exist: the second of a vocabulary of one, both of an empty one."""
LAST_ID = 2**31 - 1
"""Stands for NO_ID while ids are compared, so that it loses every tie."""
LOWEST = -3.4028234663852886e38
"""The lowest finite float32: what a row of -inf subtracts before exp, where -inf would give NaN."""


class MarginStats(NamedTuple):
    """The two largest entries of a row, in the order (larger value, then smaller id).

    `-inf` entries are entries like any other, so `0 <= id < V` holds for every row of two tokens or more,
    also where the vocabulary is masked down to one token or to none. A row with a NaN or `+inf` gives
    unspecified values.
    """

    top1: Array  # f32[...]; the largest
    id1: Array  # i32[...]; its place
    top2: Array  # f32[...]; -inf where V == 1
    id2: Array  # i32[...]; NO_ID where V == 1
    logsumexp: Array | None = None  # f32[...]; None where it was not asked for; -inf for a row of -inf


def dtypes(*, logsumexp: bool) -> list[jnp.dtype]:
    """The dtypes of the fields in order, with or without the last: what a kernel allocates for them.

    >>> len(dtypes(logsumexp=False))
    4
    """
    largest_two = [jnp.float32, jnp.int32, jnp.float32, jnp.int32]
    return [jnp.dtype(x) for x in ([*largest_two, jnp.float32] if logsumexp else largest_two)]


def bits(x: Array) -> Array:
    """f32[...] or i32[...] -> i32[...], the same bits.

    Integers carry the floats and not the other way round: an id seen as a float is denormal and may be flushed
    to 0.
    """
    return lax.bitcast_convert_type(x, jnp.int32)


def from_bits(columns: Sequence[Array]) -> MarginStats:
    """Statistics from the `bits` of their fields, i32[...] each."""
    wanted = dtypes(logsumexp=len(columns) == 5)
    return MarginStats(*(lax.bitcast_convert_type(x, d) for x, d in zip(columns, wanted, strict=True)))


def empty(shape: tuple[int, ...], *, logsumexp: bool = False) -> MarginStats:
    """The statistics of no tokens: `merge(empty(...), s) == s`.

    >>> empty(()).id1.tolist()
    -1
    """
    low, no_id = jnp.full(shape, -jnp.inf, jnp.float32), jnp.full(shape, NO_ID, jnp.int32)
    return MarginStats(low, no_id, low, no_id, low if logsumexp else None)


def merge(a: MarginStats, b: MarginStats) -> MarginStats:
    """Statistics of the union of two disjoint sets of tokens. Associative and commutative; `empty` is its
    identity.

    Ids must already be ids of the whole vocabulary. The logsumexp survives where both sides have it.

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
    """True where entry a precedes entry b: larger value, then smaller id; an absent entry comes last."""
    ia, ib = jnp.where(ia < 0, LAST_ID, ia), jnp.where(ib < 0, LAST_ID, ib)
    return (za > zb) | ((za == zb) & (ia < ib))


def close(top1: Array, id1: Array, top2: Array, id2: Array, vocab: int) -> tuple[Array, Array]:
    """The ids of a fold that passes over `-inf` entries: `(id1, id2)`, i32 of the same shape.

    Where `top2` is -inf every token but `id1` is -inf, so the second is the smallest id that is not `id1`; no
    entry needs to be looked at. Only comparisons and selects, so it also runs inside kernels.
    """
    # All of the row is -inf: then token 0 is the first by its id.
    id1 = jnp.where(top1 == -jnp.inf, 0, id1)
    if vocab == 1:
        return id1, jnp.full_like(id2, NO_ID)
    return id1, jnp.where(top2 == -jnp.inf, jnp.where(id1 == 0, 1, 0), id2)
