"""Operations for the attention of a draft tree, or of a prompt chunk, over the KV cache.

`tree_attention` reads the cache. `write_and_attend` writes new keys and values to the cache first.

Tested against `reference.tree_attention`, and against a softmax in numpy float64 (tests/kernels).

Dimensions: B batch, N queries, K key-value heads, G query heads per key-value head, D head dimension, S slots, R rows
of the region, W new rows.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from kernels_pallas.common import Interpret
from kernels_pallas.dispatch import check_options
from kernels_pallas.tree_attention import reference, xla
from kernels_pallas.tree_attention.operands import NewRows, Operands
from kernels_pallas.tree_attention.shapes import AttentionBlocks, is_flat

FORMS = ("reference", "xla", "pallas_tpu")
"""Allowed values of `implementation`, in addition to None."""


def tree_attention(
    q: Array,
    k: Array,
    v: Array,
    first: Array,
    *,
    seen: Array | None = None,
    positions: Array | None = None,
    seen_positions: Array | None = None,
    window: int | None = None,
    cap: float | None = None,
    scale: float | None = None,
    sinks: Array | None = None,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    implementation: str | None = None,
    blocks: AttentionBlocks | None = None,
    interpret: Interpret = False,
) -> Array:
    """Compute grouped-query attention over a cache whose batch rows have different lengths.

    Every query attends to all slots before `first`. The R slots from `first` on are called the region. Query i attends
    to row r of the region if `seen[b, i, r]` is True. The TPU kernel reads each batch row in blocks, from the start of
    the window, if there is one, to the end of the region. The cost of a batch row therefore depends only on its own
    length.

    Args:
      q: [B, N, K, G, D]; bfloat16 or float32.
      k: [B, S, K, D]; float32, bfloat16, or int8 with scales.
      v: [B, S, K, D].
      first: i32[B]; number of committed slots. Committed slot s contains the token at position s.
      seen: bool[B or 1, N, R]; the rows of the region that each query attends to. None: R is N, and query i attends to
        rows 0 to i.
      positions: i32[B, N]; positions of the queries, only used with a window. None: `first + i`.
      seen_positions: i32[B, R]; positions of the region's rows. None: the rows are the queries.
      window: mask keys that are `window` or more positions before the query; None: no window.
      cap: soft cap on the scores: `cap * tanh(scores / cap)`; None: no cap.
      scale: factor by which the scores are multiplied; None: D ** -0.5.
      sinks: f32[K, G]; attention sinks (gpt-oss, arXiv 2508.10925): one logit per head, neither scaled nor capped, for
        an extra slot with value zero that every query attends to; None for no sinks.
      k_scale, v_scale: f32[B, S, K]; scales of int8 keys and values, per slot and head. Pass both or neither.
      implementation: "pallas_tpu" (Mosaic), "xla", "reference", or None. None selects "xla", because the kernel has not
        run on a chip yet.
      blocks: block sizes of "pallas_tpu".
      interpret: True or `pltpu.InterpretParams(...)` to run "pallas_tpu" on a CPU.

    Returns:
      [B, N, K, G, D] in q's dtype. The output of a query that attends to no slot is zero. "pallas_tpu" and "xla"
      multiply in the dtype of keys and values, or in q's dtype if there are scales, and accumulate in float32.

    Raises:
      ValueError: the implementation is unknown, only one of the scales is given, keys are integers without scales, or
        `blocks` or `interpret` is given without "pallas_tpu".
      BlockError: the kernel does not support a shape or block size.

    >>> q, k = jnp.ones((1, 2, 1, 1, 4)), jnp.ones((1, 8, 1, 4))
    >>> v = jnp.arange(8.0)[None, :, None, None] * jnp.ones((1, 8, 1, 4))
    >>> tree_attention(q, k, v, jnp.asarray([2], jnp.int32))[0, :, 0, 0, 0].tolist()  # means of 0..2 and of 0..3
    [1.0, 1.5]
    """
    positions, scale = _defaults(q, first, positions, scale)
    operands = Operands(
        q, k, v, first, seen, positions, seen_positions, window, cap, scale, k_scale, v_scale, sinks
    )
    return _attend(operands, None, implementation, blocks, interpret)[0]


def write_and_attend(
    q: Array,
    k: Array,
    v: Array,
    new: NewRows,
    first: Array,
    *,
    seen: Array | None = None,
    positions: Array | None = None,
    seen_positions: Array | None = None,
    window: int | None = None,
    cap: float | None = None,
    scale: float | None = None,
    sinks: Array | None = None,
    implementation: str | None = None,
    blocks: AttentionBlocks | None = None,
    interpret: Interpret = False,
) -> tuple[Array, Array, Array]:
    """Write new keys and values to the cache, and then compute `tree_attention`. Donated caches are updated in place.

    The kernel writes the rows itself, which saves a separate scatter. There is one exception: in a cache with a single
    head and a dtype of less than 32 bits, neighbouring slots share 32-bit words. DMA can copy only whole words, so XLA
    scatters the rows before the kernel runs.

    Args:
      q, first: as in `tree_attention`.
      k, v: [B, S, K, D]; float32 or bfloat16.
      new: new keys and values in any float dtype. They are cast to the dtype of the cache.
      seen, positions, seen_positions, window, cap, scale, sinks: as in `tree_attention`.
      implementation, blocks, interpret: as in `tree_attention`.

    Returns:
      The result of `tree_attention`, and the updated keys and values.

    Raises:
      ValueError, BlockError: as in `tree_attention`.

    >>> q, cache = jnp.ones((1, 1, 1, 1, 4)), jnp.zeros((1, 8, 1, 4))
    >>> new = NewRows(jnp.ones((1, 1, 1, 4)), jnp.ones((1, 1, 1, 4)), jnp.asarray([2], jnp.int32))
    >>> _, k, _ = write_and_attend(q, cache, cache, new, jnp.asarray([2], jnp.int32))
    >>> k[0, :4, 0, 0].tolist()
    [0.0, 0.0, 1.0, 0.0]
    """
    positions, scale = _defaults(q, first, positions, scale)
    operands = Operands(q, k, v, first, seen, positions, seen_positions, window, cap, scale, sinks=sinks)
    return _attend(operands, new, implementation, blocks, interpret)


def _defaults(q: Array, first: Array, positions: Array | None, scale: float | None) -> tuple[Array, float]:
    """Return the positions i32[B, N] and the scale. The defaults are `first`, `first + 1`, ..., and 1 / sqrt(D)."""
    if positions is None:
        positions = first[:, None] + jnp.arange(q.shape[1], dtype=jnp.int32)[None]
    if scale is None:
        scale = float(q.shape[-1] ** -0.5)
    return positions, scale


def _attend(
    operands: Operands,
    new: NewRows | None,
    implementation: str | None,
    blocks: AttentionBlocks | None,
    interpret: Interpret,
) -> tuple[Array, Array, Array]:
    """Write the new rows, if there are any, and run an implementation; return its result and the updated caches."""
    check_options(implementation, FORMS, blocks, interpret)
    if (operands.k_scale is None) != (operands.v_scale is None):
        raise ValueError("only one of k_scale and v_scale is given: give both or neither.")
    cache_dtype = operands.k.dtype
    if operands.k_scale is None and not jnp.issubdtype(cache_dtype, jnp.floating):
        raise ValueError(f"keys are {cache_dtype.name} without scales: give k_scale and v_scale.")
    # Scatter the new rows first, unless the kernel can write them itself. DMA copies whole words, so the kernel cannot
    # write rows if neighbouring slots share a 32-bit word.
    if new is not None and (implementation != "pallas_tpu" or is_flat(operands.k)):
        k, v = xla.write_new_rows(operands.k, operands.v, new)
        operands, new = operands._replace(k=k, v=v), None
    if implementation == "pallas_tpu":
        # Import this module only if it is needed, because it in turn imports Pallas.
        from kernels_pallas.tree_attention import mosaic

        return mosaic.tree_attention(operands, new, blocks=blocks, interpret=interpret)
    if implementation == "reference":
        return reference.tree_attention(operands), operands.k, operands.v
    return xla.tree_attention(operands), operands.k, operands.v
