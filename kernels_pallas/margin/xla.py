"""Margin statistics with XLA operations: a two-level search, and reductions that XLA partitions over devices.

R rows, V vocabulary, C candidates. Oracle: `reference`.
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
"""Tokens per block. Measured on a CPU at [8, 8, 128256] and [8, 8, 4096]: 64 to 256 take equal time, 512 is 1.2-1.7x
slower at 4096."""

ROWS_BYTES = 4 * 2**20
"""Bytes of exponentials computed at a time. Measured on a CPU with 64 rows of 128256: 2 and 4 MiB take equal time, 8
MiB twice as long, and all rows at once 2 to 4 times as long, mostly in page faults."""
EXP2 = (1.535336e-4, 1.3398874e-3, 9.618437e-3, 5.5503324e-2, 2.4022648e-1, 6.931472e-1, 1.0)
"""Coefficients of 2**f, the highest power first."""


def margin_stats(logits: Array, *, logsumexp: bool = False) -> MarginStats:
    """Compute the statistics of logits [..., V] (bfloat16 or float32) over the last axis, for V >= 1.

    One vectorised pass takes the maximum of each block of `BLOCK` tokens. The largest entry is in the best
    block, the second largest in the best or in the second-best one, so only those two are searched.
    `lax.top_k` examines each entry with a scalar comparison, and `argmax` is even slower on CPU.

    With the logsumexp, a CPU processes a few rows at a time. XLA's CPU backend materialises the exponentials before it
    sums them. For a few rows they stay in the processor's cache, and so do the logits between the two passes.
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
    """Compute `_stats` of rows [R, V] with the logsumexp, `ROWS_BYTES` at a time."""
    row_count, vocab = rows.shape
    chunk_rows = min(max(ROWS_BYTES // (4 * vocab), 1), row_count)
    if chunk_rows == row_count:
        return _stats(rows, logsumexp=True)

    def step(i: Array, partial_stats: MarginStats) -> MarginStats:
        # The last chunk is full-size too, so it overlaps the one before and recomputes some rows with the same result.
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
        # The candidates would be most of the vocabulary.
        candidates, candidate_ids = logits, lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    else:
        candidates, candidate_ids = _candidates(logits, num_blocks)
    top1, id1, top2, id2 = _top_two(candidates.astype(jnp.float32), candidate_ids)
    id1, id2 = close(top1, id1, top2, id2, vocab)
    log_sum_exp = None
    if logsumexp:
        # A row of -inf has no finite maximum to subtract. Any finite number avoids NaN.
        shift = jnp.maximum(top1, LOWEST)
        # logsumexp(z) = shift + log sum exp(z - shift), with exponents of at most 0.
        exponent = logits.astype(jnp.float32) - shift[..., None]
        log_sum_exp = shift + jnp.log(jnp.sum(_exp_of_negative(exponent), axis=-1))
        # `_exp_of_negative` never gives 0, so a row of -inf needs its own result.
        log_sum_exp = jnp.where(top1 == -jnp.inf, -jnp.inf, log_sum_exp)
    return MarginStats(top1, id1, top2, id2, log_sum_exp)


def partitioned_margin_stats(logits: Array, *, logsumexp: bool = False) -> MarginStats:
    """Compute `margin_stats` with reductions over the vocabulary only.

    For a sharded vocabulary, XLA partitions each reduction into one per device and an exchange of one number per node
    and device, independent of V. For `margin_stats` above or `lax.top_k`, it would gather all logits. This form is slow
    on a CPU, where argmax is slow, and the fastest form on an H100.
    """
    z = logits.astype(jnp.float32)
    ids = lax.broadcasted_iota(jnp.int32, z.shape, z.ndim - 1)
    top1, id1 = jnp.max(z, axis=-1), jnp.argmax(z, axis=-1).astype(jnp.int32)
    # The second is the maximum without the first, which is excluded by its id because its value may occur twice.
    without_first = jnp.where(ids == id1[..., None], -jnp.inf, z)
    top2, id2 = jnp.max(without_first, axis=-1), jnp.argmax(without_first, axis=-1).astype(jnp.int32)
    id1, id2 = close(top1, id1, top2, id2, z.shape[-1])
    log_sum_exp = None
    if logsumexp:
        shift = jnp.maximum(top1, LOWEST)
        log_sum_exp = shift + jnp.log(jnp.sum(jnp.exp(z - shift[..., None]), axis=-1))
    return MarginStats(top1, id1, top2, id2, log_sum_exp)


def _candidates(logits: Array, blocks: int) -> tuple[Array, Array]:
    """Return values and ids [..., 2 * BLOCK + tail] that include the two largest entries."""
    lead = logits.shape[:-1]
    full_blocks = logits[..., : blocks * BLOCK].reshape(*lead, blocks, BLOCK)
    block_maxima = jnp.max(full_blocks, axis=-1)
    block_ids = lax.broadcasted_iota(jnp.int32, block_maxima.shape, block_maxima.ndim - 1)
    # This argmax covers only the few block maxima. Ties go to the earlier block and so to the smaller id.
    best_block = jnp.argmax(block_maxima, axis=-1, keepdims=True).astype(jnp.int32)
    second_block = jnp.argmax(
        jnp.where(block_ids == best_block, -jnp.inf, block_maxima.astype(jnp.float32)), axis=-1, keepdims=True
    )
    # i32[..., 2]: the two best blocks, gathered as [..., 2, BLOCK]. Tokens after the last full block are appended.
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
    """Return the two largest of values f32[..., C] with their ids, without argmax; ties go to the smaller id."""

    def largest(z: Array) -> tuple[Array, Array]:
        top_value = jnp.max(z, axis=-1)
        return top_value, jnp.min(jnp.where(z == top_value[..., None], ids, LAST_ID), axis=-1)

    top1, id1 = largest(values)
    # Exclude the first by its id: its value may occur twice.
    top2, id2 = largest(jnp.where(ids == id1[..., None], -jnp.inf, values))
    return top1, id1, top2, id2


def _exp_of_negative(x: Array) -> Array:
    """Compute exp(x) for x f32[...] <= 0, with a relative error of 2e-7; very negative x gives 2e-38 instead of 0.

    XLA's exponential takes 1.7x as long in a sum over the vocabulary on CPU, because it also handles overflow. Here
    2**n goes into the exponent bits, and 2**f on [-1/2, 1/2] is the polynomial of Cephes' exp2f.
    """
    x = jnp.maximum(x, -87.0) * math.log2(math.e)  # 2**-126 is the smallest normal number
    # 2**x = 2**n * 2**f, with n whole and f in [-1/2, 1/2].
    n = jnp.round(x)
    f = x - n
    # Horner's scheme for 2**f.
    power = jnp.full_like(f, EXP2[0])
    for coefficient in EXP2[1:]:
        power = power * f + coefficient
    # Adding n to the exponent, which starts at bit 23, multiplies by 2**n.
    bits = lax.bitcast_convert_type(power, jnp.int32) + (n.astype(jnp.int32) << 23)
    return lax.bitcast_convert_type(bits, jnp.float32)
