"""Functions that grow draft chains and trees level by level, shared by all drafters with a cache.

Sources: static trees SpecInfer 2305.09781; dynamic trees EAGLE-2 2406.16858, section 4; early stopping by entropy SVIP
2411.18462; sampling without replacement, see `draw`. B batch, W nodes per level, N tree nodes, D depth, U draft
vocabulary, V target vocabulary, S slots.
Tested against a Python search over the same logits in tests/drafters/test_grow.py.

After processing all committed tokens, a drafter has the logits of the first level. *Extending* nodes means running the
drafter on them: it writes their keys and values into rows of its cache and returns the logits of their children. Level
d + 1 needs the rows of level d. The last level is drafted but never extended.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from mars_jax.core.guide import Guide
from mars_jax.core.pick import pick, scatter_integers
from mars_jax.core.sampling import argmax, process, sample_processed, top_k_logits
from mars_jax.core.tree import chain, static_topology
from mars_jax.core.types import NO_TOKEN, Controls, DraftTree, PyTree, Visible
from mars_jax.drafters.draw import draw_siblings, with_leaves
from mars_jax.drafters.steering import Steering
from mars_jax.drafters.tree_shapes import Dynamic, Shape, Static


class Level(NamedTuple):
    """A level of W nodes to extend."""

    tokens: Array  # i32[B, W]; target token ids; NO_TOKEN after the drafter has stopped
    parents: Array  # i32[B, W]; index of each node's parent among the nodes of the previous level
    visible: Visible


class Growth(NamedTuple):
    """The logits, carry and functions with which `grow` runs a drafter.

    The carry is passed from level to level. It includes the drafter's cache.
    """

    logits: Array  # f32[B, 1, U]; logits of the first level
    carry: PyTree
    extend: Callable[[PyTree, Level], tuple[Array, PyTree]]  # (carry, level) -> logits f32[B, W, U], carry
    first: Array  # i32[B]; slot, and also position, of the first row of the first level
    to_target: Callable[[Array], Array] = lambda ids: ids  # draft token ids -> target token ids
    widen: Callable[[Array], Array] = lambda logits: logits  # f32[B, W, U] -> f32[B, W, V]
    # (logits f32[B, W, U], carry, controls) -> bool[B, W]; True for nodes that get no children; None: use `stops_at`
    stops: Callable[[Array, PyTree, Controls], Array] | None = None

    def ends(self, logits: Array, carry: PyTree, controls: Controls) -> Array:
        """Return bool[B, W], True for nodes that get no children."""
        if self.stops is None:
            return stops_at(logits, controls)
        return self.stops(logits, carry, controls)


Grown = tuple[DraftTree, Array, PyTree]
"""The return value of `grow`: the tree, the cache rows of its nodes, and the carry."""


def grow(
    shape: Shape,
    sample: bool,
    growth: Growth,
    root: Array,
    keys: Array,
    controls: Controls,
    guide: Guide | None = None,
) -> Grown:
    """Draft a tree whose root is the last committed token.

    Args:
      shape: shape of the tree; static.
      sample: whether to sample the draft tokens; static. A sampled tree includes the logits that its nodes were drawn
        from. Siblings are drawn without replacement and stored in the order in which they were drawn.
      growth: logits, carry and functions of the drafter.
      root: i32[B, 1]; the last committed token.
      keys: key[B]; random keys, which must change from step to step.
      controls: sampling controls of the requests. A node gets no children if the square root of the drafter's entropy
        at that node exceeds `controls.draft_stop`.
      guide: an output constraint. Each level is drafted from the allowed tokens, and q is renormalised over them.

    Returns:
      The tree, the cache rows of its nodes i32[B, N], and the carry. The root has row 0, and an extended node whose
      keys and values are in slot `growth.first + r` has row 1 + r. The rows of nodes that were not extended are
      unspecified.
    """
    steering = Steering(growth, sample, guide)
    if isinstance(shape, Dynamic):
        return _dynamic(shape, steering, root, keys, controls)
    if shape.is_chain:
        return _chain(shape, steering, root, keys, controls)
    return _static(shape, steering, root, keys, controls)


def stops_at(logits: Array, controls: Controls) -> Array:
    """Return bool[B, W], True for nodes at which the drafter's entropy is too high to draft children."""

    def unsure() -> Array:
        # The entropy in nats is H = log(sum w) - sum(w (z - top)) / sum w, with w = exp(z - top). SVIP stops if sqrt(H)
        # exceeds the threshold. A masked token has w = 0, and the product 0 * -inf would be NaN, so leave it out of the
        # sum.
        top_logit = jnp.max(logits, axis=-1, keepdims=True)
        weights = jnp.exp(logits - top_logit)
        weight_sum = jnp.sum(weights, axis=-1)
        mean = jnp.sum(jnp.where(weights > 0, weights * (logits - top_logit), 0.0), axis=-1) / weight_sum
        return jnp.sqrt(jnp.maximum(jnp.log(weight_sum) - mean, 0.0)) > controls.draft_stop[:, None]

    is_enabled = jnp.any(controls.draft_stop < jnp.inf)
    return lax.cond(is_enabled, unsure, lambda: jnp.zeros(logits.shape[:2], bool))


class _ChainLevel(NamedTuple):
    """Scan carry of `_chain`: one level of the chain."""

    tokens: Array  # i32[B, 1]
    states: Array | None  # i32[B, 1]; state of the constraint's automaton after each token
    carry: PyTree  # as in `Growth`


def _chain(shape: Static, steering: Steering, root: Array, keys: Array, controls: Controls) -> Grown:
    growth, batch = steering.growth, root.shape[0]

    def draft_next(
        depth: Array | int, raw_logits: Array, carry: PyTree, states: Array | None
    ) -> tuple[Array, Array | None]:
        """Return the next token of each row, i32[B, 1], and the logits f32[B, 1, V] that it was drawn from."""
        logits = steering.logits(raw_logits, states)
        is_end = growth.ends(steering.confidence_logits(raw_logits, logits), carry, controls)
        if steering.sample:
            q_logits = process(logits, controls)
            # The keys differ between steps, but not between levels. Fold in the depth, so that levels are drawn
            # independently.
            level_keys = _level_keys(keys, depth)
            # A chain has one node per level, so the node index is always 0.
            node_index = jnp.zeros((batch, 1), jnp.int32)
            return jnp.where(is_end, NO_TOKEN, sample_processed(level_keys, node_index, q_logits)), q_logits
        return jnp.where(is_end, NO_TOKEN, steering.best(logits, states)), None

    root_states = steering.first
    first_tokens, first_logits = draft_next(1, growth.logits, growth.carry, root_states)

    # All levels have the same shapes, so a scan compiles `extend` only once for a chain of any length.
    def body(level: _ChainLevel, depth: Array) -> tuple[_ChainLevel, tuple[Array, Array | None]]:
        # The node at depth d has slot and position `first + d - 1`; its parent is the only node of the previous level.
        slot = growth.first + depth - 1
        nodes = Level(level.tokens, jnp.zeros((batch, 1), jnp.int32), Visible.causal(slot, 1))
        with jax.named_scope("level"):
            logits, carry = growth.extend(level.carry, nodes)
        next_tokens, q = draft_next(depth + 1, logits, carry, level.states)
        # Once a row has stopped drafting, all of its later tokens are NO_TOKEN.
        next_tokens = jnp.where(level.tokens == NO_TOKEN, NO_TOKEN, next_tokens)
        next_level = _ChainLevel(next_tokens, steering.moved(level.states, next_tokens), carry)
        return next_level, jax.tree.map(lambda x: x[:, 0], (next_tokens, q))

    # Extend depths 1 .. D - 1. The leaf at depth D is drafted but not fed to the drafter.
    depths = jnp.arange(1, shape.depth, dtype=jnp.int32)
    first_level = _ChainLevel(first_tokens, steering.moved(root_states, first_tokens), growth.carry)
    last_level, (later_tokens, later_logits) = lax.scan(body, first_level, depths)
    draft_logits = None
    if first_logits is not None and later_logits is not None:
        # f32[B, N, V]: row i contains the logits that node i + 1 was drawn from. Row 0 is the root's, and the outputs
        # of the scan, [D - 1, B, V], are the next D - 1 rows. The leaf has no children, so the last row is never read.
        draft_logits = jnp.concatenate(
            [first_logits, jnp.moveaxis(later_logits, 0, 1), jnp.zeros_like(first_logits)], axis=1
        )
    tree = chain(jnp.concatenate([root, first_tokens, later_tokens.T], axis=1), draft_logits)
    return tree, jnp.maximum(tree.depths, 0), last_level.carry


@jax.named_scope("mask")
def _visible(
    growth: Growth, seen: Array, depth: Array | int, row: Array | int, depths: np.ndarray
) -> Visible:
    """Return the `Visible` of W nodes at one depth, which are stored in consecutive cache rows from `row` on.

    Args:
      seen: bool[B, W, R]; the rows that each node attends to.
      depths: i32[R]; depths of the rows.
    """
    # Row r is in slot `first + r`. All rows of depth d have the position `first + d - 1`.
    row_positions = growth.first[:, None] + jnp.asarray(depths, jnp.int32)[None] - 1
    positions = jnp.broadcast_to(growth.first[:, None] + depth - 1, seen.shape[:2])
    return Visible(
        first=growth.first,
        positions=positions,
        slot=growth.first + row,
        seen=seen,
        seen_positions=row_positions,
    )


@jax.named_scope("mask")
def _seen(parent_rows: Array, parents: Array, first: Array | int) -> Array:
    """Return the mask bool[B, W, R] of W new rows: each row attends to itself and to the rows its parent attends to."""
    row_numbers = jnp.arange(parent_rows.shape[2], dtype=jnp.int32)
    # bool[W, R]; new node i is stored in row `first + i`.
    is_self = row_numbers[None] == first + jnp.arange(parents.shape[1], dtype=jnp.int32)[:, None]
    return pick(parent_rows, parents) | is_self[None]


def _static(shape: Static, steering: Steering, root: Array, keys: Array, controls: Controls) -> Grown:
    parents, depths = static_topology(shape.branching)
    growth, batch, n = steering.growth, root.shape[0], shape.num_nodes
    drawn_logits = []  # f32[B, W, V] for each level

    def children(raw_logits: Array, depth: int, alive: Array, carry: PyTree, states: Array | None) -> Array:
        """Return i32[B, W * width], the children of the nodes at `depth`; NO_TOKEN below nodes that are not `alive`."""
        width = shape.branching[depth]
        logits = steering.logits(raw_logits, states)
        alive = alive & ~growth.ends(steering.confidence_logits(raw_logits, logits), carry, controls)
        if steering.sample:
            siblings = draw_siblings(logits, width, _level_keys(keys, depth), controls)
            drawn_logits.append(siblings.logits)
            ids = siblings.ids
        else:
            best_ids = top_k_logits(logits, width).ids if width > 1 else argmax(logits)[..., None]
            ids = steering.tokens(best_ids, states)
        return jnp.where(alive[..., None], ids, NO_TOKEN).reshape(batch, -1)

    states = steering.first
    # The root is already in the cache, so level 1 is drafted from `growth.logits`, and node r + 1 is written to row r.
    # There are R = N - 1 rows.
    tokens = [root, children(growth.logits, 0, jnp.ones((batch, 1), bool), growth.carry, states)]
    visible_rows, carry, row = jnp.zeros((batch, 1, n - 1), bool), growth.carry, 0
    next_parents, width = np.zeros(shape.branching[0], np.int32), shape.branching[0]
    for depth in range(1, shape.depth):
        level_parents = jnp.broadcast_to(jnp.asarray(next_parents), (batch, width))
        visible_rows = _seen(visible_rows, level_parents, row)
        level = Level(tokens[-1], level_parents, _visible(growth, visible_rows, depth, row, depths[1:]))
        with jax.named_scope("level"):
            logits, carry = growth.extend(carry, level)
        states = steering.moved(states, tokens[-1])
        tokens.append(children(logits, depth, tokens[-1] != NO_TOKEN, carry, states))
        # The children of one parent are adjacent, so repeat each parent's index once per child.
        next_parents, row = np.repeat(np.arange(width, dtype=np.int32), shape.branching[depth]), row + width
        width = len(next_parents)
    tree = DraftTree(
        tokens=jnp.concatenate(tokens, axis=1),
        parents=jnp.broadcast_to(jnp.asarray(parents), (batch, n)),
        depths=jnp.broadcast_to(jnp.asarray(depths), (batch, n)),
        draft_logits=with_leaves(drawn_logits, n) if steering.sample else None,
        max_depth=shape.depth,
        is_chain=False,
    )
    return tree, jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32), (batch, n)), carry


def _level_keys(keys: Array, depth: Array | int) -> Array:
    """Return the random keys, key[B], of one level of the tree."""
    return jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, depth)


class _Children(NamedTuple):
    """The k candidate children of each of W nodes; each field is [B, W * k]."""

    tokens: Array  # i32
    # f32; at most the parent's rank. In a greedy draft it is the log-probability of the path to the candidate. In a
    # sampled draft, the j-th drawn child adds the log-probability of the j-th most probable token, not its own, to its
    # parent's path.
    rank: Array
    path: Array  # f32; log-probability of the path, from which the ranks of its children are computed


class _TreeLevel(NamedTuple):
    """Scan carry of `_dynamic`: the k nodes of one level."""

    carry: PyTree  # as in `Growth`
    nodes: _Children  # [B, k]
    states: Array | None  # i32[B, k]; state of the constraint's automaton after each node
    ids: Array  # i32[B, k]; candidate numbers of the nodes
    parents: Array  # i32[B, k]; indices of their parents in the previous level
    seen: Array  # bool[B, k, R]; rows that the parents attend to


class _Extended(NamedTuple):
    """The nodes of one extended level, and the new candidates that are their children."""

    tokens: Array  # i32[B, k * k]
    rank: Array  # f32[B, k * k]
    parents: Array  # i32[B, k * k]; candidate numbers
    extended: Array  # i32[B, k]; candidate numbers of the level's nodes
    logits: Array | None  # f32[B, k, V]; logits of the nodes if the draft is sampled


def _dynamic(shape: Dynamic, steering: Steering, root: Array, keys: Array, controls: Controls) -> Grown:
    """Grow a tree whose shape follows the drafter's confidence.

    In a sampled tree, whether a candidate is kept must not depend on its token; otherwise, the kept tokens would not be
    samples from q. Therefore, a candidate's rank does not depend on its own token. The ranks of its descendants and
    later siblings do depend on that token, but they are never higher than its own.
    """
    growth, k, batch = steering.growth, shape.top_k, root.shape[0]

    def children(
        raw_logits: Array, rank: Array, path: Array, depth: Array | int, carry: PyTree, states: Array | None
    ) -> tuple[_Children, Array | None]:
        """Return the children of W nodes with this rank and path, f32[B, W], and the logits they were drawn from."""
        logits = steering.logits(raw_logits, states)
        is_end = growth.ends(steering.confidence_logits(raw_logits, logits), carry, controls)
        path = jnp.where(is_end, -jnp.inf, path)[..., None]

        def flat(values: Array) -> Array:
            return values.reshape(batch, -1)

        if steering.sample:
            siblings = draw_siblings(logits, k, _level_keys(keys, depth), controls)
            # Rank the j-th child by the j-th largest probability of q, whatever token was drawn, but no higher than its
            # parent.
            ranks = jnp.minimum(path + siblings.likeliest, rank[..., None])
            return _Children(flat(siblings.ids), flat(ranks), flat(path + siblings.log_q)), siblings.logits
        best_tokens = top_k_logits(logits, k)
        # Rounding can make a log-probability positive. Clip it, so that no child is likelier than its parent.
        log_q = steering.only_allowed(
            jnp.minimum(best_tokens.values - best_tokens.logsumexp[..., None], 0.0), best_tokens, states
        )
        path_log_q = flat(path + log_q)
        return _Children(flat(steering.tokens(best_tokens.ids, states)), path_log_q, path_log_q), None

    # Candidates are numbered by level: those of level 1 are 0 to k - 1, and each later level has the next k * k
    # numbers.
    root_scores = jnp.zeros((batch, 1), jnp.float32)
    level_1, root_q = children(growth.logits, root_scores, root_scores, 0, growth.carry, steering.first)
    # i32[B, k] for the k nodes of a level: their parents' indices in the previous level, and their candidate numbers.
    no_parents = jnp.zeros((batch, k), jnp.int32)
    ids = jnp.broadcast_to(jnp.arange(k, dtype=jnp.int32), (batch, k))
    visible_rows = jnp.zeros((batch, k, max(shape.rows, 1)), bool)
    # Each extended level writes k rows, so row r has depth 1 + r // k. A tree of depth 1 extends no level, but its
    # arrays have one unused row because they must not be empty.
    row_depths = 1 + np.arange(max(shape.rows, 1)) // k

    # All levels have the same shapes, so a scan compiles `extend` only once.
    def body(level: _TreeLevel, depth: Array) -> tuple[_TreeLevel, _Extended]:
        row = (depth - 1) * k
        seen_rows = _seen(level.seen, level.parents, row)
        nodes = Level(level.nodes.tokens, level.parents, _visible(growth, seen_rows, depth, row, row_depths))
        with jax.named_scope("level"):
            logits, carry = growth.extend(level.carry, nodes)
        new_children, new_q = children(logits, level.nodes.rank, level.nodes.path, depth, carry, level.states)
        # i32[B, k * k]: new candidates i * k .. i * k + k - 1 are children of node i of the level.
        parent_ids = jnp.repeat(level.ids, k, axis=1)
        best_ranks, best = lax.top_k(new_children.rank, k)
        best_children = _Children(pick(new_children.tokens, best), best_ranks, pick(new_children.path, best))
        parent_states = jax.tree.map(lambda states: pick(states, best // k), level.states)
        next_level = _TreeLevel(
            carry=carry,
            nodes=best_children,
            states=steering.moved(parent_states, best_children.tokens),
            # Level 1 has k candidates and each later level k * k, so the new candidates are numbered from
            # k + (depth - 1) * k * k = k + row * k.
            ids=k + row * k + best,
            parents=best // k,
            seen=seen_rows,
        )
        return next_level, _Extended(new_children.tokens, new_children.rank, parent_ids, level.ids, new_q)

    first_level = _TreeLevel(
        growth.carry, level_1, steering.moved(steering.first, level_1.tokens), ids, no_parents, visible_rows
    )
    depths = jnp.arange(1, shape.depth, dtype=jnp.int32)
    last_level, levels = lax.scan(body, first_level, depths)

    # The scan stacks its outputs over depths. Reshape [D - 1, B, k * k] to [B, (D - 1) * k * k] and append it to the k
    # candidates of level 1.
    def joined(first_values: Array, later_values: Array) -> Array:
        return jnp.concatenate([first_values, jnp.moveaxis(later_values, 0, 1).reshape(batch, -1)], axis=1)

    all_tokens, all_ranks = joined(level_1.tokens, levels.tokens), joined(level_1.rank, levels.rank)
    # Candidate numbers of the parents; -1 is the root.
    all_parents = joined(no_parents - 1, levels.parents)
    # Candidate numbers of the extended nodes, in the order of their rows.
    extended_ids = jnp.moveaxis(levels.extended, 0, 1).reshape(batch, -1)
    all_depths = np.concatenate([np.ones(k), np.repeat(np.arange(2, shape.depth + 1), k * k)]).astype(
        np.int32
    )

    tree, kept_ids = keep(shape, root, Candidates(all_tokens, all_ranks, all_parents, all_depths))
    row_ids = jnp.broadcast_to(1 + jnp.arange(extended_ids.shape[1], dtype=jnp.int32), extended_ids.shape)
    # Inverse of `extended_ids`: 1 + the row of each candidate, and 0 for candidates that were not extended.
    candidate_rows = scatter_integers(shape.candidates, extended_ids, row_ids)
    node_rows = jnp.concatenate([jnp.zeros((batch, 1), jnp.int32), pick(candidate_rows, kept_ids)], axis=1)
    if root_q is not None and levels.logits is not None:
        # f32[B, 1 + R, V]: the logits that the children of the root and of each extended node were drawn from. Row 0 is
        # the root's. Nodes that were not extended have no children, so their logits are never read.
        later_q = jnp.moveaxis(levels.logits, 0, 1)
        all_q = jnp.concatenate([root_q, later_q.reshape(batch, -1, later_q.shape[-1])], axis=1)
        tree = dataclasses.replace(tree, draft_logits=pick(all_q, node_rows))
    return tree, node_rows, last_level.carry


class Candidates(NamedTuple):
    """C candidate nodes from which a tree is selected. Parents precede their children and rank at least as high."""

    tokens: Array  # i32[B, C]
    ranks: Array  # f32[B, C]; at most the parent's; -inf: padding
    parents: Array  # i32[B, C]; candidate numbers; -1 is the root
    depths: np.ndarray  # i32[C]


def keep(shape: Dynamic, root: Array, candidates: Candidates) -> tuple[DraftTree, Array]:
    """Build a tree from the root i32[B, 1] and the N - 1 highest-ranked candidates.

    Return the tree and the numbers of the kept candidates, i32[B, N - 1].
    """
    batch, n = root.shape[0], shape.num_nodes
    # A child never ranks higher than its parent, and top_k breaks ties in favour of the lower number, which is the
    # parent's. So the selected candidates form a tree, and if they are sorted by number, parents precede their
    # children.
    kept_ids = jnp.sort(lax.top_k(candidates.ranks, n - 1)[1], axis=1)
    node_numbers = jnp.broadcast_to(jnp.arange(1, n, dtype=jnp.int32), (batch, n - 1))
    # i32[B, C]: the tree node of each candidate. Dropped candidates map to 0, which does not matter, because no kept
    # candidate has a dropped parent.
    candidate_nodes = scatter_integers(len(candidates.depths), kept_ids, node_numbers)
    parents = pick(candidates.parents, kept_ids)
    parents = jnp.where(parents < 0, 0, pick(candidate_nodes, jnp.maximum(parents, 0)))
    alive = pick(candidates.ranks, kept_ids) > -jnp.inf
    root_zeros = jnp.zeros((batch, 1), jnp.int32)
    tree = DraftTree(
        tokens=jnp.concatenate([root, jnp.where(alive, pick(candidates.tokens, kept_ids), NO_TOKEN)], axis=1),
        parents=jnp.concatenate([root_zeros - 1, jnp.where(alive, parents, 0)], axis=1),
        depths=jnp.concatenate([root_zeros, jnp.asarray(candidates.depths)[kept_ids]], axis=1),
        max_depth=shape.depth,
        is_chain=False,
    )
    return tree, kept_ids
