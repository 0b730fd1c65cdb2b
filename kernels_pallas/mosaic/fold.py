"""Bodies of the TPU kernels: the fold over vocabulary blocks, and the reduction over lanes in the last block.

A block is [rows, tokens], or [trees, N, tokens]; the state is [rows, 128] or [trees, N, 128]. Oracle: `reference`.

The fold is lane-wise: each of the 128 lanes keeps the two largest logits of its tokens, and only the last block
compares lanes. An element costs a few vector operations and no cross-lane reduction, so the kernel is bound by reading
the logits.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from kernels_pallas.blocks import LANES
from kernels_pallas.stats import LAST_ID, LOWEST, MarginStats, bits, close


def fold(logits_ref, state, block: Array, last: int | Array, *, vocab: int, logsumexp: bool) -> None:
    """Fold one block into the per-lane state: top1, id1, top2, id2 and, if `logsumexp`, the sum of exp(z - top1).

    `block` is the number of this block and `last` the number of the last block of the vocabulary.
    """
    tokens = logits_ref.shape[-1]

    @pl.when(block == 0)
    def _():
        for ref, value in zip(state, (-jnp.inf, LAST_ID, -jnp.inf, LAST_ID, 0.0), strict=False):
            ref[...] = jnp.full(ref.shape, value, ref.dtype)

    def fold_block(partial: bool) -> None:
        def one_strip(logits_ref, *state):
            rows = logits_ref.shape[0]
            lanes = lax.broadcasted_iota(jnp.int32, (rows, LANES), 1) + block * tokens

            def chunk(c: int) -> Array:
                z = logits_ref[:, c * LANES : (c + 1) * LANES].astype(jnp.float32)
                # Memory past the end of the vocabulary is uninitialised.
                return jnp.where(lanes < vocab - c * LANES, z, -jnp.inf) if partial else z

            # [rows, 128] each: lane l keeps the two largest of tokens l, l + 128, l + 256, ...
            top1, id1, top2, id2 = (ref[...] for ref in state[:4])
            old_shift = jnp.maximum(top1, LOWEST)
            for c in range(tokens // LANES):
                z, ids = chunk(c), lanes + c * LANES
                # Strictly greater: a lane visits its ids in ascending order, so the smaller id wins ties.
                leads, follows = z > top1, z > top2
                top2 = jnp.where(leads, top1, jnp.where(follows, z, top2))
                id2 = jnp.where(leads, id1, jnp.where(follows, ids, id2))
                top1, id1 = jnp.where(leads, z, top1), jnp.where(leads, ids, id1)
            for ref, value in zip(state[:4], (top1, id1, top2, id2), strict=True):
                ref[...] = value
            if logsumexp:
                shift = jnp.maximum(top1, LOWEST)
                # Rescale the sum of exp(z - old maximum) to the new maximum, as flash attention does.
                total = state[4][...] * jnp.exp(old_shift - shift)
                for c in range(tokens // LANES):
                    total += jnp.exp(chunk(c) - shift)
                state[4][...] = total

        _each_strip(one_strip, logits_ref, *state)

    if vocab % tokens == 0:
        fold_block(partial=False)
    else:
        pl.when(block < last)(lambda: fold_block(partial=False))
        pl.when(block == last)(lambda: fold_block(partial=True))


def finish(state, packed_ref, vocab: int, logsumexp: bool) -> None:
    """Join the lanes: write the bits of top1, id1, top2, id2 and logsumexp to the first lanes of i32[..., 128]."""

    def largest(z: Array, ids: Array) -> tuple[Array, Array]:
        top = jnp.max(z, axis=1, keepdims=True)
        return top, jnp.min(jnp.where(z == top, ids, LAST_ID), axis=1, keepdims=True)

    def one_strip(packed_ref, *state):
        top1, id1, top2, id2 = (ref[...] for ref in state[:4])
        # The row's runner-up is the winning lane's second entry, or another lane's first. i32[rows, 1] each.
        best, best_id = largest(top1, id1)
        winner = id1 == best_id
        second, second_id = largest(jnp.where(winner, top2, top1), jnp.where(winner, id2, id1))
        best_id, second_id = close(best, best_id, second, second_id, vocab)
        columns = [bits(best), best_id, bits(second), second_id]
        if logsumexp:
            shift = jnp.maximum(best, LOWEST)
            scale = jnp.exp(jnp.maximum(top1, LOWEST) - shift)
            columns.append(bits(shift + jnp.log(jnp.sum(state[4][...] * scale, axis=1, keepdims=True))))
        packed_ref[...] = beside(columns, packed_ref.shape)

    _each_strip(one_strip, packed_ref, *state)


def _each_strip(body, *refs) -> None:
    """Call `body` on matching strips [rows, ...], with few enough rows to keep the state in vector registers."""
    if refs[0].ndim == 2:
        rows = refs[0].shape[0]
        strip = next((s for s in (32, 16, 8) if rows % s == 0), rows)
        if strip == rows:
            body(*refs)
        else:

            @pl.loop(0, rows // strip)
            def _(i):
                strip_slice = pl.ds(pl.multiple_of(i * strip, strip), strip)
                body(*(ref.at[strip_slice] for ref in refs))

    else:
        trees, nodes = refs[0].shape[:2]

        @pl.loop(0, trees)
        def _(tree):
            for start in range(0, nodes, 32):
                strip_slice = pl.ds(start, min(32, nodes - start))
                body(*(ref.at[tree, strip_slice] for ref in refs))


def per_tree(packed_ref, trees: int, nodes: int) -> MarginStats:
    """Unpack the statistics to [trees, N] each: nodes move from sublanes to lanes."""
    lane = lax.broadcasted_iota(jnp.int32, (trees, nodes), 1)
    out = [jnp.zeros((trees, nodes), jnp.int32) for _ in range(4)]
    for n in range(nodes):
        if packed_ref.ndim == 3:
            rows = packed_ref[:, n, :]
        else:
            rows = packed_ref[pl.ds(n, trees, stride=nodes), :] if nodes > 1 else packed_ref[...]
        for k in range(4):
            out[k] = jnp.where(lane == n, rows[:, k : k + 1], out[k])
    # `finish` writes values to columns 0 and 2, and ids to columns 1 and 3.
    top1, top2 = (lax.bitcast_convert_type(out[k], jnp.float32) for k in (0, 2))
    return MarginStats(top1, out[1], top2, out[3])


def beside(columns: list[Array], shape: tuple[int, int]) -> Array:
    """Return i32[rows, lanes]: lane k holds column k, i32[rows, 1]; the remaining lanes are 0."""
    lane = lax.broadcasted_iota(jnp.int32, shape, 1)
    out = jnp.zeros(shape, jnp.int32)
    for k, column in enumerate(columns):
        out = jnp.where(lane == k, column, out)
    return out
