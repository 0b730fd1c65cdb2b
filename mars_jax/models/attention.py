"""Attention over the key-value cache, accumulated in float32.

Tested against `attend_all`, which computes the scores of all slots at once, and against transformers'
`eager_attention_forward`.

Dimensions: B batch, N tokens, S cache slots, K key-value heads, G query heads per key-value head, D head dimension.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P
from jax.tree_util import Partial
from jax.typing import DTypeLike

from kernels_pallas import BlockError, NewRows, tree_attention, write_and_attend
from kernels_pallas.common import TWO_CORES
from kernels_pallas.dispatch import kernel_on, kernel_or, whole_or_partitioned, with_gradient_of
from kernels_pallas.tree_attention.shapes import attention_blocks
from mars_jax.core import cache as kv_cache
from mars_jax.core.axes import (
    axes_here,
    current,
    device_kind,
    devices_of,
    hold_heads,
    map_devices,
    on_gpu,
    on_tpu,
)
from mars_jax.core.cache import Int8Rows, Rows
from mars_jax.core.sums import total
from mars_jax.core.types import Visible
from mars_jax.models.layers import soft_cap
from mars_jax.utils.errors import MarsError

BLOCK = 128
"""Number of KV cache slots per block on a CPU. The keys and values of a block fit in the CPU's caches."""
TURN_BYTES, TURN_SLOTS = 4 << 20, 1024
"""Target size, in bytes, of the keys and values that one iteration of the loop over blocks reads on an accelerator, and
its minimum number of slots. The size of the scores may limit a block further. The overhead of an iteration takes as
long as reading a few megabytes."""
SCORE_BYTES, GPU_SCORE_BYTES = 8 << 20, 512 << 20
"""Maximum size, in bytes, of the attention scores of one iteration. The first limit keeps the scores in an
accelerator's fast on-chip memory. The second limit is for GPUs, where each iteration copies the slots that it reads,
and the copies must fit in memory together with the model."""
FLASH_QUERIES, FLASH_SINGLE = 2048, 256
"""Number of queries, summed over rows and heads, above which cuDNN is faster than XLA on an H100 with 4,000 slots. The
first number is for several nodes per row, the second for a single node (docs/kernels.md)."""

FORMS = ("auto", "xla", "pallas", "interpret")
"""Allowed values of a model's `attention` option.

"auto" picks the fastest implementation for the batch, such as the Pallas kernel on a TPU or cuDNN on a GPU. "xla" uses
XLA operations. "pallas" uses the kernel `kernels_pallas.tree_attention` on a TPU, and XLA operations on other
platforms. "interpret" runs the kernel in Pallas' interpreter on any platform, for tests."""
KERNEL_ROWS, KERNEL_NODES = 8, 64
"""Minimum batch size for which "auto" uses the kernel on a TPU, and maximum number of nodes per row if there is a mask.

A chunk of a prompt needs no mask and may have any length. Smaller batches use the kernel only if XLA would loop over
blocks of slots; otherwise the kernel is no faster than XLA (docs/kernels.md)."""
KERNEL_SLOTS = 128
"""The kernel requires a number of cache slots that is a multiple of this, for every dtype and number of heads."""

_LOWEST = float(jnp.finfo(jnp.float32).min)

NewKV = tuple[Array, Array] | None
"""Keys and values [B, N, K, D] of the nodes; None if the cache already contains them."""


Attend = Callable[..., tuple[Array, Rows, Rows]]
"""A function that writes the keys and values of new nodes to the cache, and computes the attention of these nodes.

Call it as `attend(q, k, v, new, scale=..., cap=..., sinks=None)`. Its arguments are q [B, N, K, G, D], the cache's k
and v [B, S, K, D], the nodes' `NewKV`, and the options of `attend`. `sinks` is f32[K, G] if the layer has attention
sinks. It returns the output [B, N, K, G, D] and the updated k and v of the cache."""


def attending(form: str, visible: Visible, slots: int, window: int | None) -> Attend:
    """Return a function that computes attention for the nodes of `visible` over a cache of `slots` slots.

    The returned function is a pytree whose leaves are the arrays that it reads, so it can be an argument of a jitted
    function.

    Args:
      form: implementation, one of `FORMS`.
      visible: the slots that each node attends to.
      slots: number of slots in the cache.
      window: size of the layer's sliding window; None: full attention.

    Raises (when the returned function is called):
      MarsError: the kernel does not support the shape or dtype of the cache.
    """
    nodes = visible.positions.shape[1]
    live = jnp.max(visible.slot) + nodes
    fits = slots % KERNEL_SLOTS == 0 and (nodes <= KERNEL_NODES or visible.seen is None)
    if form == "xla" or (form == "auto" and not (on_tpu() and fits)):
        by_mask = _bind(_attend_by_mask, form == "auto")
        return Partial(by_mask, visible.dense(slots, window), live, visible.slot)
    return Partial(_bind(_attend_by_kernel, form, window), visible)


@functools.lru_cache
def _bind(attend: Attend, *options: str | int | None):
    """Return the same `functools.partial` object for the same arguments, so that jit does not recompile."""
    return functools.partial(attend, *options)


def _attend_by_mask(
    flash: bool,
    mask: Array,
    live: Array,
    slot: Array,
    q: Array,
    k: Rows,
    v: Rows,
    new: NewKV,
    *,
    scale: float,
    cap: float | None,
    sinks: Array | None = None,
) -> tuple[Array, Rows, Rows]:
    if new is not None:
        k, v = (
            hold_heads(kv_cache.write_slots(cached, rows, slot))
            for cached, rows in zip((k, v), new, strict=True)
        )
    return attend(q, k, v, mask, live, sinks, scale=scale, cap=cap, flash=flash), k, v


def _attend_by_kernel(
    form: str,
    window: int | None,
    visible: Visible,
    q: Array,
    k: Rows,
    v: Rows,
    new: NewKV,
    *,
    scale: float,
    cap: float | None,
    sinks: Array | None = None,
) -> tuple[Array, Rows, Rows]:
    kernel = functools.partial(_kernel, window=window, cap=cap, scale=scale, interpret=form == "interpret")

    def by_mask(q: Array, k: Rows, v: Rows, new: NewKV, visible: Visible, sinks: Array | None):
        return attending("xla", visible, k.shape[1], window)(q, k, v, new, sinks=sinks, scale=scale, cap=cap)

    # On a chip with two cores, the kernel splits the batch between them, so a small batch can leave one core idle. The
    # idle core matters in forward passes with a single node per row.
    idle = device_kind() in TWO_CORES and q.shape[1] == 1
    few_rows = len(q) < KERNEL_ROWS and (idle or not in_turns(q, k))
    if form == "auto" and few_rows:
        return by_mask(q, k, v, new, visible, sinks)

    def on_device(q: Array, k: Rows, v: Rows, new: NewKV, visible: Visible, sinks: Array | None):
        if form == "auto" and _unreadable(q, k):
            return by_mask(q, k, v, new, visible, sinks)
        if form == "interpret":
            return kernel(q, k, v, new, visible, sinks)
        # With "auto", fall back to XLA if the kernel does not compile.
        choose = functools.partial(kernel_on, "tpu") if form == "auto" else whole_or_partitioned
        tpu_form = choose(kernel, by_mask)
        return lax.platform_dependent(q, k, v, new, visible, sinks, tpu=tpu_form, default=by_mask)

    if form == "auto":
        on_device = with_gradient_of(by_mask, on_device)
    axes = axes_here("kv_heads", k.shape[2])
    if axes is None:
        return on_device(q, k, v, new, visible, sinks)
    by_heads = P(None, None, axes or None)
    specs = (*[by_heads] * 4, P(), P(axes or None))
    return map_devices(on_device, specs, by_heads)(q, k, v, new, visible, sinks)


def _kernel(
    q: Array,
    k: Rows,
    v: Rows,
    new: NewKV,
    visible: Visible,
    sinks: Array | None,
    *,
    window: int | None,
    cap: float | None,
    scale: float,
    interpret: bool,
) -> tuple[Array, Rows, Rows]:
    if (reason := _unreadable(q, k)) is not None:
        raise MarsError(f'{reason} Or load the model with attention="xla".')
    options: dict[str, Any] = {
        "seen": visible.seen,
        "positions": visible.positions,
        "seen_positions": visible.seen_positions,
        "sinks": sinks,
        "window": window,
        "cap": cap,
        "scale": scale,
        "implementation": "pallas_tpu",
        "interpret": interpret,
    }
    if not (isinstance(k, Int8Rows) or isinstance(v, Int8Rows) or new is None or q.shape[1] > KERNEL_NODES):
        return write_and_attend(q, k, v, NewRows(*new, visible.slot), visible.first, **options)
    # An int8 cache needs a scale per row, which the kernel does not compute, so write int8 rows here. Also write the
    # rows of a prompt chunk here: prefill does not use the output of the last layer's attention, which XLA can remove
    # if it does not also write the rows.
    if new is not None:
        k, v = (
            kv_cache.write_slots(cached, rows, visible.slot) for cached, rows in zip((k, v), new, strict=True)
        )
    (keys, k_scale), (values, v_scale) = _parts(k), _parts(v)
    out = tree_attention(q, keys, values, visible.first, k_scale=k_scale, v_scale=v_scale, **options)
    return out, k, v


def _unreadable(q: Array, k: Rows) -> BlockError | None:
    """Return the error that explains why the kernel does not support this cache; None if it does."""
    try:
        attention_blocks(None, q.shape, k.shape[1], k.dtype, scaled=isinstance(k, Int8Rows))
    except BlockError as error:
        return error
    return None


def attend(
    q: Array,
    k: Rows,
    v: Rows,
    mask: Array,
    live: Array,
    sinks: Array | None = None,
    *,
    scale: float | None = None,
    cap: float | None = None,
    flash: bool = False,
) -> Array:
    """Compute grouped-query attention.

    The cost is proportional to `live`, rounded up to whole blocks, and not to the length of the cache.

    Args:
      q: [B, N, K, G, D].
      k: [B, S, K, D]; cached keys in the layout of the cache, because XLA would have to copy the whole cache to change
        the layout. Its dtype may be wider than q's. The integers of `Int8Rows` are converted to q's dtype, and their
        scales are applied to the scores.
      v: [B, S, K, D]; cached values.
      mask: bool[B, N, S]; True where a query attends to a slot. The output of a query that attends to no slot is zero.
      live: i32[]; upper bound on the visible slots: `mask[:, :, live:]` is False everywhere.
      sinks: f32[K, G]; attention sinks (gpt-oss, arXiv 2508.10925): one logit per head, neither scaled nor capped, for
        an extra slot with value zero that every query attends to; None for no sinks.
      scale: factor by which the scores are multiplied; None: D ** -0.5.
      cap: limit on the scores, applied by `layers.soft_cap` before the mask; None: no limit.
      flash: use cuDNN on a single GPU if it supports the arrays and is expected to be faster.

    Returns:
      [B, N, K, G, D] in q's dtype.
    """

    def on_cpu(q, k, v, mask, live, sinks):
        # Multiply int8 keys in float32: bfloat16 products are slow on a CPU, and the keys must be converted anyway.
        wide = q.astype(jnp.float32) if isinstance(k, Int8Rows) else q
        return _attend_blocks(wide, k, v, mask, live, sinks, scale, cap).astype(q.dtype)

    elsewhere = gpu = functools.partial(attend_all, scale=scale, cap=cap)
    if in_turns(q, k):
        elsewhere = functools.partial(_attend_blocks, scale=scale, cap=cap, block=wide_block(q, k))
    if k.shape[1] > (block := _block(q, GPU_SCORE_BYTES)):
        # On a GPU, a loop of dynamic length waits for the host in every iteration, so loop over all slots.
        def gpu(q, k, v, mask, live, sinks):
            del live
            return _attend_blocks(q, k, v, mask, None, sinks, scale, cap, block)

    cuda = gpu
    queries = q.size // q.shape[-1]
    has_many = queries > FLASH_QUERIES or (q.shape[1] == 1 and queries >= FLASH_SINGLE)
    supported = (
        cap is None and sinks is None and q.dtype == k.dtype and k.dtype in (jnp.bfloat16, jnp.float16)
    )
    if flash and on_gpu() and current() is None and has_many and supported:
        # Use cuDNN's attention if it compiles. The gradient is always computed by the XLA implementation.
        cuda = with_gradient_of(gpu, kernel_or(functools.partial(_flash, scale=scale), gpu, platform="gpu"))
    return lax.platform_dependent(
        q, k, v, mask, live, sinks, cpu=on_cpu, cuda=cuda, rocm=gpu, default=elsewhere
    )


def _flash(
    q: Array,
    k: Array,
    v: Array,
    mask: Array,
    live: Array,
    sinks: None = None,
    *,
    scale: float | None,
    implementation: Literal["xla", "cudnn"] = "cudnn",
) -> Array:
    """Compute `attend` with `jax.nn.dot_product_attention`.

    If there are few nodes, all queries that share a key-value head form one tile, so their keys and values are read
    only once.
    """
    del live, sinks  # the mask determines how many slots each row reads
    batch, nodes, heads, group, dim = q.shape
    queries, query_mask = q, mask
    share_tile = 1 < nodes <= KERNEL_NODES
    if share_tile:
        # Query n * G + g of a key-value head belongs to node n and query head g.
        queries = jnp.swapaxes(q, 2, 3).reshape(batch, nodes * group, heads, dim)
        query_mask = jnp.repeat(mask, group, axis=1)
    last = jnp.max(jnp.where(mask, jnp.arange(1, k.shape[1] + 1, dtype=jnp.int32), 1), axis=(1, 2))
    out = jax.nn.dot_product_attention(
        queries.reshape(*queries.shape[:2], -1, dim),
        k,
        v,
        mask=query_mask[:, None],
        scale=scale,
        key_value_seq_lengths=last,
        implementation=implementation,
    )
    if share_tile:
        out = jnp.swapaxes(out.reshape(batch, nodes, group, heads, dim), 2, 3)
    out = out.reshape(q.shape)
    return jnp.where(jnp.any(mask, axis=2)[:, :, None, None, None], out, 0)


def wide_block(q: Array, k: Rows) -> int:
    """Return the number of slots per block on an accelerator: a power of two.

    If the heads are sharded over a mesh, the size depends on the number of heads per device.

    Args:
      q: [B, N, K, G, D].
      k: [B, S, K, D].

    >>> wide_block(jnp.zeros((1, 1, 2, 4, 128), jnp.bfloat16), jnp.zeros((1, 8192, 2, 128), jnp.bfloat16))
    4096
    """
    batch, _, heads, _, dim = q.shape
    slot = 2 * batch * (heads // devices_of("kv_heads", heads)) * dim * k.dtype.itemsize
    return min(_block(q, SCORE_BYTES), 1 << max(TURN_BYTES // slot, TURN_SLOTS).bit_length() - 1)


def _block(q: Array, limit: int) -> int:
    """Return the number of slots whose scores take at most `limit` bytes, as a power of two that is at least 256."""
    batch, nodes, heads, group, _ = q.shape
    scores = batch * (heads // devices_of("kv_heads", heads)) * group * nodes * 4
    return max(256, 1 << max(limit // scores, 1).bit_length() - 1)


def in_turns(q: Array, k: Rows) -> bool:
    """Return whether accelerators compute attention in blocks: they do so if the cache is longer than 1.25 blocks."""
    block = wide_block(q, k)
    return k.shape[1] > block + block // 4


def _scores(q: Array, k: Rows, mask: Array, scale: float | None, cap: float | None) -> Array:
    """Compute the attention scores f32[B, K, N, G, S]; masked scores are -inf."""
    factor = scale or q.shape[-1] ** -0.5
    keys, key_scale = _parts(k)
    if key_scale is None:
        q = q.astype(keys.dtype)
    scores = jnp.einsum("bnkgd,bskd->bkngs", q, keys.astype(q.dtype), preferred_element_type=jnp.float32)
    if key_scale is not None:
        # The D numbers of a key share one scale, so apply the scale to the dot product.
        factor = factor * _by_slot(key_scale)
    scores = scores * factor
    if cap is not None:
        scores = soft_cap(scores, cap)
    return jnp.where(mask[:, None, :, None], scores, -jnp.inf)


def _mix(weights: Array, v: Rows, dtype: DTypeLike) -> Array:
    """Return the sum f32[B, K, N, G, D] of the values, weighted by f32[B, K, N, G, S].

    `dtype` is the dtype of the queries. Int8 values are converted to it.
    """
    values, value_scale = _parts(v)
    if value_scale is not None:
        weights, values = weights * _by_slot(value_scale), values.astype(dtype)
    return jnp.einsum(
        "bkngs,bskd->bkngd", weights.astype(values.dtype), values, preferred_element_type=jnp.float32
    )


def _parts(rows: Rows) -> tuple[Array, Array | None]:
    if isinstance(rows, Int8Rows):
        return rows.values, rows.scale
    return rows, None


def _by_slot(scale: Array) -> Array:
    """Reshape the scales [B, S, K] of the slots to [B, K, 1, 1, S]."""
    return jnp.swapaxes(scale, 1, 2)[:, :, None, None]


def _slice(rows: Rows, first: Array, size: int) -> Rows:
    return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, first, size, axis=1), rows)


def _finish(mixed: Array, denominator: Array, dtype: DTypeLike) -> Array:
    """Divide the weighted sums by the softmax denominator: N * D divisions. Dividing the weights would take N * S."""
    # The denominator is 0 for a query that attends to no slot.
    mixed = mixed / jnp.where(denominator == 0, 1.0, denominator)[..., None]
    return jnp.transpose(mixed, (0, 2, 1, 3, 4)).astype(dtype)


def attend_all(
    q: Array,
    k: Rows,
    v: Rows,
    mask: Array,
    live: Array,
    sinks: Array | None = None,
    *,
    scale: float | None = None,
    cap: float | None = None,
) -> Array:
    """Compute `attend` over all slots at once; `live` is not used."""
    del live
    scores = _scores(q, k, mask, scale, cap)
    # The maximum cancels in the quotient, so it needs no gradient. If a query attends to no slot, its maximum is -inf,
    # and scores - top would be NaN. Use `_LOWEST` instead, or the sink's logit, which is also finite.
    lowest = _LOWEST
    if sinks is not None:
        # Reshape to [1, K, 1, G, 1], which broadcasts to the shape of the scores.
        lowest = sinks = sinks[None, :, None, :, None]
    top = lax.stop_gradient(jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), lowest))
    weights = jnp.exp(scores - top)
    mixed, denominator = _mix(weights, v, q.dtype), jnp.sum(weights, axis=-1)
    # Attention sinks only add to the denominator, because their value is zero.
    if sinks is not None:
        denominator += jnp.exp(sinks - top)[..., 0]
    return _finish(mixed, denominator, q.dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(6, 7, 8))
def _attend_blocks(
    q: Array,
    k: Rows,
    v: Rows,
    mask: Array,
    live: Array | None,
    sinks: Array | None = None,
    scale: float | None = None,
    cap: float | None = None,
    block: int = BLOCK,
) -> Array:
    """Compute `attend` over blocks of slots, with a running maximum and sum (arXiv 1805.02867, algorithm 3).

    The loop stops at slot `live`. If `live` is None, the loop has a static length and reads all blocks.
    """
    batch, n, heads, group, dim = q.shape
    slots = k.shape[1]
    size = min(block, slots)

    def body(i, carry):
        top, denominator, mixed = carry
        # Move the start of the last block back if the block would end past the cache. Mask the slots that the previous
        # block has already read.
        first = jnp.minimum(i * size, slots - size)
        fresh = first + jnp.arange(size, dtype=jnp.int32) >= i * size
        block_mask = lax.dynamic_slice_in_dim(mask, first, size, axis=2) & fresh[None, None]
        scores = _scores(q, _slice(k, first, size), block_mask, scale, cap)
        higher = jnp.maximum(top, jnp.max(scores, axis=-1))
        # Both running sums are relative to the old maximum. `shrink` rescales them to the new maximum.
        weights, shrink = jnp.exp(scores - higher[..., None]), jnp.exp(top - higher)
        mixed = mixed * shrink[..., None] + _mix(weights, _slice(v, first, size), q.dtype)
        return higher, denominator * shrink + total(weights), mixed

    rows = (batch, heads, n, group)
    denominator, top = jnp.zeros(rows, jnp.float32), jnp.full(rows, _LOWEST, jnp.float32)
    if sinks is not None:
        # Start the running softmax with the sink. The sink's logit is the first maximum, so its weight is exp(0) = 1.
        denominator, top = jnp.ones(rows, jnp.float32), jnp.broadcast_to(sinks[None, :, None], rows)
    carry = (top, denominator, jnp.zeros((*rows, dim), jnp.float32))
    end = slots if live is None else live.astype(jnp.int32)
    count = (end + size - 1) // size
    _, denominator, mixed = lax.fori_loop(0, count, body, carry)
    return _finish(mixed, denominator, q.dtype)


@_attend_blocks.defjvp
def _attend_blocks_jvp(scale, cap, block, primals, tangents):
    # JAX cannot differentiate a loop of dynamic length in reverse mode, so differentiate `attend_all`, which computes
    # the same function.
    return jax.jvp(functools.partial(attend_all, scale=scale, cap=cap), primals, tangents)
