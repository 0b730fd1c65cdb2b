"""Margin statistics of logits, the margins of MARS, and the walk over the edges that MARS accepts.

`walk_columns` uses only arrays [B, N] or [B, 1], and neither gathers nor sorts, so the same code runs in XLA and in the
TPU kernel. Tested against sorting in numpy (tests/kernels/test_margin.py) and against `reference.accept_by_edges`.

Dimensions: B batch, N tree nodes, D tree depth, V vocabulary, M stop tokens; `...` stands for any leading dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from kernels_pallas.common import LAST_ID

NO_ID = -1
"""Id of a missing entry: the second entry of a vocabulary of one token, or both entries of an empty vocabulary."""


class MarginStats(NamedTuple):
    """The two largest entries of each row. Among equal entries, the one with the smaller id comes first.

    `-inf` is treated like any other value. With two or more tokens, `0 <= id < V` therefore holds even in rows with at
    most one unmasked token. If a row contains NaN or `+inf`, the statistics are undefined.
    """

    top1: Array  # f32[...]; largest value
    id1: Array  # i32[...]; index of the largest value
    top2: Array  # f32[...]; second largest value; -inf if V == 1
    id2: Array  # i32[...]; index of the second largest value; NO_ID if V == 1
    logsumexp: Array | None = None  # f32[...]; -inf for a row of -inf; None if not requested


def dtypes(*, logsumexp: bool) -> list[jnp.dtype]:
    """Return the dtypes of the fields of `MarginStats`, in order, with or without the logsumexp.

    >>> len(dtypes(logsumexp=False))
    4
    """
    field_dtypes = [jnp.dtype(x) for x in (jnp.float32, jnp.int32, jnp.float32, jnp.int32, jnp.float32)]
    return field_dtypes if logsumexp else field_dtypes[:-1]


def from_bits(columns: Sequence[Array]) -> MarginStats:
    """Build `MarginStats` from the bits of its fields, i32[...] each, as returned by `common.bits`."""
    field_dtypes = dtypes(logsumexp=len(columns) == 5)
    return MarginStats(*(lax.bitcast_convert_type(x, d) for x, d in zip(columns, field_dtypes, strict=True)))


def empty(shape: tuple[int, ...], *, logsumexp: bool = False) -> MarginStats:
    """Return the statistics of an empty vocabulary, so that `merge(empty(...), s) == s`.

    >>> empty(()).id1.tolist()
    -1
    """
    neg_inf, no_ids = jnp.full(shape, -jnp.inf, jnp.float32), jnp.full(shape, NO_ID, jnp.int32)
    return MarginStats(neg_inf, no_ids, neg_inf, no_ids, neg_inf if logsumexp else None)


def merge(a: MarginStats, b: MarginStats) -> MarginStats:
    """Merge the statistics of two disjoint sets of tokens.

    The operation is associative and commutative, and `empty` is its identity. Ids must refer to the whole vocabulary.
    The result contains a logsumexp if both arguments do.

    >>> left, right = empty(()), MarginStats(*(jnp.asarray(x) for x in (2.0, 5, 1.0, 7)))
    >>> merge(left, right).id2.tolist()
    7
    """
    # The largest entry of the union is the largest entry of a or b.
    a_leads = _before(a.top1, a.id1, b.top1, b.id1)
    top1, id1 = jnp.where(a_leads, a.top1, b.top1), jnp.where(a_leads, a.id1, b.id1)
    # If the largest entry is from a, the second entry of the union is the second of a or the first of b. Otherwise it
    # is the first of a or the second of b.
    za, ia = jnp.where(a_leads, a.top2, a.top1), jnp.where(a_leads, a.id2, a.id1)
    zb, ib = jnp.where(a_leads, b.top1, b.top2), jnp.where(a_leads, b.id1, b.id2)
    a_second = _before(za, ia, zb, ib)
    log_sum_exp = None
    if a.logsumexp is not None and b.logsumexp is not None:
        log_sum_exp = jnp.logaddexp(a.logsumexp, b.logsumexp)
    return MarginStats(top1, id1, jnp.where(a_second, za, zb), jnp.where(a_second, ia, ib), log_sum_exp)


def _before(za: Array, ia: Array, zb: Array, ib: Array) -> Array:
    """Return whether entry a precedes entry b: its value is larger, or the values are equal and its id is smaller.

    Missing entries come last among equal values.
    """
    ia, ib = jnp.where(ia < 0, LAST_ID, ia), jnp.where(ib < 0, LAST_ID, ib)
    return (za > zb) | ((za == zb) & (ia < ib))


def close(top1: Array, id1: Array, top2: Array, id2: Array, vocab: int) -> tuple[Array, Array]:
    """Return `(id1, id2)` with correct ids for entries of -inf, which a search with strict comparisons never finds.

    If `top2` is -inf, all tokens except `id1` are -inf, so the second id is the smallest id other than `id1`. The
    function uses only comparisons and selections, so it also runs inside kernels.
    """
    # If all tokens are -inf, token 0 comes first, because it has the smallest id.
    id1 = jnp.where(top1 == -jnp.inf, 0, id1)
    if vocab == 1:
        return id1, jnp.full_like(id2, NO_ID)
    return id1, jnp.where(top2 == -jnp.inf, jnp.where(id1 == 0, 1, 0), id2)


class AcceptControls(NamedTuple):
    """Settings that may differ between the rows of a batch."""

    theta: Array  # f32[B]; threshold of the margin; inf relaxes nothing
    # bool[B], True to relax nothing in the row; or i32[B], number of strict edges from the root
    strict: Array
    max_relaxed_run: Array  # i32[B]; maximum number of consecutive relaxed edges
    stop_tokens: Array  # i32[B, M]; padded with -1


def as_arrays(controls: AcceptControls) -> AcceptControls:
    """Convert an object with the fields of `AcceptControls` to `AcceptControls` with `strict` i32[B]."""
    strict = controls.strict
    if strict.dtype == jnp.bool_:
        # In a strict row, set the number of strict edges above the depth of any tree.
        strict = jnp.where(strict, jnp.iinfo(jnp.int32).max, 0)
    return AcceptControls(
        controls.theta, strict.astype(jnp.int32), controls.max_relaxed_run, controls.stop_tokens
    )


class Acceptance(NamedTuple):
    """The accepted path, the next token, and the statistics of all nodes."""

    path: Array  # i32[B, D + 1]; node ids from the root on; entries after `num_accepted` repeat the last node
    num_accepted: Array  # i32[B]; number of accepted edges
    next_token: Array  # i32[B]; the target's token y at the node where the walk stops
    relaxed: Array  # bool[B, D]; edges of the path that were relaxed
    stats: MarginStats  # [B, N] each; statistics of the nodes' logits


Margin = Callable[[Array, Array, Array], Array]
"""A function of the two largest raw logits z1 >= z2 and of theta, f32 arrays of the same shape. It returns a bool
array: True if the margin is low, and False if theta is infinite."""


def ratio(z1: Array, z2: Array, theta: Array) -> Array:
    """Return whether `z2 / z1 > theta` (MARS, arXiv 2601.15498, Algorithm 1).

    For z1 <= 0, the ratio is meaningless, and the result is False. The ratio changes if a constant is added to all
    logits: a theta of 0.9, for example, accepts any p2 / p1 above exp(-0.1 z1).

    >>> ratio(jnp.asarray([10.0, -1.0]), jnp.asarray([9.5, -2.0]), jnp.asarray([0.9, 0.9])).tolist()
    [True, False]
    """
    # The inner `where` avoids a division by 0. If z1 <= 0, the result is False anyway.
    return (z1 > 0) & (z2 / jnp.where(z1 > 0, z1, 1.0) > theta)


def gap(z1: Array, z2: Array, theta: Array) -> Array:
    """Return whether `z1 - z2 < theta` in nats, which is equivalent to `p2 / p1 > exp(-theta)`.

    Unlike the ratio, the gap does not change if a constant is added to all logits.

    >>> gap(jnp.asarray(10.0), jnp.asarray(9.5), jnp.asarray(1.0)).item()
    True
    """
    return (z1 - z2 < theta) & (theta < jnp.inf)


MARGINS: dict[str, Margin] = {"ratio": ratio, "gap": gap}
"""All margins, by name."""


def check_margin(margin: str) -> None:
    """Check that `margin` is a key of `MARGINS`.

    Raises:
      ValueError: the margin is unknown.
    """
    if margin not in MARGINS:
        raise ValueError(f"margin is {margin!r}: expected one of {', '.join(MARGINS)}.")


class Walk(NamedTuple):
    """The fields of `Acceptance` as columns [B, 1], which a kernel can write to the lanes of its result."""

    path: list[Array]  # D + 1 columns i32[B, 1]
    relaxed: list[Array]  # D columns i32[B, 1] of 0 or 1
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
    """Descend from the root while a child is acceptable. Prefer exact children, then the lowest node id.

    Instead of gathers, the walk uses one-hot selections over N: at each depth, it selects the three acceptable tokens
    at the current node of each row.

    Args:
      stats: [B, N] each; statistics of the nodes' logits.
      tokens, parents, y: i32[B, N]; see `margin_accept`.
      controls: settings, with `theta`, `strict` and `max_relaxed_run` as columns [B, 1], because TPU registers have two
        dimensions.
      max_depth: D, the depth of the tree.
      margin: key of `MARGINS`.
    """
    theta, strict, max_run, stop_tokens = controls
    num_nodes = tokens.shape[1]
    # i32[B, N]; the node id of each entry.
    node_ids = lax.broadcasted_iota(jnp.int32, tokens.shape, 1)

    def is_stop(values: Array) -> Array:
        matches = jnp.zeros(values.shape, bool)
        for m in range(stop_tokens.shape[1]):
            matches |= values == stop_tokens[:, m : m + 1]
        return matches & (values >= 0)

    # At temperature 0, the target's token is the argmax, which is `id1` of the statistics.
    y = stats.id1 if y is None else jnp.where(y < 0, stats.id1, y)
    # Test whether the margin is low (z2 / z1 > theta in Algorithm 1), at all nodes at once.
    low_margin = MARGINS[margin](stats.top1, stats.top2, jnp.broadcast_to(theta, stats.top1.shape))
    # Replace the two best tokens by -2, which matches no drafted token, at nodes whose edges must not be relaxed.
    open_node = low_margin & ~is_stop(stats.id1) & ~is_stop(y)
    best_id, second_id = (jnp.where(open_node, i, -2) for i in (stats.id1, stats.id2))
    is_token = tokens >= 0
    may_relax = is_token & ~is_stop(tokens)

    # [B, 1] each; the current node, the number of relaxed edges since the last exact edge, the number of accepted
    # edges, and whether the walk continues.
    node = jnp.zeros(theta.shape, jnp.int32)
    run, num_accepted, continues = node, node, node == 0
    path, relaxed_columns = [node], []
    for depth in range(max_depth):
        # Apply Algorithm 1 at the current node of each row: accept a child x = y, which is top1 at temperature 0, or x
        # = top2 if the margin is low. Otherwise the walk stops. The next token y is selected after the loop.
        is_node = node_ids == node

        def at_node(values: Array, is_node: Array = is_node) -> Array:
            return jnp.sum(jnp.where(is_node, values, 0), axis=1, keepdims=True, dtype=values.dtype)

        # bool[B, N] each. `child`: the node is a child of the current node. `exact`: its token is the target's token y.
        # `runner_up`: its token is one of the target's two best tokens, and the margin is low.
        child = (parents == node) & continues
        exact = child & is_token & (tokens == at_node(y))
        runner_up = (tokens == at_node(best_id)) | (tokens == at_node(second_id))
        relaxable = child & may_relax & runner_up & (run < max_run) & (strict <= depth)
        # The ranks of exact children are below N, the ranks of relaxable children are from N to 2 N - 1, and the rank
        # of all other nodes is 2 N. One minimum therefore selects the exact child with the lowest id or, if there is
        # none, the relaxable child with the lowest id.
        rank = jnp.where(exact, node_ids, jnp.where(relaxable, node_ids + num_nodes, 2 * num_nodes))
        best_rank = jnp.min(rank, axis=1, keepdims=True)
        continues = best_rank < 2 * num_nodes
        is_relaxed = (best_rank >= num_nodes) & continues
        # If the walk has stopped, keep the node, so that the path repeats it.
        node = jnp.where(continues, jnp.where(is_relaxed, best_rank - num_nodes, best_rank), node)
        run = jnp.where(is_relaxed, run + 1, 0)
        num_accepted += continues.astype(jnp.int32)
        path.append(node)
        relaxed_columns.append(is_relaxed.astype(jnp.int32))
    # Select the target's token y at the node where the walk stops.
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
    """Compute `margin_accept` from the statistics of the logits, with `walk_columns`."""
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
