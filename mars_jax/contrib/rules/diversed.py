"""Rejection against a mixture of target and draft whose weight a trained head predicts. B batch, N nodes, V vocabulary.

Oracle: `mixture` at the weights that the head predicts, in tests/contrib/test_diversed.py.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from mars_jax.contrib.models import mixer
from mars_jax.contrib.rules.head_files import read_weights
from mars_jax.core import struct
from mars_jax.core.errors import MarsError
from mars_jax.core.evidence import Evidence
from mars_jax.core.types import PyTree
from mars_jax.verify.lossy import numbers
from mars_jax.verify.retargeted import Retargeted


@struct.dataclass(kw_only=True)
class Diversed(Retargeted):
    """DIVERSED (arXiv 2604.07622): the output follows v = w p + (1 - w) q, with w = sigmoid(head + `shift`).

    Like `Mixture`, but with one weight per position. The head's weights are `Params.verify`; see `models.mixer` for its
    inputs and `contrib.rules.diversed_training` for its training. Lossy; at shift inf the weight is 1 and it equals
    `rejection` bit for bit.
    """

    shift: Any  # f32[] or [B]; added to the log odds of the target's weight; inf is lossless

    @property
    def needs(self) -> tuple[str, ...]:
        return (*super().needs, "weights", "draft_hidden")

    def target(self, log_p: Array, log_q: Array, evidence: Evidence) -> Array:
        if not isinstance(evidence.params, dict) or "signals" not in evidence.params:
            raise MarsError(
                "the rule diversed needs the weights of its head: pass LoadedRule(contrib.diversed(), weights), or "
                "verify.load."
            )
        drafted = evidence.tree.hidden
        if "drafted" in evidence.params:
            size = evidence.params["drafted"].shape[1]
            if drafted is None or drafted.shape[-1] != size:
                problem = (
                    "the drafter gives none" if drafted is None else f"the draft's have {drafted.shape[-1]}"
                )
                raise MarsError(
                    f"the head of the rule diversed reads hidden states of size {size} from the draft, and {problem}: "
                    "draft with the model that the head was trained with, as in model:PATH."
                )
        odds = mixer.logit(evidence.params, evidence.hidden, log_p, log_q, drafted) + self.shift[:, None]
        log_w, log_draft_weight = jax.nn.log_sigmoid(odds), jax.nn.log_sigmoid(-odds)
        return jnp.logaddexp(log_w[..., None] + log_p, log_draft_weight[..., None] + log_q)


def diversed(*, shift: Any = 0.0, block: bool = False, exact_prefix: Any = 0) -> Diversed:
    """Make the rule `Diversed`: rejection against a learned mixture of target and draft.

    Args:
      shift: added to the head's log odds, a scalar or one value per row. Larger is closer to the target; inf is
        lossless.
      block: verify the block jointly, as in `rejection`.
      exact_prefix: as for `mars`.

    Raises:
      MarsError: a number is out of range.

    >>> diversed(shift=1.0).name
    'diversed'
    """
    return Diversed(block=block, **numbers("diversed", {"shift": shift, "exact_prefix": exact_prefix}))


def read(path: str, target: Any) -> PyTree:
    """Read the weights that `diversed:PATH` names; see `head_files.read_weights`."""
    return read_weights(path, target, "diversed")
