"""Relaxed verification by a learned indicator instead of a margin. B batch, N nodes, E hidden size.

Oracle: the same decisions made node by node in Python, in tests/contrib/test_learned.py.
"""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from mars_jax.contrib.models import indicator
from mars_jax.contrib.rules.head_files import read_weights
from mars_jax.core import struct
from mars_jax.core.errors import MarsError
from mars_jax.core.evidence import Evidence
from mars_jax.core.types import PyTree
from mars_jax.specs import UNLIMITED_RUN
from mars_jax.verify.lossy import numbers
from mars_jax.verify.relaxed import Relaxed, base_of


@struct.dataclass(kw_only=True)
class Learned(Relaxed):
    """`Mars` with a head on the target's features instead of its margin.

    An edge to one of the two best tokens is relaxed if the head's probability of a changed outcome is below `theta`.

    The head's weights are `Params.verify`; see `contrib.models.indicator`, and `contrib.rules.indicator_training` for
    its training. The guards are those of `Mars`.
    """

    theta: Any  # f32[] or [B]; a probability; inf is strict
    needs: ClassVar[tuple[str, ...]] = ("weights",)

    def low(self, evidence: Evidence) -> Array:
        if not isinstance(evidence.params, dict) or "inner" not in evidence.params:
            raise MarsError(
                "the rule learned needs the weights of its head: pass LoadedRule(contrib.learned(), weights), or "
                "verify.load."
            )
        stats = evidence.stats
        harm = jax.nn.sigmoid(indicator.logit(evidence.params, evidence.hidden, stats.top1, stats.top2))
        theta = self.theta[:, None]
        return (harm < theta) & (theta < jnp.inf)


def learned(
    theta: Any = 0.1, *, base: Any = None, max_relaxed_run: Any = UNLIMITED_RUN, exact_prefix: Any = 0
) -> Learned:
    """Make the rule `Learned`: relaxed verification by a learned head.

    Args:
      base: the strict rule, `exact()` by default, or `rejection(...)`.
      theta: a probability, a scalar or one value per row; inf is strict.
      max_relaxed_run: maximum number of consecutive relaxed tokens, a scalar or one value per row.
      exact_prefix: number of first generated tokens that are strict, a scalar or one value per row; see `Lossy`.

    Raises:
      MarsError: a number is out of range, or a base that cannot be relaxed.

    >>> learned(theta=0.2).name
    'learned'
    """
    settings = {"theta": theta, "max_relaxed_run": max_relaxed_run, "exact_prefix": exact_prefix}
    return Learned(base=base_of(base, "learned"), **numbers("learned", settings))


def read(path: str, target: Any) -> PyTree:
    """Read the weights that `learned:PATH` names; see `head_files.read_weights`."""
    return read_weights(path, target, "learned")
