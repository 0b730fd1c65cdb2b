"""Sampling of sibling nodes without replacement, for sampled draft trees.

B batch, W nodes per level, k children per node, V vocabulary. Sources: Gumbel top-k, Kool et al. 1903.06059; drafts
sampled without replacement, SpecInfer 2305.09781 and EAGLE 2401.15077. Tested against an enumeration of sequential
draws in tests/verify/test_siblings.py.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from mars_jax.core.sampling import if_greedy, is_greedy, process, top_k_logits
from mars_jax.core.types import NO_TOKEN, Controls


class Drawn(NamedTuple):
    """The sampled children of W nodes, in the order in which they were drawn."""

    ids: Array  # i32[B, W, k]; padded with NO_TOKEN if the filters leave fewer than k tokens
    log_q: Array  # f32[B, W, k]; log-probability of each child under its parent's q
    likeliest: Array  # f32[B, W, k]; the k largest log-probabilities of q, regardless of the drawn tokens
    logits: Array  # f32[B, W, V]; their softmax is q


def draw_siblings(logits: Array, k: int, keys: Array, controls: Controls) -> Drawn:
    """Draw k children of each node without replacement from q = softmax(process(logits)).

    This is the Gumbel top-k trick: add Gumbel noise to log q and take the k largest tokens in descending order. Rows at
    temperature 0 get the k most probable tokens of the unfiltered logits, as in a greedy draft.

    Args:
      logits: f32[B, W, V]; raw logits of the draft, in the target's vocabulary.
      k: children per node.
      keys: key[B]; random keys for this level.
      controls: sampling controls of the requests.
    """
    # log q up to a constant per node, with -inf for filtered tokens.
    greedy_mask = is_greedy(controls)[:, None, None]
    filtered_logits = jnp.where(greedy_mask, logits, process(logits, controls))
    top_entries = top_k_logits(filtered_logits, k)
    # log q is the logit minus the logsumexp. Rounding can make it positive, so clip it.
    top_log_q = jnp.minimum(top_entries.values - top_entries.logsumexp[..., None], 0.0)

    def noisy() -> tuple[Array, Array]:
        # The default float32 Gumbel noise has so few distinct values in its upper tail that the largest values often
        # tie in a large vocabulary. mode="high" has enough distinct values.
        gumbel_noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:], mode="high"))(keys)
        winners = top_k_logits(jnp.where(greedy_mask, filtered_logits, filtered_logits + gumbel_noise), k)
        ids = jnp.where(winners.values > -jnp.inf, winners.ids, NO_TOKEN)
        # log q of the drawn tokens, without the noise.
        drawn_logits = jnp.take_along_axis(filtered_logits, winners.ids, axis=2, mode="promise_in_bounds")
        return ids, jnp.minimum(drawn_logits - top_entries.logsumexp[..., None], 0.0)

    ids, log_q = if_greedy(controls, lambda: (top_entries.ids, top_log_q), noisy)
    return Drawn(ids, log_q, top_log_q, filtered_logits)


def with_leaves(levels: list[Array], n: int) -> Array:
    """Concatenate the logits of a static tree's inner levels into `draft_logits` f32[B, N, V].

    The rows of the leaves are filled with zeros, which are never read.
    """
    inner_logits = jnp.concatenate(levels, axis=1)
    return jnp.pad(inner_logits, ((0, 0), (0, n - inner_logits.shape[1]), (0, 0)))
