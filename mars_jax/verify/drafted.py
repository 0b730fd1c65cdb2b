"""The target's opinion of each drafted token, at the token's parent: the numbers that rules of edges compare.

B batch, N nodes, V vocabulary. Unless said otherwise they come from raw logits, so they are at temperature 1 whatever
the row's temperature is. The entries of the root and of padding mean nothing. Oracle: the warpers of transformers, in
tests/verify/test_edges.py.
"""

from __future__ import annotations

from jax import Array

from mars_jax.core.evidence import Evidence, node_stats
from mars_jax.core.sampling import at_drafted
from mars_jax.core.tree import at_parent


def shortfall(evidence: Evidence) -> Array:
    """f32[B, N]: nats by which a drafted token is less likely than the target's best one; log p(top1) - log p(x).

    >>> import jax.numpy as jnp
    >>> from mars_jax.core.tree import chain
    >>> from mars_jax.verify import evidence
    >>> given = evidence(chain(jnp.asarray([[0, 2]], jnp.int32)), jnp.asarray([[[3.0, 1.0, 2.5], [0.0, 0.0, 0.0]]]))
    >>> shortfall(given)[:, 1].tolist()
    [0.5]
    """
    return at_parent(evidence.tree, evidence.stats.top1) - at_drafted(evidence.tree, evidence.logits)


def log_prob(evidence: Evidence) -> Array:
    """f32[B, N]: log p(x)."""
    total = node_stats(evidence.logits, logsumexp=True).logsumexp
    assert total is not None
    return at_drafted(evidence.tree, evidence.logits) - at_parent(evidence.tree, total)


def preferred(evidence: Evidence, logits: Array) -> tuple[Array, Array]:
    """Logits f32[B, N, V] at each node's parent, and bool[B, N, V]: the tokens that they put above the drafted one."""
    there = at_parent(evidence.tree, logits)
    return there, there > at_drafted(evidence.tree, logits)[..., None]
