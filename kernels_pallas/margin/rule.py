"""Statistics of a vocabulary, the edges that a margin-aware rule accepts from them, and the walk over those edges.

B batch, N tree nodes, D tree depth, V vocabulary, M stop tokens; `...` stands for any leading dimensions.
`walk_columns` takes arrays [B, N] or [B, 1] and uses no gathers or sorts, so the same code runs in XLA and in the last
block of the TPU kernel. Oracles: numpy sorting in tests/kernels/test_margin.py, and `reference.accept_by_edges`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from kernels_pallas.common import LAST_ID

NO_ID = -1
"""Id of a missing entry: the second entry of a one-token vocabulary, or both entries of an empty one."""


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
    field_dtypes = [jnp.dtype(x) for x in (jnp.float32, jnp.int32, jnp.float32, jnp.int32, jnp.float32)]
    return field_dtypes if logsumexp else field_dtypes[:-1]


def from_bits(columns: Sequence[Array]) -> MarginStats:
    """Build `MarginStats` from the bit patterns of its fields, i32[...] each, as `bits` returns them."""
    field_dtypes = dtypes(logsumexp=len(columns) == 5)
    return MarginStats(*(lax.bitcast_convert_type(x, d) for x, d in zip(columns, field_dtypes, strict=True)))


def empty(shape: tuple[int, ...], *, logsumexp: bool = False) -> MarginStats:
    """Return the statistics of zero tokens: `merge(empty(...), s) == s`.

    >>> empty(()).id1.tolist()
    -1
    """
    neg_inf, no_ids = jnp.full(shape, -jnp.inf, jnp.float32), jnp.full(shape, NO_ID, jnp.int32)
    return MarginStats(neg_inf, no_ids, neg_inf, no_ids, neg_inf if logsumexp else None)


def merge(a: MarginStats, b: MarginStats) -> MarginStats:
    """Merge the statistics of two disjoint sets of tokens. Associative and commutative, with the identity `empty`.

    Ids must be ids of the whole vocabulary. The result has a logsumexp if both sides have one.

    >>> left, right = empty(()), MarginStats(*(jnp.asarray(x) for x in (2.0, 5, 1.0, 7)))
    >>> merge(left, right).id2.tolist()
    7
    """
    # The first entry of the union is the first entry of one side, the leader.
    a_leads = _before(a.top1, a.id1, b.top1, b.id1)
    top1, id1 = jnp.where(a_leads, a.top1, b.top1), jnp.where(a_leads, a.id1, b.id1)
    # The second entry of the union is the leader's second or the other side's first.
    za, ia = jnp.where(a_leads, a.top2, a.top1), jnp.where(a_leads, a.id2, a.id1)
    zb, ib = jnp.where(a_leads, b.top1, b.top2), jnp.where(a_leads, b.id1, b.id2)
    a_second = _before(za, ia, zb, ib)
    log_sum_exp = None
    if a.logsumexp is not None and b.logsumexp is not None:
        log_sum_exp = jnp.logaddexp(a.logsumexp, b.logsumexp)
    return MarginStats(top1, id1, jnp.where(a_second, za, zb), jnp.where(a_second, ia, ib), log_sum_exp)


def _before(za: Array, ia: Array, zb: Array, ib: Array) -> Array:
    """Return whether entry a precedes entry b: larger value, then smaller id; a missing entry comes last."""
    ia, ib = jnp.where(ia < 0, LAST_ID, ia), jnp.where(ib < 0, LAST_ID, ib)
    return (za > zb) | ((za == zb) & (ia < ib))


def close(top1: Array, id1: Array, top2: Array, id2: Array, vocab: int) -> tuple[Array, Array]:
    """Complete the ids `(id1, id2)`, i32 of the same shape, of a fold that skips `-inf` entries.

    If `top2` is -inf, every token but `id1` is -inf, so the second id is the smallest id other than `id1`, and no
    search is needed. The function uses only comparisons and selects, so it also runs inside kernels.
    """
    # In a row of -inf, token 0 comes first by its id.
    id1 = jnp.where(top1 == -jnp.inf, 0, id1)
    if vocab == 1:
        return id1, jnp.full_like(id2, NO_ID)
    return id1, jnp.where(top2 == -jnp.inf, jnp.where(id1 == 0, 1, 0), id2)


class AcceptControls(NamedTuple):
    """Settings that may differ between the rows of a batch."""

    theta: Array  # f32[B]; threshold in the units of the margin; inf is strict
    # bool[B], True relaxes nothing in the row; or i32[B], the number of strict edges from the root
    strict: Array
    max_relaxed_run: Array  # i32[B]; maximum consecutive relaxed edges
    stop_tokens: Array  # i32[B, M]; padded with -1


def as_arrays(controls: AcceptControls) -> AcceptControls:
    """Convert an object with the fields of `AcceptControls`, with `strict` as a number of edges, i32[B]."""
    strict = controls.strict
    if strict.dtype == jnp.bool_:
        # In a strict row, the number of strict edges exceeds the depth of every tree.
        strict = jnp.where(strict, jnp.iinfo(jnp.int32).max, 0)
    return AcceptControls(
        controls.theta, strict.astype(jnp.int32), controls.max_relaxed_run, controls.stop_tokens
    )


class Acceptance(NamedTuple):
    """The accepted path, the token that the target adds, and the statistics of every node."""

    path: Array  # i32[B, D + 1]; node ids from the root; past num_accepted it repeats the last node
    num_accepted: Array  # i32[B]; edges walked
    next_token: Array  # i32[B]; y of the node where the walk stops
    relaxed: Array  # bool[B, D]; edges accepted only because of relaxation
    stats: MarginStats  # [B, N] each; statistics of the nodes


Margin = Callable[[Array, Array, Array], Array]
"""`(z1, z2, theta)`, f32 of one shape, -> bool: True if the target is nearly indifferent between its two largest raw
logits z1 >= z2, so that relaxing is allowed. An infinite theta is strict for every margin."""


def ratio(z1: Array, z2: Array, theta: Array) -> Array:
    """Return `z2 / z1 > theta` (MARS, arXiv 2601.15498, Algorithm 1); False if z1 <= 0, where the ratio is meaningless.

    The ratio depends on the offset of the logits: a theta of 0.9 allows p2 / p1 down to exp(-0.1 z1).

    >>> ratio(jnp.asarray([10.0, -1.0]), jnp.asarray([9.5, -2.0]), jnp.asarray([0.9, 0.9])).tolist()
    [True, False]
    """
    # The inner where avoids a division by 0 in rows that are strict anyway.
    return (z1 > 0) & (z2 / jnp.where(z1 > 0, z1, 1.0) > theta)


def gap(z1: Array, z2: Array, theta: Array) -> Array:
    """Return `z1 - z2 < theta` in nats, which is `p2 / p1 > exp(-theta)`; invariant to the offset of the logits.

    >>> gap(jnp.asarray(10.0), jnp.asarray(9.5), jnp.asarray(1.0)).item()
    True
    """
    return (z1 - z2 < theta) & (theta < jnp.inf)


MARGINS: dict[str, Margin] = {"ratio": ratio, "gap": gap}
"""Margins by name."""


def check_margin(margin: str) -> None:
    """Raise ValueError for an unknown margin."""
    if margin not in MARGINS:
        raise ValueError(f"margin is {margin!r}: expected one of {', '.join(MARGINS)}.")


class Walk(NamedTuple):
    """The accepted path in columns, which a kernel writes into the lanes of its result."""

    path: list[Array]  # D + 1 of i32[B, 1]
    relaxed: list[Array]  # D of i32[B, 1], 0 or 1
    num_accepted: Array  # i32[B, 1]
    next_token: Array  # i32[B, 1]


def walk_columns(
    stats: MarginStats,
    tokens: Array,
    parents: Array,
    y: Array | None,
    controls: AcceptControls,
    *,
    max_depth: int,
    margin: str,
) -> Walk:
    """Descend from the root while a child is acceptable; prefer the exact child, then the lowest node id.

    The walk gathers no parents. At each depth, a one-hot selection over N reads the three acceptable tokens at the
    current node of each row.

    Args:
      stats: [B, N] each.
      tokens, parents, y: i32[B, N]; if y is None or negative at a node, the token with the largest logit is used.
      controls: the first three fields are f32, i32 and i32 [B, 1], since a TPU register has two dimensions.
    """
    theta, strict, max_run, stop_tokens = controls
    num_nodes = tokens.shape[1]
    # i32[B, N]: the node id of every lane.
    node_ids = lax.broadcasted_iota(jnp.int32, tokens.shape, 1)

    def is_stop(values: Array) -> Array:
        matches = jnp.zeros(values.shape, bool)
        for m in range(stop_tokens.shape[1]):
            matches |= values == stop_tokens[:, m : m + 1]
        return matches & (values >= 0)

    # At temperature 0 the target's token is its argmax, which the statistics contain.
    y = stats.id1 if y is None else jnp.where(y < 0, stats.id1, y)
    # Algorithm 1, line "z2 / z1 > theta", at all nodes at once.
    low_margin = MARGINS[margin](stats.top1, stats.top2, jnp.broadcast_to(theta, stats.top1.shape))
    # -2 matches no drafted token, so it disables the runner-up at nodes that may not be relaxed.
    open_node = low_margin & ~is_stop(stats.id1) & ~is_stop(y)
    best_id, second_id = (jnp.where(open_node, i, -2) for i in (stats.id1, stats.id2))
    is_token = tokens >= 0
    may_relax = is_token & ~is_stop(tokens)

    # i32[B, 1] each: the current node, the relaxed edges since the last exact one, and the edges walked; and
    # bool[B, 1], whether the walk continues.
    node = jnp.zeros(theta.shape, jnp.int32)
    run, num_accepted, continues = node, node, node == 0
    path, relaxed_columns = [node], []
    for depth in range(max_depth):
        # Algorithm 1 at the current node of each row: accept x = y, which is top1 at temperature 0, or x = top2 if the
        # margin is low. Otherwise the row stops, and y is emitted after the loop.
        is_node = node_ids == node

        def at_node(values: Array, is_node: Array = is_node) -> Array:
            return jnp.sum(jnp.where(is_node, values, 0), axis=1, keepdims=True, dtype=values.dtype)

        # bool[B, N] each. `child`: a child of the current node. `exact`: a child with the target's token y.
        # `runner_up`: one of the target's two best tokens, which may be relaxed.
        child = (parents == node) & continues
        exact = child & is_token & (tokens == at_node(y))
        runner_up = (tokens == at_node(best_id)) | (tokens == at_node(second_id))
        relaxable = child & may_relax & runner_up & (run < max_run) & (strict <= depth)
        # Exact children have ranks below N, relaxed ones from N to 2 N - 1, all others 2 N. So one minimum selects the
        # exact child with the lowest id, or else the relaxed one.
        rank = jnp.where(exact, node_ids, jnp.where(relaxable, node_ids + num_nodes, 2 * num_nodes))
        best_rank = jnp.min(rank, axis=1, keepdims=True)
        continues = best_rank < 2 * num_nodes
        is_relaxed = (best_rank >= num_nodes) & continues
        # A row that has stopped keeps its node, so the path repeats it.
        node = jnp.where(continues, jnp.where(is_relaxed, best_rank - num_nodes, best_rank), node)
        run = jnp.where(is_relaxed, run + 1, 0)
        num_accepted += continues.astype(jnp.int32)
        path.append(node)
        relaxed_columns.append(is_relaxed.astype(jnp.int32))
    # The target's token at the node where the walk stops, selected as in `at_node`.
    next_token = jnp.sum(jnp.where(node_ids == node, y, 0), axis=1, keepdims=True, dtype=jnp.int32)
    return Walk(path, relaxed_columns, num_accepted, next_token)


def accept_from_stats(
    stats: MarginStats,
    tokens: Array,
    parents: Array,
    y: Array | None,
    controls: AcceptControls,
    max_depth: int,
    margin: str,
) -> Acceptance:
    """Run `walk_columns` on arrays of the public shapes; see `margin_accept`."""
    column_controls = controls._replace(
        theta=controls.theta[:, None],
        strict=controls.strict[:, None],
        max_relaxed_run=controls.max_relaxed_run[:, None],
    )
    walked = walk_columns(stats, tokens, parents, y, column_controls, max_depth=max_depth, margin=margin)
    if max_depth > 0:
        relaxed_edges = jnp.concatenate(walked.relaxed, axis=1) > 0
    else:
        relaxed_edges = jnp.zeros((tokens.shape[0], 0), bool)
    return Acceptance(
        jnp.concatenate(walked.path, axis=1),
        walked.num_accepted[:, 0],
        walked.next_token[:, 0],
        relaxed_edges,
        stats,
    )
