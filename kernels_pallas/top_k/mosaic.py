"""TPU kernels of `top_k`, which scan a block of whole rows in fast memory k times.

R rows, V vocabulary, W vocabulary parts. Oracle: `reference.top_k`.

Each scan finds the entry that follows the previous one in the order (larger value, then smaller id). Scans write no
intermediate state, and ties need no special case.
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
"""Independent chains that a scan folds in parallel: in a single chain, each vector would wait for the previous one."""
STRIP = 16
"""Vectors along the vocabulary per iteration of a scan's loop."""


def top_k(logits: Array, k: int, *, interpret: Interpret = False) -> Array:
    """Return the k largest of logits [R, V] as i32[2, R, 128], packed as by `reference.pack`."""
    num_rows, vocab = logits.shape
    rows_per_block = block_rows(num_rows, vocab, k, logits.dtype)
    in_spec = pl.BlockSpec((rows_per_block, round_up(vocab, LANES)), lambda i: (i, 0))
    kernel = functools.partial(_top_k_kernel, vocab=vocab, k=k)
    return _call(kernel, logits, in_spec, num_rows, rows_per_block, interpret, "top_k")


def join(parts: Array, k: int, size: int, *, interpret: Interpret = False) -> Array:
    """Join the results i32[W, 2, R, 128] of W vocabulary parts, `size` tokens each, into i32[2, R, 128]."""
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
    """Run a kernel on blocks of `block` rows; it writes i32[2, R, 128]."""
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
"""`scan(body, start, merge)` folds `carry = body(carry, z f32[rows, 128], ids i32[rows, 128], real bool[rows, 128])`
over all entries of a row, in chains that begin with `start` and are merged at the end. Ids ascend within each lane of a
chain."""


def _top_k_kernel(logits_ref: Ref, packed_ref: Ref, *, vocab: int, k: int) -> None:
    rows = logits_ref.shape[0]
    lane = lax.broadcasted_iota(jnp.int32, (rows, LANES), 1)
    num_vectors = pl.cdiv(vocab, LANES)
    # Few rows fill few registers, so run several independent chains of comparisons to hide their latency.
    num_chains = max(CHAINS * SUBLANES // max(rows, SUBLANES), 1)

    def scan(body: Callable[..., Carry], start: Carry, merge: Callable[[Carry, Carry], Carry]) -> Carry:
        def chunk(first: Array | int, carry: Carry) -> Carry:
            """Fold vector number `first` of every row into a chain; after the loop, `first` is a Python int."""
            offset = first * LANES if isinstance(first, int) else pl.multiple_of(first * LANES, LANES)
            z = logits_ref[:, pl.ds(offset, LANES)].astype(jnp.float32)
            ids = lane + offset
            real = True
            if isinstance(first, int) and offset + LANES > vocab:
                # Memory past the end of the vocabulary is uninitialised.
                real = ids < vocab
            return body(carry, z, ids, real)

        def strip(i: Array, chains: list[Carry]) -> list[Carry]:
            # Consecutive vectors go to different chains.
            for c in range(STRIP):
                j = c % num_chains
                chains[j] = chunk(i * STRIP + c, chains[j])
            return chains

        # The loop processes only whole strips. The remaining vectors follow it; the last of them may need a mask.
        strips = vocab // LANES // STRIP
        chains = lax.fori_loop(0, strips, strip, [start] * num_chains)
        for c in range(strips * STRIP, num_vectors):
            j = c % num_chains
            chains[j] = chunk(c, chains[j])
        return functools.reduce(merge, chains)

    def logsumexp(largest: Array) -> Array:
        # The largest entry is known by now, so one more scan sums exp(z - largest) in each lane.
        shift = jnp.maximum(largest, LOWEST)

        def add(carry: Carry, z: Array, ids: Array, real: Array) -> Carry:
            return (carry[0] + jnp.where(real, jnp.exp(z - shift), 0.0),)

        zero_sum = (jnp.zeros((rows, LANES), jnp.float32),)
        (exp_sums,) = scan(add, zero_sum, lambda a, b: (a[0] + b[0],))
        return shift + jnp.log(jnp.sum(exp_sums, axis=1, keepdims=True))

    _write(packed_ref, scan, k, vocab, logsumexp)


def _join_kernel(parts_ref: Ref, packed_ref: Ref, *, k: int, size: int) -> None:
    # i32[W, 2, rows, 128]: packed results of the parts, with entries in lanes 0 .. k - 1 and the logsumexp in lane k.
    num_parts, _, rows, _ = parts_ref.shape
    lane = lax.broadcasted_iota(jnp.int32, (rows, LANES), 1)

    def values(part: int) -> Array:
        return lax.bitcast_convert_type(parts_ref[part, 0], jnp.float32)

    def scan(body: Callable[..., Carry], carry: Carry, merge: Callable[[Carry, Carry], Carry]) -> Carry:
        # One chain of W vectors, one per part. The parts are in the order of their ids, so ids ascend within each lane.
        del merge
        for part in range(num_parts):
            carry = body(carry, values(part), parts_ref[part, 1] + part * size, lane < k)
        return carry

    def logsumexp(largest: Array) -> Array:
        # f32[rows, 1] each: the logsumexps of the parts. Their logsumexp is that of the whole vocabulary.
        del largest
        part_logsumexps = [
            jnp.max(jnp.where(lane == k, values(part), -jnp.inf), axis=1, keepdims=True)
            for part in range(num_parts)
        ]
        shift = jnp.maximum(functools.reduce(jnp.maximum, part_logsumexps), LOWEST)
        return shift + jnp.log(functools.reduce(jnp.add, [jnp.exp(x - shift) for x in part_logsumexps]))

    _write(packed_ref, scan, k, num_parts * size, logsumexp)


class _Entries(NamedTuple):
    """Entries found so far: the last one, replicated over all lanes, and all of them, entry i in lane i."""

    value: Array  # f32[rows, 128]
    id: Array  # i32[rows, 128]
    values: Array  # f32[rows, 128]
    ids: Array  # i32[rows, 128]


def _write(packed_ref: Ref, scan: Scan, k: int, vocab: int, logsumexp: Callable[[Array], Array]) -> None:
    """Write the first k entries and the logsumexp, packed."""
    _, rows, _ = packed_ref.shape
    lane = lax.broadcasted_iota(jnp.int32, (rows, LANES), 1)

    def following(value: Array, id: Array) -> tuple[Array, Array]:
        """Return the entry after (value, id), f32[rows, 128] and i32[rows, 128], replicated over lanes."""

        def body(carry: Carry, z: Array, ids: Array, real: Array) -> Carry:
            lane_best, lane_best_id = carry
            comes_after = real & ((z < value) | ((z == value) & (ids > id)))
            # The first candidate of a lane always counts, even -inf. Ids ascend, so the smaller id wins ties.
            replaces_best = comes_after & ((z > lane_best) | (lane_best_id == LAST_ID))
            return jnp.where(replaces_best, z, lane_best), jnp.where(replaces_best, ids, lane_best_id)

        def merge(a: Carry, b: Carry) -> Carry:
            # Ids of different chains interleave, so ties compare them.
            replaces_best = (b[0] > a[0]) | ((b[0] == a[0]) & (b[1] < a[1]))
            return jnp.where(replaces_best, b[0], a[0]), jnp.where(replaces_best, b[1], a[1])

        nothing = jnp.full((rows, LANES), -jnp.inf, jnp.float32), jnp.full((rows, LANES), LAST_ID, jnp.int32)
        lane_best, lane_best_id = scan(body, nothing, merge)
        # Broadcast over the lanes once here rather than at every comparison.
        next_value = jnp.broadcast_to(jnp.max(lane_best, axis=1, keepdims=True), lane_best.shape)
        next_id = jnp.min(jnp.where(lane_best == next_value, lane_best_id, LAST_ID), axis=1, keepdims=True)
        return next_value, jnp.broadcast_to(next_id, lane_best.shape)

    def add(i: Array, entries: _Entries) -> _Entries:
        value, id = following(entries.value, entries.id)
        values = jnp.where(lane == i, value, entries.values)
        # A row of NaN has no next entry; keep its ids valid.
        return _Entries(value, id, values, jnp.where(lane == i, jnp.minimum(id, vocab - 1), entries.ids))

    # Every entry comes after (inf, -1), so the first scan finds the largest. Lane i gets the i-th entry.
    before_first = jnp.full((rows, LANES), jnp.inf, jnp.float32), jnp.full((rows, LANES), -1, jnp.int32)
    nothing = jnp.full((rows, LANES), -jnp.inf, jnp.float32), jnp.zeros((rows, LANES), jnp.int32)
    _, _, values, ids = lax.fori_loop(0, k, add, _Entries(*before_first, *nothing))
    largest = jnp.max(jnp.where(lane == 0, values, -jnp.inf), axis=1, keepdims=True)
    packed_ref[0] = bits(jnp.where(lane == k, logsumexp(largest), values))
    packed_ref[1] = ids
