"""Attention of a drafted tree, or of a prompt chunk, over the key-value cache.

`write_and_attend` first writes the keys and values of the queries into the cache; `tree_attention` only attends.

B batch, N queries, K key-value heads, G query heads per key-value head, D head dimension, S slots, R rows of the
region. Oracles: `reference.tree_attention`, and softmax in numpy float64 in tests/kernels/.
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
"""Accepted values of `implementation` other than None."""


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
    """Compute grouped-query attention of N queries over a cache whose batch rows have different lengths.

    Every query sees all slots before `first`. The region is the R slots from `first` on; query i sees row r of the
    region if `seen[b, i, r]`. The TPU kernel reads each batch row in blocks, from the start of the window (if there is
    one) to the end of the region, so the cost of a row depends only on its own length.

    Args:
      q: [B, N, K, G, D], bfloat16 or float32.
      k: [B, S, K, D]: float32, bfloat16, or int8 with scales.
      v: [B, S, K, D].
      first: i32[B]; slots before it are committed, and slot s holds the token at position s.
      seen: bool[B or 1, N, R]; None: R is N, and query i sees the rows 0 .. i.
      positions: i32[B, N] of the queries; None: `first + i`. Used only with a window.
      seen_positions: i32[B, R] of the region's rows; None: the rows are the queries.
      window: keys `window` or more positions before the query are hidden; None hides none.
      cap: scores become `cap * tanh(scores / cap)`; None leaves them unchanged.
      scale: scores are multiplied by it; None is D ** -0.5.
      sinks: f32[K, G]; one logit per head for an extra slot that every query sees and whose value is zero (gpt-oss,
        arXiv 2508.10925). The logits are neither scaled nor capped. None: no such slot.
      k_scale, v_scale: f32[B, S, K]; factors for keys and values, per token and head. Pass both or neither.
      implementation: "pallas_tpu" (Mosaic), "xla", "reference", or None, which selects "xla": no chip has run the
        kernel yet.
      blocks: block sizes of "pallas_tpu".
      interpret: run "pallas_tpu" on CPU: True, or `pltpu.InterpretParams(...)`.

    Returns:
      [B, N, K, G, D] in q's dtype. A query without visible slots gets zeros. "pallas_tpu" and "xla" multiply in the
      dtype of keys and values (in q's with scales) and accumulate in float32.

    Raises:
      ValueError: unknown implementation, one scale without the other, integer keys without scales, or blocks and
        interpret without "pallas_tpu".
      BlockError: a shape or block size that the kernel does not support.

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
    """Write new rows into keys and values, then compute `tree_attention`. Donated caches are updated in place.

    The kernel copies the rows itself, which saves a separate scatter. The exception is a single head in a dtype of less
    than 32 bits. Its slots share 32-bit words with neighbouring slots, and DMA copies whole words, so XLA scatters its
    rows first.

    Args:
      q, first: as for `tree_attention`.
      k, v: [B, S, K, D], float32 or bfloat16.
      new: rows in any float dtype; they are cast to the cache's dtype.
      seen, positions, seen_positions, window, cap, scale, sinks: as for `tree_attention`.
      implementation, blocks, interpret: as for `tree_attention`.

    Returns:
      The result of `tree_attention`, and keys and values with the new rows.

    Raises:
      ValueError, BlockError: as for `tree_attention`.

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
    """Return the positions i32[B, N], by default counting up from `first`, and the scale, by default 1/sqrt(D)."""
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
    """Run an implementation; return its result and the caches, with any new rows."""
    check_options(implementation, FORMS, blocks, interpret)
    if (operands.k_scale is None) != (operands.v_scale is None):
        raise ValueError("keys and values have scales both or neither: give k_scale and v_scale.")
    cache_dtype = operands.k.dtype
    if operands.k_scale is None and not jnp.issubdtype(cache_dtype, jnp.floating):
        raise ValueError(f"keys are {cache_dtype.name} without scales: give k_scale and v_scale.")
    # The kernel copies new rows into the caches itself; all other forms scatter them first.
    # DMA copies whole 32-bit words, which neighbouring slots share in a cache with a single narrow head.
    if new is not None and (implementation != "pallas_tpu" or is_flat(operands.k)):
        k, v = xla.write_new_rows(operands.k, operands.v, new)
        operands, new = operands._replace(k=k, v=v), None
    if implementation == "pallas_tpu":
        # Imported only if it runs, because it imports Pallas.
        from kernels_pallas.tree_attention import mosaic

        return mosaic.tree_attention(operands, new, blocks=blocks, interpret=interpret)
    if implementation == "reference":
        return reference.tree_attention(operands), operands.k, operands.v
    return xla.tree_attention(operands), operands.k, operands.v
