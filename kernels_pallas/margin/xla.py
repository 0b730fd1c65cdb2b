"""Margin statistics with XLA operations: a two-level search, and reductions that XLA can partition over devices.

Tested against `reference`. Dimensions: R rows, V vocabulary, C candidates.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import Array, lax

from kernels_pallas.common import LAST_ID, LOWEST
from kernels_pallas.margin.rule import MarginStats, close, empty

BLOCK = 256
"""Number of tokens per block. On a CPU, blocks of 64 to 256 tokens are equally fast for logits [8, 8, 128256] and
[8, 8, 4096]. Blocks of 512 tokens are 1.2 to 1.7 times slower for [8, 8, 4096]."""

ROWS_BYTES = 4 * 2**20
"""Number of bytes of exponentials to compute at a time. On a CPU with 64 rows of 128256 tokens, 2 MiB and 4 MiB are
equally fast, 8 MiB take twice as long, and all rows at once take 2 to 4 times as long, mostly because of page
faults."""
EXP2 = (1.535336e-4, 1.3398874e-3, 9.618437e-3, 5.5503324e-2, 2.4022648e-1, 6.931472e-1, 1.0)
"""Coefficients of a polynomial for 2**f, beginning with the highest power."""


def margin_stats(logits: Array, *, logsumexp: bool = False) -> MarginStats:
    """Compute the statistics of each row of logits [..., V], bfloat16 or float32, for V >= 1.

    One vectorised pass computes the maximum of each block of `BLOCK` tokens. The largest entry is in the block with the
    largest maximum, and the second largest entry is in the same block or in the block with the second largest maximum.
    Only these two blocks are searched. On a CPU, `lax.top_k` compares one entry at a time, and `argmax` is even slower.

    On a CPU, if the logsumexp is requested, only a few rows are processed at a time, because XLA's CPU backend writes
    all exponentials to memory before it adds them up. The exponentials of a few rows stay in the processor's cache, and
    so do the logits between the two passes.
    """
    rows = logits.reshape(-1, logits.shape[-1])
    if logsumexp:
        stats = lax.platform_dependent(
            rows, cpu=_stats_by_chunks, default=functools.partial(_stats, logsumexp=True)
        )
    else:
        stats = _stats(rows, logsumexp=False)
    return jax.tree.map(lambda x: x.reshape(logits.shape[:-1]), stats)


def _stats_by_chunks(rows: Array) -> MarginStats:
    """Compute `_stats`, with the logsumexp, in chunks of rows whose exponentials take at most `ROWS_BYTES`."""
    row_count, vocab = rows.shape
    chunk_rows = min(max(ROWS_BYTES // (4 * vocab), 1), row_count)
    if chunk_rows == row_count:
        return _stats(rows, logsumexp=True)

    def step(i: Array, partial_stats: MarginStats) -> MarginStats:
        # The last chunk has the same size, so it may overlap the chunk before it and recompute some rows.
        start = jnp.minimum(i * chunk_rows, row_count - chunk_rows)
        chunk_stats = _stats(lax.dynamic_slice_in_dim(rows, start, chunk_rows), logsumexp=True)
        return jax.tree.map(
            lambda d, x: lax.dynamic_update_slice_in_dim(d, x, start, axis=0), partial_stats, chunk_stats
        )

    return lax.fori_loop(0, math.ceil(row_count / chunk_rows), step, empty((row_count,), logsumexp=True))


def _stats(logits: Array, *, logsumexp: bool) -> MarginStats:
    vocab = logits.shape[-1]
    num_blocks = vocab // BLOCK
    if num_blocks < 4:
        # Two blocks would be at least half of the vocabulary, so search all of it.
        candidates, candidate_ids = logits, lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    else:
        candidates, candidate_ids = _candidates(logits, num_blocks)
    top1, id1, top2, id2 = _top_two(candidates.astype(jnp.float32), candidate_ids)
    id1, id2 = close(top1, id1, top2, id2, vocab)
    log_sum_exp = None
    if logsumexp:
        # If all logits of a row are -inf, subtracting their maximum would give NaN, so subtract a finite number.
        shift = jnp.maximum(top1, LOWEST)
        # logsumexp(z) = shift + log sum exp(z - shift), with exponents of at most 0.
        exponent = logits.astype(jnp.float32) - shift[..., None]
        log_sum_exp = shift + jnp.log(jnp.sum(_exp_of_negative(exponent), axis=-1))
        # `_exp_of_negative` never returns 0, so set the result for rows of -inf separately.
        log_sum_exp = jnp.where(top1 == -jnp.inf, -jnp.inf, log_sum_exp)
    return MarginStats(top1, id1, top2, id2, log_sum_exp)


def partitioned_margin_stats(logits: Array, *, logsumexp: bool = False) -> MarginStats:
    """Compute `margin_stats` with reductions over the whole vocabulary, which XLA can partition.

    If the vocabulary is sharded, each device reduces its own shard, and the devices exchange one number per node for
    each reduction. With `margin_stats` above or `lax.top_k`, XLA would gather all logits instead. This implementation
    is slow on a CPU, because argmax is slow there. On an H100, it is the fastest implementation.
    """
    z = logits.astype(jnp.float32)
    ids = lax.broadcasted_iota(jnp.int32, z.shape, z.ndim - 1)
    top1, id1 = jnp.max(z, axis=-1), jnp.argmax(z, axis=-1).astype(jnp.int32)
    # To find the second largest entry, exclude the largest one by its id, because its value may occur twice.
    without_first = jnp.where(ids == id1[..., None], -jnp.inf, z)
    top2, id2 = jnp.max(without_first, axis=-1), jnp.argmax(without_first, axis=-1).astype(jnp.int32)
    id1, id2 = close(top1, id1, top2, id2, z.shape[-1])
    log_sum_exp = None
    if logsumexp:
        shift = jnp.maximum(top1, LOWEST)
        log_sum_exp = shift + jnp.log(jnp.sum(jnp.exp(z - shift[..., None]), axis=-1))
    return MarginStats(top1, id1, top2, id2, log_sum_exp)


def _candidates(logits: Array, blocks: int) -> tuple[Array, Array]:
    """Return the logits and ids [..., 2 * BLOCK + tail] of candidates, which include the two largest of each row."""
    lead = logits.shape[:-1]
    full_blocks = logits[..., : blocks * BLOCK].reshape(*lead, blocks, BLOCK)
    block_maxima = jnp.max(full_blocks, axis=-1)
    block_ids = lax.broadcasted_iota(jnp.int32, block_maxima.shape, block_maxima.ndim - 1)
    # This argmax is only over the block maxima. Among equal maxima, it chooses the first block, and so the smaller id.
    best_block = jnp.argmax(block_maxima, axis=-1, keepdims=True).astype(jnp.int32)
    second_block = jnp.argmax(
        jnp.where(block_ids == best_block, -jnp.inf, block_maxima.astype(jnp.float32)), axis=-1, keepdims=True
    )
    # Gather the logits of the two best blocks, and append those after the last full block.
    best_blocks = jnp.concatenate([best_block, second_block.astype(jnp.int32)], axis=-1)
    values = jnp.take_along_axis(full_blocks, best_blocks[..., None], axis=-2).reshape(*lead, 2 * BLOCK)
    offset = lax.broadcasted_iota(jnp.int32, (*lead, 2, BLOCK), len(lead) + 1)
    ids = (best_blocks[..., None] * BLOCK + offset).reshape(*lead, 2 * BLOCK)
    tail = logits[..., blocks * BLOCK :]
    if tail.shape[-1]:
        tail_ids = lax.broadcasted_iota(jnp.int32, tail.shape, tail.ndim - 1) + blocks * BLOCK
        values, ids = jnp.concatenate([values, tail], axis=-1), jnp.concatenate([ids, tail_ids], axis=-1)
    return values, ids


def _top_two(values: Array, ids: Array) -> tuple[Array, Array, Array, Array]:
    """Return the two largest of values f32[..., C] and their ids, without argmax.

    Among equal values, the smaller id comes first.
    """

    def largest(z: Array) -> tuple[Array, Array]:
        top_value = jnp.max(z, axis=-1)
        return top_value, jnp.min(jnp.where(z == top_value[..., None], ids, LAST_ID), axis=-1)

    top1, id1 = largest(values)
    # Exclude the largest value by its id, because the value may occur twice.
    top2, id2 = largest(jnp.where(ids == id1[..., None], -jnp.inf, values))
    return top1, id1, top2, id2


def _exp_of_negative(x: Array) -> Array:
    """Compute exp(x) for x f32[...] <= 0, with a relative error of 2e-7.

    For very negative x, the result is 2e-38 instead of 0. In a sum over the vocabulary on a CPU, XLA's exponential
    takes 1.7 times as long, because it also handles overflow. This function splits exp(x) into 2**n * 2**f. It adds n
    to the exponent bits, and computes 2**f on [-1/2, 1/2] with the polynomial of Cephes' exp2f.
    """
    x = jnp.maximum(x, -87.0) * math.log2(math.e)  # 2**-126 is the smallest normal number
    # 2**x = 2**n * 2**f, where n is an integer and f is in [-1/2, 1/2].
    n = jnp.round(x)
    f = x - n
    # Evaluate the polynomial for 2**f by Horner's method.
    power = jnp.full_like(f, EXP2[0])
    for coefficient in EXP2[1:]:
        power = power * f + coefficient
    # Adding n to the exponent, which starts at bit 23, multiplies by 2**n.
    bits = lax.bitcast_convert_type(power, jnp.int32) + (n.astype(jnp.int32) << 23)
    return lax.bitcast_convert_type(bits, jnp.float32)
