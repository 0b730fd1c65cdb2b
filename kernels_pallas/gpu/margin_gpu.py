"""The GPU kernel: the vocabulary of each row is split over programs, and XLA merges their few numbers.

R rows, V vocabulary. Oracle: `reference`. Lowered for CUDA and interpreted on CPU in the tests; no card has run it,
and jax 0.12 deprecates the backend it is written for, so only `implementation="pallas_gpu"` leads here.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from kernels_pallas.blocks import GpuBlocks, gpu_blocks
from kernels_pallas.stats import LAST_ID, LOWEST, NO_ID, MarginStats, close, dtypes, merge


def margin_stats(
    logits: Array, *, logsumexp: bool = False, blocks: GpuBlocks | None = None, interpret=False
) -> MarginStats:
    """See `kernels_pallas.margin_stats`."""
    lead, vocab = logits.shape[:-1], logits.shape[-1]
    rows = math.prod(lead)
    blocks = gpu_blocks(blocks, rows=rows, vocab=vocab, dtype=logits.dtype)
    parts = pl.pallas_call(
        functools.partial(_kernel, vocab=vocab, blocks=blocks, logsumexp=logsumexp),
        grid=(rows, blocks.splits),
        out_shape=[
            jax.ShapeDtypeStruct((rows, blocks.splits), dtype) for dtype in dtypes(logsumexp=logsumexp)
        ],
        compiler_params=plgpu.CompilerParams(num_warps=blocks.warps, num_stages=3),
        interpret=interpret,
        name="margin_stats",
    )(logits.reshape(rows, vocab))
    return _join_splits(MarginStats(*parts), lead, vocab)


def _join_splits(stats: MarginStats, lead: tuple[int, ...], vocab: int) -> MarginStats:
    """Statistics [R, splits] of the parts of a vocabulary as statistics of the whole, of shape `lead`."""
    while stats.top1.shape[1] > 1:  # the number of splits is a power of two: halve
        half = stats.top1.shape[1] // 2
        stats = merge(
            *(jax.tree.map(lambda x, s=s: x[:, s], stats) for s in (slice(half), slice(half, None)))
        )
    stats = jax.tree.map(lambda x: x.reshape(lead), stats)
    id1, id2 = close(stats.top1, stats.id1, stats.top2, stats.id2, vocab)
    return stats._replace(id1=id1, id2=id2)


def _kernel(logits_ref, *out_refs, vocab: int, blocks: GpuBlocks, logsumexp: bool):
    row, split = pl.program_id(0), pl.program_id(1)
    # Split s takes `steps` stretches of `tokens` from `first` on; past the end of the vocabulary loads give -inf.
    steps = pl.cdiv(pl.cdiv(vocab, blocks.tokens), blocks.splits)
    offsets = lax.broadcasted_iota(jnp.int32, (blocks.tokens,), 0)
    first = split * (steps * blocks.tokens)

    def step(i, state):
        top1, id1, top2, id2, *total = state
        ids = first + i * blocks.tokens + offsets
        inside = ids < vocab
        z = plgpu.load(logits_ref.at[row, ids], mask=inside, other=-jnp.inf, eviction_policy="evict_first")
        z = z.astype(jnp.float32)
        if logsumexp:
            # One exponential an element: of the distance to the maximum so far, on whichever side z is.
            shift = jnp.maximum(top1, LOWEST)
            power = jnp.exp(-jnp.abs(z - shift))
            total = [jnp.where(z > shift, total[0] * power + 1.0, total[0] + power)]
        # Strictly greater: ids ascend from step to step, so ties stay with the smaller id.
        leads, follows = z > top1, z > top2
        top2 = jnp.where(leads, top1, jnp.where(follows, z, top2))
        id2 = jnp.where(leads, id1, jnp.where(follows, ids, id2))
        return jnp.where(leads, z, top1), jnp.where(leads, ids, id1), top2, id2, *total

    low = jnp.full((blocks.tokens,), -jnp.inf, jnp.float32)
    none = jnp.full((blocks.tokens,), LAST_ID, jnp.int32)
    state = (low, none, low, none) + (jnp.zeros((blocks.tokens,), jnp.float32),) * logsumexp
    top1, id1, top2, id2, *total = lax.fori_loop(0, steps, step, state)

    def largest(z: Array, ids: Array) -> tuple[Array, Array]:
        top = jnp.max(z)
        return top, jnp.min(jnp.where(z == top, ids, LAST_ID))

    best, best_id = largest(top1, id1)
    winner = id1 == best_id
    second, second_id = largest(jnp.where(winner, top2, top1), jnp.where(winner, id2, id1))
    # Entries of -inf were passed over; `close` names them once the splits are joined.
    absent = lambda i: jnp.where(i == LAST_ID, NO_ID, i)  # noqa: E731
    values = [best, absent(best_id), second, absent(second_id)]
    if logsumexp:
        shift = jnp.maximum(best, LOWEST)
        values.append(shift + jnp.log(jnp.sum(total[0] * jnp.exp(jnp.maximum(top1, LOWEST) - shift))))
    for ref, value in zip(out_refs, values, strict=True):
        plgpu.store(ref.at[row, split], value)
