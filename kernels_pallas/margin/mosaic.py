"""TPU kernels for `margin_stats` and `margin_accept`, which read the logits once.

A kernel processes the vocabulary block by block. Each of the 128 lanes stores the two largest logits of its own tokens,
and lanes are only compared after the last block. The kernel for `margin_accept` then also walks the tree. Each logit
needs only a few vector operations and no reduction across lanes, so reading the logits takes most of the time.

A block is [rows, tokens] or [trees, N, tokens], and the state is [rows, 128] or [trees, N, 128]. Tested against
`reference`.

Dimensions: B batch, N nodes, R = B * N rows, V vocabulary, D depth, M stop tokens.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, Ref, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.common import LANES, LAST_ID, LOWEST, SUBLANES, Interpret, bits, round_up, tile_rows
from kernels_pallas.margin.rule import (
    Acceptance,
    AcceptControls,
    MarginStats,
    accept_from_stats,
    close,
    dtypes,
    from_bits,
    walk_columns,
)
from kernels_pallas.margin.shapes import MAX_ROWS, TpuBlocks, tpu_blocks


def margin_stats(
    logits: Array, *, logsumexp: bool = False, blocks: TpuBlocks | None = None, interpret: Interpret = False
) -> MarginStats:
    """Compute `kernels_pallas.margin_stats` with the TPU kernel."""
    leading_dims = logits.shape[:-1]
    if len(leading_dims) > 1 and _grouped(leading_dims[-1], math.prod(leading_dims[:-1])):
        # The first dimension of [trees, N, V] is not tiled, so a block may contain any number of trees.
        nodes, tree_multiple = leading_dims[-1], 1
    else:
        # A block of [rows, V] must contain whole tiles of the matrix.
        nodes, tree_multiple = 1, tile_rows(logits.dtype)
    plan = _plan(logits, nodes, tree_multiple, blocks, logsumexp)
    kernel = functools.partial(_stats_kernel, vocab=logits.shape[-1])
    (packed,) = _pass(kernel, plan, [], [], interpret, "margin_stats")
    return _unpack(packed, leading_dims, logsumexp)


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
    interpret: Interpret = False,
) -> Acceptance:
    """Compute `kernels_pallas.margin_accept` with the TPU kernel."""
    batch, nodes, vocab = logits.shape
    # A tile of the operands i32[trees, N] contains SUBLANES trees. With one node per tree, the trees are also the rows
    # of the logits, and a tile of bfloat16 logits has twice as many rows.
    tree_multiple = tile_rows(logits.dtype) if nodes == 1 else SUBLANES
    if blocks is None and min(batch, tree_multiple) * nodes > MAX_ROWS:
        # The walk needs whole trees in a block, and even the smallest allowed number of trees does not fit in a block.
        # Compute only the statistics with the kernel, because they do not need whole trees.
        stats = margin_stats(logits, logsumexp=logsumexp, interpret=interpret)
        return accept_from_stats(stats, tokens, parents, y, controls, max_depth, margin)
    plan = _plan(logits, nodes, tree_multiple, blocks, logsumexp)
    # Pass the settings of each row as integers in one array: the bits of theta, strict, max_relaxed_run and the stop
    # tokens.
    settings_columns = [
        bits(controls.theta.astype(jnp.float32))[:, None],
        controls.strict.astype(jnp.int32)[:, None],
        controls.max_relaxed_run.astype(jnp.int32)[:, None],
        controls.stop_tokens.astype(jnp.int32),
    ]
    row_settings = jnp.concatenate(settings_columns, axis=1)
    tree = [x.astype(jnp.int32) for x in (tokens, parents, y) if x is not None]
    # The lanes of a verdict contain the D + 1 nodes of the path, a flag for each of the D edges (1 if it was relaxed),
    # the number of accepted edges, and the next token.
    verdict_lanes = round_up(2 * max_depth + 3, LANES)
    kernel = functools.partial(_accept_kernel, vocab=vocab, nodes=nodes, max_depth=max_depth, margin=margin)
    packed, verdict = _pass(kernel, plan, [row_settings, *tree], [verdict_lanes], interpret, "margin_accept")
    return Acceptance(
        path=verdict[:, : max_depth + 1],
        num_accepted=verdict[:, 2 * max_depth + 1],
        next_token=verdict[:, 2 * max_depth + 2],
        relaxed=verdict[:, max_depth + 1 : 2 * max_depth + 1] > 0,
        stats=_unpack(packed, (batch, nodes), logsumexp),
    )


class _Plan(NamedTuple):
    """The logits in the shape that a kernel reads, and the block size."""

    logits: Array  # [trees, N, V] or [rows, V]
    blocks: TpuBlocks
    trees: int  # number of trees, or of rows if there are no trees
    lead: tuple[int, ...]  # dimensions of a block before the vocabulary
    logsumexp: bool  # whether to compute the logsumexp


def _grouped(nodes: int, trees: int) -> bool:
    """Return whether to keep the shape [trees, N, V], to avoid the copy that a reshape to [trees * N, V] needs."""
    # In memory, the rows of each tree are padded to a multiple of SUBLANES. In a matrix, padding only follows the last
    # row.
    return trees > 1 and nodes > 1 and nodes % SUBLANES != 0 and nodes <= MAX_ROWS


def _plan(logits: Array, nodes: int, group: int, blocks: TpuBlocks | None, logsumexp: bool) -> _Plan:
    """Choose the block size and the shape in which the kernel reads the logits. See `tpu_blocks` for `group`."""
    vocab = logits.shape[-1]
    trees = math.prod(logits.shape[:-1]) // nodes
    blocks = tpu_blocks(blocks, trees=trees, nodes=nodes, vocab=vocab, dtype=logits.dtype, group=group)
    if _grouped(nodes, trees):
        return _Plan(logits.reshape(trees, nodes, vocab), blocks, trees, (blocks.trees, nodes), logsumexp)
    return _Plan(logits.reshape(trees * nodes, vocab), blocks, trees, (blocks.trees * nodes,), logsumexp)


def _pass(
    kernel: Callable[..., None],
    plan: _Plan,
    inputs: list[Array],
    widths: list[int],
    interpret: Interpret,
    name: str,
) -> list[Array]:
    """Call a kernel on blocks of the logits, together with the blocks of `inputs` [trees, ...] for the same trees.

    Returns:
      The packed statistics i32[..., 128] of every row, and an array i32[trees, width] for each of `widths`.
    """
    logits, blocks, lead = plan.logits, plan.blocks, plan.lead
    row_count, vocab = math.prod(logits.shape[:-1]), logits.shape[-1]
    # In the first dimension, block i is the i-th group of trees or rows. If there is a node dimension, each block
    # contains all nodes.
    inner_indices = (0,) * (len(lead) - 1)

    def by_tree(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((blocks.trees, width), lambda i, j: (i, 0))

    return pl.pallas_call(
        kernel,
        # The vocabulary is the inner grid dimension, so the state of a block of rows stays in fast memory.
        grid=(pl.cdiv(plan.trees, blocks.trees), pl.cdiv(vocab, blocks.tokens)),
        in_specs=[
            pl.BlockSpec((*lead, blocks.tokens), lambda i, j: (i, *inner_indices, j)),
            [by_tree(x.shape[1]) for x in inputs],
        ],
        out_specs=[
            pl.BlockSpec((*lead, LANES), lambda i, j: (i, *inner_indices, 0)),
            *(by_tree(width) for width in widths),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((*logits.shape[:-1], LANES), jnp.int32),
            *(jax.ShapeDtypeStruct((plan.trees, width), jnp.int32) for width in widths),
        ],
        scratch_shapes=[pltpu.VMEM((*lead, LANES), dtype) for dtype in dtypes(logsumexp=plan.logsumexp)],
        # On chips with two cores, the rows are divided between the cores. For each block of rows, one core processes
        # all blocks of the vocabulary in order.
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        # Each logit takes about 8 operations, and one exponential if the logsumexp is computed.
        cost_estimate=pl.CostEstimate(
            flops=row_count * vocab * 8,
            transcendentals=row_count * vocab * plan.logsumexp,
            bytes_accessed=row_count * vocab * logits.dtype.itemsize + row_count * LANES * 4,
        ),
        interpret=interpret,
        name=name,
    )(logits, inputs)


def _unpack(packed: Array, lead: tuple[int, ...], logsumexp: bool) -> MarginStats:
    """Unpack the statistics that `_finish` has written, and reshape them to `lead`."""
    field_count = len(dtypes(logsumexp=logsumexp))
    return from_bits([packed[..., lane].reshape(lead) for lane in range(field_count)])


def _stats_kernel(logits_ref: Ref, _: list[Ref], packed_ref: Ref, *state: Ref, vocab: int) -> None:
    block, last = pl.program_id(1), pl.num_programs(1) - 1
    _fold(logits_ref, state, block, last, vocab)

    @pl.when(block == last)
    def _():
        _finish(state, packed_ref, vocab)


def _accept_kernel(
    logits_ref: Ref,  # [rows, tokens] or [trees, N, tokens]
    row_refs: list[Ref],  # settings i32[trees, 3 + M]; tokens, parents and optionally y, i32[trees, N] each
    packed_ref: Ref,  # i32[..., 128]
    verdict_ref: Ref,  # i32[trees, width]
    *state: Ref,
    vocab: int,
    nodes: int,
    max_depth: int,
    margin: str,
) -> None:
    per_row_ref, *tree_refs = row_refs
    block, last = pl.program_id(1), pl.num_programs(1) - 1
    _fold(logits_ref, state, block, last, vocab)

    @pl.when(block == last)
    def _():
        _finish(state, packed_ref, vocab)
        # The statistics of these rows are now complete, and the rows form whole trees, so walk the trees.
        stats = _per_tree(packed_ref, per_row_ref.shape[0], nodes)
        row_settings = per_row_ref[...]
        tokens, parents, *optional_y = (ref[...] for ref in tree_refs)
        y = next(iter(optional_y), None)
        # The columns of the settings are theta (as its bits), strict, max_relaxed_run and the stop tokens.
        theta = lax.bitcast_convert_type(row_settings[:, 0:1], jnp.float32)
        controls = AcceptControls(theta, row_settings[:, 1:2], row_settings[:, 2:3], row_settings[:, 3:])
        walked = walk_columns(stats, tokens, parents, y, controls, max_depth=max_depth, margin=margin)
        columns = [*walked.path, *walked.relaxed, walked.num_accepted, walked.next_token]
        verdict_ref[...] = _in_lanes(columns, verdict_ref.shape)


def _fold(logits_ref: Ref, state: tuple[Ref, ...], block: int | Array, last: int | Array, vocab: int) -> None:
    """Update the state of each lane with one block of logits.

    Args:
      logits_ref: [rows, tokens] or [trees, N, tokens]; the block.
      state: the fields of `_State`.
      block: index of this block in the vocabulary.
      last: index of the last block.
      vocab: V, the number of tokens in the vocabulary.
    """
    tokens = logits_ref.shape[-1]

    @pl.when(block == 0)
    def _():
        # `strict=False`, because the state contains the sum only if the logsumexp is requested.
        for ref, initial_value in zip(state, (-jnp.inf, LAST_ID, -jnp.inf, LAST_ID, 0.0), strict=False):
            ref[...] = jnp.full(ref.shape, initial_value, ref.dtype)

    def fold_block(partial: bool) -> None:
        fold_strip = functools.partial(_fold_strip, block=block, vocab=vocab, partial=partial)
        _each_strip(fold_strip, logits_ref, *state)

    if vocab % tokens == 0:
        fold_block(partial=False)
    else:
        # Compare ids with V only in the last block, to save instructions in all other blocks.
        pl.when(block < last)(lambda: fold_block(partial=False))
        pl.when(block == last)(lambda: fold_block(partial=True))


class _State(NamedTuple):
    """State of a strip of rows, as arrays [rows, 128]. Lane l stores the two best of tokens l, l + 128, l + 256, ..."""

    top1: Ref  # f32; largest logit
    id1: Ref  # i32; token with the largest logit
    top2: Ref  # f32; second largest logit
    id2: Ref  # i32; token with the second largest logit
    total: Ref | None = None  # f32; sum of exp(z - top1); None if the logsumexp is not requested


def _fold_strip(logits_ref: Ref, *state_refs: Ref, block: int | Array, vocab: int, partial: bool) -> None:
    """Update the state of a strip of rows with block number `block`. Only a `partial` block may extend past V."""
    rows, tokens = logits_ref.shape
    # Token ids of the first 128 columns. Chunk c adds c * 128, so a token is always in lane id % 128.
    lanes = lax.broadcasted_iota(jnp.int32, (rows, LANES), 1) + block * tokens

    def chunk(c: int) -> Array:
        z = logits_ref[:, c * LANES : (c + 1) * LANES].astype(jnp.float32)
        if partial:
            # Memory past the end of the vocabulary is not initialised.
            z = jnp.where(lanes < vocab - c * LANES, z, -jnp.inf)
        return z

    state = _State(*state_refs)
    top1, id1, top2, id2 = (ref[...] for ref in state[:4])
    old_shift = jnp.maximum(top1, LOWEST)
    for c in range(tokens // LANES):
        z, ids = chunk(c), lanes + c * LANES
        # Each lane visits its ids in ascending order, so strict comparisons keep the smaller id among equal logits. If
        # z is a new maximum, the old maximum becomes the second entry. Otherwise, z may replace the second entry.
        beats_first, beats_second = z > top1, z > top2
        top2 = jnp.where(beats_first, top1, jnp.where(beats_second, z, top2))
        id2 = jnp.where(beats_first, id1, jnp.where(beats_second, ids, id2))
        top1, id1 = jnp.where(beats_first, z, top1), jnp.where(beats_first, ids, id1)
    for ref, value in zip(state[:4], (top1, id1, top2, id2), strict=True):
        ref[...] = value
    if state.total is not None:
        shift = jnp.maximum(top1, LOWEST)
        # Rescale the sum of exp(z - old maximum) to the new maximum, as in flash attention.
        exp_sum = state.total[...] * jnp.exp(old_shift - shift)
        for c in range(tokens // LANES):
            exp_sum += jnp.exp(chunk(c) - shift)
        state.total[...] = exp_sum


def _finish(state: tuple[Ref, ...], packed_ref: Ref, vocab: int) -> None:
    """Combine the lanes, and write the bits of the fields of `MarginStats` to the first lanes of i32[..., 128]."""

    def largest(z: Array, ids: Array) -> tuple[Array, Array]:
        # Among lanes with equal logits, choose the smallest id.
        top_logit = jnp.max(z, axis=1, keepdims=True)
        return top_logit, jnp.min(jnp.where(z == top_logit, ids, LAST_ID), axis=1, keepdims=True)

    def one_strip(packed_ref: Ref, *state_refs: Ref) -> None:
        state = _State(*state_refs)
        top1, id1, top2, id2 = (ref[...] for ref in state[:4])
        # The second entry of a row is the second entry of the lane with the best token, or the first entry of another
        # lane. All results are [rows, 1].
        best, best_id = largest(top1, id1)
        is_winner = id1 == best_id
        second, second_id = largest(jnp.where(is_winner, top2, top1), jnp.where(is_winner, id2, id1))
        best_id, second_id = close(best, best_id, second, second_id, vocab)
        columns = [bits(best), best_id, bits(second), second_id]
        if state.total is not None:
            shift = jnp.maximum(best, LOWEST)
            # The sum of each lane is relative to the maximum of that lane.
            scale = jnp.exp(jnp.maximum(top1, LOWEST) - shift)
            columns.append(bits(shift + jnp.log(jnp.sum(state.total[...] * scale, axis=1, keepdims=True))))
        packed_ref[...] = _in_lanes(columns, packed_ref.shape)

    _each_strip(one_strip, packed_ref, *state)


def _each_strip(body: Callable[..., None], *refs: Ref) -> None:
    """Call `body` on strips of a few rows of all `refs`, so that the state of a strip fits in vector registers.

    In a strip of 32 rows, each array of the state takes 4 registers.
    """
    if refs[0].ndim == 2:
        rows = refs[0].shape[0]
        strip_rows = next((strip_size for strip_size in (32, 16, 8) if rows % strip_size == 0), rows)
        if strip_rows == rows:
            body(*refs)
        else:

            @pl.loop(0, rows // strip_rows)
            def _(i):
                strip_slice = pl.ds(pl.multiple_of(i * strip_rows, strip_rows), strip_rows)
                body(*(ref.at[strip_slice] for ref in refs))

    else:
        trees, nodes = refs[0].shape[:2]

        # A strip belongs to one tree, because the rows of each tree are padded to whole registers.
        @pl.loop(0, trees)
        def _(tree):
            for first_node in range(0, nodes, 32):
                strip_slice = pl.ds(first_node, min(32, nodes - first_node))
                body(*(ref.at[tree, strip_slice] for ref in refs))


def _per_tree(packed_ref: Ref, trees: int, nodes: int) -> MarginStats:
    """Unpack the statistics into arrays [trees, N], with the nodes of a tree in lanes instead of sublanes."""
    lane = lax.broadcasted_iota(jnp.int32, (trees, nodes), 1)
    fields = [jnp.zeros((trees, nodes), jnp.int32) for _ in range(4)]
    for n in range(nodes):
        # `node_rows` i32[trees, 128] contains the packed statistics of node n of every tree.
        if packed_ref.ndim == 3:
            node_rows = packed_ref[:, n, :]
        elif nodes > 1:
            # Row t * N + n of the matrix is node n of tree t.
            node_rows = packed_ref[pl.ds(n, trees, stride=nodes), :]
        else:
            node_rows = packed_ref[...]
        # Broadcast column k, one of the four statistics, over the lanes, and write it to lane n.
        for k in range(4):
            fields[k] = jnp.where(lane == n, node_rows[:, k : k + 1], fields[k])
    # `_finish` writes values to columns 0 and 2, and ids to columns 1 and 3.
    top1, top2 = (lax.bitcast_convert_type(fields[k], jnp.float32) for k in (0, 2))
    return MarginStats(top1, fields[1], top2, fields[3])


def _in_lanes(columns: list[Array], shape: tuple[int, int]) -> Array:
    """Return an array i32[rows, lanes] whose lane k is column k, i32[rows, 1]. The remaining lanes are 0."""
    lane = lax.broadcasted_iota(jnp.int32, shape, 1)
    packed = jnp.zeros(shape, jnp.int32)
    for k, column in enumerate(columns):
        packed = jnp.where(lane == k, column, packed)
    return packed
