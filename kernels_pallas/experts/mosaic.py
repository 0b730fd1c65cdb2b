"""TPU kernel for int8 products in a mixture of experts: rows sorted by expert, each times its expert's matrix.

R rows, K inner and N outer width, X experts. On v5p and v6e XLA's ragged product first copies all experts into a
different layout, and Megablox does not support int8. This kernel reads only the matrices of experts that have rows,
once each, in their stored layout. Oracle: each row times its dequantised matrix (tests/models/test_moe.py).

A visit is a (row tile, expert) pair such that the tile contains rows of the expert. A visit multiplies the whole tile
by the expert's matrix and masks the rows of other experts, as in Megablox (arXiv 2211.15841).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import Array, Ref, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.common import LANES, Interpret, block_width, round_up

ROWS = 128
"""Maximum rows per tile."""
WEIGHT_BYTES = 2**21
"""Maximum bytes per matrix block. Fast memory holds two such blocks and the wider copy that is multiplied."""


def outer_block(outer: int, inner: int) -> int:
    """Return the number of outputs per block: whole int8 registers, and at most `WEIGHT_BYTES`.

    >>> outer_block(1536, 4096), outer_block(768, 2048), outer_block(96, 64)
    (512, 768, 96)
    """
    return block_width(outer, max(LANES, WEIGHT_BYTES // inner // LANES * LANES))


def visits(sizes: Array, tiles: int, rows: int) -> tuple[Array, Array, Array]:
    """Return (experts, tiles, count): the expert and the tile of every visit, i32[tiles + X - 1] each, in row order.

    Only the first `count` visits, an i32[], are real. `count` is at least 1, because a grid must not be empty.

    >>> experts, tiles, count = visits(jnp.asarray([3, 0, 2], jnp.int32), 2, 4)
    >>> experts[:3].tolist(), tiles[:3].tolist(), int(count)
    ([0, 2, 2], [0, 0, 1], 3)
    """
    # Expert e has the rows [row_ends - sizes, row_ends). `visit_ends` counts the visits of e and of the experts before.
    row_ends = jnp.cumsum(sizes)
    first_tile = (row_ends - sizes) // rows
    visit_counts = jnp.where(sizes > 0, (row_ends - 1) // rows - first_tile + 1, 0)
    visit_ends = jnp.cumsum(visit_counts)
    visit = jnp.arange(tiles + sizes.shape[0] - 1)
    # Visit v belongs to the first expert with visit_ends > v. The clamps apply to visits that are not real.
    visit_expert = jnp.minimum(jnp.sum(visit_ends[None] <= visit[:, None], axis=1), sizes.shape[0] - 1)
    visit_tile = first_tile[visit_expert] + visit - (visit_ends - visit_counts)[visit_expert]
    visit_tile, count = jnp.clip(visit_tile, 0, tiles - 1), jnp.maximum(visit_ends[-1], 1)
    return visit_expert.astype(jnp.int32), visit_tile.astype(jnp.int32), count.astype(jnp.int32)


def dense_by_expert_int8(
    x: Array, values: Array, scale: Array, sizes: Array, *, interpret: Interpret = False
) -> Array:
    """See `api.dense_by_expert_int8`."""
    row_count, num_inputs = x.shape
    num_outputs = scale.shape[1]
    tile_rows = min(ROWS, round_up(row_count, 16))
    num_tiles, out_width = pl.cdiv(row_count, tile_rows), outer_block(num_outputs, num_inputs)
    x = jnp.pad(x, ((0, num_tiles * tile_rows - row_count), (0, 0)))
    sizes = sizes.astype(jnp.int32)
    experts, tiles, num_visits = visits(sizes, num_tiles, tile_rows)
    row_ends = jnp.cumsum(sizes, dtype=jnp.int32)
    # JAX picks the layout with the least padding: a matrix whose rows do not fill registers is stored by columns.
    if num_inputs % 128 != 0 and num_outputs % 128 == 0:
        # A view of the stored layout, [X, K, N], whose blocks are columns.
        values, inner_axis = values.swapaxes(1, 2), 0
        block_shape, block_index = (num_inputs, out_width), lambda n: (0, n)
    else:
        inner_axis = 1
        block_shape, block_index = (out_width, num_inputs), lambda n: (n, 0)
    padded_product = pl.pallas_call(
        functools.partial(_kernel, inner_axis=inner_axis),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            # The visits and the bounds of the experts' rows are scalars, from which the block indices are computed.
            num_scalar_prefetch=4,
            # The visits of a tile are consecutive, so its results stay in fast memory between them.
            grid=(pl.cdiv(num_outputs, out_width), num_visits),
            in_specs=[
                pl.BlockSpec((tile_rows, num_inputs), lambda n, v, experts, tiles, *_: (tiles[v], 0)),
                pl.BlockSpec((None, *block_shape), lambda n, v, experts, *_: (experts[v], *block_index(n))),
                pl.BlockSpec((None, 1, out_width), lambda n, v, experts, *_: (experts[v], 0, n)),
            ],
            out_specs=pl.BlockSpec((tile_rows, out_width), lambda n, v, experts, tiles, *_: (tiles[v], n)),
        ),
        out_shape=jax.ShapeDtypeStruct((num_tiles * tile_rows, num_outputs), jnp.float32),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=32 * 2**20
        ),
        interpret=interpret,
        name="dense_by_expert_int8",
    )(experts, tiles, row_ends - sizes, row_ends, x, values, scale[:, None])
    return padded_product[:row_count]


def _kernel(
    expert: Ref,
    tile: Ref,
    begins: Ref,
    ends: Ref,
    x_ref: Ref,
    w_ref: Ref,
    scale: Ref,
    out: Ref,
    *,
    inner_axis: int,
) -> None:
    """Compute one visit for one block of outputs.

    Args:
      expert, tile: i32[visits].
      begins, ends: i32[X]; the first row of each expert, and the row after its last one.
      x_ref: [rows, K].
      w_ref: i8[width, K], or i8[K, width] if `inner_axis` is 0.
      scale: f32[1, width].
      out: f32[rows, width].
    """
    visit = pl.program_id(1)
    expert_id, tile_id = expert[visit], tile[visit]
    x = x_ref[...]
    # Products of int8 and bfloat16 numbers are exact in one pass of the matrix unit; float32 rows need several.
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    dimensions = (((1,), (inner_axis,)), ((), ()))
    w = w_ref[...].astype(x.dtype)
    product = lax.dot_general(x, w, dimensions, precision=precision, preferred_element_type=jnp.float32)
    # Rows are sorted by expert, and a tile that holds rows of several experts is visited once for each.
    row = tile_id * x.shape[0] + lax.broadcasted_iota(jnp.int32, product.shape, 0)
    in_expert = (row >= begins[expert_id]) & (row < ends[expert_id])
    # At a tile's first visit `out` is uninitialised. The tile's visits overwrite every row that has an expert; other
    # rows stay undefined.
    out[...] = jnp.where(in_expert, product * scale[...], out[...])
