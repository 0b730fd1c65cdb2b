"""Rejection against a mixture of target and draft, weighted by a trained head. B batch, N nodes, V vocabulary.

Tested against the rule `mixture` with the weights that the head predicts, in tests/contrib/test_diversed.py.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from mars_jax.contrib.models import mixer
from mars_jax.contrib.rules.head_files import read_weights
from mars_jax.core import struct
from mars_jax.utils.errors import MarsError
from mars_jax.utils.settings import LARGEST_FLOAT
from mars_jax.verify import Evidence, Range, Retargeted, register


@register("diversed", paper="2604.07622")
@struct.dataclass(kw_only=True)
class Diversed(Retargeted):
    """Follow a mixture of target and draft, with a weight that a trained head predicts at each position.

    DIVERSED (arXiv 2604.07622): the output follows v = w p + (1 - w) q, with w = sigmoid(head output + `shift`) at each
    position. The rule `mixture` instead uses the same weight at all positions. The head's weights are `Params.verify`;
    for its inputs see `models.mixer`, and for its training `contrib.rules.diversed_training`. The rule is lossy. At
    shift inf, w is 1 and the rule equals `rejection` bit for bit.

    >>> Diversed(shift=1.0).name
    'diversed'
    """

    # f32[] or [B]; number added to the log odds of the target's weight; inf is lossless
    shift: Any = struct.setting(
        default=0.0,
        ranges=Range(
            "a finite number, or inf, which is lossless",
            -LARGEST_FLOAT,
            LARGEST_FLOAT,
            inf=True,
            grid=(4.0, 3.0, 2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0, -3.0),
        ),
        help="number added to the log odds of the target's weight; inf is lossless",
    )
    needs: ClassVar[tuple[str, ...]] = ("draft", "q", "weights", "draft_hidden")

    def target(self, log_p: Array, log_q: Array, evidence: Evidence) -> Array:
        if not isinstance(evidence.params, dict) or "signals" not in evidence.params:
            raise MarsError(
                "the rule diversed needs the weights of its head: pass LoadedRule(contrib.diversed(), weights), or "
                "verify.load."
            )
        draft_hidden = evidence.tree.hidden
        if "drafted" in evidence.params:
            expected_size = evidence.params["drafted"].shape[1]
            problem = "the drafter gives none"
            if draft_hidden is not None:
                problem = f"the draft's have {draft_hidden.shape[-1]}"
            if draft_hidden is None or draft_hidden.shape[-1] != expected_size:
                raise MarsError(
                    f"the head of the rule diversed reads hidden states of size {expected_size} from the draft, and "
                    f"{problem}: draft with the model that the head was trained with, as in model:PATH."
                )
        log_odds = mixer.weight_log_odds(evidence.params, evidence.hidden, log_p, log_q, draft_hidden)
        log_odds = log_odds + self.shift[:, None]
        log_w, log_draft_weight = jax.nn.log_sigmoid(log_odds), jax.nn.log_sigmoid(-log_odds)
        # v = w p + (1 - w) q
        return jnp.logaddexp(log_w[..., None] + log_p, log_draft_weight[..., None] + log_q)


read = functools.partial(read_weights, rule="diversed")
"""A function that reads the weights of `diversed:PATH` for a target; see `head_files.read_weights`."""
