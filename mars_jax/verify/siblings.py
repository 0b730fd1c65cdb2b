"""Rejection along a tree: siblings are tried in order, each against the residual of p.

B batch, N nodes, V vocabulary. Oracle: exact enumeration of drafts, cells of the uniforms and emitted tokens, and a
chi-square test of the whole rule, in tests/verify/test_siblings.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from mars_jax.core.pick import in_rows, pick_one
from mars_jax.core.rule import Evidence
from mars_jax.core.sampling import at_tokens, inverse_cdf, node_uniforms
from mars_jax.core.types import DraftTree
from mars_jax.verify.override import Stretch


class Residual(NamedTuple):
    """Loop carry of the descent: the current node of each row and the residuals of p and q, [B, ...] each."""

    node: Array  # i32[B]; the current node
    tried: Array  # i32[B]; the last rejected child; `node` if there is none
    rank: Array  # i32[B]; number of rejected children
    p: Array  # f32[B, V]; residual of p, normalised
    q: Array  # f32[B, V]; residual of q, normalised; all 0 for a deterministic draft


def sibling_stretch(evidence: Evidence, log_v: Array, accept_keys: Array, draw_keys: Array) -> Stretch:
    """Return the stretch that descends a tree by rejection and draws a token where it stops; see `descend`.

    Args:
      evidence: evidence of the step.
      log_v: f32[B, N, V]; processed logits of the distribution that the output must follow.
      accept_keys, draw_keys: key[B] each.
    """

    def uniform(rank: Array, depth: Array) -> Array:
        # Siblings share their position, so fold in their rank to make their draws independent.
        keys = jax.vmap(jax.random.fold_in)(accept_keys, rank)
        return node_uniforms(keys, (evidence.start + depth)[:, None])[:, 0]

    def stretch(start: Array) -> tuple[Array, Array]:
        stop, residual = descend(evidence.tree, log_v, uniform, start)
        depth = pick_one(evidence.tree.depths, stop)
        draw_uniform = node_uniforms(draw_keys, (evidence.start + depth)[:, None])[:, 0]
        return stop, inverse_cdf(residual, draw_uniform)

    return stretch


def descend(
    tree: DraftTree, log_v: Array, uniform: Callable[[Array, Array], Array], start: Array
) -> tuple[Array, Array]:
    """Descend a tree whose siblings were drawn from q without replacement, in the order of their ids.

    At a node with distributions p and q, accept the first child x if u <= p(x) / q(x). Otherwise replace p by
    norm((p - q)+), remove x from q, normalise, and try the next child against these. If no child is accepted, draw the
    token from the residual p. (SpecInfer 2305.09781, Algorithm 2, and EAGLE 2401.15077 for siblings without
    replacement.)

    Proof that the token follows p: a child x drawn from q is accepted or rejected as in speculative sampling, which is
    correct if the step after a rejection yields a token from norm((p - q)+). Given that x was rejected, the next child
    is a sample of q without x, so the same argument applies with the residuals, by induction; after the last child, the
    token is drawn from the residual itself. Any number of children is therefore correct, provided that a child's
    presence in the tree does not depend on its token. For a deterministic draft, q is the one-hot of each child in
    turn, and the residual p excludes rejected tokens.

    Args:
      tree: the draft; the children of node i were drawn from softmax(draft_logits[:, i]), or are deterministic.
      log_v: f32[B, N, V]; processed logits of the distribution that the output must follow, p above.
      uniform: (number of previously rejected siblings i32[B], depth of the child i32[B]) -> u f32[B].
      start: i32[B]; the node to start from.

    Returns:
      The node i32[B] where the descent stops, and the residual p there, f32[B, V].
    """
    n = tree.tokens.shape[1]
    ids = jnp.arange(n, dtype=jnp.int32)[None]

    def fresh(node: Array) -> Residual:
        """Return the loop carry of rows that have just reached a node i32[B]: no child tried, p and q unchanged."""
        p = jax.nn.softmax(pick_one(log_v, node))
        if tree.draft_logits is None:
            q = jnp.zeros_like(p)
        else:
            q = jax.nn.softmax(pick_one(tree.draft_logits, node))
        return Residual(node=node, tried=node, rank=jnp.zeros_like(node), p=p, q=q)

    def next_child(carry: Residual) -> Array:
        """Return i32[B]: the next untried child; n if there is none."""
        is_untried = (tree.parents == carry.node[:, None]) & (tree.tokens >= 0) & (ids > carry.tried[:, None])
        return jnp.min(jnp.where(is_untried, ids, n), axis=1)

    def try_child(carry: Residual) -> Residual:
        child = next_child(carry)
        # i32[B], clamped to a valid id; results of rows without a child are discarded below.
        is_child, child = child < n, jnp.minimum(child, n - 1)
        token = jnp.maximum(pick_one(tree.tokens, child), 0)
        is_x = jnp.arange(carry.p.shape[-1], dtype=jnp.int32)[None] == token[:, None]
        # A deterministic draft has drawn each child with probability 1, so its q is the one-hot of x.
        q = carry.q
        if tree.draft_logits is None:
            q = jnp.where(is_x, 1.0, 0.0)
        p_x, q_x = _at_token(carry.p, token), _at_token(q, token)
        # u < p / q without the division, as q may be 0. A token of probability 0 under both is rejected.
        is_accepted = is_child & (uniform(carry.rank, pick_one(tree.depths, child)) * q_x < p_x)
        # norm((p - q)+), against which the next sibling is tried.
        residual = jnp.maximum(carry.p - q, 0.0)
        residual_sum = jnp.sum(residual, axis=-1, keepdims=True)
        # If p equals q up to rounding, the residual may vanish; then p itself is correct up to rounding.
        p = jnp.where(residual_sum > 0, residual / jnp.where(residual_sum > 0, residual_sum, 1.0), carry.p)
        # Without replacement: the next sibling was drawn from q without x.
        q_without_x = jnp.where(is_x, 0.0, carry.q)
        q_sum = jnp.sum(q_without_x, axis=-1, keepdims=True)
        rejected = Residual(
            node=carry.node,
            tried=child,
            rank=carry.rank + 1,
            p=p,
            q=q_without_x / jnp.where(q_sum > 0, q_sum, 1.0),
        )
        return in_rows(is_child, in_rows(is_accepted, fresh(child), rejected), carry)

    # Each iteration tries one child in every row that has one: at most N - 1 iterations, fewer for short walks.
    final_carry = jax.lax.while_loop(lambda carry: jnp.any(next_child(carry) < n), try_child, fresh(start))
    return final_carry.node, final_carry.p


def _at_token(weights: Array, token: Array) -> Array:
    """Gather weights f32[B, V] at tokens i32[B]: f32[B]."""
    return at_tokens(weights[:, None], jnp.zeros_like(token)[:, None], token[:, None])[:, 0]
