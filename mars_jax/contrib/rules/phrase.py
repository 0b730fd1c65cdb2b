"""Acceptance by a phrase: what a stretch of drafted tokens costs together. B batch, N nodes. Oracle: the same sums path
by path in Python, in tests/contrib/test_phrases.py."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mars_jax.core import struct
from mars_jax.core.drafter import Drafter
from mars_jax.core.errors import MarsError
from mars_jax.core.evidence import Evidence
from mars_jax.core.sampling import at_tokens
from mars_jax.core.tree import at_parent
from mars_jax.core.types import DraftTree
from mars_jax.specs import UNLIMITED_RUN
from mars_jax.verify.lossy import numbers
from mars_jax.verify.relaxed import Relaxed


@struct.dataclass(kw_only=True)
class Phrase(Relaxed):
    """A drafted token is accepted where it and the next `window` drafted ones together cost less than `bound` nats.

    What a token costs is its regret, by how much its log-probability falls short of the target's best token there. So
    the sum is the distance of the drafted phrase from the target's own choice at each of its places; what the target
    would say after a token of its own is not known without another forward. A stretch that does not fit into the draft
    refuses the token. In a tree the cheapest path below it counts. FLy (`fly`) asks instead that what follows is the
    target's own. Over `exact()`; lossy; at bound = 0 it equals `exact()` bit for bit.
    """

    bound: Any  # f32[] or [B]; nats
    window: Any  # i32[] or [B]; tokens after the one that is relaxed

    def check_drafter(self, drafter: Drafter) -> None:
        """Raise MarsError where no stretch fits into a draft."""
        least = int(np.min(np.asarray(self.window)))
        if drafter.max_depth <= least:
            raise MarsError(
                f"window is {least}, and this draft is {drafter.max_depth} tokens deep, so that the rule phrase could "
                "relax nothing: draft deeper, or give a smaller window."
            )

    def relaxable(self, evidence: Evidence) -> Array:
        return stretch(evidence.tree, regrets(evidence), self.window) < self.bound[:, None]


def regrets(evidence: Evidence) -> Array:
    """Return f32[B, N]: nats by which the edge into a node is below the target's best; inf for padding and root."""
    tree = evidence.tree
    here = at_tokens(evidence.logits, jnp.maximum(tree.parents, 0), jnp.maximum(tree.tokens, 0))
    short = at_parent(tree, evidence.stats.top1) - here
    return jnp.where((tree.tokens >= 0) & (tree.depths > 0), short, jnp.inf)


def stretch(tree: DraftTree, costs: Array, window: Array) -> Array:
    """Return f32[B, N]: the least sum of `costs` f32[B, N] over a node and `window` i32[B] nodes in a row below it; inf
    where there are not so many.

    >>> from mars_jax.core.tree import chain
    >>> costs = jnp.asarray([[jnp.inf, 1.0, 2.0, 4.0]])
    >>> stretch(chain(jnp.zeros((1, 4), jnp.int32)), costs, jnp.asarray([1])).tolist()
    [[inf, 3.0, 6.0, inf]]
    """
    to_parents = jax.vmap(lambda sums, parents: jnp.full_like(sums, jnp.inf).at[parents].min(sums))
    parents = jnp.maximum(tree.parents, 0)
    sums = found = costs
    for length in range(1, tree.max_depth):
        sums = costs + to_parents(jnp.where(tree.depths > 0, sums, jnp.inf), parents)
        found = jnp.where((window == length)[:, None], sums, found)
    return jnp.where((window < tree.max_depth)[:, None], found, jnp.inf)


def phrase(
    *, bound: Any = 1.0, window: Any = 2, max_relaxed_run: Any = UNLIMITED_RUN, exact_prefix: Any = 0
) -> Phrase:
    """Acceptance by a phrase; see `Phrase`.

    Args:
      bound: nats, of the whole stretch.
      window: drafted tokens after the relaxed one that belong to the stretch.
      max_relaxed_run, exact_prefix: as for `mars`. Every number is one value, or one per row.

    Raises:
      MarsError: a number out of its range.

    >>> from mars_jax import verify
    >>> from mars_jax.core.tree import chain
    >>> z = jnp.asarray([[[0.0, 1.0, 0.5, 0.0], [0.0, 0.0, 0.0, 9.0], [0.0, 0.0, 0.0, 9.0]]])
    >>> given = verify.evidence(chain(jnp.asarray([[0, 2, 3]], jnp.int32)), z)
    >>> accepted = jax.jit(lambda rule: verify.for_rows(rule, 1)(given)[0].num_accepted[0])
    >>> [int(accepted(phrase(bound=b, window=1))) for b in (0.6, 0.4)]
    [2, 0]
    """
    given = {
        "bound": bound,
        "window": window,
        "max_relaxed_run": max_relaxed_run,
        "exact_prefix": exact_prefix,
    }
    return Phrase(**numbers("phrase", given))
