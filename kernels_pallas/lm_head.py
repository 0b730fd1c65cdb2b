"""`lm_head_margin_stats`: unembedding and statistics in one operation, whose logits are never written to
memory.

E hidden size, V vocabulary. Oracle: `reference.lm_head_margin_stats`.
"""

from __future__ import annotations

import functools
import math

import jax.numpy as jnp
from jax import Array, lax

from kernels_pallas import reference, xla
from kernels_pallas.blocks import GpuHeadBlocks, TpuHeadBlocks
from kernels_pallas.dispatch import dispatch
from kernels_pallas.gpu import lm_head as triton_lm_head
from kernels_pallas.mosaic import lm_head as mosaic_lm_head
from kernels_pallas.stats import MarginStats, empty, merge

CHUNK_BYTES = 64 * 2**20
"""Bytes of float32 logits that the XLA form holds at a time."""


def lm_head_margin_stats(
    hidden: Array,
    weight: Array,
    *,
    logsumexp: bool = False,
    implementation: str | None = None,
    blocks: TpuHeadBlocks | GpuHeadBlocks | None = None,
    interpret=False,
) -> MarginStats:
    """`margin_stats` of the float32 logits `hidden @ weight.T`, without the logits.

    Worth it where they would be large: wide trees and big batches. B * N rows of V = 128256 are 0.5 MiB each.

    Args:
      hidden: [..., E], bfloat16 or float32.
      weight: [V, E] of the same dtype, as checkpoints store the unembedding.
      logsumexp, implementation, blocks, interpret: as in `margin_stats`.

    Raises:
      ValueError: the shapes or dtypes do not fit together, or what `margin_stats` raises.

    >>> hidden, weight = jnp.asarray([[1.0, 0.0]]), jnp.asarray([[1.0, 9.0], [3.0, 9.0], [2.0, 9.0]])
    >>> lm_head_margin_stats(hidden, weight).id1.tolist()
    [1]
    """
    if weight.ndim != 2 or hidden.ndim < 1 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(f"hidden {hidden.shape} and weight {weight.shape}: expected [..., E] and [V, E].")
    if hidden.dtype != weight.dtype:
        raise ValueError(f"hidden is {hidden.dtype} and weight {weight.dtype}: expected one dtype.")
    forms = {
        "reference": reference.lm_head_margin_stats,
        "xla": _xla,
        "partitioned": _partitioned,
        "pallas_tpu": mosaic_lm_head.lm_head_margin_stats,
        "pallas_gpu": triton_lm_head.lm_head_margin_stats,
    }
    forms = {name: functools.partial(form, logsumexp=logsumexp) for name, form in forms.items()}
    return dispatch(implementation, blocks, interpret, (hidden, weight), forms)


def _logits(hidden: Array, weight: Array) -> Array:
    return jnp.einsum("...e,ve->...v", hidden, weight, preferred_element_type=jnp.float32)


def _partitioned(hidden: Array, weight: Array, *, logsumexp: bool) -> MarginStats:
    return xla.partitioned_margin_stats(_logits(hidden, weight), logsumexp=logsumexp)


def _xla(hidden: Array, weight: Array, *, logsumexp: bool) -> MarginStats:
    """Chunk by chunk of the vocabulary where the logits are large, joined by `merge`."""
    lead, vocab = hidden.shape[:-1], weight.shape[0]
    rows = math.prod(lead)
    chunk = max(CHUNK_BYTES // (4 * max(rows, 1)) // xla.BLOCK, 4) * xla.BLOCK
    if chunk >= vocab:
        return xla.margin_stats(_logits(hidden, weight), logsumexp=logsumexp)

    def part(start: Array | int, size: int) -> MarginStats:
        rows_of_weight = lax.dynamic_slice_in_dim(weight, start, size, axis=0)
        stats = xla.margin_stats(_logits(hidden, rows_of_weight), logsumexp=logsumexp)
        offset = lambda ids: jnp.where(ids < 0, ids, ids + start)  # noqa: E731
        return stats._replace(id1=offset(stats.id1), id2=offset(stats.id2))

    whole = vocab // chunk
    stats = lax.fori_loop(
        0, whole, lambda i, stats: merge(stats, part(i * chunk, chunk)), empty(lead, logsumexp=logsumexp)
    )
    rest = vocab - whole * chunk
    return merge(stats, part(whole * chunk, rest)) if rest else stats
