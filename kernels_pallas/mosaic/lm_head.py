"""The TPU kernel of `lm_head_margin_stats`: a matmul whose result is folded where it lies, in fast memory.

R rows, E hidden size, V vocabulary. Oracle: `reference`.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.blocks import LANES, TpuHeadBlocks, tpu_head_blocks
from kernels_pallas.mosaic.fold import finish, fold
from kernels_pallas.mosaic.margin import state_like, unpack
from kernels_pallas.stats import MarginStats


def lm_head_margin_stats(
    hidden: Array,
    weight: Array,
    *,
    logsumexp: bool = False,
    blocks: TpuHeadBlocks | None = None,
    interpret=False,
) -> MarginStats:
    """See `kernels_pallas.lm_head_margin_stats`."""
    lead, (vocab, width) = hidden.shape[:-1], weight.shape
    rows = math.prod(lead)
    blocks = tpu_head_blocks(blocks, rows=rows, vocab=vocab, width=width, dtype=hidden.dtype)
    itemsize = hidden.dtype.itemsize
    row_blocks = pl.cdiv(rows, blocks.rows)
    packed = pl.pallas_call(
        functools.partial(_kernel, vocab=vocab, depth=blocks.depth, logsumexp=logsumexp),
        grid=(row_blocks, pl.cdiv(vocab, blocks.tokens), width // blocks.depth),
        in_specs=[
            # The rows stay for a whole pass over the vocabulary; only the weight streams by.
            pl.BlockSpec((blocks.rows, width), lambda i, j, k: (i, 0)),
            pl.BlockSpec((blocks.tokens, blocks.depth), lambda i, j, k: (j, k)),
        ],
        out_specs=pl.BlockSpec((blocks.rows, LANES), lambda i, j, k: (i, 0)),
        out_shape=jax.ShapeDtypeStruct((rows, LANES), jnp.int32),
        scratch_shapes=[
            pltpu.VMEM((blocks.rows, blocks.tokens), jnp.float32),
            *state_like((blocks.rows,), logsumexp),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=2 * rows * vocab * width,
            transcendentals=rows * vocab if logsumexp else 0,
            bytes_accessed=(rows + row_blocks * vocab) * width * itemsize + rows * LANES * 4,
        ),
        interpret=interpret,
        name="lm_head_margin_stats",
    )(hidden.reshape(rows, width), weight)
    return unpack(packed, lead, logsumexp)


def _kernel(
    hidden_ref,  # [rows, E]
    weight_ref,  # [tokens, depth]
    packed_ref,  # i32[rows, 128]
    logits_ref,  # f32[rows, tokens]
    *state,
    vocab: int,
    depth: int,
    logsumexp: bool,
):
    block, last, k = pl.program_id(1), pl.num_programs(1) - 1, pl.program_id(2)
    last_k = k == pl.num_programs(2) - 1
    part = hidden_ref[:, pl.ds(pl.multiple_of(k * depth, depth), depth)]
    product = lax.dot_general(
        part, weight_ref[...], (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )

    @pl.when(k == 0)
    def _():
        logits_ref[...] = product

    @pl.when(k > 0)
    def _():
        logits_ref[...] += product

    @pl.when(last_k)
    def _():
        fold(logits_ref, state, block, last, vocab=vocab, logsumexp=logsumexp)

    @pl.when(last_k & (block == last))
    def _():
        finish(state, packed_ref, vocab, logsumexp)
