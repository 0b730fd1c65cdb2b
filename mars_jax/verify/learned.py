"""Relaxed verification by a learned indicator in place of a margin. B batch, N nodes, E hidden size.

Oracle: the same decisions made node by node in Python, in tests/verify/test_learned.py.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from mars_jax.core.errors import MarsError
from mars_jax.core.types import Controls, DraftTree, PyTree, Verdict
from mars_jax.models import indicator
from mars_jax.verify.exact import Exact
from mars_jax.verify.mars import node_stats, relaxable_edges
from mars_jax.verify.rejection import Rejection


@dataclasses.dataclass(frozen=True)
class Learned:
    """See `learned`."""

    base: Exact | Rejection
    # A value in Controls, as in `mars`.
    theta: float = dataclasses.field(compare=False)
    reads_hidden: ClassVar[bool] = True

    @property
    def name(self) -> str:
        return "learned" if self.base == Exact() else f"learned over {self.base.name}"

    def __call__(
        self, keys: Array, tree: DraftTree, logits: Array, controls: Controls, hidden: Array, weights: PyTree
    ) -> Verdict:
        stats = node_stats(logits)
        harm = jax.nn.sigmoid(indicator.logit(weights, hidden, stats.top1, stats.top2))
        theta = controls.theta[:, None]
        low = (harm < theta) & (theta < jnp.inf)
        return self.base.relax(keys, tree, logits, controls, relaxable_edges(tree, stats, low, controls))


def learned(base: Exact | Rejection | None = None, *, theta: float = 0.1) -> Learned:
    """As `mars`, with a head on the target's features in place of its margin: an edge to one of the two best tokens is
    relaxed where the head gives the outcome of the text less than `theta` of a chance to change.

    The head's weights are `Params.verify`; see `models.indicator`, and `training.indicator` for how it learns. The
    guards are those of `mars`.

    Args:
      base: the strict rule, `exact()` by default, or `rejection(...)`.
      theta: default of `Controls.theta`: a probability, or inf, which is strict.

    Raises:
      MarsError: theta out of its range.

    >>> learned(theta=0.2).name
    'learned'
    """
    if not (0 < theta <= 1 or theta == float("inf")):
        raise MarsError(
            f"theta is {theta} for a learned indicator: expected above 0 and at most 1, or inf, which is strict."
        )
    return Learned(base=Exact() if base is None else base, theta=float(theta))
