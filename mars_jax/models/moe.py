"""Mixture-of-experts layers, in which a router chooses a few MLPs (experts) for each token (arXiv 2401.04088).

If experts are sharded over devices, each device runs its experts on all tokens, and one all-reduce adds up the results.
For the few tokens of a decoding step, this transfers less data than sending tokens to the devices of their experts.
Experts have no capacity limit: a token always uses all experts that the router chose, so the output of a row does not
depend on the rest of the batch.

Gathering the expert matrices for each token would copy them, and running every expert on every token would take X / C
times as many operations. Instead, the (token, expert) pairs, one per row, are sorted by expert, and each expert's
matrix multiplies that expert's rows. `lax.ragged_dot_general` does this in one operation, but is slow on two backends:

- On TPUs, except for int8 on v5e, XLA first copies all matrices to a different layout. TPUs therefore use Megablox,
  JAX's kernel for MegaBlocks (arXiv 2211.15841). Megablox does not support int8 or MXFP4, for which
  `kernels_pallas.experts` has kernels.
- XLA's CPU backend transposes the weights, and then multiplies all rows by all experts, which is slower than running
  every expert on every token. CPUs therefore use `_blocks`.

These implementations read only the experts that have rows, and read them in the layout in which they are stored.

Tested against transformers' `modeling_mixtral.py`, `modeling_qwen3_moe.py` and `modeling_gpt_oss.py`.

Dimensions: T tokens, C experts per token, R = T * C rows, X experts, E hidden size, M hidden units of an expert.
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
"""Maximum number of rows per block on a CPU. Larger blocks need more padding, and their products are not faster."""
_TILE = 128
"""Maximum number of rows per Megablox tile on a TPU."""
_WIDEST = 1024
"""Maximum number of inputs and outputs of a weight tile, which then takes up to 2 MB in bfloat16."""


def _blocks(x: Array, w: Array | Mxfp4, sizes: Array) -> Array:
    """Multiply sorted rows by their experts' matrices, in blocks of rows that share an expert.

    Experts without rows cost nothing.
    """
    rows, experts = x.shape[0], w.shape[0]
    size = min(_LARGEST, 1 << (max(rows // experts, 1).bit_length() - 1))
    # For each expert, i32[X]: its number of blocks, the end of its blocks, and its first row.
    blocks = (sizes + size - 1) // size
    ends, first = jnp.cumsum(blocks), jnp.cumsum(sizes) - sizes
    x = jnp.pad(x, ((0, size), (0, 0)))

    def body(i, y):
        # Block i belongs to the first expert whose blocks end after i.
        expert = jnp.sum(ends <= i)
        begin = first[expert] + (i - ends[expert] + blocks[expert]) * size
        # XLA converts bfloat16 to float32 before it slices. The barrier makes w depend on i, so that XLA converts only
        # one matrix in each iteration, and not the whole stack before the loop.
        tied, _ = lax.optimization_barrier((w, i))
        matrix = jax.tree.map(lambda stack: stack[expert], tied).astype(x.dtype)
        product = dense_cpu(lax.dynamic_slice_in_dim(x, begin, size), matrix)
        # The last block of an expert may extend into the rows of the next experts. Later iterations overwrite these
        # rows.
        return lax.dynamic_update_slice_in_dim(y, product, begin, 0)

    y = jnp.zeros((rows + size, w.shape[1]), jnp.float32)
    return lax.fori_loop(0, ends[-1], body, y)[:rows]


def _gmm(x: Array, w: Array, sizes: Array) -> Array:
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm  # imports Pallas

    rows, (outer, inner) = x.shape[0], w.shape[1:]
    tiling = min(_TILE, -(-rows // 16) * 16), block_width(inner, _WIDEST), block_width(outer, _WIDEST)
    x = jnp.pad(x, ((0, -rows % tiling[0]), (0, 0)))
    # The kernel's grid must not be empty: if this device's experts have no rows, assign one row to the last expert.
    sizes = sizes.at[-1].max((jnp.sum(sizes, dtype=jnp.int32) == 0).astype(jnp.int32))
    return gmm(x, w, sizes, jnp.float32, tiling, transpose_rhs=True)[:rows]


def _megablox(x: Array, w: Array, sizes: Array) -> Array:
    ragged = experts_xla.ragged_product
    return with_gradient_of(ragged, kernel_on("tpu", _gmm, ragged))(x, w, sizes)


def dense_by_expert(x: Array, w: Array | Int8 | Mxfp4, sizes: Array) -> Array:
    """Multiply each row of x by the matrix of its expert; return f32[R, out].

    Args:
      x: [R, in]; rows sorted by expert.
      w: [X, out, in]; one matrix per expert.
      sizes: i32[X]; number of rows of each expert. The first `sizes[0]` rows belong to expert 0, the next `sizes[1]`
        rows to expert 1, and so on.

    >>> x, w = jnp.ones((3, 1)), jnp.asarray([[[1.0]], [[2.0]], [[3.0]]])
    >>> dense_by_expert(x, w, jnp.asarray([1, 0, 2], jnp.int32)).tolist()
    [[1.0], [3.0], [3.0]]
    """
    # Import this module only when it is needed, because it imports Pallas.
    from kernels_pallas.experts import mosaic

    ragged = experts_xla.ragged_product
    # JAX cannot differentiate kernels, or loops of dynamic length, in reverse mode, so use the derivative of the XLA
    # implementation.
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
    """Run the router on tokens [T, E]; return the weights f32[T, C] and indices i32[T, C] of each token's experts.

    The arguments are the same as for `experts_mlp`.
    """
    logits = dense(tokens, layer["router"], layer.get("router_bias"), dtype=jnp.float32)
    if "score_bias" in layer:
        # DeepSeek-V3 (arXiv 2412.19437, equations 12 to 16): the bias (`e_score_correction_bias`) affects which experts
        # are chosen, but not their weights.
        scores = jax.nn.sigmoid(logits)
        biased_scores = scores + layer["score_bias"].astype(jnp.float32)[None]
        _, expert_ids = lax.top_k(_in_best_groups(biased_scores, *groups), count)
        share = jnp.take_along_axis(scores, expert_ids, axis=-1)
    else:
        # With `normalize`, this equals a softmax over the logits of the chosen experts (gpt-oss, Mixtral).
        share, expert_ids = lax.top_k(jax.nn.softmax(logits, axis=-1), count)
    # `norm_topk_prob` in transformers.
    if normalize:
        share = share / jnp.sum(share, axis=-1, keepdims=True)
    # `multiplier` is DeepSeek's `routed_scaling_factor`.
    return share * multiplier, expert_ids


def _in_best_groups(scores: Array, groups: int, kept: int) -> Array:
    """Set the scores f32[T, X] of experts outside each token's best groups to -inf (DeepSeek-V3).

    The score of a group is the sum of its two largest scores.

    Args:
      scores: scores of all experts.
      groups: number of groups, `n_group` in transformers.
      kept: number of groups that a token may use, `topk_group` in transformers.
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
    """Run each token's `count` most probable experts, and sum their outputs weighted by the router.

    Args:
      layer: `router` [X, E], `expert_gate` and `expert_up` [X, M, E], `expert_down` [X, E, M], and optional biases. If
        there is a `score_bias` [X], the routing weights are sigmoids of the router's logits instead of their softmax.
        The bias is added to them only to choose the experts.
      x: [B, N, E].
      activation: name of an activation in `layers.ACTIVATIONS`.
      count: C, the number of experts per token.
      normalize: scale the routing weights of each token to sum to 1.
      swiglu: (alpha, limit) of `layers.clamped_swiglu`, which then replaces `activation`.
      groups: number of groups of experts, and number of groups that a token may use. Only used with `score_bias`.
      multiplier: factor by which the routing weights are multiplied after `normalize`.

    Returns:
      [B, N, E] in the dtype of x. Activations and weighted sums are computed in float32.
    """
    experts, size = layer["expert_gate"].shape[:2]
    if isinstance(layer["expert_down"], Mxfp4):
        size //= experts_xla.BLOCK  # shard the inputs of `expert_down` in whole blocks
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
        # Biases, and the scales of int8 matrices, have one axis fewer than the matrices: the last axis is missing.
        specs = {k: jax.tree.map(lambda x, k=k: P(*specs[k][: x.ndim]), w) for k, w in matrices.items()}
        mixed = map_devices(local, (specs, P(), P(), P()))(matrices, tokens, share, expert_ids)
    else:
        mixed = _mix(matrices, tokens, share, expert_ids, gated, None)
    if "expert_down_bias" in layer:
        # Add the bias outside `local`, so that it is added only once, even if an expert's hidden units are spread over
        # several devices.
        mixed += jnp.einsum("tc,tce->te", share, layer["expert_down_bias"][expert_ids].astype(jnp.float32))
    return mixed.astype(x.dtype).reshape(x.shape)


def shared_expert(layer: dict[str, Array], x: Array, activation: str) -> Array:
    """Run the shared expert, an MLP that every token uses, on x [B, N, E].

    If the layer has a `shared_router`, multiply each token's output by the sigmoid of its gate.
    """
    mlp = {name: layer[f"shared_{name}"] for name in ("gate", "up", "down")}
    if "shared_router" not in layer:
        return gated_mlp(mlp, x, activation)
    # `shared_expert_gate` in Qwen2-MoE.
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
    """Compute the weighted sum f32[T, E] of the outputs of each token's experts.

    Args:
      matrices: matrices of all experts if `first` is None, and otherwise only those of this device's experts. The dict
        also contains the biases of the gate and up projections.
      tokens: [T, E].
      share: f32[T, C]; routing weights of the experts.
      expert_ids: i32[T, C]. Experts on other devices contribute nothing.
      gated: function that computes the inputs of `expert_down` from the outputs of `expert_gate` and `expert_up`.
      first: i32[]; index of this device's first expert; None: all experts are on this device.
    """
    experts, count = matrices["expert_gate"].shape[0], expert_ids.shape[1]
    is_local = None
    if first is not None:
        is_local = (expert_ids >= first) & (expert_ids < first + experts)
        # Sort the rows of other devices' experts to the end, where no expert multiplies them.
        expert_ids = jnp.where(is_local, expert_ids - first, experts)
    # Before the sort, row r of the R = T * C rows is choice r % C of token r // C. `order` sorts the rows by expert.
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
    # Undo the sort, and apply the weights.
    weighted = down[jnp.argsort(order)].reshape(-1, count, tokens.shape[-1]) * share[..., None]
    if is_local is not None:
        weighted = jnp.where(is_local[..., None], weighted, 0.0)
    return jnp.sum(weighted, axis=1)
