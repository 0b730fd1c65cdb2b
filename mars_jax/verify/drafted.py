"""Statistics of each drafted token under the target's distribution at its parent node, for rules that relax edges.

By default, the statistics are computed from raw logits, that is, at temperature 1 regardless of the row's temperature.
The entries for the root and for padding are meaningless. Tested against the logits warpers of transformers
(tests/verify/test_edges.py).

Dimensions: B batch, N nodes, V vocabulary.
"""

from __future__ import annotations

from jax import Array

from mars_jax.core.rule import Evidence, node_stats
from mars_jax.core.sampling import at_drafted
from mars_jax.core.tree import at_parent


def shortfall(evidence: Evidence) -> Array:
    """Return log p(top1) - log p(x), in nats, for each drafted token x, f32[B, N].

    >>> import jax.numpy as jnp
    >>> from mars_jax.core.tree import chain
    >>> from mars_jax.verify import evidence
    >>> inputs = evidence(chain(jnp.asarray([[0, 2]], jnp.int32)), jnp.asarray([[[3.0, 1.0, 2.5], [0.0, 0.0, 0.0]]]))
    >>> shortfall(inputs)[:, 1].tolist()
    [0.5]
    """
    # The difference equals z_1 - z_x, because the normaliser of the softmax cancels.
    return at_parent(evidence.tree, evidence.stats.top1) - at_drafted(evidence.tree, evidence.logits)


def log_prob(evidence: Evidence) -> Array:
    """Return log p(x), in nats, for each drafted token x, f32[B, N]."""
    # log p(x) = z_x - logsumexp(z), both at the parent of x's node.
    log_sum_exp = node_stats(evidence.logits, logsumexp=True).logsumexp
    assert log_sum_exp is not None
    return at_drafted(evidence.tree, evidence.logits) - at_parent(evidence.tree, log_sum_exp)


def preferred(evidence: Evidence, logits: Array) -> tuple[Array, Array]:
    """Return the logits at each node's parent, f32[B, N, V], and a mask of the preferred tokens, bool[B, N, V].

    The mask is True for tokens whose logit is larger than the logit of the drafted token.
    """
    parent_logits = at_parent(evidence.tree, logits)
    return parent_logits, parent_logits > at_drafted(evidence.tree, logits)[..., None]
