"""Building blocks of transformer layers: matrix products, norms, MLPs and embeddings, as pure functions.

Tested against transformers' `modeling_llama.py` and similar files.

Dimensions: B batch, N tokens, V vocabulary, E hidden size, H heads, D head dimension.
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
    """Compute gpt-oss's activation (up + 1) * gate * sigmoid(alpha * gate), with clamped inputs.

    First, `gate` is clipped to at most `limit`, and `up` to [-limit, limit]. In gpt-oss, `alpha` is 1.702
    (`swiglu_alpha`) and `limit` is `swiglu_limit`.

    >>> float(clamped_swiglu(jnp.asarray(9.0), jnp.asarray(-9.0), 0.0, 2.0))  # (-2 + 1) * 2 * sigmoid(0)
    -1.0
    """
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return (up + 1) * gate * jax.nn.sigmoid(alpha * gate)


_LONGEST_SUM = (2**31 - 1) // 127**2
"""Maximum number of products of 8-bit integers whose sum always fits in int32."""
_FEW = 8
"""Minimum number of rows for which devices exchange partial sums in the dtype of x instead of float32."""

AxisSize = tuple[str, int] | None
"""A logical axis of `mesh.RULES`, and the size of this axis."""


def _dense(x: Array, w: Array, dtype: DTypeLike = jnp.float32) -> Array:
    return lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=dtype)


def dense_cpu(x: Array, w: Array) -> Array:
    """Compute x @ w.T in float32, with the operations that are fastest in XLA's CPU backend.

    The choices below are based on measurements by scripts/bench_shapes.py at commit 5336526.
    """
    rows = x.shape[0]
    if x.dtype == jnp.bfloat16:
        # A single row would be a matrix-vector product, which uses scalar code and is 10 times slower. With AMX, the
        # order of summation for one or two rows differs from that for more. Padding to four rows costs no time.
        return _dense(jnp.pad(x, ((0, max(4 - rows, 0)), (0, 0))), w)[:rows]
    # Eigen's kernels process eight columns at a time and are slow for a remainder: 5 to 7 columns take longer than 8,
    # and 9 to 15 longer than 16.
    padded = jnp.pad(x, ((0, -rows % 8), (0, 0))) if rows > 4 else x
    y = lax.dot_general(w, padded, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    # Compute (w @ x.T).T, which reads the weights twice as fast as x @ w.T. The barrier keeps XLA from undoing this.
    return lax.optimization_barrier(y)[:, :rows].T


def _dense_int8(x: Array, values: Array) -> Array:
    # Pad to a multiple of 8 rows: for fewer rows, a TPU would not use its matrix units.
    eights = jnp.pad(x, ((0, -x.shape[0] % 8), (0, 0)))
    return _dense(eights, values.astype(x.dtype))[: x.shape[0]]


def _integer_products(x: Array, values: Array) -> Array:
    """Multiply x by int8 weights with a CPU's integer instructions, at about the speed of bfloat16 or faster.

    Each row of x is represented by three rows of 8-bit integers: x = scale * (high + middle / 254 + low / 254^2). This
    preserves 23 bits of the largest number in the row. Integer sums are exact, so the result does not depend on the
    number of rows.
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
        parts = [jnp.concatenate(parts)]  # one product, which reads the weights once
    # Products with fewer than four rows would use scalar code. The barriers keep XLA from fusing other operations into
    # the products.
    padded = [jnp.pad(part, ((0, max(4 - len(part), 0)), (0, 0))) for part in parts]
    products = [_dense(values, part, jnp.int32) for part in lax.optimization_barrier(padded)]
    products = [product.T for product in lax.optimization_barrier(products)]
    if count == 1:
        products = [products[0][i : i + 1] for i in range(3)]
    high, middle, low = (part[:count].astype(jnp.float32) for part in products)
    return (high + middle / 254 + low / 254**2) * scale


_dense_int8_cpu = with_gradient_of(_dense_int8, _integer_products)


def _as_float(w: Array, dtype: DTypeLike) -> Array:
    """Convert an int8 matrix to `dtype`, and return other matrices unchanged.

    The whole matrix is converted: if it were converted in slices, XLA would gather the slices from all devices.
    """
    if w.dtype != jnp.int8:
        return w
    return w.astype(dtype)


def _dense_int4(x: Array, w: Int4) -> Array:
    return int4_xla.dense_int4(x, w.values, w.scale, w.offset)


def _dense_int4_tpu(x: Array, w: Int4, *, outputs: AxisSize, inputs: AxisSize, dtype: DTypeLike) -> Array:
    """Multiply with the int4 kernel on each device's shard if the kernel supports the shapes, and with XLA otherwise.

    If the inputs are sharded, the devices add up their partial sums in `dtype`.
    """
    axes, parts = None, 1
    if sharded := outputs or inputs:
        axes, parts = mesh.axes_here(*sharded), mesh.devices_of(*sharded)
    if inputs and len(w.values) % parts:
        axes, parts = (), 1  # the matrix is replicated (see `Int4.leaves`)
    # `out` and `inner` become the shape of this device's shard. `by_out` and `by_in` are the mesh axes that shard them.
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
    """Multiply by one group of a 4-bit matrix at a time, so that the converted group stays in a core's cache.

    Otherwise XLA would first write the whole matrix to memory as floats.
    """
    (count, size, _), x = w.values.shape, x.astype(jnp.float32)
    groups = x.reshape(x.shape[0], count, size)

    def body(i: Array, y: Array) -> Array:
        # Without the barrier, XLA would either convert all weights before the loop or convert each number inside the
        # product.
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
    """Compute the linear layer x @ w.T + bias, with sums in float32.

    On a mesh, each device casts its partial sums to the dtype of x before the devices exchange them, if there are at
    least 8 rows and no bias.

    Args:
      x: [..., in].
      w: [out, in].
      bias: [out]; None: no bias.
      dtype: dtype of the output [..., out]; None: the dtype of x.
      outputs: logical axis over which a mesh shards the outputs of w, and its size, such as ("heads", 32). Only the
        int4 kernel on a TPU needs it.
      inputs: the same for the inputs of w.

    >>> dense(jnp.ones((1, 3)), jnp.ones((2, 3)), jnp.ones((2,))).tolist()
    [[4.0, 4.0]]
    """
    rows = x.reshape(-1, x.shape[-1])
    unsharded = mesh.size_of("model", mesh.current()) == 1
    # If the matrix is sharded, exchange partial sums in bfloat16, which halves the bytes. Each device still accumulates
    # in float32. With few rows, exchange float32 instead: there is little to exchange, and on a TPU XLA splits products
    # with few rows into even more partial sums.
    narrow = jnp.float32
    if not unsharded and rows.shape[0] >= _FEW and bias is None and dtype in (None, x.dtype):
        narrow = x.dtype
    if isinstance(w, Int4):
        int4_cpu = _dense_int4_cpu if unsharded else _dense_int4
        int4_tpu = functools.partial(_dense_int4_tpu, outputs=outputs, inputs=inputs, dtype=narrow)
        y = lax.platform_dependent(rows, w, cpu=int4_cpu, tpu=int4_tpu, default=_dense_int4)
    elif isinstance(w, Int8) and unsharded:
        # Integer sums over more inputs could overflow int32.
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
    """Apply RMSNorm (arXiv 1910.07467): divide x [..., E] by its root mean square and multiply by scale [E].

    The result is computed in float32 and cast to the dtype of x. With `plus_one`, the factor is 1 + scale (zero-centred
    RMSNorm), as in the checkpoints of Gemma and Qwen3-Next.
    """
    y = x.astype(jnp.float32)
    # Compute y / sqrt(mean(y ** 2) + eps).
    y = y * lax.rsqrt(total(jnp.square(y))[..., None] / y.shape[-1] + eps)
    scale = scale.astype(jnp.float32)
    if plus_one:
        scale = scale + 1.0
    return (y * jnp.expand_dims(scale, tuple(range(x.ndim - 1)))).astype(x.dtype)


def rms_norm_heads(x: Array, scale: Array, eps: float, head_dim: int) -> Array:
    """Apply `rms_norm` to x [..., H * D], over all H heads together, where D is `head_dim`.

    A mesh may shard the heads. Each device then sums the squares of its own heads, and the devices exchange one number
    per head.
    """
    by_head = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, head_dim)
    squares = mesh.hold_whole(total(jnp.square(by_head)))
    y = by_head * lax.rsqrt(total(squares) / x.shape[-1] + eps)[..., None, None]
    scale_by_head = jnp.expand_dims(scale.astype(jnp.float32).reshape(-1, head_dim), tuple(range(x.ndim - 1)))
    return (y * scale_by_head).astype(x.dtype).reshape(x.shape)


def gated_mlp(layer: dict[str, Array], x: Array, activation: str) -> Array:
    """Compute the gated MLP down(activation(gate(x)) * up(x)) of x [B, N, E] (arXiv 2002.05202).

    The outputs of `gate` and `up`, and their product, are float32.
    """
    hidden = ("hidden", layer["gate"].shape[0])
    gate = dense(x, layer["gate"], layer.get("gate_bias"), dtype=jnp.float32, outputs=hidden)
    up = dense(x, layer["up"], layer.get("up_bias"), dtype=jnp.float32, outputs=hidden)
    x = (ACTIVATIONS[activation](gate) * up).astype(x.dtype)
    return dense(x, layer["down"], layer.get("down_bias"), inputs=hidden)


def soft_cap(x: Array, cap: float) -> Array:
    """Limit x smoothly to (-cap, cap): cap * tanh(x / cap) (Gemma 2, arXiv 2408.00118). Small values hardly change.

    >>> soft_cap(jnp.asarray([0.0, 1e9]), 30.0).tolist()
    [0.0, 30.0]
    """
    return cap * jnp.tanh(x / cap)


def embed(table: Array | Int8, ids: Array) -> Array:
    """Look up the embeddings [B, N, E] of token ids i32[B, N] in table [V, E]. Ids outside `[0, V)` are clipped."""
    if isinstance(table, Int8):
        # Look up at least 8 ids: for fewer, XLA on a TPU slices the table, and copies all of it to another layout in
        # every step.
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
    """Gather bfloat16 rows as integers, because XLA's CPU backend would first convert a bfloat16 table to float32."""
    return lax.bitcast_convert_type(_take(lax.bitcast_convert_type(table, jnp.uint16), ids), jnp.bfloat16)


@_gather.defjvp
def _gather_jvp(primals, tangents):
    # The cast to integers has no derivative. The gather is linear in the table, so the derivative is also a gather.
    (table, ids), (change, _) = primals, tangents
    return _gather(table, ids), _take(change, ids)
