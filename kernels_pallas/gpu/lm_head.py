"""The GPU kernel of `lm_head_margin_stats`: each program multiplies its rows by its part of the vocabulary.

R rows, E hidden size, V vocabulary. Oracle: `reference`. Lowered for CUDA and interpreted on CPU in the
tests.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from kernels_pallas.blocks import GpuHeadBlocks, gpu_head_blocks
from kernels_pallas.gpu.margin import join_splits
from kernels_pallas.stats import LAST_ID, LOWEST, NO_ID, MarginStats, merge


def lm_head_margin_stats(
    hidden: Array,
    weight: Array,
    *,
    logsumexp: bool = False,
    blocks: GpuHeadBlocks | None = None,
    interpret=False,
) -> MarginStats:
    """See `kernels_pallas.lm_head_margin_stats`."""
    lead, (vocab, width) = hidden.shape[:-1], weight.shape
    rows = math.prod(lead)
    blocks = gpu_head_blocks(blocks, rows=rows, vocab=vocab, width=width, dtype=hidden.dtype)
    # Programs write whole blocks of rows; what lies behind the last row is cut off.
    padded = pl.cdiv(rows, blocks.rows) * blocks.rows
    dtypes = [jnp.float32, jnp.int32, jnp.float32, jnp.int32] + [jnp.float32] * logsumexp
    parts = pl.pallas_call(
        functools.partial(_kernel, rows=rows, vocab=vocab, width=width, blocks=blocks, logsumexp=logsumexp),
        grid=(padded // blocks.rows, blocks.splits),
        out_shape=[jax.ShapeDtypeStruct((padded, blocks.splits), dtype) for dtype in dtypes],
        compiler_params=plgpu.CompilerParams(num_warps=blocks.warps, num_stages=3),
        interpret=interpret,
        name="lm_head_margin_stats",
    )(hidden.reshape(rows, width), weight)
    return join_splits(MarginStats(*(x[:rows] for x in parts)), lead, vocab)


def _kernel(
    hidden_ref,  # [R, E]
    weight_ref,  # [V, E]
    *out_refs,
    rows: int,
    vocab: int,
    width: int,
    blocks: GpuHeadBlocks,
    logsumexp: bool,
):
    split = pl.program_id(1)
    steps = pl.cdiv(pl.cdiv(vocab, blocks.tokens), blocks.splits)
    row = pl.program_id(0) * blocks.rows + lax.broadcasted_iota(jnp.int32, (blocks.rows,), 0)
    token = lax.broadcasted_iota(jnp.int32, (blocks.tokens,), 0)
    column = lax.broadcasted_iota(jnp.int32, (blocks.depth,), 0)

    def logits(first: Array) -> Array:
        ids = first + token

        def multiply(k, total):
            at = k * blocks.depth + column
            inside = (at < width)[None, :]
            h = plgpu.load(
                hidden_ref.at[row[:, None], at[None, :]], mask=(row < rows)[:, None] & inside, other=0.0
            )
            w = plgpu.load(
                weight_ref.at[ids[:, None], at[None, :]], mask=(ids < vocab)[:, None] & inside, other=0.0
            )
            return total + plgpu.dot(h, w, trans_b=True).astype(jnp.float32)

        zero = jnp.zeros((blocks.rows, blocks.tokens), jnp.float32)
        z = lax.fori_loop(0, pl.cdiv(width, blocks.depth), multiply, zero)
        return jnp.where((ids < vocab)[None, :], z, -jnp.inf)

    def step(i, stats: MarginStats) -> MarginStats:
        first = (split * steps + i) * blocks.tokens
        z = logits(first)
        ids = jnp.broadcast_to((first + token)[None, :], z.shape)

        def largest(z: Array) -> tuple[Array, Array]:
            top = jnp.max(z, axis=1)
            found = jnp.min(jnp.where(z == top[:, None], ids, LAST_ID), axis=1)
            # Entries of -inf were passed over; `close` names them once the splits are joined.
            return top, jnp.where(top == -jnp.inf, NO_ID, found)

        top1, id1 = largest(z)
        top2, id2 = largest(jnp.where(ids == id1[:, None], -jnp.inf, z))
        total = None
        if logsumexp:
            shift = jnp.maximum(top1, LOWEST)
            total = shift + jnp.log(jnp.sum(jnp.exp(z - shift[:, None]), axis=1))
        return _merge(stats, MarginStats(top1, id1, top2, id2, total))

    low = jnp.full((blocks.rows,), -jnp.inf, jnp.float32)
    none = jnp.full((blocks.rows,), NO_ID, jnp.int32)
    stats = MarginStats(low, none, low, none, low if logsumexp else None)
    stats = lax.fori_loop(0, steps, step, stats)
    for ref, value in zip(out_refs, [x for x in stats if x is not None], strict=True):
        plgpu.store(ref.at[row, split], value)


def _merge(a: MarginStats, b: MarginStats) -> MarginStats:
    """`merge` with a logaddexp in operations that Triton has."""
    merged = merge(a._replace(logsumexp=None), b._replace(logsumexp=None))
    if a.logsumexp is None or b.logsumexp is None:
        return merged
    shift = jnp.maximum(jnp.maximum(a.logsumexp, b.logsumexp), LOWEST)
    total = jnp.exp(a.logsumexp - shift) + jnp.exp(b.logsumexp - shift)
    return merged._replace(logsumexp=shift + jnp.log(total))
