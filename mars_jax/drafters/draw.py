"""Siblings drawn without replacement, for drafts whose true q the rule is to know.

B batch, W nodes of a level, k children of each, V vocabulary. Sources: Gumbel top-k, Kool et al. 1903.06059; drafts
sampled without replacement, SpecInfer 2305.09781 and EAGLE 2401.15077. Oracle: sequential draws, enumerated, in
tests/verify/test_siblings.py.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from mars_jax.core.sampling import if_greedy, is_greedy, process, top_k
from mars_jax.core.types import NO_TOKEN, Controls


class Drawn(NamedTuple):
    """The children of W nodes, in the order in which they were drawn."""

    ids: Array  # i32[B, W, k]; NO_TOKEN where the filters leave fewer than k tokens
    log_q: Array  # f32[B, W, k]; log-probability of each under its node's q
    likeliest: Array  # f32[B, W, k]; the k largest log-probabilities under q, whatever was drawn
    logits: Array  # f32[B, W, V]; softmax is q


def draw_siblings(logits: Array, k: int, keys: Array, controls: Controls) -> Drawn:
    """k children of each node: the first from q = softmax(process(logits)), each next one from what is left of q.

    Where Gumbel noise is added to log q, the k largest are such a sequence, in their order. Rows at temperature 0 get
    their k best tokens, the filters aside, as a draft that does not sample has them.

    Args:
      logits: f32[B, W, V]; raw, of the draft, in the target's vocabulary.
      k: children of a node.
      keys: key[B]; of this level.
      controls: of the requests.
    """
    greedy = is_greedy(controls)[:, None, None]
    kept = jnp.where(greedy, logits, process(logits, controls))
    best = top_k(kept, k)
    likeliest = jnp.minimum(best.values - best.logsumexp[..., None], 0.0)

    def noisy() -> tuple[Array, Array]:
        # In float32 the usual Gumbel has so few values in its tail that likely winners among many tokens tie.
        noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:], mode="high"))(keys)
        found = top_k(jnp.where(greedy, kept, kept + noise), k)
        ids = jnp.where(found.values > -jnp.inf, found.ids, NO_TOKEN)
        own = jnp.take_along_axis(kept, found.ids, axis=2, mode="promise_in_bounds")
        return ids, jnp.minimum(own - best.logsumexp[..., None], 0.0)

    ids, log_q = if_greedy(controls, lambda: (best.ids, likeliest), noisy)
    return Drawn(ids, log_q, likeliest, kept)


def with_leaves(levels: list[Array], n: int) -> Array:
    """f32[B, N, V], the `draft_logits` of a static tree, of the logits of the levels that have children; the rows of
    leaves are never read."""
    made = jnp.concatenate(levels, axis=1)
    return jnp.pad(made, ((0, 0), (0, n - made.shape[1]), (0, 0)))
