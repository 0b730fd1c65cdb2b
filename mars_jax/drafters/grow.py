"""Grow chains and trees from any drafter that extends nodes: the part that drafters with a cache share.

Sources: static trees SpecInfer 2305.09781; dynamic trees EAGLE-2 2406.16858, section 4; stopping by entropy SVIP
2411.18462; siblings without replacement `draw`. B batch, W nodes of a level, N tree nodes, D depth, U draft vocabulary,
V target vocabulary, S slots.
Oracle: a Python search over the same logits in tests/drafters/test_grow.py.

A drafter that has read all committed tokens knows the logits of the first level. To *extend* nodes is to run it over
them: it writes their rows into its cache and gives the logits of their children. Level d + 1 needs the rows of level
d; the last level is drafted and never extended.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from mars_jax.core.guide import Guide
from mars_jax.core.pick import pick, put
from mars_jax.core.sampling import argmax, process, sample_processed, top_k
from mars_jax.core.tree import chain, static_topology
from mars_jax.core.types import NO_TOKEN, Controls, DraftTree, Visible
from mars_jax.drafters.draw import draw_siblings, with_leaves
from mars_jax.drafters.steering import Steering
from mars_jax.drafters.tree_shapes import Dynamic, Shape, Static


class Level(NamedTuple):
    """W nodes to extend."""

    tokens: Array  # i32[B, W]; of the target's vocabulary; NO_TOKEN after a drafter that has stopped
    parents: Array  # i32[B, W]; index of each node's parent among the nodes of the level before
    visible: Visible


class Growth(NamedTuple):
    """Functions by which a drafter grows a tree. The carry is its cache, and what else it hands from level to level."""

    logits: Array  # f32[B, 1, U]; of the first level
    carry: Any
    extend: Callable[[Any, Level], tuple[Array, Any]]  # (carry, level) -> logits f32[B, W, U], carry
    first: Array  # i32[B]; slot and position of the first level's rows
    to_target: Callable[[Array], Array] = lambda ids: ids  # ids of the draft vocabulary -> the target's
    widen: Callable[[Array], Array] = lambda logits: logits  # f32[B, W, U] -> f32[B, W, V]
    # (logits f32[B, W, U], carry, controls) -> bool[B, W]: nothing follows these nodes; None: `stops_at`
    stops: Callable[[Array, Any, Controls], Array] | None = None

    def ends(self, logits: Array, carry: Any, controls: Controls) -> Array:
        return stops_at(logits, controls) if self.stops is None else self.stops(logits, carry, controls)


def grow(
    shape: Shape,
    sample: bool,
    growth: Growth,
    root: Array,
    keys: Array,
    controls: Controls,
    guide: Guide | None = None,
) -> tuple[DraftTree, Array, Any]:
    """Draft a tree under the last committed token.

    Args:
      shape, sample: static; a sampled draft carries the logits that it was drawn from. Siblings of a sampled tree are
        drawn without replacement, and come in the order in which they were drawn.
      growth: the drafter.
      root: i32[B, 1]; the last committed token.
      keys: key[B], for sampling.
      controls: of the requests. After a node where the square root of the draft's entropy is above
        `controls.draft_stop` a row drafts nothing more.
      guide: of a constraint: a level is drafted from what may follow, and the true q is that of what is left.

    Returns:
      The tree; i32[B, N], 1 + the row (from `growth.first` on) into which each node was written, 0 for the root and
      anything for nodes that were not extended; and the carry.
    """
    steering = Steering(growth, sample, guide)
    if isinstance(shape, Dynamic):
        return _dynamic(shape, sample, growth, root, keys, controls, steering)
    if shape.is_chain:
        return _chain(shape, sample, growth, root, keys, controls, steering)
    return _static(shape, sample, growth, root, keys, controls, steering)


def stops_at(logits: Array, controls: Controls) -> Array:
    """bool[B, W]: the drafter is too unsure of what follows these nodes to go on."""

    def unsure() -> Array:
        # H = log(sum w) - sum(w (z - top)) / sum w, with w = exp(z - top): the entropy in nats without a softmax. SVIP
        # stops where its square root is above the threshold. A masked token has w = 0, and 0 * -inf must not be added.
        top = jnp.max(logits, axis=-1, keepdims=True)
        weights = jnp.exp(logits - top)
        total = jnp.sum(weights, axis=-1)
        mean = jnp.sum(jnp.where(weights > 0, weights * (logits - top), 0.0), axis=-1) / total
        return jnp.sqrt(jnp.maximum(jnp.log(total) - mean, 0.0)) > controls.draft_stop[:, None]

    asked = jnp.any(controls.draft_stop < jnp.inf)
    return lax.cond(asked, unsure, lambda: jnp.zeros(logits.shape[:2], bool))


def _chain(
    shape: Static,
    sample: bool,
    growth: Growth,
    root: Array,
    keys: Array,
    controls: Controls,
    steering: Steering,
):
    batch = root.shape[0]

    def pick(depth, plain: Array, carry: Any, states: Array | None) -> tuple[Array, Array | None]:
        """The next token of each row, i32[B, 1], and the processed logits f32[B, 1, V] that it was drawn from."""
        logits = steering.logits(plain, states)
        stops = growth.ends(steering.judged(plain, logits), carry, controls)
        if sample:
            processed = process(logits, controls)
            # A draft's draws are its own: keyed by the depth below keys that are fresh in every step.
            level_keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, depth)
            root = jnp.zeros((batch, 1), jnp.int32)  # the keys know the depth already
            return jnp.where(stops, NO_TOKEN, sample_processed(level_keys, root, processed)), processed
        return jnp.where(stops, NO_TOKEN, steering.best(logits, states)), None

    first = steering.first
    tokens, processed = pick(1, growth.logits, growth.carry, first)

    # A chain's levels are alike: a loop compiles one extension, however long the chain.
    def body(carry, depth):
        tokens, states, carry = carry
        # The node at depth d is written to slot and position `first + d - 1`; its parent is the only node of its level.
        at = growth.first + depth - 1
        level = Level(tokens, jnp.zeros((batch, 1), jnp.int32), Visible.causal(at, 1))
        with jax.named_scope("level"):
            logits, carry = growth.extend(carry, level)
        following, q = pick(depth + 1, logits, carry, states)
        # A row that has stopped drafts no more.
        following = jnp.where(tokens == NO_TOKEN, NO_TOKEN, following)
        states = steering.moved(states, following)
        return (following, states, carry), (following[:, 0], None if q is None else q[:, 0])

    # Depths 1 .. D - 1 are extended; the leaf at depth D is drafted and never fed.
    depths = jnp.arange(1, shape.depth, dtype=jnp.int32)
    begin = (tokens, steering.moved(first, tokens), growth.carry)
    (_, _, carry), (rest, rest_processed) = lax.scan(body, begin, depths)
    draft_logits = None
    if processed is not None and rest_processed is not None:
        # Row i is q of node i + 1: the root's, then [D - 1, B, V] of the scan as [B, D - 1, V], N rows in all. The last
        # node has no children, so its row is never read.
        draft_logits = jnp.concatenate(
            [processed, jnp.moveaxis(rest_processed, 0, 1), jnp.zeros_like(processed)], axis=1
        )
    tree = chain(jnp.concatenate([root, tokens, rest.T], axis=1), draft_logits)
    return tree, jnp.maximum(tree.depths, 0), carry


@jax.named_scope("mask")
def _visible(growth: Growth, seen: Array, depth: Any, row: Any, depths: np.ndarray) -> Visible:
    """Attention of W nodes of a depth that are written from row `row` on.

    Rows have depths i32[R], and the nodes see those that are `seen` bool[B, W, R].
    """
    # Row r is in slot `first + r`, and at the position of its depth, which many rows share: depth 1 is at `first`.
    of_rows = growth.first[:, None] + jnp.asarray(depths, jnp.int32)[None] - 1
    positions = jnp.broadcast_to(growth.first[:, None] + depth - 1, seen.shape[:2])
    return Visible(
        first=growth.first, positions=positions, slot=growth.first + row, seen=seen, seen_positions=of_rows
    )


@jax.named_scope("mask")
def _seen(before: Array, parents: Array, first: Any) -> Array:
    """bool[B, W, R] for W new rows from row `first` on: what their parents see, and themselves."""
    rows = jnp.arange(before.shape[2], dtype=jnp.int32)
    # bool[W, R]: new node i is row `first + i`.
    own = rows[None] == first + jnp.arange(parents.shape[1], dtype=jnp.int32)[:, None]
    return pick(before, parents) | own[None]


def _static(
    shape: Static,
    sample: bool,
    growth: Growth,
    root: Array,
    keys: Array,
    controls: Controls,
    steering: Steering,
):
    parents, depths = static_topology(shape.branching)
    batch, n = root.shape[0], shape.num_nodes
    drawn_from = []  # f32[B, W, V] of each level

    def children(plain: Array, depth: int, alive: Array, carry: Any, states: Array | None) -> Array:
        """i32[B, W * width], the children of a level at `depth`; NO_TOKEN under nodes that are not alive."""
        width = shape.branching[depth]
        logits = steering.logits(plain, states)
        alive = alive & ~growth.ends(steering.judged(plain, logits), carry, controls)
        if sample:
            drawn = draw_siblings(logits, width, _of_level(keys, depth), controls)
            drawn_from.append(drawn.logits)
            ids = drawn.ids
        else:
            best = top_k(logits, width).ids if width > 1 else argmax(logits)[..., None]
            ids = steering.tokens(best, states)
        return jnp.where(alive[..., None], ids, NO_TOKEN).reshape(batch, -1)

    states = steering.first
    # The root was fed before, so level 1 comes from its logits, and row r of the cache is node r + 1: R = N - 1.
    levels = [root, children(growth.logits, 0, jnp.ones((batch, 1), bool), growth.carry, states)]
    seen, carry, row = jnp.zeros((batch, 1, n - 1), bool), growth.carry, 0
    above, width = np.zeros(shape.branching[0], np.int32), shape.branching[0]
    for depth in range(1, shape.depth):
        up = jnp.broadcast_to(jnp.asarray(above), (batch, width))
        seen = _seen(seen, up, row)
        level = Level(levels[-1], up, _visible(growth, seen, depth, row, depths[1:]))
        with jax.named_scope("level"):
            logits, carry = growth.extend(carry, level)
        states = steering.moved(states, levels[-1])
        levels.append(children(logits, depth, levels[-1] != NO_TOKEN, carry, states))
        # Children stand side by side under their parent: [W, width] flattened, so parent i is repeated `width` times.
        above, row = np.repeat(np.arange(width, dtype=np.int32), shape.branching[depth]), row + width
        width = len(above)
    tree = DraftTree(
        tokens=jnp.concatenate(levels, axis=1),
        parents=jnp.broadcast_to(jnp.asarray(parents), (batch, n)),
        depths=jnp.broadcast_to(jnp.asarray(depths), (batch, n)),
        draft_logits=with_leaves(drawn_from, n) if sample else None,
        max_depth=shape.depth,
        is_chain=False,
    )
    return tree, jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32), (batch, n)), carry


def _of_level(keys: Array, depth: Any) -> Array:
    """key[B] for the draws of a level."""
    return jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, depth)


class _Children(NamedTuple):
    """The candidates under W nodes, [B, W * k] each."""

    tokens: Array  # i32
    # f32; what a candidate is ranked by, never above its parent's: the log-probability of its path. In a sampled
    # draft the j-th drawn child counts its parent's path and the j-th likeliest token instead.
    rank: Array
    path: Array  # f32; log-probability of its path, by which its own children are ranked; -inf: it stops


def _dynamic(
    shape: Dynamic,
    sample: bool,
    growth: Growth,
    root: Array,
    keys: Array,
    controls: Controls,
    steering: Steering,
):
    """A tree whose shape follows the drafter's confidence.

    A sampled one must not let a token decide whether it is kept, or what is kept would not be drawn from q. So a
    candidate's rank does not depend on its own token, and nothing that does depend on it, its descendants and the
    siblings drawn after it, is ranked above it: what is kept before it is settled without it.
    """
    k, batch = shape.top_k, root.shape[0]

    def children(
        plain: Array, rank: Array, path: Array, depth: Any, carry: Any, states: Array | None
    ) -> tuple[_Children, Array | None]:
        """The k children of each of W nodes whose ranks and paths are f32[B, W]; and what they were drawn from."""
        logits = steering.logits(plain, states)
        ends = growth.ends(steering.judged(plain, logits), carry, controls)
        path = jnp.where(ends, -jnp.inf, path)[..., None]

        def flat(values: Array) -> Array:
            return values.reshape(batch, -1)

        if sample:
            drawn = draw_siblings(logits, k, _of_level(keys, depth), controls)
            # The j-th child is ranked by the j-th largest of q, whatever was drawn, and never above its parent.
            ranks = jnp.minimum(path + drawn.likeliest, rank[..., None])
            made = _Children(flat(drawn.ids), flat(ranks), flat(path + drawn.log_q))
            return made, drawn.logits
        found = top_k(logits, k)
        # At most 0 also where rounding says otherwise, so that no child is likelier than its parent.
        log_q = steering.only_allowed(
            jnp.minimum(found.values - found.logsumexp[..., None], 0.0), found, states
        )
        score = flat(path + log_q)
        return _Children(flat(steering.tokens(found.ids, states)), score, score), None

    # A candidate is known by its number: level 1 is 0 .. k - 1, and k * k follow for every level.
    zeros = jnp.zeros((batch, 1), jnp.float32)
    top, q = children(growth.logits, zeros, zeros, 0, growth.carry, steering.first)
    # Of the k nodes of a level, i32[B, k] each: their numbers, and the places of their parents in the level before.
    nothing = jnp.zeros((batch, k), jnp.int32)
    ids = jnp.broadcast_to(jnp.arange(k, dtype=jnp.int32), (batch, k))
    before = jnp.zeros((batch, k, max(shape.rows, 1)), bool)
    # k rows a level are written, so row r is at depth 1 + r // k; a depth of 1 has none, and the arrays one unused row.
    row_depths = 1 + np.arange(max(shape.rows, 1)) // k

    # One compiled extension for all levels, which are alike.
    def body(carry, depth):
        carry, nodes, states, ids, up, before = carry
        row = (depth - 1) * k
        seen = _seen(before, up, row)
        level = Level(nodes.tokens, up, _visible(growth, seen, depth, row, row_depths))
        with jax.named_scope("level"):
            logits, carry = growth.extend(carry, level)
        new, new_q = children(logits, nodes.rank, nodes.path, depth, carry, states)
        # i32[B, k * k]: the new candidates i * k .. i * k + k - 1 are under node i of the level.
        parents = jnp.repeat(ids, k, axis=1)
        best_ranks, best = lax.top_k(new.rank, k)
        chosen = _Children(pick(new.tokens, best), best_ranks, pick(new.path, best))
        above = None if states is None else pick(states, best // k)
        states = steering.moved(above, chosen.tokens)
        # Level 1 has k candidates and each later one k * k, so the new ones begin at k + (depth - 1) * k * k, which is
        # k + row * k.
        following = (carry, chosen, states, k + row * k + best, best // k, seen)
        return following, (new.tokens, new.rank, parents, ids, new_q)

    carry = (growth.carry, top, steering.moved(steering.first, top.tokens), ids, nothing, before)
    depths = jnp.arange(1, shape.depth, dtype=jnp.int32)
    (carry, *_), levels = lax.scan(body, carry, depths)

    # A scan stacks over depths: [D - 1, B, k * k] becomes [B, (D - 1) * k * k] after the k of level 1.
    def joined(first: Array, rest: Array) -> Array:
        return jnp.concatenate([first, jnp.moveaxis(rest, 0, 1).reshape(batch, -1)], axis=1)

    all_tokens, all_ranks = joined(top.tokens, levels[0]), joined(top.rank, levels[1])
    all_parents = joined(nothing - 1, levels[2])  # candidates; -1 is the root
    extended = jnp.moveaxis(levels[3], 0, 1).reshape(batch, -1)  # candidates, in the order of their rows
    all_depths = np.concatenate([np.ones(k), np.repeat(np.arange(2, shape.depth + 1), k * k)]).astype(
        np.int32
    )

    tree, kept = keep(shape, root, Candidates(all_tokens, all_ranks, all_parents, all_depths))
    rows = jnp.broadcast_to(1 + jnp.arange(extended.shape[1], dtype=jnp.int32), extended.shape)
    # Inverse of `extended`: 1 + the row of each candidate, and 0 for one that was never extended.
    row_of = put(shape.candidates, extended, rows)
    node_rows = jnp.concatenate([jnp.zeros((batch, 1), jnp.int32), pick(row_of, kept)], axis=1)
    if q is not None:
        # Rows are numbered from 1, so that 0 is the root's; those of nodes that were not extended are never read.
        tree = dataclasses.replace(tree, draft_logits=pick(_rows_of_q(q, levels[4]), node_rows))
    return tree, node_rows, carry


class Candidates(NamedTuple):
    """C nodes of which a tree is to be kept: parents before their children, and none below its child."""

    tokens: Array  # i32[B, C]
    ranks: Array  # f32[B, C]; at most the parent's; -inf: it is none
    parents: Array  # i32[B, C]; candidates; -1 is the root
    depths: np.ndarray  # i32[C]


def keep(shape: Dynamic, root: Array, given: Candidates) -> tuple[DraftTree, Array]:
    """The tree of the highest ranks, `shape.num_nodes` with the root i32[B, 1]; and i32[B, N - 1], which they are."""
    batch, n = root.shape[0], shape.num_nodes
    # A child is ranked no higher than its parent, and of equals top_k takes the lower number, the parent's: so the
    # chosen ones hang together, and in the order of their numbers parents come first.
    kept = jnp.sort(lax.top_k(given.ranks, n - 1)[1], axis=1)
    nodes = jnp.broadcast_to(jnp.arange(1, n, dtype=jnp.int32), (batch, n - 1))
    # i32[B, C]: the node that each candidate has become; 0 for those that were left out, which no kept one names.
    node_of = put(len(given.depths), kept, nodes)
    parent = pick(given.parents, kept)
    parent = jnp.where(parent < 0, 0, pick(node_of, jnp.maximum(parent, 0)))
    alive = pick(given.ranks, kept) > -jnp.inf
    zero = jnp.zeros((batch, 1), jnp.int32)
    tree = DraftTree(
        tokens=jnp.concatenate([root, jnp.where(alive, pick(given.tokens, kept), NO_TOKEN)], axis=1),
        parents=jnp.concatenate([zero - 1, jnp.where(alive, parent, 0)], axis=1),
        depths=jnp.concatenate([zero, jnp.asarray(given.depths)[kept]], axis=1),
        max_depth=shape.depth,
        is_chain=False,
    )
    return tree, kept


def _rows_of_q(first: Array, rest: Array | None) -> Array:
    """f32[B, 1 + R, V]: what the children of the root and of every extended node were drawn from."""
    assert rest is not None  # the levels were drawn as the first was
    rest = jnp.moveaxis(rest, 0, 1)
    return jnp.concatenate([first, rest.reshape(rest.shape[0], -1, rest.shape[-1])], axis=1)
