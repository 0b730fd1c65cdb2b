"""The common part of lossy rules: the rows and first tokens that are strict, and how factories read numbers.

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
    """The base of every lossy rule: the first `exact_prefix` generated tokens of a row are those of its strict base.

    0 by default, as in the papers. Under jailbreaks and prompt injection lossy rules lose more than their scores say.
    One strict token restores most of it for Qwen3 and little for Llama-3 (Secure Speculative Decoding, arXiv
    2610.08678).
    """

    exact_prefix: Any = np.int32(0)  # i32[] or [B]; generated tokens at the start that are strict

    def strict_edges(self, evidence: Evidence) -> Array:
        """i32[B]: edges to nodes of at most this depth are strict; all of them in strict rows."""
        # An edge at depth d emits the row's token number `generated` + d, so what is left of the prefix is a depth.
        left = jnp.maximum(self.exact_prefix - evidence.generated, 0)
        return jnp.where(evidence.controls.strict, ALL_EDGES, left)


def below_strict(evidence: Evidence) -> Array | bool:
    """bool[B, N]: the edge into a node is strict, since a span says so of the node above; False where there is none."""
    return False if evidence.strict_nodes is None else at_parent(evidence.tree, evidence.strict_nodes)


def number(value: Any, dtype: Any = np.float32) -> Any:
    """A number of a rule as a strongly typed leaf, [] or [B]; a traced or device array is cast where it is.

    >>> number(0.9).dtype, number([1, 2], np.int32).shape
    (dtype('float32'), (2,))
    """
    return value.astype(dtype) if isinstance(value, Array) else np.asarray(value, dtype)


def numbers(rule: str, given: dict[str, Any], **chosen: Any) -> dict[str, Any]:
    """Numbers of a rule of the table, checked against its row and typed.

    Args:
      rule: of `specs.RULES`.
      given: by name; one number each, or one per row.
      chosen: the structural choices that ranges depend on.

    Raises:
      MarsError: a number out of its range.

    >>> numbers("mars", {"theta": 0.5, "max_relaxed_run": [1, 2]})["max_relaxed_run"].dtype
    dtype('int32')
    """
    kinds = {name: setting.kind for name, setting in specs.rule(rule).settings.items()}
    for name, value in given.items():
        specs.check_setting(rule, name, value, **chosen)
    return {name: number(v, np.int32 if kinds[name] is int else np.float32) for name, v in given.items()}
