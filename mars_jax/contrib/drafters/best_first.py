"""Best-first trees from independent marginals: the nodes whose paths have the highest products of probabilities.

Source: DDTree 2604.12989. B batch, D depth, V vocabulary, M nodes without the root, k maximum children per node.
Tested against a best-first search with a heap in Python (tests/contrib/test_best_first.py).

All nodes at one depth have the same candidate children. So once the prefixes at a depth are sorted, there is a lower
bound on each node's rank that does not depend on the probabilities. Consider the j-th child of the r-th prefix, both
counted from 0. At its depth, (r + 1) * (j + 1) nodes (including the child itself) have a prefix and a last token that
rank at least as high. These nodes and their ancestors are therefore at least as probable as the child. If there are
more than M of them, the child cannot be in the tree. `_plan` lists the nodes that this bound does not exclude (about
3,000 for M = 59 and D = 15), in parts of up to three depths. Their log-probabilities are sums of terms at static
indices. Only the last depth of a part is sorted, to rank the prefixes of the next part.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from mars_jax.core.pick import pick
from mars_jax.core.sampling import top_k_logits
from mars_jax.core.types import NO_TOKEN, DraftTree
from mars_jax.drafters.tree_shapes import Dynamic


@jax.named_scope("best_first")
def best_first(shape: Dynamic, root: Array, logits: Array, alive: Array) -> DraftTree:
    """Return the tree of the `shape.num_nodes` most probable nodes, in order, with up to `shape.top_k` children each.

    Args:
      shape: shape of the tree, with depth D.
      root: i32[B, 1]; the last committed token.
      logits: f32[B, D, V]; logits of the token at each depth below the root, which do not depend on its ancestors.
      alive: bool[B, D]; False at all depths below the end of the draft.

    >>> half = jnp.log(jnp.asarray([[[0.6, 0.4], [0.9, 0.1]]]))
    >>> tree = best_first(Dynamic(2, 2, 4), jnp.asarray([[7]]), half, jnp.ones((1, 2), bool))
    >>> tree.tokens.tolist(), tree.parents.tolist()
    ([[7, 0, 0, 1]], [[-1, 0, 1, 0]])
    """
    batch, m = root.shape[0], shape.num_nodes - 1
    k = min(shape.top_k, m)
    plan = _plan(m, shape.depth, k)
    top_entries = top_k_logits(logits, k)
    # Rounding can make a log-probability positive. Clip it, so that no child is likelier than its parent.
    child_log_q = jnp.minimum(top_entries.values - top_entries.logsumexp[..., None], 0.0)
    child_log_q = jnp.where(alive[..., None], child_log_q, -jnp.inf)

    zero_term = jnp.zeros((batch, 1), jnp.float32)
    prefix_log_q, node_log_q, sorted_prefixes = zero_term, [], []
    for part in plan.parts:
        # Terms of the sums: log-probabilities of the sorted prefixes and of the tokens at each depth, and a zero.
        part_log_q = child_log_q[:, part.begin : part.end].reshape(batch, -1)
        node_log_q.append(_sums(jnp.concatenate([prefix_log_q, part_log_q, zero_term], axis=1), part.places))
        if part.width:
            prefix_log_q, best_indices = lax.top_k(node_log_q[-1][:, part.last :], part.width)
            sorted_prefixes.append(best_indices + part.first + part.last)

    # A child's sum is its parent's sum with a zero replaced by a term of at most 0, so a child's sum is never above its
    # parent's, even after rounding. top_k breaks ties in favour of the lower index, which is the parent's. The kept
    # nodes therefore form a tree in which parents precede their children.
    ranks, kept_ids = lax.top_k(jnp.concatenate(node_log_q, axis=1), m)
    # Look up the kept candidates in the static table of all candidates; each column becomes an i32[B, M].
    node_columns = jnp.asarray(plan.table).at[kept_ids].get(mode="promise_in_bounds")
    token_index, parent_ids, depths = jnp.unstack(node_columns, axis=2)
    if sorted_prefixes:
        prefix_ids = pick(jnp.concatenate(sorted_prefixes, axis=1), jnp.maximum(-1 - parent_ids, 0))
        parent_ids = jnp.where(parent_ids < 0, prefix_ids, parent_ids)
    # A parent's node number is 1 + its index among the kept nodes. If the parent is the root, its id matches no kept
    # node, so the sum is 0, which is the root's node number.
    is_parent = parent_ids[:, :, None] == kept_ids[:, None]
    parents = jnp.sum(jnp.where(is_parent, jnp.arange(1, m + 1, dtype=jnp.int32), 0), axis=2, dtype=jnp.int32)
    tokens = pick(top_entries.ids.reshape(batch, -1), token_index)
    is_drafted = ranks > -jnp.inf
    root_zeros = jnp.zeros((batch, 1), jnp.int32)
    return DraftTree(
        tokens=jnp.concatenate([root, jnp.where(is_drafted, tokens, NO_TOKEN)], axis=1),
        parents=jnp.concatenate([root_zeros - 1, jnp.where(is_drafted, parents, 0)], axis=1),
        depths=jnp.concatenate([root_zeros, depths], axis=1),
        max_depth=shape.depth,
        is_chain=False,
    )


def _sums(source: Array, places: np.ndarray) -> Array:
    """Return the sums f32[B, C] of `source` f32[B, S] over the indices in each row of `places` i32[C, P].

    Within a row of `places`, only the index of the zero term may repeat.
    """

    def gathered(source: Array) -> Array:
        # Add in a fixed order, so that the sums of a node and its parent are rounded in the same way.
        return functools.reduce(jnp.add, (source[:, column] for column in places.T))

    def compared(source: Array) -> Array:
        source_indices = jnp.arange(source.shape[1], dtype=jnp.int32)[None]
        is_term = functools.reduce(
            jnp.logical_or, (jnp.asarray(column)[:, None] == source_indices for column in places.T)
        )
        return jnp.sum(jnp.where(is_term[None], source[:, None], 0.0), axis=2)

    return lax.platform_dependent(source, cpu=gathered, default=compared)


class _Part(NamedTuple):
    """The candidate nodes of consecutive depths that are processed together. Parents precede their children."""

    begin: int  # the first of L depths, counted from 0
    end: int  # one past the last depth
    # i32[C, 1 + L]; for each node, the indices of its prefix and of the tokens below the prefix, padded with the index
    # of the zero term. The indices refer to the terms of the sums in `best_first`.
    places: np.ndarray
    first: int  # index of the part's first node, counted over all parts
    last: int  # index, within the part, of the first node at its deepest level
    width: int  # number of prefixes that the next part uses; 0 in the last part


class _CandidatePlan(NamedTuple):
    parts: tuple[_Part, ...]
    # i32[candidates, 3]. Column 0: index of the node's token among the D * k tokens. Column 1: index of the parent
    # among the candidates. It is the number of candidates if the parent is the root, and -1 - i if the parent is
    # entry i of the concatenated `sorted_prefixes` of `best_first`. Column 2: depth of the node.
    table: np.ndarray


@functools.lru_cache
def _plan(m: int, depth: int, k: int) -> _CandidatePlan:
    """List the candidate nodes for trees with m nodes, `depth` levels and k children per node."""
    # With more depths per part there are fewer sorts, but each sorts more nodes.
    part_depths = 1
    if m <= 128:
        part_depths = 3
    elif m <= 512:
        part_depths = 2
    part_bounds = [*range(0, depth, part_depths), depth]
    part_nodes, num_prefixes = [], 1
    for begin, end in itertools.pairwise(part_bounds):
        part_nodes.append(list(_nodes(m, k, begin, end, num_prefixes)))
        num_prefixes = sum(len(path) == 1 + end - begin for path in part_nodes[-1])
    # Use only the prefixes that have candidates below them.
    widths = [1, *(1 + max(path[0] for path in paths) for paths in part_nodes[1:]), 0]
    num_nodes = sum(map(len, part_nodes))
    parts, node_table, first_number, prefix_offset = [], [], 0, -widths[0]
    for paths, begin, end, num_sources, width in zip(
        part_nodes, part_bounds, part_bounds[1:], widths, widths[1:], strict=False
    ):
        paths.sort(key=len)
        node_numbers = {path: first_number + i for i, path in enumerate(paths)}
        zero_index = num_sources + (end - begin) * k
        term_indices = np.full((len(paths), 1 + end - begin), zero_index, np.int32)
        for terms, path in zip(term_indices, paths, strict=True):
            terms[: len(path)] = [path[0], *(num_sources + level * k + j for level, j in enumerate(path[1:]))]
            level = begin + len(path) - 2
            if len(path) > 2:
                parent_number = node_numbers[path[:-1]]
            elif begin:
                parent_number = -1 - (prefix_offset + path[0])
            else:
                parent_number = num_nodes
            node_table.append((level * k + path[-1], parent_number, level + 1))
        last_depth_index = next(i for i, path in enumerate(paths) if len(path) == 1 + end - begin)
        parts.append(_Part(begin, end, term_indices, first_number, last_depth_index, width))
        first_number, prefix_offset = first_number + len(paths), prefix_offset + num_sources
    return _CandidatePlan(tuple(parts), np.asarray(node_table, np.int32))


def _nodes(m: int, k: int, begin: int, end: int, prefixes: int) -> Iterator[tuple[int, ...]]:
    """Yield the nodes of depths `begin` .. `end` - 1 that may be among the m most probable ones.

    A node is represented by its path: the rank of its prefix among `prefixes` prefixes, then the ranks of the tokens
    below.
    """

    def descendants(path: tuple[int, ...], width: int, num_likelier: int) -> Iterator[tuple[int, ...]]:
        """Yield the nodes below `path` that may be among the m most probable ones.

        `width` is a lower bound on the number of nodes at the depth of `path`, including `path` itself, that are at
        least as probable as `path`. `num_likelier` is a lower bound on the number of such nodes at all depths.
        """
        for j in range(k):
            num_ahead = num_likelier + width * (j + 1)
            if num_ahead > m:
                return
            yield (*path, j)
            if begin + len(path) < end:
                yield from descendants((*path, j), width * (j + 1), num_ahead)

    if not begin:
        yield from descendants((0,), 1, 0)
        return
    for r in range(min(m, prefixes)):
        # The nodes that are at least as probable as prefix r include r + 1 nodes at its depth, one of which is prefix r
        # itself, and its ancestors below the root.
        yield from descendants((r,), r + 1, r + begin)
