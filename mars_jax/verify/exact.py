"""The lossless rule for drafts that are a deterministic function of the committed tokens.

B batch, N nodes, V vocabulary. Oracle: exact enumeration and chi-square in tests/verify/.
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

    The target chooses one token y per node, and the child that holds y is accepted. y is the argmax in a greedy row,
    and otherwise a sample from the processed distribution. The rule is lossless for every draft that does not
    depend on the target's noise: greedy chains, top-k trees, n-grams. `next_token` is y of the node where the walk
    stops. The noise is a function of the position, so a seed produces the same tokens with every such draft, and
    without a draft.

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
        """Verify like `__call__`, but also take the edges in `allowed`, except where y is a stop token."""
        tree, controls = evidence.tree, evidence.controls
        y = target_tokens(evidence)
        target_token = at_parent(tree, y)  # i32[B, N]: y at the parent, the token that a node must hold
        if allowed is not None:
            # Without the relaxed edge the row would emit y, so a y that ends the output is never replaced.
            allowed = allowed._replace(edges=allowed.edges & ~is_stop(target_token, controls.stop_tokens))
        path, num_accepted, relaxed = walk(tree, tree.tokens == target_token, allowed)
        # The path repeats its last node, so its last entry is where the walk stopped: y there is the correction, or the
        # bonus token if every drafted token was accepted.
        next_token = pick_one(y, path[:, -1])
        return Verdict(path=path, num_accepted=num_accepted, next_token=next_token, relaxed=relaxed)


exact = Exact


def target_tokens(evidence: Evidence) -> Array:
    """Return i32[B, N]: the token y that the target chooses at each node."""
    # Nodes at the same depth share their uniform, which is the one that autoregression would use at that position.
    return sample(evidence.keys, evidence.positions, evidence.logits, evidence.controls)
