"""TPU kernels for `top_k`, which scan a block of whole rows in fast memory k times.

Entries are in order of decreasing value and, among equal values, increasing id. Each scan finds the entry that follows
the previous one in this order. Scans therefore store no intermediate state, and ties need no special case.

Tested against `reference.top_k`. Dimensions: R rows, V vocabulary, W vocabulary parts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, Ref, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.common import LANES, LAST_ID, LOWEST, SUBLANES, Interpret, bits, round_up
from kernels_pallas.top_k.shapes import block_rows

CHAINS = 4
"""Number of independent chains of comparisons in a scan. In a single chain, each vector would have to wait for the
previous one."""
STRIP = 16
"""Number of vectors of the vocabulary that one iteration of a scan's loop processes."""


def top_k(logits: Array, k: int, *, interpret: Interpret = False) -> Array:
    """Find the k largest logits of each row of [R, V]; return i32[2, R, 128], in the format of `reference.pack`."""
    num_rows, vocab = logits.shape
    rows_per_block = block_rows(num_rows, vocab, k, logits.dtype)
    in_spec = pl.BlockSpec((rows_per_block, round_up(vocab, LANES)), lambda i: (i, 0))
    kernel = functools.partial(_top_k_kernel, vocab=vocab, k=k)
    return _call(kernel, logits, in_spec, num_rows, rows_per_block, interpret, "top_k")


def join(parts: Array, k: int, size: int, *, interpret: Interpret = False) -> Array:
    """Merge the packed results i32[W, 2, R, 128] of W vocabulary parts of `size` tokens into i32[2, R, 128]."""
    num_parts, _, rows, _ = parts.shape
    rows_per_block = min(rows, SUBLANES)
    in_spec = pl.BlockSpec((num_parts, 2, rows_per_block, LANES), lambda i: (0, 0, i, 0))
    kernel = functools.partial(_join_kernel, k=k, size=size)
    return _call(kernel, parts, in_spec, rows, rows_per_block, interpret, "join_top_k")


def _call(
    kernel: Callable[..., None],
    operand: Array,
    in_spec: pl.BlockSpec,
    rows: int,
    block: int,
    interpret: Interpret,
    name: str,
) -> Array:
    """Run a kernel on blocks of `block` rows, and return its output i32[2, R, 128]."""
    return pl.pallas_call(
        kernel,
        grid=(pl.cdiv(rows, block),),
        in_specs=[in_spec],
        out_specs=pl.BlockSpec((2, block, LANES), lambda i: (0, i, 0)),
        out_shape=jax.ShapeDtypeStruct((2, rows, LANES), jnp.int32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        interpret=interpret,
        name=name,
    )(operand)


Carry = tuple[Array, ...]
Scan = Callable[[Callable[..., Carry], Carry, Callable[[Carry, Carry], Carry]], Carry]
"""A function `scan(body, start, merge)` that visits all entries of a row, 128 at a time.

It calls `carry = body(carry, z f32[rows, 128], ids i32[rows, 128], real bool[rows, 128])` in several chains, which
begin with `start` and are combined by `merge` at the end. Ids ascend within each lane of a chain."""


def _top_k_kernel(logits_ref: Ref, packed_ref: Ref, *, vocab: int, k: int) -> None:
    rows = logits_ref.shape[0]
    lane = lax.broadcasted_iota(jnp.int32, (rows, LANES), 1)
    num_vectors = pl.cdiv(vocab, LANES)
    # A few rows fill only a few registers, so use several independent chains of comparisons to hide latency.
    num_chains = max(CHAINS * SUBLANES // max(rows, SUBLANES), 1)

    def scan(body: Callable[..., Carry], start: Carry, merge: Callable[[Carry, Carry], Carry]) -> Carry:
        def chunk(first: Array | int, carry: Carry) -> Carry:
            """Update one chain with vector number `first` of each row. In calls after the loop, `first` is an int."""
            offset = first * LANES if isinstance(first, int) else pl.multiple_of(first * LANES, LANES)
            z = logits_ref[:, pl.ds(offset, LANES)].astype(jnp.float32)
            ids = lane + offset
            real = True
            if isinstance(first, int) and offset + LANES > vocab:
                # Memory past the end of the vocabulary is not initialised.
                real = ids < vocab
            return body(carry, z, ids, real)

        def strip(i: Array, chains: list[Carry]) -> list[Carry]:
            # Consecutive vectors belong to different chains.
            for c in range(STRIP):
                j = c % num_chains
                chains[j] = chunk(i * STRIP + c, chains[j])
            return chains

        # The loop processes whole strips. Process the remaining vectors separately, because the last one may need a
        # mask.
        strips = vocab // LANES // STRIP
        chains = lax.fori_loop(0, strips, strip, [start] * num_chains)
        for c in range(strips * STRIP, num_vectors):
            j = c % num_chains
            chains[j] = chunk(c, chains[j])
        return functools.reduce(merge, chains)

    def logsumexp(largest: Array) -> Array:
        # The largest entry is already known, so one more scan computes the sum of exp(z - largest) in each lane.
        shift = jnp.maximum(largest, LOWEST)

        def add(carry: Carry, z: Array, ids: Array, real: Array) -> Carry:
            return (carry[0] + jnp.where(real, jnp.exp(z - shift), 0.0),)

        zero_sum = (jnp.zeros((rows, LANES), jnp.float32),)
        (exp_sums,) = scan(add, zero_sum, lambda a, b: (a[0] + b[0],))
        return shift + jnp.log(jnp.sum(exp_sums, axis=1, keepdims=True))

    _write(packed_ref, scan, k, vocab, logsumexp)


def _join_kernel(parts_ref: Ref, packed_ref: Ref, *, k: int, size: int) -> None:
    # `parts_ref` i32[W, 2, rows, 128] contains the packed results of the parts: the entries in lanes 0 to k - 1, and
    # the logsumexp in lane k.
    num_parts, _, rows, _ = parts_ref.shape
    lane = lax.broadcasted_iota(jnp.int32, (rows, LANES), 1)

    def values(part: int) -> Array:
        return lax.bitcast_convert_type(parts_ref[part, 0], jnp.float32)

    def scan(body: Callable[..., Carry], carry: Carry, merge: Callable[[Carry, Carry], Carry]) -> Carry:
        # Use a single chain, which reads one vector per part. The parts are in the order of their ids, so ids ascend in
        # each lane.
        del merge
        for part in range(num_parts):
            carry = body(carry, values(part), parts_ref[part, 1] + part * size, lane < k)
        return carry

    def logsumexp(largest: Array) -> Array:
        # The logsumexp of the parts' logsumexps, f32[rows, 1] each, is the logsumexp of the whole vocabulary.
        del largest
        part_logsumexps = [
            jnp.max(jnp.where(lane == k, values(part), -jnp.inf), axis=1, keepdims=True)
            for part in range(num_parts)
        ]
        shift = jnp.maximum(functools.reduce(jnp.maximum, part_logsumexps), LOWEST)
        return shift + jnp.log(functools.reduce(jnp.add, [jnp.exp(x - shift) for x in part_logsumexps]))

    _write(packed_ref, scan, k, num_parts * size, logsumexp)


class _Entries(NamedTuple):
    """Entries of each row that have been found so far."""

    value: Array  # f32[rows, 128]; value of the last entry, in all lanes
    id: Array  # i32[rows, 128]; id of the last entry, in all lanes
    values: Array  # f32[rows, 128]; values of all entries, entry i in lane i
    ids: Array  # i32[rows, 128]; ids of all entries, entry i in lane i


def _write(packed_ref: Ref, scan: Scan, k: int, vocab: int, logsumexp: Callable[[Array], Array]) -> None:
    """Find the first k entries of each row with `scan`, and write them and the logsumexp in packed form."""
    _, rows, _ = packed_ref.shape
    lane = lax.broadcasted_iota(jnp.int32, (rows, LANES), 1)

    def following(value: Array, id: Array) -> tuple[Array, Array]:
        """Return the entry that follows (value, id), as f32[rows, 128] and i32[rows, 128] with identical lanes."""

        def body(carry: Carry, z: Array, ids: Array, real: Array) -> Carry:
            lane_best, lane_best_id = carry
            comes_after = real & ((z < value) | ((z == value) & (ids > id)))
            # The first candidate of a lane is always used, even if it is -inf. Ids ascend, so among equal values the
            # smaller id is kept.
            replaces_best = comes_after & ((z > lane_best) | (lane_best_id == LAST_ID))
            return jnp.where(replaces_best, z, lane_best), jnp.where(replaces_best, ids, lane_best_id)

        def merge(a: Carry, b: Carry) -> Carry:
            # The ids of different chains interleave, so break ties between equal values by id.
            replaces_best = (b[0] > a[0]) | ((b[0] == a[0]) & (b[1] < a[1]))
            return jnp.where(replaces_best, b[0], a[0]), jnp.where(replaces_best, b[1], a[1])

        nothing = jnp.full((rows, LANES), -jnp.inf, jnp.float32), jnp.full((rows, LANES), LAST_ID, jnp.int32)
        lane_best, lane_best_id = scan(body, nothing, merge)
        # Broadcast over the lanes once here instead of in every comparison.
        next_value = jnp.broadcast_to(jnp.max(lane_best, axis=1, keepdims=True), lane_best.shape)
        next_id = jnp.min(jnp.where(lane_best == next_value, lane_best_id, LAST_ID), axis=1, keepdims=True)
        return next_value, jnp.broadcast_to(next_id, lane_best.shape)

    def add(i: Array, entries: _Entries) -> _Entries:
        value, id = following(entries.value, entries.id)
        values = jnp.where(lane == i, value, entries.values)
        # In a row of NaNs, no entry is found, and `id` is LAST_ID. Clip it to the vocabulary.
        return _Entries(value, id, values, jnp.where(lane == i, jnp.minimum(id, vocab - 1), entries.ids))

    # All entries come after (inf, -1), so the first scan finds the largest entry. Write the i-th entry to lane i.
    before_first = jnp.full((rows, LANES), jnp.inf, jnp.float32), jnp.full((rows, LANES), -1, jnp.int32)
    nothing = jnp.full((rows, LANES), -jnp.inf, jnp.float32), jnp.zeros((rows, LANES), jnp.int32)
    _, _, values, ids = lax.fori_loop(0, k, add, _Entries(*before_first, *nothing))
    largest = jnp.max(jnp.where(lane == 0, values, -jnp.inf), axis=1, keepdims=True)
    packed_ref[0] = bits(jnp.where(lane == k, logsumexp(largest), values))
    packed_ref[1] = ids
