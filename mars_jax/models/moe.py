"""Mixture of experts: each token uses the few MLPs that a router chooses for it (arXiv 2401.04088).

If experts are divided over devices, each device runs its experts on all tokens, and one sum combines the results. For
the few tokens of a decode step, this transfers less data than exchanging rows.

Experts have no capacity limit: every token gets all of its experts, so a row's result does not depend on the batch.
Oracle: transformers' `modeling_mixtral.py`, `modeling_qwen3_moe.py` and `modeling_gpt_oss.py`. T tokens, C experts per
token, R = T * C rows, X experts, E hidden size, M hidden units of an expert.

Gathering each token's matrices would copy them, and running every expert on every token does X / C times the work.
Instead the rows are sorted by expert, and every expert multiplies its rows. `lax.ragged_dot_general` does that in one
operation, but is slow on two backends. On TPUs, except for int8 on v5e, XLA first copies all matrices to a different
layout. TPUs therefore use Megablox (JAX's kernel after MegaBlocks, arXiv 2211.15841), and for int8 and MXFP4, which
Megablox does not support, our own kernels. XLA's CPU backend expands the operation to all experts and all rows and
transposes the weights first, which is slower than running every expert on every token. CPUs therefore use `_blocks`.
All of them read only the experts that have rows, in their stored layout.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from kernels_pallas.common import block_width
from kernels_pallas.dispatch import kernel_on, with_gradient_of
from kernels_pallas.experts import xla as experts_xla
from mars_jax.core.axes import expert_axes, map_devices
from mars_jax.models.layers import ACTIVATIONS, clamped_swiglu, dense, dense_cpu, gated_mlp
from mars_jax.models.quantize import Int8, Mxfp4

_LARGEST = 32
"""Maximum rows of a block on CPU: larger blocks add padding and make no product faster."""
_TILE = 128
"""Maximum rows of a tile on a TPU."""
_WIDEST = 1024
"""Maximum inner and outer width of a tile: up to 2 MB of bfloat16 weights."""


def _blocks(x: Array, w: Array | Mxfp4, sizes: Array) -> Array:
    """Loop over blocks of rows, where each block belongs to one expert. An expert without rows costs nothing."""
    rows, experts = x.shape[0], w.shape[0]
    size = min(_LARGEST, 1 << (max(rows // experts, 1).bit_length() - 1))
    # Blocks of each expert, i32[X]; `ends` is one past its last block, and `first` its first row.
    blocks = (sizes + size - 1) // size
    ends, first = jnp.cumsum(blocks), jnp.cumsum(sizes) - sizes
    x = jnp.pad(x, ((0, size), (0, 0)))

    def body(i, y):
        # Block i belongs to the first expert that ends after it.
        expert = jnp.sum(ends <= i)
        begin = first[expert] + (i - ends[expert] + blocks[expert]) * size
        # XLA widens bfloat16 to slice it. The barrier ties w to i, so that XLA widens one matrix, inside the loop.
        tied, _ = lax.optimization_barrier((w, i))
        matrix = jax.tree.map(lambda stack: stack[expert], tied).astype(x.dtype)
        product = dense_cpu(lax.dynamic_slice_in_dim(x, begin, size), matrix)
        # The last block of an expert may overlap the rows of later experts, which later iterations overwrite.
        return lax.dynamic_update_slice_in_dim(y, product, begin, 0)

    y = jnp.zeros((rows + size, w.shape[1]), jnp.float32)
    return lax.fori_loop(0, ends[-1], body, y)[:rows]


def _gmm(x: Array, w: Array, sizes: Array) -> Array:
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm  # imports Pallas

    rows, (outer, inner) = x.shape[0], w.shape[1:]
    tiling = min(_TILE, -(-rows // 16) * 16), block_width(inner, _WIDEST), block_width(outer, _WIDEST)
    x = jnp.pad(x, ((0, -rows % tiling[0]), (0, 0)))
    # If no row belongs to an expert on this device, the kernel's grid would be empty.
    sizes = sizes.at[-1].max((jnp.sum(sizes, dtype=jnp.int32) == 0).astype(jnp.int32))
    return gmm(x, w, sizes, jnp.float32, tiling, transpose_rhs=True)[:rows]


def _megablox(x: Array, w: Array, sizes: Array) -> Array:
    ragged = experts_xla.ragged_product
    return with_gradient_of(ragged, kernel_on("tpu", _gmm, ragged))(x, w, sizes)


def dense_by_expert(x: Array, w: Array | Int8 | Mxfp4, sizes: Array) -> Array:
    """Multiply x [R, in] by the matrices w [X, out, in]: f32[R, out].

    Args:
      x: rows sorted by expert.
      w: one matrix per expert.
      sizes: i32[X]; the first `sizes[0]` rows belong to expert 0, the next `sizes[1]` to expert 1; they sum to R.

    >>> x, w = jnp.ones((3, 1)), jnp.asarray([[[1.0]], [[2.0]], [[3.0]]])
    >>> dense_by_expert(x, w, jnp.asarray([1, 0, 2], jnp.int32)).tolist()
    [[1.0], [3.0], [3.0]]
    """
    # Imported at the first call, because it imports Pallas.
    from kernels_pallas.experts import mosaic

    ragged = experts_xla.ragged_product
    # Loops of dynamic length and kernels have no derivative.
    blocks = with_gradient_of(ragged, _blocks)
    if isinstance(w, Int8):
        xla = experts_xla.dense_by_expert_int8
        tpu = with_gradient_of(xla, kernel_on("tpu", mosaic.dense_by_expert_int8, xla))
        forms = {"cpu": experts_xla.scaled(blocks), "tpu": tpu, "default": xla}
        return lax.platform_dependent(x, w.values, w.scale, sizes, **forms)
    if isinstance(w, Mxfp4):

        def mxfp4_blocks(x: Array, values: Array, scale: Array, sizes: Array) -> Array:
            return _blocks(x, Mxfp4(values, scale, dtype=w.dtype), sizes)

        xla = experts_xla.dense_by_expert_mxfp4
        tpu = kernel_on("tpu", mosaic.dense_by_expert_mxfp4, xla)
        forms = {
            "cpu": with_gradient_of(xla, mxfp4_blocks),
            "tpu": with_gradient_of(xla, tpu),
            "default": xla,
        }
        return lax.platform_dependent(x, w.values, w.scale, sizes, **forms)
    return lax.platform_dependent(x, w, sizes, cpu=blocks, tpu=_megablox, default=ragged)


def choose_experts(
    layer: dict[str, Array],
    tokens: Array,
    count: int,
    *,
    normalize: bool,
    groups: tuple[int, int] = (1, 1),
    multiplier: float = 1.0,
) -> tuple[Array, Array]:
    """Return the weights f32[T, C] and the ids i32[T, C] of the experts of tokens [T, E]; see `experts_mlp`."""
    logits = dense(tokens, layer["router"], layer.get("router_bias"), dtype=jnp.float32)
    if "score_bias" in layer:
        # DeepSeek-V3 (arXiv 2412.19437, equations 12 to 16): the bias (`e_score_correction_bias`) affects the choice
        # but not the weights.
        scores = jax.nn.sigmoid(logits)
        biased_scores = scores + layer["score_bias"].astype(jnp.float32)[None]
        _, expert_ids = lax.top_k(_in_best_groups(biased_scores, *groups), count)
        share = jnp.take_along_axis(scores, expert_ids, axis=-1)
    else:
        # If normalised, these shares equal the softmax over only the chosen logits (gpt-oss, Mixtral).
        share, expert_ids = lax.top_k(jax.nn.softmax(logits, axis=-1), count)
    # `norm_topk_prob`.
    if normalize:
        share = share / jnp.sum(share, axis=-1, keepdims=True)
    # `multiplier` is DeepSeek's `routed_scaling_factor`.
    return share * multiplier, expert_ids


def _in_best_groups(scores: Array, groups: int, kept: int) -> Array:
    """Set scores f32[T, X] to -inf outside the `kept` groups with the largest sums of their two best scores.

    Group-limited routing of DeepSeek-V3: `groups` is its `n_group`, and `kept` its `topk_group`.
    """
    if kept == groups:
        return scores
    grouped = scores.reshape(len(scores), groups, -1)
    group_scores = jnp.sum(lax.top_k(grouped, 2)[0], axis=-1)
    is_kept = jnp.any(jax.nn.one_hot(lax.top_k(group_scores, kept)[1], groups, dtype=bool), axis=1)
    return jnp.where(is_kept[..., None], grouped, -jnp.inf).reshape(scores.shape)


def experts_mlp(
    layer: dict[str, Array],
    x: Array,
    activation: str,
    *,
    count: int,
    normalize: bool,
    swiglu: tuple[float, float] | None = None,
    groups: tuple[int, int] = (1, 1),
    multiplier: float = 1.0,
) -> Array:
    """Run the gated MLPs of each token's `count` most probable experts, weighted by their probabilities.

    Args:
      layer: `router` [X, E], `expert_gate` and `expert_up` [X, M, E], `expert_down` [X, E, M]; and their biases, if
        any. With `score_bias` [X], the weights are sigmoids of logits instead of probabilities, and the bias is added
        to them only to choose the experts.
      x: [B, N, E].
      activation: see `layers.ACTIVATIONS`.
      count: C.
      normalize: scale the weights of a token's experts to sum to 1.
      swiglu: see `ModelConfig.swiglu`.
      groups: number of groups of experts, and number of groups that a token uses. Only with `score_bias`.
      multiplier: factor of the weights, after `normalize`.

    Returns:
      [B, N, E]; float32 between products.
    """
    experts, size = layer["expert_gate"].shape[:2]
    if isinstance(layer["expert_down"], Mxfp4):
        size //= experts_xla.BLOCK  # shard whole blocks of the inputs of `expert_down`
    by_expert, by_unit = expert_axes(experts, size)
    tokens = x.reshape(-1, x.shape[-1])
    share, expert_ids = choose_experts(
        layer, tokens, count, normalize=normalize, groups=groups, multiplier=multiplier
    )
    by_hidden = ("expert_gate", "expert_up", "expert_gate_bias", "expert_up_bias")
    matrices = {name: layer[name] for name in (*by_hidden, "expert_down") if name in layer}

    def gated(gate: Array, up: Array) -> Array:
        if swiglu is not None:
            return clamped_swiglu(gate, up, *swiglu)
        return ACTIVATIONS[activation](gate) * up

    def local(matrices: dict[str, Array], tokens: Array, share: Array, expert_ids: Array) -> Array:
        first = None
        if by_expert:
            first = lax.axis_index(by_expert) * matrices["expert_gate"].shape[0]
        return lax.psum(_mix(matrices, tokens, share, expert_ids, gated, first), (*by_expert, *by_unit))

    if by_expert or by_unit:
        specs = {"expert_down": P(by_expert, None, by_unit)}
        specs |= dict.fromkeys(by_hidden, P(by_expert, by_unit, None))
        # Biases and the scales of int8 matrices have no last axis.
        specs = {k: jax.tree.map(lambda x, k=k: P(*specs[k][: x.ndim]), w) for k, w in matrices.items()}
        mixed = map_devices(local, (specs, P(), P(), P()))(matrices, tokens, share, expert_ids)
    else:
        mixed = _mix(matrices, tokens, share, expert_ids, gated, None)
    if "expert_down_bias" in layer:
        # Outside of `local`: devices that share an expert's hidden units must add its bias only once.
        mixed += jnp.einsum("tc,tce->te", share, layer["expert_down_bias"][expert_ids].astype(jnp.float32))
    return mixed.astype(x.dtype).reshape(x.shape)


def shared_expert(layer: dict[str, Array], x: Array, activation: str) -> Array:
    """Run the MLP that all tokens x [B, N, E] share, times the sigmoid of each token's gate, if there is one."""
    mlp = {name: layer[f"shared_{name}"] for name in ("gate", "up", "down")}
    if "shared_router" not in layer:
        return gated_mlp(mlp, x, activation)
    # `shared_expert_gate` of Qwen2-MoE.
    gate = jax.nn.sigmoid(dense(x, layer["shared_router"], dtype=jnp.float32))
    return (gate * gated_mlp(mlp, x, activation)).astype(x.dtype)


def _mix(
    matrices: dict[str, Array],
    tokens: Array,
    share: Array,
    expert_ids: Array,
    gated: Callable[[Array, Array], Array],
    first: Array | None,
) -> Array:
    """Return f32[T, E]: the sum of the outputs of each token's experts, weighted by `share` f32[T, C].

    Args:
      matrices: matrices of all experts if `first` is None, otherwise of this device's experts, which start at `first`;
        and the biases of gate and up.
      expert_ids: i32[T, C]. Experts on other devices contribute nothing.
      gated: (gate, up) -> inputs of down.
    """
    experts, count = matrices["expert_gate"].shape[0], expert_ids.shape[1]
    is_local = None
    if first is not None:
        is_local = (expert_ids >= first) & (expert_ids < first + experts)
        # Sort rows of other devices' experts after the last row that is multiplied.
        expert_ids = jnp.where(is_local, expert_ids - first, experts)
    # Row r of R = T * C is choice r % C of token r // C. `order` sorts the rows by expert.
    order = jnp.argsort(expert_ids.reshape(-1))
    sizes = jnp.bincount(expert_ids.reshape(-1), length=experts).astype(jnp.int32)
    rows = tokens[order // count]
    gate = dense_by_expert(rows, matrices["expert_gate"], sizes)
    up = dense_by_expert(rows, matrices["expert_up"], sizes)
    if "expert_gate_bias" in matrices:
        row_experts = expert_ids.reshape(-1)[order]
        gate += matrices["expert_gate_bias"][row_experts].astype(jnp.float32)
        up += matrices["expert_up_bias"][row_experts].astype(jnp.float32)
    inner = gated(gate, up).astype(tokens.dtype)
    down = dense_by_expert(inner, matrices["expert_down"], sizes)
    # Undo the sort, and sum over the C choices.
    weighted = down[jnp.argsort(order)].reshape(-1, count, tokens.shape[-1]) * share[..., None]
    if is_local is not None:
        weighted = jnp.where(is_local[..., None], weighted, 0.0)
    return jnp.sum(weighted, axis=1)
