"""Rejection sampling in a tree: siblings are tried in order, each against the residual of p left by earlier siblings.

Tested against an exact enumeration of drafts, random-number intervals and emitted tokens, and with a chi-square test of
the whole rule (tests/verify/test_siblings.py).

Dimensions: B batch, N nodes, V vocabulary.
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
    """Loop carry of the descent: the current node of each row, and the residuals of p and q."""

    node: Array  # i32[B]; current node
    tried: Array  # i32[B]; the child rejected last, or `node` if no child has been rejected
    rank: Array  # i32[B]; number of rejected children
    p: Array  # f32[B, V]; residual of p, normalised
    q: Array  # f32[B, V]; residual of q, normalised; 0 everywhere for a deterministic draft


def sibling_stretch(evidence: Evidence, log_v: Array, accept_keys: Array, draw_keys: Array) -> Stretch:
    """Return a function that descends a tree by rejection sampling, and samples a token at the node where it stops.

    Args:
      evidence: evidence of the step.
      log_v: f32[B, N, V]; processed logits of the distribution that the output must follow.
      accept_keys: key[B]; random keys for accepting children.
      draw_keys: key[B]; random keys for sampling the next token.
    """

    def uniform(rank: Array, depth: Array) -> Array:
        # Siblings have the same position, so fold in their rank to make their random numbers independent.
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
    """Descend a tree by rejection sampling, for siblings that were drawn from q without replacement.

    Siblings are tried in the order of their ids. At a node with distributions p and q, accept the first child x if u <
    p(x) / q(x), for a random number u. Otherwise, replace p with norm((p - q)+), set q(x) to 0, normalise q, and try
    the next child against these residuals. If no child is accepted, the next token must be drawn from the residual of
    p. See SpecInfer (arXiv 2305.09781, Algorithm 2), and EAGLE (arXiv 2401.15077) for siblings without replacement.

    Proof that the emitted token follows p: a child x, drawn from q, is accepted or rejected as in speculative sampling.
    This is correct if the token after a rejection follows norm((p - q)+). Given that x was rejected, the next child is
    a sample of q without x, so the same argument applies to the residuals, by induction. After the last child, the
    token is drawn from the residual itself. The proof holds for any number of children, provided that the presence of a
    child in the tree does not depend on its token. For a deterministic draft, q is the one-hot distribution of each
    child in turn, and the residual of p excludes the rejected tokens.

    Args:
      tree: the draft. The children of node i were drawn from softmax(draft_logits[:, i]), or are deterministic.
      log_v: f32[B, N, V]; processed logits of p, the distribution that the output must follow.
      uniform: function that returns the random numbers u f32[B], given the number of siblings already rejected and the
        depth of the child, i32[B] each.
      start: i32[B]; node where the descent starts.

    Returns:
      The node i32[B] where the descent stops, and the residual f32[B, V] of p at this node.
    """
    n = tree.tokens.shape[1]
    ids = jnp.arange(n, dtype=jnp.int32)[None]

    def fresh(node: Array) -> Residual:
        """Return the loop carry for rows that have just reached `node` i32[B] and have not tried any child."""
        p = jax.nn.softmax(pick_one(log_v, node))
        if tree.draft_logits is None:
            q = jnp.zeros_like(p)
        else:
            q = jax.nn.softmax(pick_one(tree.draft_logits, node))
        return Residual(node=node, tried=node, rank=jnp.zeros_like(node), p=p, q=q)

    def next_child(carry: Residual) -> Array:
        """Return the next child to try, i32[B], or n if all children have been tried."""
        is_untried = (tree.parents == carry.node[:, None]) & (tree.tokens >= 0) & (ids > carry.tried[:, None])
        return jnp.min(jnp.where(is_untried, ids, n), axis=1)

    def try_child(carry: Residual) -> Residual:
        child = next_child(carry)
        # Clamp the id to a valid one. The results of rows without a child are discarded below.
        is_child, child = child < n, jnp.minimum(child, n - 1)
        token = jnp.maximum(pick_one(tree.tokens, child), 0)
        is_x = jnp.arange(carry.p.shape[-1], dtype=jnp.int32)[None] == token[:, None]
        # In a deterministic draft, each child was chosen with probability 1, so q is the one-hot distribution of its
        # token x.
        q = carry.q
        if tree.draft_logits is None:
            q = jnp.where(is_x, 1.0, 0.0)
        p_x, q_x = _at_token(carry.p, token), _at_token(q, token)
        # Test u < p / q without a division, because q may be 0. A token with probability 0 under both is rejected.
        is_accepted = is_child & (uniform(carry.rank, pick_one(tree.depths, child)) * q_x < p_x)
        # The next sibling is tried against norm((p - q)+).
        residual = jnp.maximum(carry.p - q, 0.0)
        residual_sum = jnp.sum(residual, axis=-1, keepdims=True)
        # If p equals q up to rounding, the residual may be zero everywhere, and using p is correct up to rounding.
        p = jnp.where(residual_sum > 0, residual / jnp.where(residual_sum > 0, residual_sum, 1.0), carry.p)
        # Siblings are drawn without replacement, so the next one was drawn from q without x.
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

    # Each iteration tries one child in every row that has an untried one, so there are at most N - 1 iterations.
    final_carry = jax.lax.while_loop(lambda carry: jnp.any(next_child(carry) < n), try_child, fresh(start))
    return final_carry.node, final_carry.p


def _at_token(weights: Array, token: Array) -> Array:
    """Return the weight of one token per row, f32[B], given the weights f32[B, V] and the token ids i32[B]."""
    return at_tokens(weights[:, None], jnp.zeros_like(token)[:, None], token[:, None])[:, 0]
