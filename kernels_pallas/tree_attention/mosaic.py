"""TPU kernel for tree attention over a KV cache, which reads only the used slots of each batch row.

The queries of a batch row are divided into tiles. The kernel processes items: an item is one tile of one batch row.

Tested against `reference.tree_attention`.

Dimensions: B batch, N queries, K key-value heads, G query heads per key-value head, D head dimension, S slots, R rows
of the region, W new rows, T tiles, M query rows per key-value head and tile: G for each query, and padding.
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
"""Factor by which the scores are multiplied, so that the kernel can compute 2 ** x, for which a TPU has an instruction,
instead of e ** x. This saves one product per score."""
FIRST, BASE, COUNT, RECENT, WRITTEN = range(5)
"""Indices of the table entries of an item.

`FIRST`: all queries of the tile attend to the slots before this slot. `BASE`: first slot of the first block. `COUNT`:
number of blocks. `RECENT`: last slot that the window of any query hides. `WRITTEN`: slot of the first new row; only if
there are new rows."""
UPPER, AFTER, WORDS = 0, 1, 2
"""Indices of the columns of a query.

`UPPER`: last slot that the query attends to if the mask is causal. `AFTER`: last slot that the window hides. `WORDS`:
first word of a bitmask of the region's rows that the query attends to, with 32 rows per word."""
ITEM, BLOCK, ISSUED, USED, LANDED = range(5)
"""Indices of the state of a core: the item and block to copy next, the number of blocks whose copy has started, the
number of blocks that have been used, and whether the new rows have been written."""


class Shape(NamedTuple):
    """Static parameters of a kernel call."""

    slots: int  # S
    align: int  # the first slot of a block is a multiple of this
    tiles: int  # T
    cores: int  # number of cores, or of halves that run one after the other on a single core
    items: int  # number of items per core
    cap: float | None  # soft cap on the scores
    scale: float  # factor by which the scores are multiplied
    causal: bool  # whether the mask is causal
    writes: bool  # whether there are new rows to write
    blocks: AttentionBlocks
    simulated: bool  # True if the kernel runs in JAX's simulation of TPU memory


def tree_attention(
    operands: Operands,
    new: NewRows | None = None,
    *,
    blocks: AttentionBlocks | None = None,
    interpret: Interpret = False,
) -> tuple[Array, Array, Array]:
    """Compute `kernels_pallas.tree_attention` with the TPU kernel; return its result and the updated caches.

    If there are new rows, the kernel writes them first, and the cache must not be flat (see `is_flat`).
    """
    q, k, v = operands.q, operands.k, operands.v
    batch, n, heads, group, dim = q.shape
    has_scales = operands.k_scale is not None
    blocks, align = attention_blocks(blocks, q.shape, k.shape[1], k.dtype, scaled=has_scales)
    # For each query, find the rows of the region that it attends to and the last position that the window hides from
    # it.
    visible_rows, last_hidden = operands.region()
    tiles, per_tile = pl.cdiv(n, blocks.queries), blocks.queries
    # Divide a batch of even size into two halves. On a chip with two cores, each core processes one half; other chips
    # process the halves one after the other.
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
    # Undo `_tiled`: remove the padding, and reshape [B, T, K, M, D] to [B, N, K, G, D].
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
    """Run the kernel; return its result [B, T, K, M, D] and, if there are new rows, the updated caches."""
    heads, m, dim = queries.shape[2:]
    rows_per_core = shape.items // shape.tiles

    # Grid index (c, i) is item i of core c. The tiles of a batch row are consecutive items.
    def query_block(c: Array, i: Array, _: Ref) -> tuple[Array, Array, int, int, int]:
        return (c * rows_per_core + lax.div(i, shape.tiles), lax.rem(i, shape.tiles), 0, 0, 0)

    query_spec = pl.BlockSpec((1, 1, heads, m, dim), query_block)
    in_hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    sources, buffers = _sources(operands, shape, in_place=not interpret)
    # This memory stores one number per query and head, repeated in all lanes (see `_Folded`).
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
                # Pallas copies the queries and their columns. The kernel itself copies blocks of keys and values.
                query_spec,
                pl.BlockSpec((1, 1, m, columns.shape[3]), lambda *index: query_block(*index)[:4]),
                [in_hbm for _ in sources],
                [in_hbm for _ in new_rows],
                [pl.BlockSpec(memory_space=pltpu.VMEM) for _ in sinks],
            ],
            out_specs=[query_spec, [in_hbm for _ in caches]],
            # These are the fields of `_Folded`, followed by the fields of `_Core` from `state` on.
            scratch_shapes=[
                (lane_replicated, lane_replicated, pltpu.VMEM((heads, m, dim), jnp.float32)),
                pltpu.SMEM((5,), jnp.int32),
                tuple(buffers),
                semaphores,
                pltpu.SemaphoreType.DMA((shape.blocks.buffers, len(sources))),
            ],
        ),
        out_shape=[jax.ShapeDtypeStruct(queries.shape, operands.q.dtype), caches],
        # Inputs 0 to 2 are the table, the queries and their columns, and inputs 3 and 4 are the keys and values. Output
        # 0 is the result. Outputs 1 and 2 are the updated caches, which reuse the memory of the keys and values.
        input_output_aliases={3 + i: 1 + i for i in range(len(caches))},
        # A core processes its items in order, because the copy for the next item starts during the current item.
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=_cost(queries, operands.k),
        interpret=interpret,
        # Include the block sizes, which identify the kernel's configuration in a profile.
        name=f"tree_attention-bq{shape.blocks.queries}-bkv{shape.blocks.slots}",
    )(table, queries, columns, sources, new_rows, sinks)
    return [out, *caches]


def _sources(operands: Operands, shape: Shape, *, in_place: bool) -> tuple[list[Array], list[Any]]:
    """Return the arrays from which the kernel copies blocks, and a buffer for each. Keys and values come first."""
    k, dim, block_slots = operands.k, operands.k.shape[3], shape.blocks.slots
    sources = [k, operands.v]
    if is_flat(k):
        sources = [x.reshape(k.shape[0], shape.slots, dim) for x in sources]
        buffer_shape = (block_slots, dim)
    else:
        # A strided load reads rows that are as wide as a register, so copy wider heads in parts. `attention_blocks` has
        # checked that a head is narrower than a register, or that its width is a multiple of the register's.
        part_width = min(dim, LANES)
        buffer_shape = (dim // part_width, block_slots, k.shape[2], part_width)
    if in_place:
        # Without this constraint, the cost estimate makes XLA move a whole cache to fast memory if it fits.
        sources = [pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in sources]
    buffers = [pltpu.VMEM((shape.blocks.buffers, *buffer_shape), k.dtype) for _ in sources]
    if operands.k_scale is not None and operands.v_scale is not None:
        # Put the slots in lanes, to match the layout of the scores that the scales multiply.
        sources += [jnp.swapaxes(x, 1, 2) for x in (operands.k_scale, operands.v_scale)]
        scale_buffer = (shape.blocks.buffers, k.shape[2], block_slots)
        buffers += [pltpu.VMEM(scale_buffer, jnp.float32) for _ in range(2)]
    return sources, buffers


def _cost(queries: Array, k: Array) -> pl.CostEstimate:
    """Estimate the cost of a call, assuming that all slots are used. XLA uses it to schedule prefetches."""
    batch, tiles, heads, m, dim = queries.shape
    num_scores = batch * tiles * heads * m * k.shape[1]
    # There are two products per score, one with keys and one with values. Each tile reads both caches once.
    return pl.CostEstimate(
        flops=4 * num_scores * dim,
        transcendentals=num_scores,
        bytes_accessed=2 * tiles * k.size * k.dtype.itemsize + 2 * queries.size * queries.dtype.itemsize,
    )


def _tiled(q: Array, tiles: int, per_tile: int) -> Array:
    """Reshape q [B, N, K, G, D] to [B, T, K, M, D], padded to whole memory tiles."""
    batch, n, heads, group, dim = q.shape
    # Row i * G + g of a tile belongs to query i and head g of the group. All heads of a group use the same keys.
    q = jnp.pad(q, ((0, 0), (0, tiles * per_tile - n), (0, 0), (0, 0), (0, 0)))
    q = jnp.moveaxis(q.reshape(batch, tiles, per_tile, heads, group, dim), 2, 3)
    q = q.reshape(batch, tiles, heads, per_tile * group, dim)
    return jnp.pad(q, ((0, 0), (0, 0), (0, 0), (0, -per_tile * group % tile_rows(q.dtype)), (0, 0)))


def _tiled_sinks(sinks: Array, per_tile: int, m: int) -> Array:
    """Return the sinks f32[K, G] times log2(e), in the order of `_tiled`, repeated in all lanes: f32[K, M, 128]."""
    by_query = jnp.tile(sinks * LOG2_E, (1, per_tile))
    by_query = jnp.pad(by_query, ((0, 0), (0, m - by_query.shape[1])))
    return jnp.broadcast_to(by_query[..., None], (*by_query.shape, LANES))


def _columns(
    first: Array, visible: Array | None, last_hidden: Array | None, shape: Shape, n: int, group: int, m: int
) -> Array:
    """Return the columns of the queries (see `UPPER`), i32[B, T, M, 2 + words].

    Padding queries attend to no row of the region.
    """
    batch, tiles, per_tile = first.shape[0], shape.tiles, shape.blocks.queries
    # Query i is in slot `first + i`, which is the last slot that it attends to under a causal mask.
    last_causal_slot = first[:, None] + jnp.arange(n, dtype=jnp.int32)[None]
    if last_hidden is None:
        last_hidden = jnp.full_like(last_causal_slot, -1)
    columns = [last_causal_slot[..., None], last_hidden[..., None]]
    if visible is not None:
        columns.append(pack_bits(jnp.broadcast_to(visible, (batch, *visible.shape[1:]))))
    # Use the order of `_tiled`: repeat the columns of each query for all heads of a group.
    padded_columns = jnp.pad(jnp.concatenate(columns, axis=2), ((0, 0), (0, tiles * per_tile - n), (0, 0)))
    by_query = jnp.repeat(padded_columns.reshape(batch, tiles, per_tile, -1), group, axis=2)
    return jnp.pad(by_query, ((0, 0), (0, 0), (0, m - per_tile * group), (0, 0)))


def _table(first: Array, visible: Array | None, last_hidden: Array | None, shape: Shape, n: int) -> Array:
    """Return the table of all items, i32[4, B * T], with the entries of `tile_table` for each item.

    The tiles of a batch row are adjacent.
    """
    per_tile = shape.blocks.queries
    tile_tables = []
    for first_query in range(0, n, per_tile):
        end_query = min(first_query + per_tile, n)
        if visible is None:
            # The mask is causal. All queries of the tile attend to the slots before the first query, and the last query
            # attends to the slots up to its own slot.
            tile_first, region_rows = first + first_query, end_query - first_query
        else:
            tile_first, region_rows = first, visible.shape[2]
        tile_hidden = None if last_hidden is None else last_hidden[:, first_query:end_query]
        block_sizes = {"slots": shape.slots, "size": shape.blocks.slots, "align": shape.align}
        tile_tables.append(tile_table(tile_first, region_rows, tile_hidden, **block_sizes)[..., None])
    # Reshape [4, B, T] to [4, B * T], so that each item is a column.
    return jnp.concatenate(tile_tables, axis=2).reshape(RECENT + 1, -1)


def tile_table(
    first: Array, rows: int, last_hidden: Array | None, *, slots: int, size: int, align: int
) -> Array:
    """Return the table entries of one tile for all batch rows, i32[4, B]: `FIRST`, `BASE`, `COUNT` and `RECENT`.

    Args:
      first: i32[B]; all queries of the tile attend to the slots before this slot.
      rows: number of slots from `first` to the end of the region, or to the tile's last query if the mask is causal.
      last_hidden: i32[B, N]; last position that the window of each query hides; None: no window.
      slots: S, the number of slots in the cache.
      size: number of slots per block.
      align: the first slot of a block must be a multiple of this.

    >>> tile_table(jnp.asarray([3, 90]), 6, None, slots=96, size=16, align=1)[2].tolist()
    [1, 6]
    """
    first_slot, last_hidden_slot = jnp.zeros_like(first), jnp.full_like(first, -1)
    if last_hidden is not None:
        # Begin at the first slot that is inside the window of any query. In the region, positions may differ from
        # slots, so always read the whole region. The first block must fit in the cache.
        first_slot = jnp.clip(jnp.minimum(jnp.min(last_hidden, axis=1) + 1, first), 0, max(slots - size, 0))
        first_slot, last_hidden_slot = first_slot // align * align, jnp.max(last_hidden, axis=1)
    # Read the blocks from `first_slot` to the end of the region or of the cache, and at least one block.
    block_count = pl.cdiv(jnp.minimum(first + rows, slots) - first_slot, size)
    return jnp.stack([first, first_slot, jnp.maximum(block_count, 1), last_hidden_slot]).astype(jnp.int32)


class _Folded(NamedTuple):
    """Running softmax of each head over the blocks processed so far."""

    # `top` and `total` are repeated in all lanes, because they are combined with values in every lane. If they were
    # stored in one lane, every register of scores would need a permutation. For a draft tree, these permutations took
    # nearly half of the time spent on a block.
    top: Ref  # f32[K, M, 128], identical in all lanes; largest score
    total: Ref  # f32[K, M, 128], identical in all lanes; sum of the weights relative to `top`
    mixed: Ref  # f32[K, M, D]; sum of the weighted values


class _Core(NamedTuple):
    """DMA copies of one core. They start in the order of use and ahead of time, even across batch rows."""

    number: Array  # i32[]; index of the core, 0 or 1
    shape: Shape
    table: Ref  # i32[4 or 5, B T]; table in scalar memory
    # Keys and values [B, S, K, D] in HBM, followed by their scales f32[B, K, S], if there are any.
    sources: list[Ref]
    new_rows: list[Ref]  # new keys and values [B, W, K, D] in HBM, if there are any
    state: Ref  # i32[5]; state in scalar memory, see `ITEM`
    buffers: tuple[Ref, ...]  # buffers in VMEM, one for each source
    landed: list[Ref]  # semaphores [2] of the copies of new rows, if there are any
    arrived: Ref  # semaphores [buffers, sources] of the copies of blocks

    @property
    def rows(self) -> int:
        """Number of batch rows per core."""
        return self.shape.items // self.shape.tiles

    def row_of(self, item: Array) -> Array:
        """Return the batch row of an item."""
        return self.number * self.rows + lax.div(item, self.shape.tiles)

    def entry(self, name: int, item: Array) -> Array:
        """Return one table entry of an item; `name` is an index such as `FIRST`."""
        return self.table[name, self.number * self.shape.items + item]

    def start_of(self, item: Array, block: Array) -> Array:
        """Return the first slot of a block of an item."""
        size = self.shape.blocks.slots
        # A block that would end past the cache starts earlier, and repeats slots of the previous block.
        start = jnp.minimum(self.entry(BASE, item) + block * size, self.shape.slots - size)
        return pl.multiple_of(start, self.shape.align)

    def row_copies(self, i: Array) -> Iterator[Any]:
        """Yield the copies that write the new rows of batch row `i` of this core to the caches."""
        row = self.number * self.rows + i
        for source_index, (rows, cache) in enumerate(zip(self.new_rows, self.sources, strict=True)):
            slots = pl.ds(self.entry(WRITTEN, i * self.shape.tiles), rows.shape[1])
            yield pltpu.make_async_copy(rows.at[row], cache.at[row, slots], self.landed[0].at[source_index])

    def block_copies(self, row: Array, start: Array, buffer: Array) -> Iterator[Any]:
        """Yield the copies that read the block of slots that begins at `start` into a buffer."""
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
        """Start to write all new rows of this core and to copy its first blocks."""
        # On a chip with one core, the second half of the batch uses the same state as the first half, so reset it.
        for i in range(5):
            self.state[i] = 0
        if self.shape.writes:
            # Write the new rows of all batch rows now, because the blocks of a batch row are copied before its turn.
            def start_row(i: Array, _: int) -> int:
                for copy in self.row_copies(i):
                    copy.start()
                return 0

            lax.fori_loop(0, self.rows, start_row, 0)
        # Start filling all buffers except one. The first step of the first item starts filling that one.
        for _ in range(self.shape.blocks.buffers - 1):
            self.copy_next()

    def land(self) -> None:
        """Wait until all new rows of this core have been written."""

        def wait_for_row(i: Array, _: int) -> int:
            for copy in self.row_copies(i):
                copy.wait()
            return 0

        lax.fori_loop(0, self.rows, wait_for_row, 0)
        self.state[LANDED] = 1

    def copy_next(self) -> None:
        """Start copying the next block, of this item or the next one."""
        state, blocks = self.state, self.shape.blocks
        item, block = state[ITEM], state[BLOCK]

        @pl.when(item < self.shape.items)
        def _():
            start = self.start_of(item, block)
            if self.shape.writes:
                # Wait for the new rows only before the first block that contains any of them. The batch rows share
                # their semaphores, so wait until the new rows of all batch rows have been written.
                unwritten = state[LANDED] == 0
                pl.when(unwritten & (start + blocks.slots > self.entry(WRITTEN, item)))(self.land)

            # The buffers are used in turn.
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
    sinks: list[Ref],  # f32[K, M, 128], identical in all lanes; empty if there are no sinks
    out: Ref,  # [1, 1, K, M, D]
    caches: list[Ref],
    softmax: tuple[Ref, Ref, Ref],  # scratch memory of `_Folded`
    *copying: Any,  # scratch memory of `_Core`
    shape: Shape,
) -> None:
    """Process one item: compute the attention of its queries in a loop over the blocks of its batch row."""
    # New rows are written to the output caches, so read from these. On a TPU, they alias the input caches. In an
    # interpreter, they are separate arrays.
    core = _Core(pl.program_id(0), shape, table, caches or sources, new_rows, *copying)
    item = pl.program_id(1)
    block_slots = shape.blocks.slots
    pl.when(item == 0)(core.begin)
    row = core.row_of(item)
    first, base, last_hidden_slot = core.entry(FIRST, item), core.entry(BASE, item), core.entry(RECENT, item)
    # Start with an empty softmax. Use `LOWEST` instead of -inf, because all scores of a query in a block may be -inf,
    # and -inf - -inf is NaN.
    folded = _Folded(*softmax)
    for ref, value in zip(folded, (LOWEST, 0.0, 0.0), strict=True):
        ref[...] = jnp.full(ref.shape, value, ref.dtype)
    if sinks:
        # Start the running softmax with the sink. The sink's logit is the first maximum, so its weight is exp(0) = 1.
        folded.top[...] = sinks[0][...]
        folded.total[...] = jnp.ones(folded.total.shape, jnp.float32)

    def step(block: Array, _: int) -> int:
        # Start filling the buffer that the previous step used. The copy runs while the current block is processed.
        core.copy_next()
        # The slots from `own_start` on belong to this block. The last block of the cache may begin earlier, at `start`.
        start, own_start = core.start_of(item, block), base + block * block_slots
        buffer = lax.rem(core.state[USED], shape.blocks.buffers)
        for copy in core.block_copies(row, start, buffer):
            copy.wait()
        # A block needs no mask if all its slots are committed, no slot is repeated, and no window hides any slot.
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
    # Divide by the denominator of the softmax. It is 0 if a query attends to no slot, and the result is then 0.
    for head in range(q.shape[2]):
        total = folded.total[head]
        normalised = folded.mixed[head] / _wide(jnp.where(total == 0, 1.0, total), out.shape[-1])
        out[0, 0, head] = normalised.astype(out.dtype)


def _attend_block(q: Ref, folded: _Folded, core: _Core, buffer: Array, mask: Array | None) -> None:
    """Update the softmax and the weighted sum of every query with the block in a buffer."""
    buffers, cap, scale = core.buffers, core.shape.cap, core.shape.scale
    for head in range(q.shape[2]):
        keys, values = (_of_head(ref, buffer, head, q.dtype, core.shape.simulated) for ref in buffers[:2])
        scores = lax.dot_general(
            q[0, 0, head], keys, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        )
        # f32[M, slots]. Without a cap, the scale includes the factor log2(e). With a cap, this factor is applied after
        # the tanh.
        scores = scores * (scale if cap is not None else scale * LOG2_E)
        if len(buffers) > 2:
            # Multiply by the scales of the keys. There is one scale per slot, which is a lane of the scores.
            scores = scores * buffers[2][buffer, pl.ds(head, 1)]
        if cap is not None:
            scores = cap * LOG2_E * jnp.tanh(scores / cap)
        if mask is not None:
            scores = jnp.where(mask, scores, -jnp.inf)
        # Update the running softmax. If the maximum increases, rescale the earlier sums.
        previous_top = folded.top[head]
        top = jnp.maximum(previous_top, jnp.max(scores, axis=1, keepdims=True))
        weights, rescale = jnp.exp2(scores - _wide(top, scores.shape[1])), jnp.exp2(previous_top - top)
        folded.top[head] = top
        folded.total[head] = folded.total[head] * rescale + jnp.sum(weights, axis=1, keepdims=True)
        if len(buffers) > 2:
            # Multiply by the scales of the values, which are not part of the denominator.
            weights = weights * buffers[3][buffer, pl.ds(head, 1)]
        folded.mixed[head] = folded.mixed[head] * _wide(rescale, values.shape[1]) + jnp.dot(
            weights.astype(values.dtype), values, preferred_element_type=jnp.float32
        )


def _wide(x: Array, width: int) -> Array:
    """Widen f32[M, 128] with identical lanes to f32[M, width]. This needs no permutation across lanes."""
    return jnp.concatenate([x] * pl.cdiv(width, LANES), axis=1)[:, :width]


def _mask(columns: Array, first: Array, start: Array, own_start: Array, size: int, *, causal: bool) -> Array:
    """Return the mask bool[M, size] of a block, from the columns i32[M, 2 + words] of the queries."""
    slot = start + lax.broadcasted_iota(jnp.int32, (columns.shape[0], size), 1)
    # bool[M, size]; True if the slot is inside the window.
    in_window = slot > columns[:, AFTER : AFTER + 1]
    if causal:
        visible = (slot <= columns[:, UPPER : UPPER + 1]) & in_window
    else:
        # Bit r % 32 of word r // 32 is set if the query attends to row r of the region. `region_row` is negative for
        # slots before the region.
        region_row = slot - first
        word = jnp.zeros_like(region_row)
        for i in range(columns.shape[1] - WORDS):
            word = jnp.where(region_row >> 5 == i, columns[:, WORDS + i : WORDS + i + 1], word)
        # For slots after the region, the bit is 0. The bitmask already includes the window.
        row_bit = (word >> (region_row & 31)) & 1
        visible = jnp.where(region_row < 0, in_window.astype(jnp.int32), row_bit) == 1
    # Mask the slots before `own_start`, which the previous block has already processed.
    return visible & (slot >= own_start)


def _of_head(ref: Ref, buffer: Array, head: int, dtype: DTypeLike, simulated: bool) -> Array:
    """Return the keys or values [slots, D] of one head, from a block [parts, slots, K, lanes].

    In a narrow dtype, two or four heads share a 32-bit word. A strided load reads the words, and shifts extract the
    head.
    """
    if len(ref.shape) == 3:
        # A flat cache has a single head.
        return ref[buffer].astype(dtype)
    _, parts, size, heads, width = ref.shape
    packing = 4 // jnp.dtype(ref.dtype).itemsize
    # A slot has `slot_words` words of 32 bits, each of which contains one number from each of `packing` heads.
    # `place_in_word` is the head's place within its word, counted from the low bits.
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
        # Row s * slot_words + w contains word w of slot s, so a stride of `slot_words` reads one word of every slot.
        rows = block.reshape(size * slot_words, width)[pl.ds(head // packing, size, stride=slot_words), :]
        if packing == 2:
            # The bits of a bfloat16 number are the upper half of the bits of the same float32 number.
            rows = rows << 16 if place_in_word == 0 else rows & jnp.uint32(0xFFFF0000)
            rows = pltpu.bitcast(rows, jnp.float32)
        elif packing == 4:
            # Sign-extend the byte: shift it to the top of the word and back.
            rows = (pltpu.bitcast(rows << (8 * (3 - place_in_word)), jnp.int32) >> 24).astype(jnp.float32)
        head_parts.append(rows.astype(dtype))
    return jnp.concatenate(head_parts, axis=1)
