"""Common parts of lossy rules: strict rows and the exact prefix.

B batch, N nodes. Oracle: tests/verify/test_rules.py.
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
    """Base class of lossy rules: the first `exact_prefix` generated tokens of a row follow its strict base.

    The default is 0, as in the papers. Under jailbreaks and prompt injection, lossy rules lose more robustness than
    their benchmark scores suggest. One strict token restores most of it for Qwen3, but little for Llama-3 (Secure
    Speculative Decoding, arXiv 2610.08678).
    """

    # i32[] or [B]; number of generated tokens at the start that are verified strictly
    exact_prefix: Any = struct.setting(
        default=0,
        kind=int,
        ranges=WHOLE,
        help="tokens at the start of each answer that are verified strictly",
        flag=True,
    )

    def strict_edges(self, evidence: Evidence) -> Array:
        """Return i32[B]: the depth down to which edges are strict; in strict rows, all edges are."""
        # The edge to depth d emits new token `generated` + d, so the rest of the prefix ends at this depth.
        remaining = jnp.maximum(self.exact_prefix - evidence.generated, 0)
        return jnp.where(evidence.controls.strict, ALL_EDGES, remaining)


def below_strict(evidence: Evidence) -> Array | bool:
    """Return bool[B, N]: whether a span at its parent makes the edge into a node strict; False without spans."""
    if evidence.strict_nodes is None:
        return False
    return at_parent(evidence.tree, evidence.strict_nodes)
