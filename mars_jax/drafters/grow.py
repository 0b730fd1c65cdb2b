"""Grow chains and trees from any drafter that extends nodes: the part that drafters with a cache share.

Sources: static trees SpecInfer 2305.09781; dynamic trees EAGLE-2 2406.16858, section 4; stopping by entropy SVIP
2411.18462. B batch, W nodes of a level, N tree nodes, D depth, U draft vocabulary, V target vocabulary, S slots.
Oracle: a Python search over the same logits in tests/drafters/test_grow.py.

A drafter that has read all committed tokens knows the logits of the first level. To *extend* nodes is to run it over
them: it writes their rows into its cache and gives the logits of their children. Level d + 1 needs the rows of level
d; the last level is drafted and never extended.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from mars_jax.core.sampling import argmax, process, sample_processed, top_k
from mars_jax.core.tree import chain, static_topology
from mars_jax.core.types import NO_TOKEN, Controls, DraftTree, Visible
from mars_jax.drafters.shapes import Dynamic, Shape, Static


class Level(NamedTuple):
    """W nodes to extend."""

    tokens: Array  # i32[B, W]; of the target's vocabulary; NO_TOKEN after a drafter that has stopped
    parents: Array  # i32[B, W]; index of each node's parent among the nodes of the level before
    visible: Visible


class Growth(NamedTuple):
    """How a drafter grows a tree, as functions of its carry: its cache, and what else it hands from level to level."""

    logits: Array  # f32[B, 1, U]; of the first level
    carry: Any
    extend: Callable[[Any, Level], tuple[Array, Any]]  # (carry, level) -> logits f32[B, W, U], carry
    first: Array  # i32[B]; slot and position of the first level's rows
    to_target: Callable[[Array], Array] = lambda ids: ids  # ids of the draft vocabulary -> the target's
    widen: Callable[[Array], Array] = lambda logits: logits  # f32[B, W, U] -> f32[B, W, V]


def grow(
    shape: Shape, sample: bool, growth: Growth, root: Array, keys: Array, controls: Controls
) -> tuple[DraftTree, Array, Any]:
    """Draft a tree under the last committed token.

    Args:
      shape, sample: static; a sampled chain carries the logits that it was drawn from.
      growth: the drafter.
      root: i32[B, 1]; the last committed token.
      keys: key[B], for sampling.
      controls: of the requests. After a node where the square root of the draft's entropy is above
        `controls.draft_stop` a row drafts nothing more.

    Returns:
      The tree; i32[B, N], 1 + the row (from `growth.first` on) into which each node was written, 0 for the root and
      anything for nodes that were not extended; and the carry.
    """
    if isinstance(shape, Dynamic):
        return _dynamic(shape, growth, root, controls)
    if shape.is_chain:
        return _chain(shape, sample, growth, root, keys, controls)
    return _static(shape, growth, root, controls)


def stops_at(logits: Array, controls: Controls) -> Array:
    """bool[B, W]: the drafter is too unsure of what follows these nodes to go on."""

    def unsure() -> Array:
        top = jnp.max(logits, axis=-1, keepdims=True)
        weights = jnp.exp(logits - top)
        total = jnp.sum(weights, axis=-1)
        mean = jnp.sum(jnp.where(weights > 0, weights * (logits - top), 0.0), axis=-1) / total
        return jnp.sqrt(jnp.maximum(jnp.log(total) - mean, 0.0)) > controls.draft_stop[:, None]

    asked = jnp.any(controls.draft_stop < jnp.inf)
    return lax.cond(asked, unsure, lambda: jnp.zeros(logits.shape[:2], bool))


def _chain(shape: Static, sample: bool, growth: Growth, root: Array, keys: Array, controls: Controls):
    batch = root.shape[0]

    def pick(depth, logits: Array) -> tuple[Array, Array | None]:
        """The next token of each row, i32[B, 1], and the processed logits f32[B, 1, V] that it was drawn from."""
        stops = stops_at(logits, controls)
        if sample:
            processed = process(growth.widen(logits), controls)
            level_keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, depth)
            root = jnp.zeros((batch, 1), jnp.int32)  # the keys know the depth already
            return jnp.where(stops, NO_TOKEN, sample_processed(level_keys, root, processed)), processed
        return jnp.where(stops, NO_TOKEN, growth.to_target(argmax(logits))), None

    tokens, processed = pick(1, growth.logits)

    # A chain's levels are alike: a loop compiles one extension, however long the chain.
    def body(carry, depth):
        tokens, carry = carry
        at = growth.first + depth - 1
        level = Level(tokens, jnp.zeros((batch, 1), jnp.int32), Visible.causal(at, 1))
        with jax.named_scope("level"):
            logits, carry = growth.extend(carry, level)
        following, q = pick(depth + 1, logits)
        following = jnp.where(tokens == NO_TOKEN, NO_TOKEN, following)
        return (following, carry), (following[:, 0], None if q is None else q[:, 0])

    depths = jnp.arange(1, shape.depth, dtype=jnp.int32)
    (_, carry), (rest, rest_processed) = lax.scan(body, (tokens, growth.carry), depths)
    draft_logits = None
    if processed is not None and rest_processed is not None:
        # The last node has no children, so its row is never read.
        draft_logits = jnp.concatenate(
            [processed, jnp.moveaxis(rest_processed, 0, 1), jnp.zeros_like(processed)], axis=1
        )
    tree = chain(jnp.concatenate([root, tokens, rest.T], axis=1), draft_logits)
    return tree, jnp.maximum(tree.depths, 0), carry


@jax.named_scope("mask")
def _visible(growth: Growth, seen: Array, depth: Any, row: Any, depths: np.ndarray) -> Visible:
    """What W nodes of a depth see that are written from row `row` on: of the rows, whose depths are i32[R], those
    `seen` bool[B, W, R]."""
    of_rows = growth.first[:, None] + jnp.asarray(depths, jnp.int32)[None] - 1
    positions = jnp.broadcast_to(growth.first[:, None] + depth - 1, seen.shape[:2])
    return Visible(
        first=growth.first, positions=positions, slot=growth.first + row, seen=seen, seen_positions=of_rows
    )


@jax.named_scope("mask")
def _seen(before: Array, parents: Array, first: Any) -> Array:
    """bool[B, W, R] for W new rows from row `first` on: what their parents see, and themselves."""
    rows = jnp.arange(before.shape[2], dtype=jnp.int32)
    own = rows[None] == first + jnp.arange(parents.shape[1], dtype=jnp.int32)[:, None]
    return jnp.take_along_axis(before, parents[:, :, None], axis=1) | own[None]


def _static(shape: Static, growth: Growth, root: Array, controls: Controls):
    parents, depths = static_topology(shape.branching)
    batch, n = root.shape[0], shape.num_nodes

    def children(logits: Array, width: int, alive: Array) -> Array:
        """i32[B, W * width]; NO_TOKEN under nodes that are not alive."""
        ids = top_k(logits, width)[1] if width > 1 else argmax(logits)[..., None]
        alive = alive & ~stops_at(logits, controls)
        return jnp.where(alive[..., None], growth.to_target(ids), NO_TOKEN).reshape(batch, -1)

    levels = [root, children(growth.logits, shape.branching[0], jnp.ones((batch, 1), bool))]
    seen, carry, row = jnp.zeros((batch, 1, n - 1), bool), growth.carry, 0
    above, width = np.zeros(shape.branching[0], np.int32), shape.branching[0]
    for depth in range(1, shape.depth):
        up = jnp.broadcast_to(jnp.asarray(above), (batch, width))
        seen = _seen(seen, up, row)
        level = Level(levels[-1], up, _visible(growth, seen, depth, row, depths[1:]))
        with jax.named_scope("level"):
            logits, carry = growth.extend(carry, level)
        levels.append(children(logits, shape.branching[depth], levels[-1] != NO_TOKEN))
        above, row = np.repeat(np.arange(width, dtype=np.int32), shape.branching[depth]), row + width
        width = len(above)
    tree = DraftTree(
        tokens=jnp.concatenate(levels, axis=1),
        parents=jnp.broadcast_to(jnp.asarray(parents), (batch, n)),
        depths=jnp.broadcast_to(jnp.asarray(depths), (batch, n)),
        max_depth=shape.depth,
        is_chain=False,
    )
    return tree, jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32), (batch, n)), carry


def _dynamic(shape: Dynamic, growth: Growth, root: Array, controls: Controls):
    k, batch, n = shape.top_k, root.shape[0], shape.num_nodes

    def children(logits: Array, score: Array) -> tuple[Array, Array]:
        """The k likeliest children of each of W nodes, i32[B, W * k], and their scores; -inf where it stops."""
        top, ids = top_k(logits, k)
        # At most 0 also where rounding says otherwise, so that no child is likelier than its parent.
        log_p = jnp.minimum(top - jax.nn.logsumexp(logits, axis=-1, keepdims=True), 0.0)
        score = jnp.where(stops_at(logits, controls), -jnp.inf, score)
        return growth.to_target(ids).reshape(batch, -1), (score[..., None] + log_p).reshape(batch, -1)

    # A candidate is known by its number: level 1 is 0 .. k - 1, and k * k follow for every level.
    tokens, scores = children(growth.logits, jnp.zeros((batch, 1), jnp.float32))
    nothing = jnp.zeros((batch, k), jnp.int32)
    ids = jnp.broadcast_to(jnp.arange(k, dtype=jnp.int32), (batch, k))
    before = jnp.zeros((batch, k, max(shape.rows, 1)), bool)
    row_depths = 1 + np.arange(max(shape.rows, 1)) // k

    # One compiled extension for all levels, which are alike.
    def body(carry, depth):
        carry, tokens, scores, ids, up, before = carry
        row = (depth - 1) * k
        seen = _seen(before, up, row)
        level = Level(tokens, up, _visible(growth, seen, depth, row, row_depths))
        with jax.named_scope("level"):
            logits, carry = growth.extend(carry, level)
        new_tokens, new_scores = children(logits, scores)
        parents = jnp.repeat(ids, k, axis=1)
        best_scores, best = lax.top_k(new_scores, k)
        best_tokens = jnp.take_along_axis(new_tokens, best, axis=1)
        following = (carry, best_tokens, best_scores, k + row * k + best, best // k, seen)
        return following, (new_tokens, new_scores, parents, ids)

    carry = (growth.carry, tokens, scores, ids, nothing, before)
    depths = jnp.arange(1, shape.depth, dtype=jnp.int32)
    (carry, *_), levels = lax.scan(body, carry, depths)

    def joined(first: Array, rest: Array) -> Array:
        return jnp.concatenate([first, jnp.moveaxis(rest, 0, 1).reshape(batch, -1)], axis=1)

    all_tokens, all_scores = joined(tokens, levels[0]), joined(scores, levels[1])
    all_parents = joined(nothing - 1, levels[2])  # candidates; -1 is the root
    extended = jnp.moveaxis(levels[3], 0, 1).reshape(batch, -1)  # candidates, in the order of their rows
    all_depths = np.concatenate([np.ones(k), np.repeat(np.arange(2, shape.depth + 1), k * k)]).astype(
        np.int32
    )

    # A child is no likelier than its parent, and of equals top_k takes the lower number, the parent's: so the chosen
    # ones hang together, and in the order of their numbers parents come first.
    kept = jnp.sort(lax.top_k(all_scores, n - 1)[1], axis=1)

    def numbered(places: Array, values: Array) -> Array:
        """i32[B, candidates]: values at their candidates, 0 elsewhere."""
        empty = jnp.zeros((batch, shape.candidates), jnp.int32)
        return jax.vmap(lambda row, at, new: row.at[at].set(new))(empty, places, values)

    def at_kept(values: Array) -> Array:
        return jnp.take_along_axis(values, kept, axis=1)

    nodes = jnp.broadcast_to(jnp.arange(1, n, dtype=jnp.int32), (batch, n - 1))
    node_of = numbered(kept, nodes)
    parent = at_kept(all_parents)
    parent = jnp.where(parent < 0, 0, jnp.take_along_axis(node_of, jnp.maximum(parent, 0), axis=1))
    row_of = numbered(
        extended, jnp.broadcast_to(1 + jnp.arange(extended.shape[1], dtype=jnp.int32), extended.shape)
    )
    alive = at_kept(all_scores) > -jnp.inf
    zero = jnp.zeros((batch, 1), jnp.int32)
    tree = DraftTree(
        tokens=jnp.concatenate([root, jnp.where(alive, at_kept(all_tokens), NO_TOKEN)], axis=1),
        parents=jnp.concatenate([zero - 1, jnp.where(alive, parent, 0)], axis=1),
        depths=jnp.concatenate([zero, jnp.asarray(all_depths)[kept]], axis=1),
        max_depth=shape.depth,
        is_chain=False,
    )
    return tree, jnp.concatenate([zero, at_kept(row_of)], axis=1), carry
