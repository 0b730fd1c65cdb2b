"""Common parts of lossy rules: strict rows, the exact prefix, and validation of factory arguments.

B batch, N nodes. Oracle: tests/verify/test_rules.py.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from mars_jax import specs
from mars_jax.core import struct
from mars_jax.core.evidence import Evidence
from mars_jax.core.rule import ALL_EDGES, Rule
from mars_jax.core.tree import at_parent


@struct.dataclass(kw_only=True)
class Lossy(Rule):
    """Base class of lossy rules: the first `exact_prefix` generated tokens of a row follow its strict base.

    The default is 0, as in the papers. Under jailbreaks and prompt injection, lossy rules lose more robustness than
    their benchmark scores suggest. One strict token restores most of it for Qwen3, but little for Llama-3 (Secure
    Speculative Decoding, arXiv 2610.08678).
    """

    exact_prefix: Any = np.int32(0)  # i32[] or [B]; generated tokens at the start that are strict

    def strict_edges(self, evidence: Evidence) -> Array:
        """Return i32[B]: edges to nodes of at most this depth are strict; all edges in strict rows."""
        # An edge to depth d emits generated token number `generated` + d, so the remaining prefix length is a depth.
        remaining = jnp.maximum(self.exact_prefix - evidence.generated, 0)
        return jnp.where(evidence.controls.strict, ALL_EDGES, remaining)


def below_strict(evidence: Evidence) -> Array | bool:
    """Return bool[B, N]: a span makes the edge into this node strict at its parent; False without spans."""
    return False if evidence.strict_nodes is None else at_parent(evidence.tree, evidence.strict_nodes)


def number(value: Any, dtype: Any = np.float32) -> Any:
    """Convert a rule's parameter to a strongly typed leaf, [] or [B]; cast a traced or device array in place.

    >>> number(0.9).dtype, number([1, 2], np.int32).shape
    (dtype('float32'), (2,))
    """
    return value.astype(dtype) if isinstance(value, Array) else np.asarray(value, dtype)


def numbers(rule: str, given: dict[str, Any], **chosen: Any) -> dict[str, Any]:
    """Validate the parameters of a rule against `specs.RULES` and convert them to typed leaves.

    Args:
      rule: a name in `specs.RULES`.
      given: name -> one number, or one per row.
      chosen: the structural choices that ranges depend on.

    Raises:
      MarsError: a number is out of range.

    >>> numbers("mars", {"theta": 0.5, "max_relaxed_run": [1, 2]})["max_relaxed_run"].dtype
    dtype('int32')
    """
    kinds = {name: setting.kind for name, setting in specs.rule(rule).settings.items()}
    for name, value in given.items():
        specs.check_setting(rule, name, value, **chosen)
    return {name: number(v, np.int32 if kinds[name] is int else np.float32) for name, v in given.items()}
