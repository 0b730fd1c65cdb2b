"""`margin_stats`: the two largest logits of each row, with their ids, in one pass over the vocabulary.

V vocabulary. Oracle: `reference.margin_stats`, and numpy in tests/kernels/.
"""

from __future__ import annotations

import functools

from jax import Array

from kernels_pallas import reference, xla
from kernels_pallas.blocks import GpuBlocks, TpuBlocks
from kernels_pallas.dispatch import dispatch
from kernels_pallas.gpu import margin as triton
from kernels_pallas.mosaic import margin as mosaic
from kernels_pallas.stats import MarginStats

__all__ = ["MarginStats", "margin_stats"]


def margin_stats(
    logits: Array,
    *,
    logsumexp: bool = False,
    implementation: str | None = None,
    blocks: TpuBlocks | GpuBlocks | None = None,
    interpret=False,
) -> MarginStats:
    """Statistics of logits [..., V] (bfloat16 or float32, V >= 1) over the last axis, in float32.

    They serve decisions, so no gradient flows through them.

    Args:
      logits: raw logits; `-inf` where a token is masked.
      logsumexp: also return it. Greedy decoding needs none, and without it none is computed.
      implementation: "pallas_tpu" (Mosaic), "pallas_gpu" (Triton), "xla", "partitioned", "reference", or
        None. None is "partitioned" where XLA spreads the program over devices by itself, else the kernel
        of the platform the program is lowered for, and "xla" where there is none. A named one is never
        replaced: on another platform it fails.
      blocks: block sizes of a named kernel, `TpuBlocks` or `GpuBlocks`.
      interpret: run a named kernel on CPU: True, or `pltpu.InterpretParams(...)` for "pallas_tpu".

    Raises:
      ValueError: unknown implementation, illegal block sizes, or options the implementation does not have.

    >>> import jax.numpy as jnp
    >>> margin_stats(jnp.asarray([[1.0, 3.0, 2.0]])).id2.tolist()
    [2]
    """
    forms = {
        "reference": reference.margin_stats,
        "xla": xla.margin_stats,
        "partitioned": xla.partitioned_margin_stats,
        "pallas_tpu": mosaic.margin_stats,
        "pallas_gpu": triton.margin_stats,
    }
    forms = {name: functools.partial(form, logsumexp=logsumexp) for name, form in forms.items()}
    return dispatch(implementation, blocks, interpret, (logits,), forms)
