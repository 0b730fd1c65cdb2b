"""Base class for lossy rules, with support for strict rows and the exact prefix.

Tests: tests/verify/test_rules.py. Dimensions: B batch, N nodes.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

from mars_jax.core import struct
from mars_jax.core.rule import ALL_EDGES, Evidence, Rule
from mars_jax.core.tree import at_parent
from mars_jax.verify.ranges import WHOLE


@struct.dataclass(kw_only=True)
class Lossy(Rule):
    """Base class for lossy rules. The first `exact_prefix` generated tokens of a row are verified strictly.

    `exact_prefix` is 0 by default, as in the papers that propose these rules. Lossy rules reduce a model's robustness
    against jailbreaks and prompt injection by more than benchmark scores suggest. If only the first token is verified
    strictly, Qwen3 regains most of its robustness, but Llama-3 only a little (Secure Speculative Decoding, arXiv
    2610.08678).
    """

    # i32[] or [B]; number of tokens at the start of the output that are verified strictly
    exact_prefix: Any = struct.setting(
        default=0,
        kind=int,
        ranges=WHOLE,
        help="tokens at the start of each answer that are verified strictly",
        flag=True,
    )

    def strict_edges(self, evidence: Evidence) -> Array:
        """Return the depth down to which edges must be exact, i32[B]. In strict rows, all edges must be exact."""
        # An edge to depth d leads to generated token number `generated` + d, so the prefix ends at depth `remaining`.
        remaining = jnp.maximum(self.exact_prefix - evidence.generated, 0)
        return jnp.where(evidence.controls.strict, ALL_EDGES, remaining)


def below_strict(evidence: Evidence) -> Array | bool:
    """Return bool[B, N], True if a span makes the edge into the node strict; return False if there are no spans."""
    if evidence.strict_nodes is None:
        return False
    return at_parent(evidence.tree, evidence.strict_nodes)
