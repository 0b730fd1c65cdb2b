"""TPU kernels that pass over the vocabulary once; the last block decides acceptance and walks the tree.

R rows = B batch * N nodes, V vocabulary, D depth, M stop tokens; a block is [rows, tokens]. Oracle: `reference`.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.blocks import LANES, MAX_ROWS, SUBLANES, TpuBlocks, fits, tile_rows, tpu_blocks
from kernels_pallas.margin_rule import Acceptance, AcceptControls, decide, walk
from kernels_pallas.mosaic.fold import beside, finish, fold, per_tree
from kernels_pallas.stats import MarginStats, bits, dtypes, from_bits


def margin_stats(
    logits: Array, *, logsumexp: bool = False, blocks: TpuBlocks | None = None, interpret=False
) -> MarginStats:
    """See `kernels_pallas.margin_stats`."""
    lead, vocab = logits.shape[:-1], logits.shape[-1]
    nodes = lead[-1] if len(lead) > 1 and _grouped(lead[-1], math.prod(lead[:-1])) else 1
    logits = _arrange(logits, nodes)
    trees = logits.shape[0]
    # Leading dimensions are not tiled: only the rows of a matrix come in groups.
    group = 1 if logits.ndim == 3 else tile_rows(logits.dtype)
    blocks = tpu_blocks(blocks, trees=trees, nodes=nodes, vocab=vocab, dtype=logits.dtype, group=group)
    block, state = _block(logits, blocks, nodes), _state_like(_block_shape(logits, blocks, nodes), logsumexp)
    packed = pl.pallas_call(
        functools.partial(_stats_kernel, vocab=vocab, logsumexp=logsumexp),
        grid=(pl.cdiv(trees, blocks.trees), pl.cdiv(vocab, blocks.tokens)),
        in_specs=[block.logits],
        out_specs=block.packed,
        out_shape=jax.ShapeDtypeStruct((*logits.shape[:-1], LANES), jnp.int32),
        scratch_shapes=state,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=_cost(math.prod(lead), vocab, logits.dtype, logsumexp),
        interpret=interpret,
        name="margin_stats",
    )(logits)
    return _unpack(packed, lead, logsumexp)


def margin_accept(
    logits: Array,
    tokens: Array,
    parents: Array,
    y: Array | None,
    controls: AcceptControls,
    *,
    max_depth: int,
    margin: str,
    logsumexp: bool = False,
    blocks: TpuBlocks | None = None,
    interpret=False,
) -> Acceptance:
    """See `kernels_pallas.margin_accept`."""
    batch, nodes, vocab = logits.shape
    group = tile_rows(logits.dtype) if nodes == 1 else SUBLANES
    if blocks is None and not fits(batch, nodes, group):
        # The walk needs whole trees in a block; the fold does not.
        stats = margin_stats(logits, logsumexp=logsumexp, interpret=interpret)
        return decide(stats, tokens, parents, y, controls, max_depth, margin)
    logits = _arrange(logits, nodes)
    blocks = tpu_blocks(blocks, trees=batch, nodes=nodes, vocab=vocab, dtype=logits.dtype, group=group)
    block, state = _block(logits, blocks, nodes), _state_like(_block_shape(logits, blocks, nodes), logsumexp)
    # Pass the per-row settings as one integer array: theta's bits, strict, max_relaxed_run, then the stop tokens.
    numbers = [
        bits(controls.theta.astype(jnp.float32))[:, None],
        controls.strict.astype(jnp.int32)[:, None],
        controls.max_relaxed_run.astype(jnp.int32)[:, None],
        controls.stop_tokens.astype(jnp.int32),
    ]
    per_row = jnp.concatenate(numbers, axis=1)
    tree = [tokens, parents] if y is None else [tokens, parents, y]
    # A verdict has 2 D + 3 numbers, one per lane: D + 1 nodes of the path, D flags, the count and the next token.
    width = -(-(2 * max_depth + 3) // LANES) * LANES
    packed, verdict = pl.pallas_call(
        functools.partial(
            _accept_kernel,
            has_y=y is not None,
            vocab=vocab,
            logsumexp=logsumexp,
            nodes=nodes,
            max_depth=max_depth,
            margin=margin,
        ),
        grid=(pl.cdiv(batch, blocks.trees), pl.cdiv(vocab, blocks.tokens)),
        in_specs=[block.logits, *(_by_tree(blocks, x.shape[1]) for x in (per_row, *tree))],
        out_specs=[block.packed, _by_tree(blocks, width)],
        out_shape=[
            jax.ShapeDtypeStruct((*logits.shape[:-1], LANES), jnp.int32),
            jax.ShapeDtypeStruct((batch, width), jnp.int32),
        ],
        scratch_shapes=state,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=_cost(batch * nodes, vocab, logits.dtype, logsumexp),
        interpret=interpret,
        name="margin_accept",
    )(logits, per_row, *(x.astype(jnp.int32) for x in tree))
    edge = max_depth + 1  # lane of the first flag, after the path
    return Acceptance(
        path=verdict[:, :edge],
        num_accepted=verdict[:, 2 * max_depth + 1],
        next_token=verdict[:, 2 * max_depth + 2],
        relaxed=verdict[:, edge : edge + max_depth] > 0,
        stats=_unpack(packed, (batch, nodes), logsumexp),
    )


def _stats_kernel(logits_ref, packed_ref, *state, vocab: int, logsumexp: bool):
    block, last = pl.program_id(1), pl.num_programs(1) - 1
    fold(logits_ref, state, block, last, vocab=vocab, logsumexp=logsumexp)

    @pl.when(block == last)
    def _():
        finish(state, packed_ref, vocab, logsumexp)


def _accept_kernel(
    logits_ref,  # [rows, tokens] or [trees, N, tokens]
    per_row_ref,  # i32[trees, 3 + M]
    tokens_ref,  # i32[trees, N]
    parents_ref,  # i32[trees, N]
    *refs,  # y i32[trees, N] if `has_y`; packed i32[..., 128]; verdict i32[trees, width]; the state
    has_y: bool,
    vocab: int,
    logsumexp: bool,
    nodes: int,
    max_depth: int,
    margin: str,
):
    y_ref, refs = (refs[0], refs[1:]) if has_y else (None, refs)
    packed_ref, verdict_ref, *state = refs
    block, last = pl.program_id(1), pl.num_programs(1) - 1
    fold(logits_ref, state, block, last, vocab=vocab, logsumexp=logsumexp)

    @pl.when(block == last)
    def _():
        finish(state, packed_ref, vocab, logsumexp)
        stats = per_tree(packed_ref, tokens_ref.shape[0], nodes)
        per_row = per_row_ref[...]
        walked = walk(
            stats,
            tokens_ref[...],
            parents_ref[...],
            None if y_ref is None else y_ref[...],
            lax.bitcast_convert_type(per_row[:, 0:1], jnp.float32),
            per_row[:, 1:2],
            per_row[:, 2:3],
            per_row[:, 3:],
            max_depth=max_depth,
            margin=margin,
        )
        columns = [*walked.path, *walked.relaxed, walked.num_accepted, walked.next_token]
        verdict_ref[...] = beside(columns, verdict_ref.shape)


def _grouped(nodes: int, trees: int) -> bool:
    """Return True if [trees, N, V] keeps its shape, because [trees * N, V] has another layout and needs a copy."""
    return trees > 1 and nodes > 1 and nodes % SUBLANES != 0 and nodes <= MAX_ROWS


def _arrange(logits: Array, nodes: int) -> Array:
    """Reshape logits [..., V] to [trees, N, V] if `_grouped`, otherwise to [rows, V]."""
    vocab = logits.shape[-1]
    trees = math.prod(logits.shape[:-1]) // nodes
    return logits.reshape((trees, nodes, vocab) if _grouped(nodes, trees) else (trees * nodes, vocab))


class _Block(NamedTuple):
    logits: pl.BlockSpec
    packed: pl.BlockSpec


def _block_shape(logits: Array, blocks: TpuBlocks, nodes: int) -> tuple[int, ...]:
    return (blocks.trees, nodes) if logits.ndim == 3 else (blocks.trees * nodes,)


def _block(logits: Array, blocks: TpuBlocks, nodes: int) -> _Block:
    lead = _block_shape(logits, blocks, nodes)
    zeros = (0,) * (len(lead) - 1)
    return _Block(
        pl.BlockSpec((*lead, blocks.tokens), lambda i, j: (i, *zeros, j)),
        pl.BlockSpec((*lead, LANES), lambda i, j: (i, *zeros, 0)),
    )


def _by_tree(blocks: TpuBlocks, width: int) -> pl.BlockSpec:
    return pl.BlockSpec((blocks.trees, width), lambda i, j: (i, 0))


def _state_like(rows: tuple[int, ...], logsumexp: bool) -> list:
    """Return the scratch memory of the fold for a block of `rows`."""
    return [pltpu.VMEM((*rows, LANES), dtype) for dtype in dtypes(logsumexp=logsumexp)]


def _unpack(packed: Array, lead: tuple[int, ...], logsumexp: bool) -> MarginStats:
    """Unpack the result of `finish` into statistics of shape `lead`."""
    return from_bits([packed[..., k].reshape(lead) for k in range(5 if logsumexp else 4)])


def _cost(rows: int, vocab: int, dtype, logsumexp: bool) -> pl.CostEstimate:
    return pl.CostEstimate(
        flops=rows * vocab * 8,
        transcendentals=rows * vocab if logsumexp else 0,
        bytes_accessed=rows * vocab * jnp.dtype(dtype).itemsize + rows * LANES * 4,
    )
