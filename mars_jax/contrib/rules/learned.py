"""A relaxed rule that uses a trained head instead of a margin. B batch, N nodes, E hidden size.

Tested against the same decisions, made node by node in Python, in tests/contrib/test_learned.py.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from mars_jax.contrib.models import indicator
from mars_jax.contrib.rules.head_files import read_weights
from mars_jax.core import struct
from mars_jax.utils.errors import MarsError
from mars_jax.verify import Evidence, Relaxed, register
from mars_jax.verify.ranges import HARMS, share


@register("learned", paper="after 2501.19309")
@struct.dataclass(kw_only=True)
class Learned(Relaxed):
    """Also accept the runner-up if a trained head predicts that the outcome stays the same.

    The rule is like `Mars`, with a head on the target's hidden state in place of the margin.

    A drafted token that is one of the two best is accepted if the head's probability of a changed outcome is below
    `theta`. The head's weights are `Params.verify`; `contrib.models.indicator` defines and trains the head. The guards
    are the same as those of `Mars`.

    >>> Learned(theta=0.2).name
    'learned'
    """

    # f32[] or [B]; a probability; inf is strict
    theta: Any = struct.setting(
        default=0.1,
        ranges=share("a probability, a number above 0 and at most 1, or inf, which is strict", HARMS),
        help="probability of a changed outcome below which a token is relaxed; inf never relaxes",
        flag=True,
        kw_only=False,
    )
    needs: ClassVar[tuple[str, ...]] = ("draft", "weights")

    def low(self, evidence: Evidence) -> Array:
        if not isinstance(evidence.params, dict) or "inner" not in evidence.params:
            raise MarsError(
                "the rule learned needs the weights of its head: pass LoadedRule(contrib.learned(), weights), or "
                "verify.load."
            )
        stats = evidence.stats
        harm_prob = jax.nn.sigmoid(
            indicator.harm_log_odds(evidence.params, evidence.hidden, stats.top1, stats.top2)
        )
        theta = self.theta[:, None]
        return (harm_prob < theta) & (theta < jnp.inf)


read = functools.partial(read_weights, rule="learned")
"""A function that reads the weights of `learned:PATH` for a target; see `head_files.read_weights`."""
