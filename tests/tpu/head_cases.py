"""`lm_head_margin_stats` at the named shapes, as functions to compile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kernels_pallas import lm_head_margin_stats
from kernels_pallas.shapes import DRAFTS, TARGETS
from tests.tpu import aot


class Case(NamedTuple):
    target: str
    draft: str


def head_cases() -> Iterator[Case]:
    """Each target with a chain and with the widest batch of trees."""
    for target in TARGETS:
        for draft in ("chain", "wide-tree-batch"):
            yield Case(target, draft)


def name(case: Case) -> str:
    return f"lm_head_margin_stats {case.target} {case.draft} bfloat16"


def compile_head(case: Case, generation: str) -> dict[str, Any]:
    """Compile; `logits_bytes` is what the matmul alone would have written."""
    target, draft, on = TARGETS[case.target], DRAFTS[case.draft], aot.mesh(generation)
    rows = draft.batch * draft.nodes
    shapes = (
        jax.ShapeDtypeStruct((draft.batch, draft.nodes, target.hidden), jnp.bfloat16),
        jax.ShapeDtypeStruct((target.vocab, target.hidden), jnp.bfloat16),
    )

    def stats(hidden: jax.Array, weight: jax.Array) -> Any:
        return lm_head_margin_stats(hidden, weight, implementation="pallas_tpu")

    report = aot.compile_for(stats, *aot.abstract(shapes, on))
    return {"logits_bytes": rows * target.vocab * 4, **report}
