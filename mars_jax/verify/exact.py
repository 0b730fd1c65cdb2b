"""Lossless rule for drafts that are a deterministic function of the committed tokens.

Tested by exact enumeration and with chi-square tests (tests/verify/).

Dimensions: B batch, N nodes.
"""

from __future__ import annotations

from typing import ClassVar

from jax import Array

from mars_jax.core import struct
from mars_jax.core.controls import is_stop
from mars_jax.core.pick import pick_one
from mars_jax.core.rule import Evidence, Rule
from mars_jax.core.sampling import sample
from mars_jax.core.tree import Allowance, at_parent, walk
from mars_jax.core.types import Verdict
from mars_jax.verify.definition import register


@register("exact")
@struct.dataclass
class Exact(Rule):
    """Accept a drafted token if it equals the target's own token.

    The target chooses one token y at each node, and a child is accepted if its token is y. In a greedy row, y is the
    argmax; otherwise it is a sample from the processed distribution. The y of the node at which the walk stops becomes
    `next_token`.

    The rule is lossless for every draft that does not depend on the target's random numbers, such as a greedy chain, a
    top-k tree or an n-gram draft. These random numbers depend only on the row's key and the position, so a given seed
    produces the same tokens with any such draft, and without a draft.

    >>> import jax.numpy as jnp
    >>> from mars_jax import verify
    >>> from mars_jax.core.tree import chain
    >>> z = jnp.eye(4, dtype=jnp.float32)[None, 1:4]  # the target generates 1, 2, 3
    >>> inputs = verify.evidence(chain(jnp.asarray([[0, 1, 3]], jnp.int32)), z)
    >>> verdict, _ = Exact()(inputs)
    >>> verdict.num_accepted.tolist(), verdict.next_token.tolist()
    ([1], [2])
    """

    lossless: ClassVar[bool] = True

    def __call__(self, evidence: Evidence) -> tuple[Verdict, Exact]:
        return self.relax(evidence, None), self

    def relax(self, evidence: Evidence, allowed: Allowance | None) -> Verdict:
        """Verify as `__call__` does, but also accept the edges in `allowed`, unless the target chose a stop token."""
        tree, controls = evidence.tree, evidence.controls
        y = target_tokens(evidence)
        target_token = at_parent(tree, y)  # i32[B, N]; y at each node's parent; the token of exact nodes
        if allowed is not None:
            # If the edge is not relaxed, the row emits y. If y is a stop token, it must be emitted, so do not relax the
            # edge.
            allowed = allowed._replace(edges=allowed.edges & ~is_stop(target_token, controls.stop_tokens))
        path, num_accepted, relaxed = walk(tree, tree.tokens == target_token, allowed)
        # The last entry of the path is the node where the walk stopped. Its y corrects the rejected token, or is the
        # bonus token if all drafted tokens were accepted.
        next_token = pick_one(y, path[:, -1])
        return Verdict(path=path, num_accepted=num_accepted, next_token=next_token, relaxed=relaxed)


exact = Exact


def target_tokens(evidence: Evidence) -> Array:
    """Return the token y that the target chooses at each node, i32[B, N]."""
    # Nodes at the same depth share a random number: the one that decoding without a draft would use at that position.
    return sample(evidence.keys, evidence.positions, evidence.logits, evidence.controls)
