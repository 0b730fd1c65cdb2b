"""The lossless rule for drafts that are a deterministic function of the committed tokens.

B batch, N nodes, V vocabulary. Oracle: exact enumeration and chi-square in tests/verify/.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import Array

from mars_jax.core.sampling import sample
from mars_jax.core.tree import at_parent, walk
from mars_jax.core.types import Controls, DraftTree, Verdict
from mars_jax.verify.stops import is_stop


@dataclasses.dataclass(frozen=True)
class Exact:
    """See `exact`."""

    @property
    def name(self) -> str:
        return "exact"

    def __call__(self, keys: Array, tree: DraftTree, logits: Array, controls: Controls) -> Verdict:
        return self.relax(keys, tree, logits, controls, None)

    def relax(
        self, keys: Array, tree: DraftTree, logits: Array, controls: Controls, relaxable: Array | None
    ) -> Verdict:
        """As the call; the edge into node i is also taken where `relaxable` bool[B, N], unless y is a stop
        token."""
        y = sample(keys, logits, controls)
        wanted = at_parent(tree, y)
        if relaxable is None:
            relaxable = jnp.zeros(tree.tokens.shape, bool)
        else:
            relaxable = relaxable & ~is_stop(wanted, controls)
        path, num_accepted, relaxed = walk(tree, tree.tokens == wanted, relaxable, controls.max_relaxed_run)
        next_token = jnp.take_along_axis(y, path[:, -1:], axis=1)[:, 0]
        return Verdict(path=path, num_accepted=num_accepted, next_token=next_token, relaxed=relaxed)


def exact() -> Exact:
    """The target names one token y per node; a child is accepted where it carries y.

    y is the argmax of a greedy row and otherwise a sample of the processed distribution. Lossless for every
    draft that does not depend on the target's noise: greedy chains, top-k trees, n-grams. `next_token` is y
    of the node where the walk stops.

    >>> import jax
    >>> from mars_jax.core.controls import make_controls
    >>> from mars_jax.core.tree import chain
    >>> z = jnp.eye(4, dtype=jnp.float32)[None, 1:4]  # the target goes 1, 2, 3
    >>> keys = jax.random.split(jax.random.key(0), 1)
    >>> verdict = exact()(keys, chain(jnp.asarray([[0, 1, 3]], jnp.int32)), z, make_controls(1, limit=9))
    >>> verdict.num_accepted.tolist(), verdict.next_token.tolist()
    ([1], [2])
    """
    return Exact()
