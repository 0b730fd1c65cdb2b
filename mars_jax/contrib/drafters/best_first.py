"""Trees from independent marginals, best first: the likeliest nodes of all, by the product of probabilities.

Source: DDTree 2604.12989. B batch, D depth, V vocabulary, M nodes besides the root, k children of a node at most.
Oracle: a best-first search with a heap in Python (tests/contrib/test_best_first.py).

All nodes of one depth have the same children. So where the prefixes of a depth are sorted, it is known without their
values how many nodes are no less likely than the j-th child of the r-th of them: at its depth the (r + 1) * (j + 1)
made of no later prefixes and children, and at each depth above it those above these. Where that is more than M, the
node is in no tree. The others are few, and `_plan` lists them: for M = 59 and D = 15 some 3,000, three depths at a
time. Their values are sums at places that never change, and only the last of three depths is sorted for the next three.
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
from mars_jax.core.sampling import top_k
from mars_jax.core.types import NO_TOKEN, DraftTree
from mars_jax.drafters.tree_shapes import Dynamic


@jax.named_scope("best_first")
def best_first(shape: Dynamic, root: Array, logits: Array, alive: Array) -> DraftTree:
    """Return the tree of the `shape.num_nodes` likeliest nodes, `shape.top_k` children each at most, likeliest first.

    Args:
      shape: its depth is D.
      root: i32[B, 1]; the last committed token.
      logits: f32[B, D, V]; of the token at each depth below the root, whatever is above it.
      alive: bool[B, D]; False from a depth on at which nothing is drafted.

    >>> half = jnp.log(jnp.asarray([[[0.6, 0.4], [0.9, 0.1]]]))
    >>> tree = best_first(Dynamic(2, 2, 4), jnp.asarray([[7]]), half, jnp.ones((1, 2), bool))
    >>> tree.tokens.tolist(), tree.parents.tolist()
    ([[7, 0, 0, 1]], [[-1, 0, 1, 0]])
    """
    batch, m = root.shape[0], shape.num_nodes - 1
    k = min(shape.top_k, m)
    plan = _plan(m, shape.depth, k)
    found = top_k(logits, k)
    # At most 0 also where rounding says otherwise, so that no child is likelier than its parent.
    children = jnp.minimum(found.values - found.logsumexp[..., None], 0.0)
    children = jnp.where(alive[..., None], children, -jnp.inf)

    zero = jnp.zeros((batch, 1), jnp.float32)
    prefixes, values, sorted_prefixes = zero, [], []
    for part in plan.parts:
        # A source for the sums: log-probabilities of the sorted prefixes, of the children at each depth, and a zero.
        of_part = children[:, part.begin : part.end].reshape(batch, -1)
        values.append(_sums(jnp.concatenate([prefixes, of_part, zero], axis=1), part.places))
        if part.width:
            prefixes, at = lax.top_k(values[-1][:, part.last :], part.width)
            sorted_prefixes.append(at + part.first + part.last)

    # A child's sum is its parent's with a term that is at most 0 in the place of a zero, so it is no higher, however it
    # is rounded; and of equals top_k takes the lower number first, the parent's. So what is kept hangs together, and
    # parents come first.
    ranks, kept = lax.top_k(jnp.concatenate(values, axis=1), m)
    # i32[B, M] each, from the table of all candidates: they differ by row only in which of them were kept.
    token, above, depth = jnp.unstack(jnp.asarray(plan.table).at[kept].get(mode="promise_in_bounds"), axis=2)
    if sorted_prefixes:
        which = pick(jnp.concatenate(sorted_prefixes, axis=1), jnp.maximum(-1 - above, 0))
        above = jnp.where(above < 0, which, above)
    # A parent's node is 1 + its place among the kept; the root is none of them, and the sum over no match is 0.
    parents = jnp.sum(
        jnp.where(above[:, :, None] == kept[:, None], jnp.arange(1, m + 1, dtype=jnp.int32), 0),
        axis=2,
        dtype=jnp.int32,
    )
    tokens = pick(found.ids.reshape(batch, -1), token)
    drafted = ranks > -jnp.inf
    none = jnp.zeros((batch, 1), jnp.int32)
    return DraftTree(
        tokens=jnp.concatenate([root, jnp.where(drafted, tokens, NO_TOKEN)], axis=1),
        parents=jnp.concatenate([none - 1, jnp.where(drafted, parents, 0)], axis=1),
        depths=jnp.concatenate([none, depth], axis=1),
        max_depth=shape.depth,
        is_chain=False,
    )


def _sums(source: Array, places: np.ndarray) -> Array:
    """Return f32[B, C]: of source f32[B, S] the sums at places i32[C, P], which differ but for that of a zero."""

    def gathered(source: Array) -> Array:
        # One after the other: the same order for a node and its parent.
        return functools.reduce(jnp.add, (source[:, at] for at in places.T))

    def compared(source: Array) -> Array:
        of = jnp.arange(source.shape[1], dtype=jnp.int32)[None]
        here = functools.reduce(jnp.logical_or, (jnp.asarray(at)[:, None] == of for at in places.T))
        return jnp.sum(jnp.where(here[None], source[:, None], 0.0), axis=2)

    return lax.platform_dependent(source, cpu=gathered, default=compared)


class _Part(NamedTuple):
    """Depths that are drafted together, and the nodes of these depths that may be in a tree, parents first."""

    begin: int  # its depths, from 0
    end: int
    # i32[C, 1 + L]: a node's prefix and its tokens below it, as places in the prefixes, the children of the L depths,
    # and a zero.
    places: np.ndarray
    first: int  # number of its first node among those of all parts
    last: int  # number of the first one of the last depth among its own
    width: int  # prefixes that the next part reads; 0: there is none


class _Plan(NamedTuple):
    parts: tuple[_Part, ...]
    # i32[all nodes, 3]: place of the node's token among D * k; number of its parent, beyond all where it is the root,
    # and -1 - place among the sorted prefixes of all parts where it is one of those; its depth.
    table: np.ndarray


@functools.lru_cache
def _plan(m: int, depth: int, k: int) -> _Plan:
    """Return the static part of trees of m nodes, `depth` levels and k children."""
    # More depths at once are fewer sorts of more nodes.
    size = 3 if m <= 128 else 2 if m <= 512 else 1
    cuts = [*range(0, depth, size), depth]
    found, above = [], 1
    for begin, end in itertools.pairwise(cuts):
        found.append(list(_nodes(m, k, begin, end, above)))
        above = sum(len(path) == 1 + end - begin for path in found[-1])
    # Of the prefixes only those that something is below.
    widths = [1, *(1 + max(path[0] for path in paths) for paths in found[1:]), 0]
    total = sum(map(len, found))
    parts, table, first, carried = [], [], 0, -widths[0]
    for paths, begin, end, before, width in zip(found, cuts, cuts[1:], widths, widths[1:], strict=False):
        paths.sort(key=len)
        number = {path: first + i for i, path in enumerate(paths)}
        zero = before + (end - begin) * k
        places = np.full((len(paths), 1 + end - begin), zero, np.int32)
        for row, path in zip(places, paths, strict=True):
            row[: len(path)] = [path[0], *(before + level * k + j for level, j in enumerate(path[1:]))]
            level = begin + len(path) - 2
            if len(path) > 2:
                parent = number[path[:-1]]
            else:
                parent = -1 - (carried + path[0]) if begin else total
            table.append((level * k + path[-1], parent, level + 1))
        last = next(i for i, path in enumerate(paths) if len(path) == 1 + end - begin)
        parts.append(_Part(begin, end, places, first, last, width))
        first, carried = first + len(paths), carried + before
    return _Plan(tuple(parts), np.asarray(table, np.int32))


def _nodes(m: int, k: int, begin: int, end: int, prefixes: int) -> Iterator[tuple[int, ...]]:
    """Yield the nodes of depths `begin` .. `end` - 1 that may be among the m likeliest: the number of the prefix, by
    its likelihood among `prefixes`, and those of the tokens below it.
    """

    def below(path: tuple[int, ...], width: int, better: int) -> Iterator[tuple[int, ...]]:
        """Yield the nodes below one.

        At its depth `width` nodes, itself among them, are no less likely; of all, `better` are.
        """
        for j in range(k):
            count = better + width * (j + 1)
            if count > m:
                return
            yield (*path, j)
            if begin + len(path) < end:
                yield from below((*path, j), width * (j + 1), count)

    if not begin:
        yield from below((0,), 1, 0)
        return
    for r in range(min(m, prefixes)):
        # The prefix's own depth, and one node at least at each above it.
        yield from below((r,), r + 1, r + begin)
