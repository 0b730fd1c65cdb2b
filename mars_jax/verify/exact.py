"""The lossless rule for drafts that are a deterministic function of the committed tokens.

B batch, N nodes, V vocabulary. Oracle: exact enumeration and chi-square in tests/verify/.
"""

from __future__ import annotations

from typing import ClassVar

from jax import Array

from mars_jax.core import struct
from mars_jax.core.controls import is_stop
from mars_jax.core.evidence import Evidence
from mars_jax.core.pick import pick_one
from mars_jax.core.rule import Rule
from mars_jax.core.sampling import sample
from mars_jax.core.tree import Allowance, at_parent, walk
from mars_jax.core.types import Verdict


@struct.dataclass
class Exact(Rule):
    """The target names one token y per node; a child is accepted where it carries y.

    y is the argmax of a greedy row and otherwise a sample of the processed distribution. Lossless for every
    draft that does not depend on the target's noise: greedy chains, top-k trees, n-grams. `next_token` is y
    of the node where the walk stops. The noise is a function of the position, so that a seed gives the same text after
    every such draft, and without one.

    >>> import jax.numpy as jnp
    >>> from mars_jax import verify
    >>> from mars_jax.core.tree import chain
    >>> z = jnp.eye(4, dtype=jnp.float32)[None, 1:4]  # the target goes 1, 2, 3
    >>> given = verify.evidence(chain(jnp.asarray([[0, 1, 3]], jnp.int32)), z)
    >>> verdict, _ = Exact()(given)
    >>> verdict.num_accepted.tolist(), verdict.next_token.tolist()
    ([1], [2])
    """

    lossless: ClassVar[bool] = True

    def __call__(self, evidence: Evidence) -> tuple[Verdict, Exact]:
        return self.relax(evidence, None), self

    def relax(self, evidence: Evidence, allowed: Allowance | None) -> Verdict:
        """Do what the call does, and also take the edges that `allowed` names, unless y is a stop token there."""
        tree, controls = evidence.tree, evidence.controls
        y = named(evidence)
        wanted = at_parent(tree, y)  # i32[B, N]: what a node has to carry to be accepted
        if allowed is not None:
            allowed = allowed._replace(edges=allowed.edges & ~is_stop(wanted, controls.stop_tokens))
        path, num_accepted, relaxed = walk(tree, tree.tokens == wanted, allowed)
        said = pick_one(y, path[:, -1])
        return Verdict(path=path, num_accepted=num_accepted, next_token=said, relaxed=relaxed)


def named(evidence: Evidence) -> Array:
    """i32[B, N]: the token y that the target names at each node."""
    return sample(evidence.keys, evidence.positions, evidence.logits, evidence.controls)


def exact() -> Exact:
    """The strict rule for deterministic drafts; see `Exact`.

    >>> exact().name
    'exact'
    """
    return Exact()
