"""TPU attention over a key-value cache: DMA copies in the used slots of each row and reads nothing else.

B batch, N queries, K key-value heads, G query heads per key-value head, D head dimension, S slots, R rows of the
region, M = N * G queries of a head in one tile, T tiles. Oracle: `reference.tree_attention`.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.blocks import LANES, AttentionBlocks, attention_blocks, tile_rows
from kernels_pallas.mask import pack, region
from kernels_pallas.mosaic.attend import RECENT, Shape, attend_rows
from kernels_pallas.new_rows import NewRows


def tree_attention(
    q: Array,
    k: Array,
    v: Array,
    first: Array,
    *,
    seen: Array | None,
    positions: Array,
    seen_positions: Array | None,
    window: int | None,
    cap: float | None,
    scale: float,
    k_scale: Array | None,
    v_scale: Array | None,
    new: NewRows | None = None,
    blocks: AttentionBlocks | None = None,
    interpret: Any = False,
) -> Any:
    """See `kernels_pallas.tree_attention` and, with `new`, which needs a cache that is not flat, `write_and_attend`."""
    batch, n, heads, group, dim = q.shape
    slots = k.shape[1]
    blocks, align = attention_blocks(
        blocks,
        n=n,
        heads=heads,
        group=group,
        dim=dim,
        slots=slots,
        dtype=k.dtype,
        scaled=k_scale is not None,
    )
    inside, hidden_until = region(seen, positions, seen_positions, window)
    rows = n if inside is None else inside.shape[2]
    # Products are in the dtype of the cache, or in that of the queries if the cache is int8.
    dtype = k.dtype if k_scale is None else q.dtype
    tiles, per_tile = pl.cdiv(n, blocks.queries), blocks.queries
    queries = _tiled(q.astype(dtype), tiles, per_tile)
    m = queries.shape[3]
    visibility = _known(first, inside, hidden_until, n, tiles * per_tile).reshape(batch, tiles, per_tile, -1)
    visibility = jnp.repeat(visibility, group, axis=2)
    visibility = jnp.pad(visibility, ((0, 0), (0, 0), (0, m - per_tile * group), (0, 0)))
    # With a causal mask each tile reads up to its last query; with any other mask it reads the whole region.
    parts = [(t * per_tile, min((t + 1) * per_tile, n)) for t in range(tiles)]
    table = jnp.concatenate(
        [
            tile_table(
                first + (begin if inside is None else 0),
                end - begin if inside is None else rows,
                None if hidden_until is None else hidden_until[:, begin:end],
                slots=slots,
                size=blocks.slots,
                align=align,
            )[..., None]
            for begin, end in parts
        ],
        axis=2,
    ).reshape(RECENT + 1, batch * tiles)
    if new is not None:
        table = jnp.concatenate([table, jnp.repeat(new.slot.astype(jnp.int32), tiles)[None]])

    simulated = isinstance(interpret, pltpu.InterpretParams)
    cores = 2 if batch % 2 == 0 else 1
    items = batch // cores * tiles

    def query_block(c: Array, i: Array, _: Any) -> tuple[Array, Array, int, int, int]:
        return (c * (batch // cores) + lax.div(i, tiles), lax.rem(i, tiles), 0, 0, 0)

    shape = Shape(
        heads=heads,
        slots=slots,
        align=align,
        tiles=tiles,
        items=items,
        cap=cap,
        scale=scale,
        causal=inside is None,
        writes=new is not None,
    )
    by_heads = pl.BlockSpec((1, 1, heads, m, dim), query_block)
    sources, scratch = [k, v], []
    if is_flat(k):
        sources = [x.reshape(batch, slots, dim) for x in sources]
        buffer_shape = (blocks.slots, dim)
    else:
        # Heads wider than the lanes are copied in parts, because a strided load reads rows of one register's width.
        width = LANES if dim % LANES == 0 else dim
        buffer_shape = (dim // width, blocks.slots, heads, width)
    if not interpret:
        # Otherwise XLA, given the cost estimate, would move a whole cache into fast memory if it fits.
        sources = [pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in sources]
    scratch += [pltpu.VMEM((blocks.buffers, *buffer_shape), k.dtype) for _ in sources]
    if k_scale is not None and v_scale is not None:
        sources += [jnp.swapaxes(x, 1, 2) for x in (k_scale, v_scale)]
        scratch += [pltpu.VMEM((blocks.buffers, heads, blocks.slots), jnp.float32) for _ in range(2)]
    arrived = pltpu.SemaphoreType.DMA((blocks.buffers, len(sources)))
    in_memory = pl.BlockSpec(memory_space=pltpu.HBM)
    out_specs, out_shape, aliases = [by_heads], [jax.ShapeDtypeStruct(queries.shape, q.dtype)], {}
    if new is not None:
        sources += [rows.astype(k.dtype) for rows in (new.k, new.v)]
        scratch.append(pltpu.SemaphoreType.DMA((2,)))
        out_specs += [in_memory, in_memory]
        out_shape += [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (k, v)]
        aliases = {
            3: 1,
            4: 2,
        }  # keys and values; inputs 0 to 2 are the table, the queries and their columns
    scratch.append(arrived)
    out, *caches = pl.pallas_call(
        functools.partial(attend_rows, shape=shape, blocks=blocks, simulated=simulated),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(cores, items),
            in_specs=[
                by_heads,
                pl.BlockSpec((1, 1, m, visibility.shape[3]), lambda *index: query_block(*index)[:4]),
                *[in_memory for _ in sources],
            ],
            out_specs=out_specs,
            scratch_shapes=[
                pltpu.VMEM((heads, m, LANES), jnp.float32),
                pltpu.VMEM((heads, m, LANES), jnp.float32),
                pltpu.VMEM((heads, m, dim), jnp.float32),
                pltpu.SMEM((5,), jnp.int32),
                *scratch,
            ],
        ),
        out_shape=out_shape,
        input_output_aliases=aliases,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=_cost(queries, k),
        interpret=interpret,
        name=f"tree_attention-bq{per_tile}-bkv{blocks.slots}",  # identifies the schedule
    )(table, queries, visibility, *sources)
    out = out[:, :, :, : per_tile * group].reshape(batch, tiles, heads, per_tile, group, dim)
    out = jnp.moveaxis(out, 2, 3).reshape(batch, tiles * per_tile, heads, group, dim)[:, :n]
    return (out, *caches) if caches else out


def _cost(queries: Array, k: Array) -> pl.CostEstimate:
    """Return the cost of a call whose rows are all full. XLA uses it to decide on prefetches during the call."""
    batch, tiles, heads, m, dim = queries.shape
    scores = batch * tiles * heads * m * k.shape[1]
    return pl.CostEstimate(
        flops=4 * scores * dim,
        transcendentals=scores,
        bytes_accessed=2 * tiles * k.size * k.dtype.itemsize + 2 * queries.size * queries.dtype.itemsize,
    )


def _tiled(q: Array, tiles: int, per_tile: int) -> Array:
    """Return q [B, N, K, G, D] as [B, T, K, M, D], padded to whole tiles of memory."""
    batch, n, heads, group, dim = q.shape
    q = jnp.pad(q, ((0, 0), (0, tiles * per_tile - n), (0, 0), (0, 0), (0, 0)))
    q = jnp.moveaxis(q.reshape(batch, tiles, per_tile, heads, group, dim), 2, 3)
    q = q.reshape(batch, tiles, heads, per_tile * group, dim)
    return jnp.pad(q, ((0, 0), (0, 0), (0, 0), (0, -per_tile * group % tile_rows(q.dtype)), (0, 0)))


def _known(first: Array, inside: Array | None, after: Array | None, n: int, padded: int) -> Array:
    """Return the columns of the queries, i32[B, padded, 2 + words]; padding after the first N sees no region rows."""
    upper = first[:, None] + jnp.arange(n, dtype=jnp.int32)[None]
    columns = [upper[..., None], jnp.full_like(upper, -1)[..., None] if after is None else after[..., None]]
    if inside is not None:
        columns.append(pack(jnp.broadcast_to(inside, (first.shape[0], *inside.shape[1:]))))
    return jnp.pad(jnp.concatenate(columns, axis=2), ((0, 0), (0, padded - n), (0, 0)))


def tile_table(first: Array, rows: int, after: Array | None, *, slots: int, size: int, align: int) -> Array:
    """Return the table entries of one tile of every row, i32[4, B]: `FIRST`, `BASE`, `COUNT` and `RECENT`.

    Args:
      first: i32[B]; all queries of the tile see the slots before it.
      rows: R, or the rows up to the tile's last query.
      after: i32[B, N], the last position that each query's window hides, or None.
      slots: S.
      size: slots of a block.
      align: the first slot of a block is a multiple of this.

    >>> tile_table(jnp.asarray([3, 90]), 6, None, slots=96, size=16, align=1)[2].tolist()
    [1, 6]
    """
    base, recent = jnp.zeros_like(first), jnp.full_like(first, -1)
    if after is not None:
        # In the region a position may differ from its slot, so always read the whole region.
        base = jnp.clip(jnp.minimum(jnp.min(after, axis=1) + 1, first), 0, max(slots - size, 0))
        base, recent = base // align * align, jnp.max(after, axis=1)
    # Read blocks from `base` to the end of the region, clipped to the cache, and at least one.
    count = pl.cdiv(jnp.minimum(first + rows, slots) - base, size)
    return jnp.stack([first, base, jnp.maximum(count, 1), recent]).astype(jnp.int32)


def is_flat(k: Array) -> bool:
    """Return True if a cache is read as [B, S, D], because slots rather than heads share 32-bit words."""
    return k.shape[2] == 1 and jnp.dtype(k.dtype).itemsize < 4
