"""TPU kernel for products with grouped int4 weights, which unpacks them in registers and multiplies in bfloat16.

XLA computes one product per group, scales the results and adds them up. For 60 rows and groups of 32, these products
take far longer than reading the weights. The kernel reads the matrix in the layout in which it is stored.

Each 32-bit word contains the weights of eight consecutive inputs for one output. A shift, a mask and an exclusive-or
convert the weights of inputs k and k + 4 of a word to two bfloat16 numbers, 24 + v for a weight v. These numbers are
between 16 and 32, so the top four bits of their mantissa are v + 8. This conversion changes the order of the inputs, so
a product with a permutation matrix, which is exact, reorders x in the same way.

The scales multiply the results of each group, so that the weights need no rounding. The offsets are adjusted to cancel
the 24. A chunk is 128 inputs, the depth of a matrix unit. If a chunk has several groups, each row of x is split into
one row per group, with 0 in the other groups. The kernel stores the scales of a chunk as 8 rows, which line up with 8
rows of results. At the end, it adds up the results of rows that come from the same row of x. If the split results in
too many rows, as it does for a draft tree, the weights are instead scaled before the product and rounded to bfloat16,
as in a dequantised model.

Tested against the product with the dequantised matrix (tests/kernels/test_int4.py).

Dimensions: R rows, K inputs, N outputs, G groups of `size` inputs.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, Ref, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.common import SUBLANES, TWO_CORES, Interpret, block_width, round_up
from kernels_pallas.int4.shapes import CHUNK, ROWS

INNER = 2048
"""Maximum number of inputs per block."""
WEIGHTS = 2**20, 2**21
"""Maximum number of weights per block: the first for chips before v6e, the second for v6e and later. Blocks are small
because the copy of the first block does not overlap with any computation. On v6e and later, computing a block takes
about as long as copying it, so larger blocks leave fewer gaps between blocks."""
SCALES = 2**18
"""Maximum number of scales for the outputs of a block, over all groups. Each scale takes 16 to 28 bytes of fast memory,
and a v4 has 16 MB."""
BIAS = 24
"""The unpacked value of a weight of 0."""


def block_sizes(inputs: int, outputs: int, groups: int, *, in_bfloat16: bool) -> tuple[int, int]:
    """Return the numbers of inputs and outputs per block.

    Args:
      inputs, outputs: shape of the matrix.
      groups: G, the number of groups.
      in_bfloat16: whether weights are scaled in bfloat16, as on v6e and later chips.

    >>> block_sizes(13824, 5120, 108, in_bfloat16=False)
    (1536, 640)
    """
    inner = block_width(inputs, INNER)
    # The scales and offsets of all groups must fit in fast memory together with a block.
    return inner, block_width(outputs, max(128, min(WEIGHTS[in_bfloat16] // inner, SCALES // groups)))


def dense_int4(
    x: Array, values: Array, scale: Array, offset: Array, *, chip: str, interpret: Interpret = False
) -> Array:
    """Multiply x by the matrix `values * scale + offset`; return f32[R, N].

    `shapes.supports_product` defines the shapes that the kernel supports.

    Args:
      x: bf16[R, K].
      values: i4[G, size, N].
      scale: f16[G, N].
      offset: f32[G, N].
      chip: JAX's name for the device kind. On v6e and later chips, weights are scaled in bfloat16, with scales rounded
        to bfloat16. Earlier chips can scale only in float32.
      interpret: see `kernels_pallas.common.Interpret`.
    """
    (row_count, inputs), (groups, group_size, outputs) = x.shape, values.shape
    groups_per_chunk = CHUNK // group_size
    # If the rows of x still fit in one product after each is split into one row per group, scale the results of each
    # group. Otherwise scale the weights.
    by_group = groups_per_chunk * row_count <= ROWS or groups_per_chunk == 1
    in_bfloat16 = not chip.startswith(("TPU v4", "TPU v5"))
    block_inputs, block_outputs = block_sizes(inputs, outputs, groups, in_bfloat16=in_bfloat16)
    input_blocks, block_groups = inputs // block_inputs, block_inputs // group_size
    parts, scale_rows = 1, block_groups
    if by_group and groups_per_chunk > 1:
        parts = groups_per_chunk
        x = _row_per_group(x, group_size, parts)
        # Store 8 rows of scales per chunk, one for each of 8 rows of a product (see `_start_total`).
        scale_rows = block_inputs // CHUNK * SUBLANES
    padded_rows = round_up(len(x), SUBLANES)
    x = jnp.pad(x, ((0, padded_rows - len(x)), (0, 0)))
    cores = 2 if chip in TWO_CORES and outputs // block_outputs % 2 == 0 else 1
    turns = outputs // block_outputs // cores

    # Grid index (c, j, i) stands for core c, its j-th block of outputs, and the i-th block of inputs.
    def column(c: Array, j: Array, i: Array) -> tuple[int, Array]:
        return 0, c * turns + j

    padded_product = pl.pallas_call(
        functools.partial(_kernel, by_group=by_group, in_bfloat16=in_bfloat16),
        grid=(cores, turns, input_blocks),
        in_specs=[
            pl.BlockSpec((padded_rows, inputs), lambda c, j, i: (0, 0)),
            pl.BlockSpec((block_groups, group_size, block_outputs), lambda c, j, i: (i, 0, c * turns + j)),
            pl.BlockSpec((groups, block_outputs), column),
            pl.BlockSpec((groups, block_outputs), column),
        ],
        out_specs=pl.BlockSpec((padded_rows // parts, block_outputs), column),
        out_shape=jax.ShapeDtypeStruct((padded_rows // parts, outputs), jnp.float32),
        # These are the fields of `_Memory` from `ordered` on. The inputs are reordered once for all blocks of outputs.
        scratch_shapes=[
            pltpu.VMEM((input_blocks, padded_rows, block_inputs), jnp.bfloat16),
            pltpu.VMEM((input_blocks, padded_rows, block_groups), jnp.float32),
            pltpu.VMEM((padded_rows, 3 * groups), jnp.bfloat16),
            pltpu.VMEM((input_blocks, scale_rows, block_outputs), jnp.float32),
            pltpu.VMEM((block_outputs // 128 * padded_rows, 128), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=48 * 2**20
        ),
        # For each output, the kernel reads half a byte per weight and 6 bytes per group for its scale and offset, and
        # writes 4 bytes per row.
        cost_estimate=pl.CostEstimate(
            flops=2 * padded_rows * inputs * outputs,
            transcendentals=0,
            bytes_accessed=outputs * (inputs // 2 + 6 * groups + 4 * padded_rows),
        ),
        interpret=interpret,
        name="dense_int4",
        # Mosaic does not support float16, so pass the bits of the scales.
    )(x, values, lax.bitcast_convert_type(scale, jnp.uint16), offset)
    return padded_product[:row_count]


def _row_per_group(x: Array, group_size: int, parts: int) -> Array:
    """Split each row of x into `parts` rows; return [R * parts, K].

    Row r * parts + g contains the inputs of x[r] that are in group g of their chunk, and zeros elsewhere.
    """
    k, group = (lax.broadcasted_iota(jnp.int32, (1, parts, x.shape[1]), axis) for axis in (2, 1))
    return jnp.where(k // group_size % parts == group, x[:, None], 0).reshape(-1, x.shape[1])


class _Memory(NamedTuple):
    """References to the kernel's inputs, its output, and its scratch arrays, which begin with `ordered`."""

    x: Ref  # bf16[R, K]; each row of the output is the sum of `parts` rows
    values: Ref  # i4[groups of the block, size, outputs]; weights
    bits: Ref  # u16[G, outputs]; bits of the float16 scales
    offset: Ref  # f32[G, outputs]; offsets
    out: Ref  # f32[R / parts, outputs]; output
    ordered: Ref  # bf16[steps, R, inputs of the block]; x, with inputs in the order of unpacked weights
    added: Ref  # f32[steps, R, groups of the block]; sums of x over groups
    sums: Ref  # bf16[R, 3 G]; `added`, split into bfloat16 numbers
    # f32[steps, rows, outputs]; scales of the results, with one row per group, or 8 rows per chunk if a chunk has
    # several groups. Not used if the weights are scaled.
    scales: Ref
    total: Ref  # f32[outputs / 128 * R, 128]; running sums of the output, see `_put`


def _kernel(*refs: Ref, by_group: bool, in_bfloat16: bool) -> None:
    """Add the product of one block of weights to the running sums of its outputs.

    Args:
      refs: the fields of `_Memory`.
      by_group: scale the results of each group instead of the weights.
      in_bfloat16: scale the weights in bfloat16 instead of float32.
    """
    memory = _Memory(*refs)
    out, total, rows = memory.out, memory.total, len(memory.x)
    turn, step = pl.program_id(1), pl.program_id(2)
    # All blocks of outputs use the same reordered x, so compute it once per core.
    pl.when((turn == 0) & (step == 0))(functools.partial(_order_rows, memory, by_group or in_bfloat16))
    pl.when(step == 0)(functools.partial(_start_total, memory, by_group))
    # Read the running sums as f32[R, outputs], which is the inverse of `_put`.
    product = jnp.concatenate([total[first : first + rows] for first in range(0, len(total), rows)], axis=1)
    if by_group:
        product = _add_groups(memory, product, step)
    else:
        product = _add_scaled_weights(memory, product, step, in_bfloat16)
    _put(total, product)

    @pl.when(step == len(memory.ordered) - 1)
    def _():
        # Output row r is the sum over g of the rows r * parts + g. A strided read returns the rows of one g.
        parts = rows // len(out)
        for t in range(len(total) // rows):
            group_rows = [total[pl.ds(rows * t + g, len(out), stride=parts)] for g in range(parts)]
            out[:, 128 * t : 128 * (t + 1)] = sum(group_rows)


def _order_rows(memory: _Memory, pairs: bool) -> None:
    """Reorder the inputs of x to match the order of the unpacked weights, and compute the sums of x over groups."""
    x, ordered, added = memory.x, memory.ordered, memory.added
    steps, _, inner = ordered.shape
    # `permutation` bf16[CHUNK, CHUNK] reorders the inputs of a chunk to match the order of the unpacked weights. Input
    # 64h + 8s + k + 4t moves to column 64h + 16k + 2s + t if `pairs`, and otherwise to 64h + 16k + 8t + s.
    row, column = (lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), axis) for axis in (0, 1))
    s, t = ((column >> 1) & 7, column & 1) if pairs else (column & 7, (column >> 3) & 1)
    input_row = (column & 64) + 8 * s + ((column >> 4) & 3) + 4 * t
    permutation = (row == input_row).astype(jnp.bfloat16)
    # A product with `group_members` bf16[inputs, groups] adds up the inputs of each group. Group sizes are powers of
    # two, so `row & -size` is the first input of the row's group.
    size = memory.values.shape[1]
    row, column = (lax.broadcasted_iota(jnp.int32, (inner, inner // size), axis) for axis in (0, 1))
    group_members = ((row & -size) == column * size).astype(jnp.bfloat16)

    @pl.loop(0, steps)
    def _(i: Array) -> None:
        block = x[:, pl.ds(pl.multiple_of(i * inner, CHUNK), inner)]
        for c in range(0, inner, CHUNK):
            ordered[i, :, c : c + CHUNK] = _product(block[:, c : c + CHUNK], permutation).astype(jnp.bfloat16)
        added[i] = _product(block, group_members)

    # Store bf16[R, 3 G], the left factor of the product in `_start_total`.
    high, low = _split(jnp.concatenate([added[i] for i in range(steps)], axis=1))
    memory.sums[...] = jnp.concatenate([high, low, high], axis=1)


def _start_total(memory: _Memory, by_group: bool) -> None:
    """Initialise the running sums with the group sums times the offsets, and store the scales of the results."""
    offsets = memory.offset[...]
    if by_group:
        scale = _float32(memory.bits[...])
        # Unpacked weights are too large by `BIAS`. Correct the offsets for this.
        offsets -= BIAS * scale
        block_groups, group_size, _ = memory.values.shape
        groups_per_chunk = CHUNK // group_size
        for i in range(len(memory.scales)):
            step_scale = scale[i * block_groups : (i + 1) * block_groups]
            if groups_per_chunk > 1:
                # Row r * groups_per_chunk + g of a product belongs to group g of the chunk. Store the chunk's scales in
                # the same order, repeated until they fill the 8 rows of a register.
                chunks = [
                    step_scale[first : first + groups_per_chunk]
                    for first in range(0, block_groups, groups_per_chunk)
                ]
                repeats = SUBLANES // groups_per_chunk
                step_scale = jnp.concatenate([part for part in chunks for _ in range(repeats)], axis=0)
            memory.scales[i] = step_scale
    # Multiply numbers with 16 bits of mantissa, as one product of bfloat16 numbers: high * high + low * high +
    # high * low.
    high_part, low_part = _split(offsets)
    _put(memory.total, _product(memory.sums[...], jnp.concatenate([high_part, high_part, low_part], axis=0)))


def _add_groups(memory: _Memory, product: Array, step: Array) -> Array:
    """Return `product` plus the product of one block, scaling the results of each group."""
    values, scales, (rows, _) = memory.values, memory.scales, product.shape
    for c in range(memory.ordered.shape[2] // CHUNK):
        # bf16[CHUNK, outputs]; the chunk's weights, each increased by `BIAS`, in the order of `ordered`.
        w = jnp.concatenate([_biased(word, k) for word in _words(values, c) for k in range(4)], axis=0)
        chunk_product = _product(memory.ordered[step, :, CHUNK * c : CHUNK * (c + 1)], w)
        if values.shape[1] == CHUNK:
            # The chunk is one group, whose scales apply to all rows.
            product += chunk_product * scales[step, c : c + 1]
        else:
            row_scales = scales[step, SUBLANES * c : SUBLANES * (c + 1)]
            product += chunk_product * jnp.concatenate([row_scales] * (rows // SUBLANES), axis=0)
    return product


def _add_scaled_weights(memory: _Memory, product: Array, step: Array, in_bfloat16: bool) -> Array:
    """Return `product` plus the product of one block, whose weights are scaled and rounded to bfloat16."""
    block_groups, inner = memory.values.shape[0], memory.ordered.shape[2]
    first_group = pl.multiple_of(step * block_groups, block_groups)
    scale = _float32(memory.bits[pl.ds(first_group, block_groups), :])
    if in_bfloat16:
        # The matrix units of these chips have a depth of two chunks. Each word contains the bfloat16 scale twice, once
        # for each of two weights. The bits of a bfloat16 number are the upper half of the bits of the same float32
        # number.
        product_depth = 2 * CHUNK
        scale_bits = lax.bitcast_convert_type(scale.astype(jnp.bfloat16).astype(jnp.float32), jnp.int32)
        scale = lax.bitcast_convert_type(scale_bits | lax.shift_right_logical(scale_bits, 16), jnp.float32)
    else:
        # `_scaled` leaves each weight in the top 4 bits of its word, which multiplies it by 2^28.
        product_depth, scale = CHUNK, scale * 2.0**-28
    for first_input in range(0, inner, product_depth):
        end_input = min(first_input + product_depth, inner)
        chunks = range(first_input // CHUNK, end_input // CHUNK)
        w = jnp.concatenate(
            [weights for c in chunks for weights in _scaled(memory.values, scale, c, in_bfloat16)], axis=0
        )
        product += _product(memory.ordered[step, :, first_input:end_input], w.astype(jnp.bfloat16))
    return product


def _put(total: Ref, product: Array) -> None:
    """Store `product` f32[R, outputs] as slices of 128 columns, one below the other, to allow strided reads."""
    num_rows = len(product)
    for t in range(len(total) // num_rows):
        total[num_rows * t : num_rows * (t + 1)] = product[:, 128 * t : 128 * (t + 1)]


def _product(x: Array, w: Array) -> Array:
    return jnp.dot(x, w, preferred_element_type=jnp.float32)


def _split(x: Array) -> tuple[Array, Array]:
    """Split float32 numbers into two bfloat16 numbers whose sum is accurate to 16 bits."""
    # The first number is x rounded to bfloat16. The second is the rounding error, also in bfloat16.
    high_part = x.astype(jnp.bfloat16)
    return high_part, (x - high_part.astype(jnp.float32)).astype(jnp.bfloat16)


def _float32(bits: Array) -> Array:
    """Convert the bits u16 of float16 numbers, including subnormal ones, to float32."""
    bits = bits.astype(jnp.int32)
    # Remove the sign bit. A float16 has 10 bits of mantissa and an exponent bias of 15, and a float32 has 23 bits and a
    # bias of 127. So shift by 13 and multiply by 2^(127 - 15).
    magnitude_bits = bits & 0x7FFF
    normal_magnitude = lax.bitcast_convert_type(magnitude_bits << 13, jnp.float32) * 2.0**112
    # For subnormal numbers, the first term is 0. For normal numbers, the second term is smaller than the first.
    magnitude = jnp.maximum(normal_magnitude, magnitude_bits.astype(jnp.float32) * 2.0**-24)
    return jnp.where(bits >= 0x8000, -magnitude, magnitude)


def _words(values: Ref, chunk: int) -> list[Array]:
    """Return the weights of a chunk as two arrays of words, i32[8, N] each."""
    groups_per_chunk = CHUNK // values.shape[1]
    chunk_weights = values[chunk * groups_per_chunk : (chunk + 1) * groups_per_chunk]
    # i32[16, N]; word s contains inputs 8s to 8s + 7, with input 8s + k in bits 4k to 4k + 3.
    words = pltpu.bitcast(chunk_weights.reshape(CHUNK, values.shape[2]), jnp.int32)
    return [words[:8], words[8:]]


def _biased(word: Array, k: int) -> Array:
    """Unpack the weights of inputs k and k + 4 of words i32[8, N]; return these weights plus 24, bf16[16, N]."""
    # Input k goes to bits 3 to 6, the top of a bfloat16 mantissa, and input k + 4 to the same bits of the upper half.
    # The exclusive-or flips the sign bit of the weight, which adds 8, and sets the exponent to that of numbers from 16
    # to 32.
    shifted_word = word << 3 if k == 0 else word >> (4 * k - 3)
    return pltpu.bitcast((shifted_word & 0x00780078) ^ 0x41C041C0, jnp.bfloat16)


def _scaled(values: Ref, scales: Array, chunk: int, in_bfloat16: bool) -> list[Array]:
    """Return the scaled weights of a chunk, as a list of bf16[16, N] if `in_bfloat16`, and otherwise of f32[8, N]."""
    scaled_parts, groups_per_half, word_shape = [], 64 // values.shape[1], (8, values.shape[2])
    for half, word in enumerate(_words(values, chunk), 2 * chunk):
        # The 8 inputs of a word belong to one group. Half a chunk contains one group, or two groups of 4 words each.
        half_groups = range(half * groups_per_half, (half + 1) * groups_per_half)
        scale, *other_scales = [jnp.broadcast_to(scales[g : g + 1], word_shape) for g in half_groups]
        if other_scales:
            scale = jnp.where(lax.broadcasted_iota(jnp.int32, word_shape, 0) < 4, scale, *other_scales)
        if in_bfloat16:
            scale = pltpu.bitcast(scale, jnp.bfloat16)
            scaled_parts += [(_biased(word, k) - jnp.bfloat16(BIAS)) * scale for k in range(4)]
        else:
            for k in range(4):
                # The weight of input k + 4 is in the top bits, including its sign. The weight of input k is 16 bits
                # lower and adds less than 2^-12 to this weight, so it does not need to be masked out.
                two_inputs = (word << (12 - 4 * k)) & -0x0FFF1000
                scaled_parts += [w.astype(jnp.float32) * scale for w in (two_inputs << 16, two_inputs)]
    return scaled_parts
