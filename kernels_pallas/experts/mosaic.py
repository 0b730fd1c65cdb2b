"""TPU kernels that multiply rows, sorted by expert, by the int8 or MXFP4 matrices of their experts.

On v5p and v6e, XLA's ragged product first copies all experts into a different layout, and Megablox does not support
these dtypes. The kernels of this module read only the matrices of experts that have rows, in the layout in which they
are stored. MXFP4 matrices are dequantised exactly, one block at a time.

The kernels iterate over visits. A visit is a pair of a row tile and an expert that has rows in this tile. For each
visit, a kernel multiplies the whole tile by the expert's matrix, and masks the rows of other experts, as in Megablox
(arXiv 2211.15841).

Tested against the product of each row with its expert's dequantised matrix (tests/models/test_moe.py).

Dimensions: R rows, K inputs, N outputs, X experts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import Array, Ref, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.common import LANES, Interpret, block_width, round_up
from kernels_pallas.experts.xla import mxfp4_numbers, mxfp4_powers

ROWS = 128
"""Maximum number of rows per tile."""
WEIGHT_BYTES = 2**21
"""Maximum number of bytes per block of a matrix. Two such blocks must fit in fast memory, together with a copy of one
of them in the dtype of x."""
MXFP4_WIDTH = 256
"""Maximum number of outputs per block of an MXFP4 matrix. The kernel converts a block to 32 bits before the product, so
blocks must be small."""


def outer_block(outer: int, inner: int) -> int:
    """Return the number of outputs per block of an int8 matrix, such that a block takes at most `WEIGHT_BYTES`.

    >>> outer_block(1536, 4096), outer_block(768, 2048), outer_block(96, 64)
    (512, 768, 96)
    """
    return block_width(outer, max(LANES, WEIGHT_BYTES // inner // LANES * LANES))


def visits(sizes: Array, tiles: int, rows: int) -> tuple[Array, Array, Array]:
    """List the visits in the order of the rows.

    Args:
      sizes: i32[X]; number of rows of each expert.
      tiles: number of row tiles.
      rows: number of rows per tile.

    Returns:
      The expert and the tile of every visit, i32[tiles + X - 1] each, and the number of visits, i32[]. Later entries
      are padding. The number is at least 1, because a grid must not be empty.

    >>> experts, tiles, count = visits(jnp.asarray([3, 0, 2], jnp.int32), 2, 4)
    >>> experts[:3].tolist(), tiles[:3].tolist(), int(count)
    ([0, 2, 2], [0, 0, 1], 3)
    """
    # The rows of expert e are row_ends[e] - sizes[e] to row_ends[e] - 1. `visit_ends[e]` is the total number of visits
    # to experts 0 to e.
    row_ends = jnp.cumsum(sizes)
    first_tile = (row_ends - sizes) // rows
    visit_counts = jnp.where(sizes > 0, (row_ends - 1) // rows - first_tile + 1, 0)
    visit_ends = jnp.cumsum(visit_counts)
    visit = jnp.arange(tiles + sizes.shape[0] - 1)
    # Visit v belongs to the first expert with visit_ends > v. `minimum` and `clip` only affect the padding.
    visit_expert = jnp.minimum(jnp.sum(visit_ends[None] <= visit[:, None], axis=1), sizes.shape[0] - 1)
    visit_tile = first_tile[visit_expert] + visit - (visit_ends - visit_counts)[visit_expert]
    visit_tile, count = jnp.clip(visit_tile, 0, tiles - 1), jnp.maximum(visit_ends[-1], 1)
    return visit_expert.astype(jnp.int32), visit_tile.astype(jnp.int32), count.astype(jnp.int32)


def dense_by_expert_int8(
    x: Array, values: Array, scale: Array, sizes: Array, *, interpret: Interpret = False
) -> Array:
    """Compute `xla.dense_by_expert_int8` with a TPU kernel."""
    num_inputs, num_outputs = x.shape[1], scale.shape[1]
    # JAX chooses the layout with the least padding, and stores a matrix by columns if its rows do not fill registers.
    by_columns = num_inputs % 128 != 0 and num_outputs % 128 == 0
    if by_columns:
        values = values.swapaxes(1, 2)  # [X, K, N]; this is the stored layout, so nothing is copied
    return _by_expert(
        functools.partial(_int8_product, inner_axis=int(not by_columns)),
        x,
        [(values, int(by_columns) + 1), (scale[:, None], 2)],
        sizes,
        outer_block(num_outputs, num_inputs),
        interpret=interpret,
    )


def dense_by_expert_mxfp4(
    x: Array, values: Array, scale: Array, sizes: Array, *, interpret: Interpret = False
) -> Array:
    """Compute `xla.dense_by_expert_mxfp4` with a TPU kernel.

    XLA copies the scales of all experts, which make up 1/17 of the matrices' bytes, to another layout.
    """
    # Byte j contains inputs 2j and 2j + 1. Reorder the inputs of x so that the even ones come first.
    x = jnp.concatenate([x[:, ::2], x[:, 1::2]], axis=1)
    # Matrices whose rows do not fill registers are stored by columns (see `dense_by_expert_int8`).
    matrices = [(values.swapaxes(1, 2), 2), (scale.swapaxes(1, 2), 2)]
    width = block_width(values.shape[1], MXFP4_WIDTH)
    return _by_expert(_mxfp4_product, x, matrices, sizes, width, interpret=interpret)


def _by_expert(
    product: Callable[..., Array],
    x: Array,
    matrices: Sequence[tuple[Array, int]],
    sizes: Array,
    out_width: int,
    *,
    interpret: Interpret,
) -> Array:
    """Multiply each row by the matrix of its expert, with one grid step per visit and block of outputs.

    Args:
      product: computes f32[rows, out_width] from a tile of x and references to blocks of an expert's matrices.
      x: [R, K]; rows sorted by expert.
      matrices: (array, output axis) pairs. The arrays [X, ., .] together represent the experts' matrices; each is
        divided into blocks along its output axis.
      sizes: i32[X]; number of rows of each expert.
      out_width: number of outputs per block.
      interpret: see `kernels_pallas.common.Interpret`.
    """
    (row_count, num_inputs), (array, axis) = x.shape, matrices[0]
    num_outputs = array.shape[axis]
    tile_rows = min(ROWS, round_up(row_count, 16))
    num_tiles = pl.cdiv(row_count, tile_rows)
    x = jnp.pad(x, ((0, num_tiles * tile_rows - row_count), (0, 0)))
    sizes = sizes.astype(jnp.int32)
    experts, tiles, num_visits = visits(sizes, num_tiles, tile_rows)
    row_ends = jnp.cumsum(sizes, dtype=jnp.int32)

    def spec(array: Array, axis: int) -> pl.BlockSpec:
        if axis == 1:
            return pl.BlockSpec(
                (None, out_width, array.shape[2]), lambda n, v, experts, *_: (experts[v], n, 0)
            )
        return pl.BlockSpec((None, array.shape[1], out_width), lambda n, v, experts, *_: (experts[v], 0, n))

    padded_product = pl.pallas_call(
        functools.partial(_kernel, product=product),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            # Prefetch the visits and the bounds of the experts' rows as scalars, because the block indices depend on
            # the visits.
            num_scalar_prefetch=4,
            # The visits to a tile are consecutive, so its results stay in fast memory between them.
            grid=(pl.cdiv(num_outputs, out_width), num_visits),
            in_specs=[
                pl.BlockSpec((tile_rows, num_inputs), lambda n, v, experts, tiles, *_: (tiles[v], 0)),
                *[spec(array, axis) for array, axis in matrices],
            ],
            out_specs=pl.BlockSpec((tile_rows, out_width), lambda n, v, experts, tiles, *_: (tiles[v], n)),
        ),
        out_shape=jax.ShapeDtypeStruct((num_tiles * tile_rows, num_outputs), jnp.float32),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=32 * 2**20
        ),
        interpret=interpret,
        name="dense_by_expert",
    )(experts, tiles, row_ends - sizes, row_ends, x, *[array for array, _ in matrices])
    return padded_product[:row_count]


def _kernel(
    expert: Ref, tile: Ref, begins: Ref, ends: Ref, x_ref: Ref, *refs: Ref, product: Callable[..., Array]
) -> None:
    """Compute one block of outputs for one visit.

    Args:
      expert, tile: i32[visits]; expert and row tile of each visit.
      begins, ends: i32[X]; first row of each expert, and the row after its last row.
      x_ref: [rows, K]; row tile of x.
      refs: blocks of the expert's matrices, then the output f32[rows, width].
      product: see `_by_expert`.
    """
    *matrix_refs, out = refs
    visit = pl.program_id(1)
    expert_id, tile_id = expert[visit], tile[visit]
    y = product(x_ref[...], *matrix_refs)
    # A tile with rows of several experts is visited once for each of these experts. Write only this expert's rows.
    row = tile_id * y.shape[0] + lax.broadcasted_iota(jnp.int32, y.shape, 0)
    in_expert = (row >= begins[expert_id]) & (row < ends[expert_id])
    # On the first visit to a tile, `out` is not initialised. Together, the visits to a tile write every row that has an
    # expert. Other rows remain undefined.
    out[...] = jnp.where(in_expert, y, out[...])


def _product(x: Array, w: Array, inner_axis: int) -> Array:
    # If x is bfloat16, one pass of the matrix unit multiplies it exactly by int8 or MXFP4 numbers. If x is float32,
    # several passes are needed.
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    dimensions = (((1,), (inner_axis,)), ((), ()))
    w = w.astype(x.dtype)
    return lax.dot_general(x, w, dimensions, precision=precision, preferred_element_type=jnp.float32)


def _int8_product(x: Array, w_ref: Ref, scale: Ref, *, inner_axis: int) -> Array:
    """Multiply x by weights i8[width, K], or i8[K, width] if `inner_axis` is 0, and by scales f32[1, width]."""
    return _product(x, w_ref[...], inner_axis) * scale[...]


def _mxfp4_product(x: Array, values: Ref, scale: Ref) -> Array:
    """Multiply x by values u8[K / 2, width] with scales u8[K / 32, width]. In x, even inputs come before odd ones."""
    codes, powers = values[...].astype(jnp.int32), mxfp4_powers(scale[...])
    groups, width = powers.shape
    # Each power of two applies to a block of 32 inputs, which take up 16 bytes.
    powers = jnp.broadcast_to(powers[:, None], (groups, 16, width)).reshape(-1, width)
    halves = [(mxfp4_numbers(half) * powers).astype(x.dtype) for half in (codes & 15, codes >> 4)]
    return _product(x, jnp.concatenate(halves), 0)
