"""Rejection along a tree: siblings are tried one after the other against what is left of p.

B batch, N nodes, V vocabulary. Oracle: exact enumeration of drafts, cells of the uniforms and emitted tokens, and
chi-square through the whole rule, in tests/verify/test_siblings.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from mars_jax.core.evidence import Evidence
from mars_jax.core.pick import in_rows, pick_one
from mars_jax.core.sampling import at_tokens, inverse_cdf, node_uniforms
from mars_jax.core.types import DraftTree
from mars_jax.verify.override import Stretch


class Left(NamedTuple):
    """A row on its way down, [B, ...] each."""

    node: Array  # i32[B]; where it stands
    tried: Array  # i32[B]; the child that was refused last; `node` where none was
    rank: Array  # i32[B]; how many were
    p: Array  # f32[B, V]; what is left of p, normalised
    q: Array  # f32[B, V]; what is left of q, normalised; all 0 where the draft is deterministic


def sibling_stretch(evidence: Evidence, log_v: Array, accept_keys: Array, draw_keys: Array) -> Stretch:
    """Rejection down a tree, with a draw where it stops; see `descend`.

    Args:
      evidence: of the step.
      log_v: f32[B, N, V]; processed logits of what the output is to follow.
      accept_keys, draw_keys: key[B] each.
    """

    def uniform(rank: Array, depth: Array) -> Array:
        # Siblings share their position, so the number of those refused before tells their draws apart.
        keys = jax.vmap(jax.random.fold_in)(accept_keys, rank)
        return node_uniforms(keys, (evidence.start + depth)[:, None])[:, 0]

    def stretch(start: Array) -> tuple[Array, Array]:
        stop, left = descend(evidence.tree, log_v, uniform, start)
        depth = pick_one(evidence.tree.depths, stop)
        return stop, inverse_cdf(left, node_uniforms(draw_keys, (evidence.start + depth)[:, None])[:, 0])

    return stretch


def descend(
    tree: DraftTree, log_v: Array, uniform: Callable[[Array, Array], Array], start: Array
) -> tuple[Array, Array]:
    """Go down a tree whose siblings were drawn from q without replacement, in the order of their ids.

    At a node with p and q: the first child x is accepted where u <= p(x) / q(x). Else p becomes norm((p - q)+), q loses
    x and is normalised, and the next child is tried against these. Where no child is accepted, the token is drawn
    from what is left of p. (SpecInfer 2305.09781, Algorithm 2, and EAGLE 2401.15077 for siblings without replacement.)

    Law: a child x is drawn from q, and accepted or not as in speculative sampling, so the token is p's whatever stands
    in place of "draw from norm((p - q)+)", if its law is that. Given that x was refused, the next child is drawn from q
    without x, of which that is as true, and so on by induction; after the last child it is the draw itself. So the
    number of children does not matter, if no child's token decides whether it is kept. Where the draft is
    deterministic, q is the one-hot of each child in turn, and p loses what is refused.

    Args:
      tree: the draft; the children of node i were drawn from softmax(draft_logits[:, i]), or are what they are.
      log_v: f32[B, N, V]; processed logits of what the output is to follow, p in the text above.
      uniform: (how many siblings were refused before i32[B], depth of the child i32[B]) -> u f32[B].
      start: i32[B]; the node to start from.

    Returns:
      The node i32[B] where it stops, and what is left of p there, f32[B, V].
    """
    n = tree.tokens.shape[1]
    ids = jnp.arange(n, dtype=jnp.int32)[None]

    def fresh(node: Array) -> Left:
        p = jax.nn.softmax(pick_one(log_v, node))
        q = (
            jnp.zeros_like(p)
            if tree.draft_logits is None
            else jax.nn.softmax(pick_one(tree.draft_logits, node))
        )
        return Left(node=node, tried=node, rank=jnp.zeros_like(node), p=p, q=q)

    def next_child(at: Left) -> Array:
        """i32[B]; n where there is none."""
        open_ = (tree.parents == at.node[:, None]) & (tree.tokens >= 0) & (ids > at.tried[:, None])
        return jnp.min(jnp.where(open_, ids, n), axis=1)

    def try_child(at: Left) -> Left:
        child = next_child(at)
        # i32[B], clamped so that rows without a child gather something, which is thrown away below.
        is_child, child = child < n, jnp.minimum(child, n - 1)
        token = jnp.maximum(pick_one(tree.tokens, child), 0)
        is_x = jnp.arange(at.p.shape[-1], dtype=jnp.int32)[None] == token[:, None]
        q = jnp.where(is_x, 1.0, 0.0) if tree.draft_logits is None else at.q
        p_x, q_x = _at_token(at.p, token), _at_token(q, token)
        # u < p / q without the division, as q may be 0. A token that neither allows is refused.
        taken = is_child & (uniform(at.rank, pick_one(tree.depths, child)) * q_x < p_x)
        # norm((p - q)+), by which the next sibling is judged.
        missed = jnp.maximum(at.p - q, 0.0)
        total = jnp.sum(missed, axis=-1, keepdims=True)
        # Where p equals q up to rounding nothing may be left; then p itself is within rounding of right.
        p = jnp.where(total > 0, missed / jnp.where(total > 0, total, 1.0), at.p)
        # Without replacement: the next sibling was drawn from q without x.
        others = jnp.where(is_x, 0.0, at.q)
        rest = jnp.sum(others, axis=-1, keepdims=True)
        refused = Left(
            node=at.node,
            tried=child,
            rank=at.rank + 1,
            p=p,
            q=others / jnp.where(rest > 0, rest, 1.0),
        )
        return in_rows(is_child, in_rows(taken, fresh(child), refused), at)

    # Each turn tries one child in every row that has one: at most N - 1 turns, and fewer where walks are short.
    end = jax.lax.while_loop(lambda at: jnp.any(next_child(at) < n), try_child, fresh(start))
    return end.node, end.p


def _at_token(weights: Array, token: Array) -> Array:
    """weights f32[B, V] at tokens i32[B]: f32[B]."""
    return at_tokens(weights[:, None], jnp.zeros_like(token)[:, None], token[:, None])[:, 0]
