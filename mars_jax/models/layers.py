"""Parts of a transformer layer as pure functions. Oracle: transformers' `modeling_llama.py` and similar files.

B batch, N tokens, S cache slots, E hidden size, K key-value heads, G query heads per key-value head, D head dimension.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from kernels_pallas.dispatch import kernel_on, with_gradient_of
from kernels_pallas.int4 import xla as int4_xla
from kernels_pallas.int4.shapes import supports_product
from mars_jax.core import axes as mesh
from mars_jax.core.sums import total
from mars_jax.models.quantize import Int4, Int8, Quantized

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
}
"""Activation functions by their names in `ModelConfig.activation`."""


def clamped_swiglu(gate: Array, up: Array, alpha: float, limit: float) -> Array:
    """Return (up + 1) * gate * sigmoid(alpha * gate), after clamping gate from above and up on both sides (gpt-oss).

    `alpha` is `swiglu_alpha`, 1.702 there, and `limit` is `swiglu_limit`.

    >>> float(clamped_swiglu(jnp.asarray(9.0), jnp.asarray(-9.0), 0.0, 2.0))  # (-2 + 1) * 2 * sigmoid(0)
    -1.0
    """
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return (up + 1) * gate * jax.nn.sigmoid(alpha * gate)


_LONGEST_SUM = (2**31 - 1) // 127**2
"""Number of products of 8-bit integers whose sum fits in int32."""
_FEW = 8
"""Minimum rows for which devices exchange partial sums in bfloat16."""

AxisSize = tuple[str, int] | None
"""A logical axis of `mesh.RULES` and its size."""


def _dense(x: Array, w: Array, dtype: DTypeLike = jnp.float32) -> Array:
    return lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=dtype)


def dense_cpu(x: Array, w: Array) -> Array:
    """Multiply in the forms that XLA's CPU backend runs fastest (scripts/bench_shapes.py at commit 5336526)."""
    rows = x.shape[0]
    if x.dtype == jnp.bfloat16:
        # One row would be a matrix-vector product, which falls back to scalar code: 10x slower. With AMX, one or two
        # rows are summed in a different order than three or more, and padding to four takes no longer.
        return _dense(jnp.pad(x, ((0, max(4 - rows, 0)), (0, 0))), w)[:rows]
    # Eigen's kernels process eight columns at a time; 5 to 7 cost more than 8, and 9 to 15 more than 16.
    padded = jnp.pad(x, ((0, -rows % 8), (0, 0))) if rows > 4 else x
    y = lax.dot_general(w, padded, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    # W @ x.T streams [out, in] weights twice as fast as x @ W.T; the barrier keeps XLA from undoing the swap.
    return lax.optimization_barrier(y)[:, :rows].T


def _dense_int8(x: Array, values: Array) -> Array:
    # A TPU would compute integer products with fewer than 8 rows outside of its matrix units.
    eights = jnp.pad(x, ((0, -x.shape[0] % 8), (0, 0)))
    return _dense(eights, values.astype(x.dtype))[: x.shape[0]]


def _integer_products(x: Array, values: Array) -> Array:
    """Multiply x by int8 weights as integers, for which CPUs have instructions: about as fast as bfloat16, or faster.

    Each row of x is split into three of 8 bits, x = scale * (high + middle / 254 + low / 254^2), which keep 23 bits of
    the largest number of the row. Integer sums are exact, so they do not depend on the number of rows.
    """
    count, x = x.shape[0], x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(x), axis=1, keepdims=True)
    scale = jnp.where(largest == 0, 1.0, largest / 127)
    parts, remainder = [], x / scale
    for _ in range(3):
        part = jnp.round(remainder)
        parts.append(part.astype(jnp.int8))
        remainder = (remainder - part) * 254
    if count == 1:
        parts = [jnp.concatenate(parts)]  # reads the weights once
    # Fewer than four rows would be multiplied in scalar code. The barriers keep other operations out of the products.
    padded = [jnp.pad(part, ((0, max(4 - len(part), 0)), (0, 0))) for part in parts]
    products = [_dense(values, part, jnp.int32) for part in lax.optimization_barrier(padded)]
    products = [product.T for product in lax.optimization_barrier(products)]
    if count == 1:
        products = [products[0][i : i + 1] for i in range(3)]
    high, middle, low = (part[:count].astype(jnp.float32) for part in products)
    return (high + middle / 254 + low / 254**2) * scale


_dense_int8_cpu = with_gradient_of(_dense_int8, _integer_products)


def _as_float(w: Array, dtype: DTypeLike) -> Array:
    """Convert an int8 matrix as a whole: on a mesh, XLA would gather slices of it from all devices."""
    if w.dtype != jnp.int8:
        return w
    return w.astype(dtype)


def _dense_int4(x: Array, w: Int4) -> Array:
    return int4_xla.dense_int4(x, w.values, w.scale, w.offset)


def _dense_int4_tpu(x: Array, w: Int4, *, outputs: AxisSize, inputs: AxisSize, dtype: DTypeLike) -> Array:
    """Run the kernel on each device's shard if it supports the shapes; devices add up partial sums in `dtype`."""
    axes, parts = None, 1
    if sharded := outputs or inputs:
        axes, parts = mesh.axes_here(*sharded), mesh.devices_of(*sharded)
    if inputs and len(w.values) % parts:
        axes, parts = (), 1  # the matrix is replicated, see `Int4.leaves`
    # The size of this device's shard, and the mesh axes of each dimension.
    (out, inner), by_out, by_in = w.shape, None, None
    if outputs:
        out, by_out = out // parts, axes or None
    if inputs:
        inner, by_in = inner // parts, axes or None
    supported = supports_product(x.shape[0], inner, out, w.values.shape[1])
    if not supported or x.dtype != jnp.bfloat16 or w.values.dtype != jnp.int4:
        return _dense_int4(x, w)
    from kernels_pallas.int4 import mosaic  # imports Pallas

    kernel = functools.partial(mosaic.dense_int4, chip=mesh.device_kind())
    on_device = with_gradient_of(int4_xla.dense_int4, kernel_on("tpu", kernel, int4_xla.dense_int4))
    if axes is None:
        return on_device(x, w.values, w.scale, w.offset)

    def part(*operands: Array) -> Array:
        y = on_device(*operands)
        if not by_in:
            return y
        return lax.psum(y.astype(dtype), by_in).astype(y.dtype)

    specs = (P(None, by_in), P(by_in, None, by_out), *[P(by_in, by_out)] * 2)
    tpu = with_gradient_of(int4_xla.dense_int4, mesh.map_devices(part, specs, P(None, by_out)))
    return tpu(x, w.values, w.scale, w.offset)


def _dense_int4_cpu(x: Array, w: Int4) -> Array:
    """Convert one group at a time in a core's cache. XLA would first write the whole matrix as floats."""
    (count, size, _), x = w.values.shape, x.astype(jnp.float32)
    groups = x.reshape(x.shape[0], count, size)

    def body(i: Array, y: Array) -> Array:
        # The barrier keeps XLA from converting all weights before the loop, or each number inside the product.
        values = lax.optimization_barrier(w.values[i].astype(jnp.float32))
        return y + (groups[:, i] @ values) * w.scale[i].astype(jnp.float32)[None]

    return lax.fori_loop(0, count, body, jnp.sum(groups, axis=-1) @ w.offset)


def dense(
    x: Array,
    w: Array | Quantized,
    bias: Array | None = None,
    *,
    dtype: DTypeLike | None = None,
    outputs: AxisSize = None,
    inputs: AxisSize = None,
) -> Array:
    """Multiply x [..., in] by w [out, in], plus bias [out]: [..., out], summed in float32, cast to `dtype` or x's.

    If devices share the sums of at least 8 rows, each casts its partial sums before they are exchanged and added up.
    `outputs` or `inputs`, such as ("heads", 32), is the axis over which a mesh shards w; the int4 kernel on a TPU needs
    it.

    >>> dense(jnp.ones((1, 3)), jnp.ones((2, 3)), jnp.ones((2,))).tolist()
    [[4.0, 4.0]]
    """
    rows = x.reshape(-1, x.shape[-1])
    unsharded = mesh.size_of("model", mesh.current()) == 1
    # With a sharded matrix, bfloat16 halves the bytes of the partial sums that devices exchange. Each device still
    # accumulates in float32. Few rows stay in float32: their sums are small, and XLA splits such products on a TPU.
    narrow = jnp.float32
    if not unsharded and rows.shape[0] >= _FEW and bias is None and dtype in (None, x.dtype):
        narrow = x.dtype
    if isinstance(w, Int4):
        int4_cpu = _dense_int4_cpu if unsharded else _dense_int4
        int4_tpu = functools.partial(_dense_int4_tpu, outputs=outputs, inputs=inputs, dtype=narrow)
        y = lax.platform_dependent(rows, w, cpu=int4_cpu, tpu=int4_tpu, default=_dense_int4)
    elif isinstance(w, Int8) and unsharded:
        # Sums over more inputs could exceed int32.
        int8_cpu = _dense_int8_cpu if rows.shape[1] <= _LONGEST_SUM else _dense_int8
        y = lax.platform_dependent(rows, w.values, cpu=int8_cpu, default=_dense_int8)
    else:

        def cpu(x: Array, w: Array) -> Array:
            return dense_cpu(x, _as_float(w, x.dtype)).astype(narrow)

        def default(x: Array, w: Array) -> Array:
            return _dense(x, _as_float(w, x.dtype), narrow)

        y = lax.platform_dependent(rows, w.values if isinstance(w, Int8) else w, cpu=cpu, default=default)
    if isinstance(w, Int8):
        y = y.astype(jnp.float32) * w.scale[None]
    if bias is not None:
        y = y + bias.astype(jnp.float32)[None]
    return y.astype(dtype or x.dtype).reshape(*x.shape[:-1], w.shape[0])


def rms_norm(x: Array, scale: Array, eps: float, *, plus_one: bool = False) -> Array:
    """Divide x [..., E] by its root mean square and multiply by scale [E]; in float32, cast back (arXiv 1910.07467).

    With `plus_one`, multiply by 1 + scale (zero-centred RMSNorm), as in the checkpoints of Gemma and Qwen3-Next.
    """
    y = x.astype(jnp.float32)
    # y / sqrt(mean(y ** 2) + eps)
    y = y * lax.rsqrt(total(jnp.square(y))[..., None] / y.shape[-1] + eps)
    scale = scale.astype(jnp.float32)
    if plus_one:
        scale = scale + 1.0
    return (y * jnp.expand_dims(scale, tuple(range(x.ndim - 1)))).astype(x.dtype)


def rms_norm_heads(x: Array, scale: Array, eps: float, head_dim: int) -> Array:
    """Return `rms_norm` of x [..., H * D] over all H heads, D = `head_dim`, which a mesh may shard.

    Each device sums the squares of its heads, and devices exchange one number per head.
    """
    by_head = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, head_dim)
    squares = mesh.hold_whole(total(jnp.square(by_head)))
    y = by_head * lax.rsqrt(total(squares) / x.shape[-1] + eps)[..., None, None]
    scale_by_head = jnp.expand_dims(scale.astype(jnp.float32).reshape(-1, head_dim), tuple(range(x.ndim - 1)))
    return (y * scale_by_head).astype(x.dtype).reshape(x.shape)


def gated_mlp(layer: dict[str, Array], x: Array, activation: str) -> Array:
    """Return down(activation(gate(x)) * up(x)) for x [B, N, E] (arXiv 2002.05202); float32 between products."""
    hidden = ("hidden", layer["gate"].shape[0])
    gate = dense(x, layer["gate"], layer.get("gate_bias"), dtype=jnp.float32, outputs=hidden)
    up = dense(x, layer["up"], layer.get("up_bias"), dtype=jnp.float32, outputs=hidden)
    x = (ACTIVATIONS[activation](gate) * up).astype(x.dtype)
    return dense(x, layer["down"], layer.get("down_bias"), inputs=hidden)


def soft_cap(x: Array, cap: float) -> Array:
    """Squeeze x into (-cap, cap); small x are nearly unchanged (Gemma 2, arXiv 2408.00118).

    >>> soft_cap(jnp.asarray([0.0, 1e9]), 30.0).tolist()
    [0.0, 30.0]
    """
    return cap * jnp.tanh(x / cap)


def embed(table: Array | Int8, ids: Array) -> Array:
    """Return rows of table [V, E] at ids i32[B, N]: [B, N, E]. Ids outside of `[0, V)` are clipped."""
    if isinstance(table, Int8):
        # For fewer than 8 ids, XLA on a TPU uses slices and copies the whole table to a different layout at every step.
        flat = ids.reshape(-1)
        eights = jnp.pad(flat, (0, -flat.size % 8))
        rows = Int8(_take(table.values, eights), _take(table.scale, eights), table.dtype).astype(table.dtype)
        return rows[: flat.size].reshape(*ids.shape, -1)
    return _gather(table, ids)


@jax.custom_jvp
def _gather(table: Array, ids: Array) -> Array:
    if table.dtype != jnp.bfloat16:
        return _take(table, ids)
    return lax.platform_dependent(table, ids, cpu=_take_bits, default=_take)


def _take(table: Array, ids: Array) -> Array:
    return jnp.take(table, ids, axis=0, mode="clip")


def _take_bits(table: Array, ids: Array) -> Array:
    """Gather bfloat16 as bits: XLA's CPU backend would widen a bfloat16 table first, but copies integers directly."""
    return lax.bitcast_convert_type(_take(lax.bitcast_convert_type(table, jnp.uint16), ids), jnp.bfloat16)


@_gather.defjvp
def _gather_jvp(primals, tangents):
    # Bits have no derivative, but the gather is linear in the table.
    (table, ids), (change, _) = primals, tangents
    return _gather(table, ids), _take(change, ids)
