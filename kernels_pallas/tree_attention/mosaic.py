"""TPU attention over a key-value cache: DMA reads only the used slots of each row.

B batch, N queries, K key-value heads, G query heads per key-value head, D head dimension, S slots, R rows of the
region, W new rows, M = N * G queries per head and tile, T tiles. Oracle: `reference.tree_attention`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, Ref, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from kernels_pallas.common import LANES, LOWEST, Interpret, tile_rows
from kernels_pallas.tree_attention.operands import NewRows, Operands, pack_bits
from kernels_pallas.tree_attention.shapes import AttentionBlocks, attention_blocks, is_flat

LOG2_E = 1.4426950408889634
"""Scores are scaled by this, so that 2 ** x, which a TPU computes natively, replaces e ** x and saves one product per
score."""
FIRST, BASE, COUNT, RECENT, WRITTEN = range(5)
"""Table entries per tile of a row: the slot before which every query of the tile sees all slots, the first slot of the
tile's first block, the number of blocks, the last slot hidden by any window and, if there are new rows, the slot of the
first one."""
UPPER, AFTER, WORDS = 0, 1, 2
"""Columns of a query: the last slot that it sees if the mask is causal, the last slot that its window hides, and from
column `WORDS` on a bitmask of the region's rows that it sees, 32 per word."""
ITEM, BLOCK, ISSUED, USED, LANDED = range(5)
"""State entries: the item and the block to copy in next, the numbers of blocks copied and used so far, and whether the
new rows have been written."""


class Shape(NamedTuple):
    """Static parameters of a call."""

    slots: int  # S
    align: int  # the first slot of a block is a multiple of this
    tiles: int
    cores: int
    items: int  # row tiles per core
    cap: float | None
    scale: float
    causal: bool
    writes: bool  # if True, write new rows first
    blocks: AttentionBlocks
    simulated: bool


def tree_attention(
    operands: Operands,
    new: NewRows | None = None,
    *,
    blocks: AttentionBlocks | None = None,
    interpret: Interpret = False,
) -> tuple[Array, Array, Array]:
    """Return the result of `kernels_pallas.tree_attention`, and the caches with the new rows, if there are any.

    A cache with new rows must not be flat, see `is_flat`.
    """
    q, k, v = operands.q, operands.k, operands.v
    batch, n, heads, group, dim = q.shape
    has_scales = operands.k_scale is not None
    blocks, align = attention_blocks(blocks, q.shape, k.shape[1], k.dtype, scaled=has_scales)
    # The rows of the region that each query sees, and the last position that its window hides.
    visible_rows, last_hidden = operands.region()
    tiles, per_tile = pl.cdiv(n, blocks.queries), blocks.queries
    # Chips with two cores split the rows. On other chips both halves run on the single core.
    cores = math.gcd(batch, 2)
    shape = Shape(
        slots=k.shape[1],
        align=align,
        tiles=tiles,
        cores=cores,
        items=batch // cores * tiles,
        cap=operands.cap,
        scale=operands.scale,
        causal=visible_rows is None,
        writes=new is not None,
        blocks=blocks,
        simulated=isinstance(interpret, pltpu.InterpretParams),
    )
    queries = _tiled(q.astype(operands.product_dtype), tiles, per_tile)
    columns = _columns(operands.first, visible_rows, last_hidden, shape, n, group, queries.shape[3])
    table = _table(operands.first, visible_rows, last_hidden, shape, n)
    if new is not None:
        # Append the entry `WRITTEN`, which is the same for all tiles of a row.
        table = jnp.concatenate([table, jnp.repeat(new.slot.astype(jnp.int32), tiles)[None]])
    tiled_out, *caches = _call(operands, new, shape, table, queries, columns, interpret)
    # Undo `_tiled`: cut the padding and move the heads after the queries, [B, T, K, M, D] -> [B, N, K, G, D].
    tiled_out = tiled_out[:, :, :, : per_tile * group].reshape(batch, tiles, heads, per_tile, group, dim)
    tiled_out = jnp.moveaxis(tiled_out, 2, 3).reshape(batch, tiles * per_tile, heads, group, dim)[:, :n]
    k, v = caches or (k, v)
    return tiled_out, k, v


def _call(
    operands: Operands,
    new: NewRows | None,
    shape: Shape,
    table: Array,
    queries: Array,
    columns: Array,
    interpret: Interpret,
) -> list[Array]:
    """Run the kernel; return its result [B, T, K, M, D] and, with new rows, the caches."""
    heads, m, dim = queries.shape[2:]
    rows_per_core = shape.items // shape.tiles

    # Grid index (c, i) is item i of core c: the tiles of a row are consecutive items.
    def query_block(c: Array, i: Array, _: Ref) -> tuple[Array, Array, int, int, int]:
        return (c * rows_per_core + lax.div(i, shape.tiles), lax.rem(i, shape.tiles), 0, 0, 0)

    query_spec = pl.BlockSpec((1, 1, heads, m, dim), query_block)
    in_hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    sources, buffers = _sources(operands, shape, in_place=not interpret)
    # One number per query and head, in all lanes; see `_Folded`.
    lane_replicated = pltpu.VMEM((heads, m, LANES), jnp.float32)
    sinks, new_rows, caches, semaphores = [], [], [], []
    if operands.sinks is not None:
        sinks = [_tiled_sinks(operands.sinks, shape.blocks.queries, m)]
    if new is not None:
        new_rows = [rows.astype(operands.k.dtype) for rows in (new.k, new.v)]
        caches = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (operands.k, operands.v)]
        semaphores = [pltpu.SemaphoreType.DMA((2,))]
    out, caches = pl.pallas_call(
        functools.partial(_attend_rows, shape=shape),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(shape.cores, shape.items),
            in_specs=[
                # Pallas copies the queries and their columns; the kernel itself copies blocks of keys and values.
                query_spec,
                pl.BlockSpec((1, 1, m, columns.shape[3]), lambda *index: query_block(*index)[:4]),
                [in_hbm for _ in sources],
                [in_hbm for _ in new_rows],
                [pl.BlockSpec(memory_space=pltpu.VMEM) for _ in sinks],
            ],
            out_specs=[query_spec, [in_hbm for _ in caches]],
            # The fields of `_Folded`, then the fields of `_Core`, starting at `state`.
            scratch_shapes=[
                (lane_replicated, lane_replicated, pltpu.VMEM((heads, m, dim), jnp.float32)),
                pltpu.SMEM((5,), jnp.int32),
                tuple(buffers),
                semaphores,
                pltpu.SemaphoreType.DMA((shape.blocks.buffers, len(sources))),
            ],
        ),
        out_shape=[jax.ShapeDtypeStruct(queries.shape, operands.q.dtype), caches],
        # Inputs 0 to 2 are the table, the queries and their columns; keys and values follow. Output 0 is the result;
        # outputs 1 and 2 are the caches, which reuse the memory of the keys and values.
        input_output_aliases={3 + i: 1 + i for i in range(len(caches))},
        # A core runs its items in order, because the copy for the next item starts during the current one.
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=_cost(queries, operands.k),
        interpret=interpret,
        # Block sizes identify the schedule in a profile.
        name=f"tree_attention-bq{shape.blocks.queries}-bkv{shape.blocks.slots}",
    )(table, queries, columns, sources, new_rows, sinks)
    return [out, *caches]


def _sources(operands: Operands, shape: Shape, *, in_place: bool) -> tuple[list[Array], list[Any]]:
    """Return the arrays that the kernel copies blocks from, keys and values first, and a buffer for each."""
    k, dim, block_slots = operands.k, operands.k.shape[3], shape.blocks.slots
    sources = [k, operands.v]
    if is_flat(k):
        sources = [x.reshape(k.shape[0], shape.slots, dim) for x in sources]
        buffer_shape = (block_slots, dim)
    else:
        # Heads wider than the lanes are copied in parts, because a strided load reads rows of one register's width.
        # A head whose width is not a multiple of the lanes is narrower than the lanes, see `attention_blocks`.
        part_width = min(dim, LANES)
        buffer_shape = (dim // part_width, block_slots, k.shape[2], part_width)
    if in_place:
        # Without this constraint XLA, given the cost estimate, would move a whole cache into fast memory if it fits.
        sources = [pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in sources]
    buffers = [pltpu.VMEM((shape.blocks.buffers, *buffer_shape), k.dtype) for _ in sources]
    if operands.k_scale is not None and operands.v_scale is not None:
        # Put the slots in the lanes, as in the scores that the scales multiply.
        sources += [jnp.swapaxes(x, 1, 2) for x in (operands.k_scale, operands.v_scale)]
        scale_buffer = (shape.blocks.buffers, k.shape[2], block_slots)
        buffers += [pltpu.VMEM(scale_buffer, jnp.float32) for _ in range(2)]
    return sources, buffers


def _cost(queries: Array, k: Array) -> pl.CostEstimate:
    """Return the cost of a call whose rows are all full. XLA uses it to decide on prefetches during the call."""
    batch, tiles, heads, m, dim = queries.shape
    num_scores = batch * tiles * heads * m * k.shape[1]
    # Two products per score, with keys and with values. Each tile reads both caches once.
    return pl.CostEstimate(
        flops=4 * num_scores * dim,
        transcendentals=num_scores,
        bytes_accessed=2 * tiles * k.size * k.dtype.itemsize + 2 * queries.size * queries.dtype.itemsize,
    )


def _tiled(q: Array, tiles: int, per_tile: int) -> Array:
    """Return q [B, N, K, G, D] as [B, T, K, M, D], padded to whole memory tiles."""
    batch, n, heads, group, dim = q.shape
    # Row i * G + g of a tile's M rows is query i of head g of the group. All heads of a group read the same keys.
    q = jnp.pad(q, ((0, 0), (0, tiles * per_tile - n), (0, 0), (0, 0), (0, 0)))
    q = jnp.moveaxis(q.reshape(batch, tiles, per_tile, heads, group, dim), 2, 3)
    q = q.reshape(batch, tiles, heads, per_tile * group, dim)
    return jnp.pad(q, ((0, 0), (0, 0), (0, 0), (0, -per_tile * group % tile_rows(q.dtype)), (0, 0)))


def _tiled_sinks(sinks: Array, per_tile: int, m: int) -> Array:
    """Return sinks f32[K, G], times log2(e), in the row order of `_tiled`: f32[K, M, 128], lane-replicated."""
    by_query = jnp.tile(sinks * LOG2_E, (1, per_tile))
    by_query = jnp.pad(by_query, ((0, 0), (0, m - by_query.shape[1])))
    return jnp.broadcast_to(by_query[..., None], (*by_query.shape, LANES))


def _columns(
    first: Array, visible: Array | None, last_hidden: Array | None, shape: Shape, n: int, group: int, m: int
) -> Array:
    """Return the columns of the queries, i32[B, T, M, 2 + words]; padding queries see no row of the region."""
    batch, tiles, per_tile = first.shape[0], shape.tiles, shape.blocks.queries
    # Query i is in slot `first + i`, the last one that it sees under a causal mask.
    last_causal_slot = first[:, None] + jnp.arange(n, dtype=jnp.int32)[None]
    if last_hidden is None:
        last_hidden = jnp.full_like(last_causal_slot, -1)
    columns = [last_causal_slot[..., None], last_hidden[..., None]]
    if visible is not None:
        columns.append(pack_bits(jnp.broadcast_to(visible, (batch, *visible.shape[1:]))))
    # Order the rows as in `_tiled`: repeat each query's columns once per head of its group.
    padded_columns = jnp.pad(jnp.concatenate(columns, axis=2), ((0, 0), (0, tiles * per_tile - n), (0, 0)))
    by_query = jnp.repeat(padded_columns.reshape(batch, tiles, per_tile, -1), group, axis=2)
    return jnp.pad(by_query, ((0, 0), (0, 0), (0, m - per_tile * group), (0, 0)))


def _table(first: Array, visible: Array | None, last_hidden: Array | None, shape: Shape, n: int) -> Array:
    """Return the table of all tiles, i32[4, B * T]: the entries of `tile_table`, with the tiles of a row adjacent."""
    per_tile = shape.blocks.queries
    tile_tables = []
    for first_query in range(0, n, per_tile):
        end_query = min(first_query + per_tile, n)
        if visible is None:
            # The mask is causal: all queries of the tile see the slots before its first query, and its last query sees
            # the slots up to its own.
            tile_first, region_rows = first + first_query, end_query - first_query
        else:
            tile_first, region_rows = first, visible.shape[2]
        tile_hidden = None if last_hidden is None else last_hidden[:, first_query:end_query]
        block_sizes = {"slots": shape.slots, "size": shape.blocks.slots, "align": shape.align}
        tile_tables.append(tile_table(tile_first, region_rows, tile_hidden, **block_sizes)[..., None])
    # [4, B, T] -> [4, B * T], so that an item of the grid is a column.
    return jnp.concatenate(tile_tables, axis=2).reshape(RECENT + 1, -1)


def tile_table(
    first: Array, rows: int, last_hidden: Array | None, *, slots: int, size: int, align: int
) -> Array:
    """Return the table entries of one tile of every row, i32[4, B]: `FIRST`, `BASE`, `COUNT` and `RECENT`.

    Args:
      first: i32[B]; all queries of the tile see the slots before it.
      rows: R, or the rows up to the tile's last query.
      last_hidden: i32[B, N], the last position that each query's window hides, or None.
      slots: S.
      size: slots per block.
      align: the first slot of a block is a multiple of this.

    >>> tile_table(jnp.asarray([3, 90]), 6, None, slots=96, size=16, align=1)[2].tolist()
    [1, 6]
    """
    first_slot, last_hidden_slot = jnp.zeros_like(first), jnp.full_like(first, -1)
    if last_hidden is not None:
        # Begin at the first slot that any window shows. In the region a position may differ from its slot, so always
        # read the whole region. The first block must fit into the cache.
        first_slot = jnp.clip(jnp.minimum(jnp.min(last_hidden, axis=1) + 1, first), 0, max(slots - size, 0))
        first_slot, last_hidden_slot = first_slot // align * align, jnp.max(last_hidden, axis=1)
    # Read blocks from `first_slot` to the end of the region, clipped to the cache, and at least one.
    block_count = pl.cdiv(jnp.minimum(first + rows, slots) - first_slot, size)
    return jnp.stack([first, first_slot, jnp.maximum(block_count, 1), last_hidden_slot]).astype(jnp.int32)


class _Folded(NamedTuple):
    """Running softmax over the blocks so far, per head."""

    # `top` and `total` are replicated over all lanes, where they are compared with scores. In a single lane they would
    # need a permutation for every register of scores, which took nearly half the time of a tree's block.
    top: Ref  # f32[K, M, 128], lane-replicated; the largest score
    total: Ref  # f32[K, M, 128], lane-replicated; the sum of the weights relative to `top`
    mixed: Ref  # f32[K, M, D]; the sum of the weighted values


class _Core(NamedTuple):
    """The copies of one core. They start in the order in which they are used, so that none waits for a row to end."""

    number: Array  # i32[]; 0, or 1 for the second core
    shape: Shape
    table: Ref  # i32[4 or 5, B T] in scalar memory
    # Keys and values [B, S, K, D] in HBM, followed by their scales f32[B, K, S], if they have any.
    sources: list[Ref]
    new_rows: list[Ref]  # new keys and values [B, W, K, D] in HBM, if there are any
    state: Ref  # i32[5] in scalar memory
    buffers: tuple[Ref, ...]  # one for each source
    landed: list[Ref]  # semaphores [2] of the new rows, if there are any
    arrived: Ref  # semaphores [buffers, sources]

    @property
    def rows(self) -> int:
        """Batch rows per core."""
        return self.shape.items // self.shape.tiles

    def row_of(self, item: Array) -> Array:
        """Return the batch row of an item, that is, of one tile of a row."""
        return self.number * self.rows + lax.div(item, self.shape.tiles)

    def entry(self, name: int, item: Array) -> Array:
        """Return a table entry, such as `FIRST`, of an item."""
        return self.table[name, self.number * self.shape.items + item]

    def start_of(self, item: Array, block: Array) -> Array:
        """Return the first slot of a block."""
        size = self.shape.blocks.slots
        # The last block of the cache starts earlier, so that it is whole; it repeats slots of the previous block.
        start = jnp.minimum(self.entry(BASE, item) + block * size, self.shape.slots - size)
        return pl.multiple_of(start, self.shape.align)

    def row_copies(self, i: Array) -> Iterator[Any]:
        """Yield the copies of the new rows of this core's row `i` into the caches."""
        row = self.number * self.rows + i
        for source_index, (rows, cache) in enumerate(zip(self.new_rows, self.sources, strict=True)):
            slots = pl.ds(self.entry(WRITTEN, i * self.shape.tiles), rows.shape[1])
            yield pltpu.make_async_copy(rows.at[row], cache.at[row, slots], self.landed[0].at[source_index])

    def block_copies(self, row: Array, start: Array, buffer: Array) -> Iterator[Any]:
        """Yield the copies into a buffer of the block of slots that begins at `start`."""
        slot_range = pl.ds(start, self.shape.blocks.slots)
        for source_index, (source, target) in enumerate(zip(self.sources, self.buffers, strict=True)):
            semaphore = self.arrived.at[buffer, source_index]
            if source_index >= 2:  # scales
                yield pltpu.make_async_copy(source.at[row, :, slot_range], target.at[buffer], semaphore)
            elif len(target.shape) == 3:
                yield pltpu.make_async_copy(source.at[row, slot_range], target.at[buffer], semaphore)
            else:
                _, parts, _, _, width = target.shape
                for part in range(parts):
                    rows = source.at[row, slot_range, :, pl.ds(part * width, width)]
                    yield pltpu.make_async_copy(rows, target.at[buffer, part], semaphore)

    def begin(self) -> None:
        """Start writing all new rows of this core, and start copying its first blocks."""
        # The second core may run after the first one on the same chip, so reset the state.
        for i in range(5):
            self.state[i] = 0
        if self.shape.writes:
            # Write the rows of later items now as well, because blocks are copied in before their row's turn.
            def start_row(i: Array, _: int) -> int:
                for copy in self.row_copies(i):
                    copy.start()
                return 0

            lax.fori_loop(0, self.rows, start_row, 0)
        # Fill all buffers but one, which the first step of the first item fills before it waits.
        for _ in range(self.shape.blocks.buffers - 1):
            self.copy_next()

    def land(self) -> None:
        """Wait until all new rows of this core are written."""

        def wait_for_row(i: Array, _: int) -> int:
            for copy in self.row_copies(i):
                copy.wait()
            return 0

        lax.fori_loop(0, self.rows, wait_for_row, 0)
        self.state[LANDED] = 1

    def copy_next(self) -> None:
        """Start copying the next block, from this row or the next."""
        state, blocks = self.state, self.shape.blocks
        item, block = state[ITEM], state[BLOCK]

        @pl.when(item < self.shape.items)
        def _():
            start = self.start_of(item, block)
            if self.shape.writes:
                # Only a block that contains new rows waits. It waits for the new rows of all batch rows, which share
                # semaphores.
                unwritten = state[LANDED] == 0
                pl.when(unwritten & (start + blocks.slots > self.entry(WRITTEN, item)))(self.land)

            # Buffers form a ring in the order of use.
            for copy in self.block_copies(self.row_of(item), start, lax.rem(state[ISSUED], blocks.buffers)):
                copy.start()
            item_done = block + 1 == self.entry(COUNT, item)
            state[ITEM] = jnp.where(item_done, item + 1, item)
            state[BLOCK] = jnp.where(item_done, 0, block + 1)
            state[ISSUED] += 1


def _attend_rows(
    table: Ref,
    q: Ref,  # [1, 1, K, M, D]
    columns: Ref,  # i32[1, 1, M, 2 + words]
    sources: list[Ref],
    new_rows: list[Ref],
    sinks: list[Ref],  # at most one, f32[K, M, 128], lane-replicated
    out: Ref,  # [1, 1, K, M, D]
    caches: list[Ref],
    softmax: tuple[Ref, Ref, Ref],  # scratch memory of `_Folded`
    *copying: Any,  # scratch memory of `_Core`
    shape: Shape,
) -> None:
    """Run the kernel: each grid item is one query tile of a row and loops over the row's blocks."""
    # New rows are written to the output caches, so read from those. On a TPU they alias the arguments; in an
    # interpreter they are separate memory.
    core = _Core(pl.program_id(0), shape, table, caches or sources, new_rows, *copying)
    item = pl.program_id(1)
    block_slots = shape.blocks.slots
    pl.when(item == 0)(core.begin)
    row = core.row_of(item)
    first, base, last_hidden_slot = core.entry(FIRST, item), core.entry(BASE, item), core.entry(RECENT, item)
    # Start from an empty softmax. Use `LOWEST` for -inf, since a query may see no slot of a block and -inf - -inf is
    # NaN.
    folded = _Folded(*softmax)
    for ref, value in zip(folded, (LOWEST, 0.0, 0.0), strict=True):
        ref[...] = jnp.full(ref.shape, value, ref.dtype)
    if sinks:
        # Start the softmax with the sink: it is the maximum so far, so its weight is 1. Its value is zero.
        folded.top[...] = sinks[0][...]
        folded.total[...] = jnp.ones(folded.total.shape, jnp.float32)

    def step(block: Array, _: int) -> int:
        # This fills the buffer that the previous step used, while the current block is multiplied.
        core.copy_next()
        # Slots from `own_start` on belong to this block; the last block of a cache begins earlier, at `start`.
        start, own_start = core.start_of(item, block), base + block * block_slots
        buffer = lax.rem(core.state[USED], shape.blocks.buffers)
        for copy in core.block_copies(row, start, buffer):
            copy.wait()
        # A block needs no mask if all its slots are committed, none is repeated and no window hides any.
        needs_no_mask = (start + block_slots <= first) & (start == own_start) & (start > last_hidden_slot)

        @pl.when(needs_no_mask)
        def _():
            _attend_block(q, folded, core, buffer, None)

        @pl.when(~needs_no_mask)
        def _():
            mask = _mask(columns[0, 0], first, start, own_start, block_slots, causal=shape.causal)
            _attend_block(q, folded, core, buffer, mask)

        core.state[USED] += 1
        return 0

    lax.fori_loop(0, core.entry(COUNT, item), step, 0)
    # Divide by the softmax's total. It is 0 for a query without visible slots, whose result is 0.
    for head in range(q.shape[2]):
        total = folded.total[head]
        normalised = folded.mixed[head] / _wide(jnp.where(total == 0, 1.0, total), out.shape[-1])
        out[0, 0, head] = normalised.astype(out.dtype)


def _attend_block(q: Ref, folded: _Folded, core: _Core, buffer: Array, mask: Array | None) -> None:
    """Fold the slots in a buffer into the softmax and the weighted sum of every query."""
    buffers, cap, scale = core.buffers, core.shape.cap, core.shape.scale
    for head in range(q.shape[2]):
        keys, values = (_of_head(ref, buffer, head, q.dtype, core.shape.simulated) for ref in buffers[:2])
        scores = lax.dot_general(
            q[0, 0, head], keys, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        )
        # f32[M, slots]. With a cap, the factor log2(e) comes after the tanh; otherwise it is part of the scale.
        scores = scores * (scale if cap is not None else scale * LOG2_E)
        if len(buffers) > 2:
            # Multiply by the keys' scales, one per slot and thus per lane of the scores.
            scores = scores * buffers[2][buffer, pl.ds(head, 1)]
        if cap is not None:
            scores = cap * LOG2_E * jnp.tanh(scores / cap)
        if mask is not None:
            scores = jnp.where(mask, scores, -jnp.inf)
        # Fold the softmax over blocks: a higher maximum rescales the earlier sums.
        previous_top = folded.top[head]
        top = jnp.maximum(previous_top, jnp.max(scores, axis=1, keepdims=True))
        weights, rescale = jnp.exp2(scores - _wide(top, scores.shape[1])), jnp.exp2(previous_top - top)
        folded.top[head] = top
        folded.total[head] = folded.total[head] * rescale + jnp.sum(weights, axis=1, keepdims=True)
        if len(buffers) > 2:
            # Multiply by the values' scales. The softmax's total stays unscaled.
            weights = weights * buffers[3][buffer, pl.ds(head, 1)]
        folded.mixed[head] = folded.mixed[head] * _wide(rescale, values.shape[1]) + jnp.dot(
            weights.astype(values.dtype), values, preferred_element_type=jnp.float32
        )


def _wide(x: Array, width: int) -> Array:
    """Widen a lane-replicated f32[M, 128] to f32[M, width]. Values stay replicated to avoid a cross-lane permute."""
    return jnp.concatenate([x] * pl.cdiv(width, LANES), axis=1)[:, :width]


def _mask(columns: Array, first: Array, start: Array, own_start: Array, size: int, *, causal: bool) -> Array:
    """Return bool[M, size], the slots of a block that the queries see, from their columns i32[M, 2 + words]."""
    slot = start + lax.broadcasted_iota(jnp.int32, (columns.shape[0], size), 1)
    # bool[M, size]: the window shows the slot.
    in_window = slot > columns[:, AFTER : AFTER + 1]
    if causal:
        visible = (slot <= columns[:, UPPER : UPPER + 1]) & in_window
    else:
        # Bit r % 32 of word r // 32 is set if row r of the region is seen. Slots before the region have row < 0.
        region_row = slot - first
        word = jnp.zeros_like(region_row)
        for i in range(columns.shape[1] - WORDS):
            word = jnp.where(region_row >> 5 == i, columns[:, WORDS + i : WORDS + i + 1], word)
        # Slots after the region select no set bit. The bitmask already includes the window.
        row_bit = (word >> (region_row & 31)) & 1
        visible = jnp.where(region_row < 0, in_window.astype(jnp.int32), row_bit) == 1
    # The previous block covered the slots before `own_start`.
    return visible & (slot >= own_start)


def _of_head(ref: Ref, buffer: Array, head: int, dtype: DTypeLike, simulated: bool) -> Array:
    """Return the rows [slots, D] of one head from a block [parts, slots, K, lanes], where a slot's heads are adjacent.

    Two or four heads of a narrow dtype share a 32-bit word: a strided load reads the words, and shifts extract the
    head.
    """
    if len(ref.shape) == 3:
        # A flat cache has a single head.
        return ref[buffer].astype(dtype)
    _, parts, size, heads, width = ref.shape
    packing = 4 // jnp.dtype(ref.dtype).itemsize
    # Words per slot, and the head's place in its word, counted from the low bits.
    slot_words, place_in_word = heads // packing, head % packing
    head_parts = []
    for part in range(parts):
        if simulated:
            # JAX's simulation of TPU memory does not support reshaping references.
            head_parts.append(ref[buffer, part, :, head].astype(dtype))
            continue
        block = ref.at[buffer, part]
        if packing > 1:
            block = block.bitcast(jnp.uint32)
        # Row s * words + w holds word w of slot s, so a stride of `slot_words` rows reads one word of every slot.
        rows = block.reshape(size * slot_words, width)[pl.ds(head // packing, size, stride=slot_words), :]
        if packing == 2:
            # A bfloat16 number is the upper half of the float32 with the same value.
            rows = rows << 16 if place_in_word == 0 else rows & jnp.uint32(0xFFFF0000)
            rows = pltpu.bitcast(rows, jnp.float32)
        elif packing == 4:
            # Shift the byte to the top and back, which extends its sign.
            rows = (pltpu.bitcast(rows << (8 * (3 - place_in_word)), jnp.int32) >> 24).astype(jnp.float32)
        head_parts.append(rows.astype(dtype))
    return jnp.concatenate(head_parts, axis=1)
