"""Body of the attention kernel: DMA copies blocks of each row's slots in while earlier blocks are processed.

B batch, K key-value heads, D head dimension, S slots, M queries of a head in a tile. Oracle:
`reference.tree_attention`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.blocks import LANES, AttentionBlocks

LOWEST = float(jnp.finfo(jnp.float32).min)
LOG2_E = 1.4426950408889634
"""Scores are scaled by this, so that 2 ** x, which a TPU computes natively, replaces e ** x and saves one product per
score."""
FIRST, BASE, COUNT, RECENT, WRITTEN = range(5)
"""Table entries of a row's tile: the slot before which every query of the tile sees all slots, the first slot of its
first block, its number of blocks, the last slot hidden by any window and, if there are new rows, the slot of the first
of them."""
UPPER, AFTER, WORDS = 0, 1, 2
"""Columns of a query: the last slot that it sees if the mask is causal, the last slot that its window hides, and from
column `WORDS` on a bitmask of the region's rows that it sees, 32 per word."""


class Shape(NamedTuple):
    """Static parameters of a call."""

    heads: int
    slots: int
    align: int  # the first slot of a block is a multiple of this
    tiles: int
    items: int
    cap: float | None
    scale: float
    causal: bool
    writes: bool  # if True, write new rows first


ITEM, BLOCK, ISSUED, USED, LANDED = range(5)
"""State entries: the item and the block to copy in next, the numbers of blocks copied and used so far, and whether the
new rows have been written."""


def attend_rows(
    table_ref,  # i32[4 or 5, B T] in scalar memory
    q_ref,  # [1, 1, K, M, D]
    known_ref,  # i32[1, 1, M, 2 + words]
    *refs,  # inputs: keys and values [B, S, K, D] in HBM, and scales f32[B, K, S] or new rows [B, W, K, D] of both;
    # outputs: the result and, with new rows, keys and values; scratch: the state, and a buffer for each source
    shape: Shape,
    blocks: AttentionBlocks,
    simulated: bool,
):
    """Run the kernel: one item of the grid is a row's tile of queries, which loops over the row's blocks.

    Copies start in the order of use, across rows, so that no copy waits for a row to end.
    """
    arrived = refs[-1]  # semaphores [buffers, sources]
    new_rows: Any = ()
    landed: Any = None
    if shape.writes:
        # New rows are written to the output caches, so read those. On a TPU they alias the arguments; in an
        # interpreter they are separate memory.
        _, _, *new_rows, out_ref, k_ref, v_ref = refs[:7]
        sources, landed, refs = (k_ref, v_ref), refs[-2], (out_ref, *refs[7:-2])
    else:
        sources, refs = refs[: arrived.shape[1]], refs[arrived.shape[1] : -1]
    # out [1, 1, K, M, D]; top and total f32[K, M, 128], lane-replicated; mixed f32[K, M, D]; state i32[5] in SMEM
    out_ref, top_ref, total_ref, mixed_ref, state_ref, *buffers = refs
    core, item = pl.program_id(0), pl.program_id(1)
    size, rows_of_core = blocks.slots, shape.items // shape.tiles

    def row_of(item):
        return core * rows_of_core + lax.div(item, shape.tiles)

    def entry(name, item):
        return table_ref[name, core * shape.items + item]

    def writing(i):
        """Yield the copies of the new rows of this core's row `i` into the caches."""
        row = core * rows_of_core + i
        for kind, (rows, cache) in enumerate(zip(new_rows, sources, strict=True)):
            place = pl.ds(entry(WRITTEN, i * shape.tiles), rows.shape[1])
            yield pltpu.make_async_copy(rows.at[row], cache.at[row, place], landed.at[kind])

    def land():
        """Wait until all new rows of this core are written."""

        def end(i, _):
            for copy in writing(i):
                copy.wait()
            return 0

        lax.fori_loop(0, rows_of_core, end, 0)
        state_ref[LANDED] = 1

    def start_of(item, block):
        # The last block of the cache starts earlier, so that it is whole; it repeats slots of the block before.
        return pl.multiple_of(jnp.minimum(entry(BASE, item) + block * size, shape.slots - size), shape.align)

    def copies(row, start, buffer):
        for kind, (source, target) in enumerate(zip(sources, buffers, strict=True)):
            signal = arrived.at[buffer, kind]
            if kind >= 2:  # scales
                yield pltpu.make_async_copy(source.at[row, :, pl.ds(start, size)], target.at[buffer], signal)
            elif len(target.shape) == 3:
                yield pltpu.make_async_copy(source.at[row, pl.ds(start, size)], target.at[buffer], signal)
            else:
                _, parts, _, _, width = target.shape
                for part in range(parts):
                    lanes = pl.ds(part * width, width)
                    rows = source.at[row, pl.ds(start, size), :, lanes]
                    yield pltpu.make_async_copy(rows, target.at[buffer, part], signal)

    def copy_next():
        """Start the copy of the next block, of this row or of the next."""
        item, block = state_ref[ITEM], state_ref[BLOCK]

        @pl.when(item < shape.items)
        def _():
            start = start_of(item, block)
            if shape.writes:
                # Only a block that contains new rows waits. It waits for those of all rows, which share semaphores.
                pl.when((state_ref[LANDED] == 0) & (start + size > entry(WRITTEN, item)))(land)

            for copy in copies(row_of(item), start, lax.rem(state_ref[ISSUED], blocks.buffers)):
                copy.start()
            row_done = block + 1 == entry(COUNT, item)
            state_ref[ITEM] = jnp.where(row_done, item + 1, item)
            state_ref[BLOCK] = jnp.where(row_done, 0, block + 1)
            state_ref[ISSUED] += 1

    @pl.when(item == 0)
    def _():
        for i in range(5):
            state_ref[i] = 0
        if shape.writes:
            # Write the new rows of all this core's rows now, because blocks are copied in before their row's turn.
            def begin(i, _):
                for copy in writing(i):
                    copy.start()
                return 0

            lax.fori_loop(0, rows_of_core, begin, 0)
        for _ in range(blocks.buffers - 1):
            copy_next()

    row = row_of(item)
    first, base, recent = entry(FIRST, item), entry(BASE, item), entry(RECENT, item)
    top_ref[...] = jnp.full_like(top_ref, LOWEST)
    total_ref[...] = jnp.zeros_like(total_ref)
    mixed_ref[...] = jnp.zeros_like(mixed_ref)

    def attend(buffer, mask):
        for head in range(shape.heads):
            keys, values = (_of_head(ref, buffer, head, q_ref.dtype, simulated) for ref in buffers[:2])
            scores = lax.dot_general(
                q_ref[0, 0, head], keys, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
            )
            scores = scores * (shape.scale if shape.cap is not None else shape.scale * LOG2_E)
            if len(buffers) > 2:
                scores = scores * buffers[2][buffer, pl.ds(head, 1)]
            if shape.cap is not None:
                scores = shape.cap * LOG2_E * jnp.tanh(scores / shape.cap)
            if mask is not None:
                scores = jnp.where(mask, scores, -jnp.inf)
            # Fold the softmax over blocks: a higher maximum rescales the earlier sums.
            previous_top = top_ref[head]
            top = jnp.maximum(previous_top, jnp.max(scores, axis=1, keepdims=True))
            weights, shrink = jnp.exp2(scores - _wide(top, scores.shape[1])), jnp.exp2(previous_top - top)
            top_ref[head] = top
            total_ref[head] = total_ref[head] * shrink + jnp.sum(weights, axis=1, keepdims=True)
            if len(buffers) > 2:
                weights = weights * buffers[3][buffer, pl.ds(head, 1)]
            mixed_ref[head] = mixed_ref[head] * _wide(shrink, values.shape[1]) + jnp.dot(
                weights.astype(values.dtype), values, preferred_element_type=jnp.float32
            )

    def step(block, _):
        copy_next()
        start, own_start = start_of(item, block), base + block * size
        buffer = lax.rem(state_ref[USED], blocks.buffers)
        for copy in copies(row, start, buffer):
            copy.wait()
        # A block needs no mask if all its slots are committed, none repeats and no window hides any.
        needs_no_mask = (start + size <= first) & (start == own_start) & (start > recent)

        @pl.when(needs_no_mask)
        def _():
            attend(buffer, None)

        @pl.when(~needs_no_mask)
        def _():
            attend(buffer, _mask(known_ref[0, 0], first, start, own_start, size, causal=shape.causal))

        state_ref[USED] += 1
        return 0

    lax.fori_loop(0, entry(COUNT, item), step, 0)
    for head in range(shape.heads):
        total = total_ref[head]
        out = mixed_ref[head] / _wide(jnp.where(total == 0, 1.0, total), out_ref.shape[-1])
        out_ref[0, 0, head] = out.astype(out_ref.dtype)


def _wide(x: Array, width: int) -> Array:
    """Widen a lane-replicated f32[M, 128] to f32[M, width]. Values stay replicated to avoid a cross-lane permute."""
    return jnp.concatenate([x] * -(-width // LANES), axis=1)[:, :width]


def _mask(known: Array, first: Array, start: Array, own: Array, size: int, *, causal: bool) -> Array:
    """Return bool[M, size], the slots of a block that the queries see, from their columns i32[M, 2 + words]."""
    slot = start + lax.broadcasted_iota(jnp.int32, (known.shape[0], size), 1)
    recent = slot > known[:, AFTER : AFTER + 1]
    if causal:
        visible = (slot <= known[:, UPPER : UPPER + 1]) & recent
    else:
        # Bit r % 32 of word r // 32 is set if row r of the region is seen. Slots before the region have row < 0.
        row = slot - first
        word = jnp.zeros_like(row)
        for i in range(known.shape[1] - WORDS):
            word = jnp.where(row >> 5 == i, known[:, WORDS + i : WORDS + i + 1], word)
        inside = (word >> (row & 31)) & 1
        visible = jnp.where(row < 0, recent.astype(jnp.int32), inside) == 1
    return visible & (slot >= own)  # the previous block covered slots before `own`


def _of_head(ref: Any, buffer: Any, head: int, dtype: Any, simulated: bool) -> Array:
    """Return the rows [slots, D] of one head in a block [parts, slots, K, lanes], whose heads of a slot are adjacent.

    Two or four heads of a narrow dtype share a 32-bit word: a strided load reads the words, and shifts extract the
    head.
    """
    if len(ref.shape) == 3:
        return ref[buffer].astype(dtype)
    _, parts, size, heads, width = ref.shape
    packing = 4 // jnp.dtype(ref.dtype).itemsize
    words, place = heads // packing, head % packing
    head_parts = []
    for part in range(parts):
        if simulated:  # JAX's simulation of TPU memory does not support reshaping references
            head_parts.append(ref[buffer, part, :, head].astype(dtype))
            continue
        rows = ref.at[buffer, part]
        rows = (rows if packing == 1 else rows.bitcast(jnp.uint32)).reshape(size * words, width)
        rows = rows[pl.ds(head // packing, size, stride=words), :]
        if packing == 2:
            rows = rows << 16 if place == 0 else rows & jnp.uint32(0xFFFF0000)
            rows = pltpu.bitcast(rows, jnp.float32)
        elif packing == 4:
            rows = (pltpu.bitcast(rows << (8 * (3 - place)), jnp.int32) >> 24).astype(jnp.float32)
        head_parts.append(rows.astype(dtype))
    return head_parts[0] if parts == 1 else jnp.concatenate(head_parts, axis=1)
