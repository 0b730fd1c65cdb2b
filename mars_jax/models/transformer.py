"""Decoder-only transformer: one implementation for all supported model families, controlled by its config.

Tested against the same checkpoint in PyTorch transformers (tests/models).

Dimensions: B batch, N tokens, S cache slots, E hidden size, V vocabulary, K key-value heads, G query heads per
key-value head, D head dimension, n tokens per device.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from mars_jax.core import cache as kv_cache
from mars_jax.core.axes import alone, current, devices_of, hold_whole, in_order, map_devices, on_tpu
from mars_jax.core.types import ForwardOutput, KVCache, LanguageModel, PyTree, Visible
from mars_jax.models import latent_attention, ring, weights
from mars_jax.models.attention import BLOCK, FORMS, KERNEL_ROWS, KERNEL_SLOTS, TURN_SLOTS, Attend, attending
from mars_jax.models.config import ModelConfig
from mars_jax.models.delta import DeltaRows, RecurrentCache, Span, delta_net, with_states
from mars_jax.models.layers import dense, embed, gated_mlp, rms_norm, rms_norm_heads, soft_cap
from mars_jax.models.moe import experts_mlp, shared_expert
from mars_jax.models.rope import Rope, rotate, rotation_at
from mars_jax.utils.errors import MarsError, short_repr

RING_ROWS = 256
"""Minimum number of tokens per device for which a prompt chunk uses ring communication (`models.ring`). With fewer
tokens, loading the weights for each piece takes longer than sending the piece."""

Sublayers = tuple[tuple[bool, bool], ...]
"""For every layer: whether its attention runs, and whether its MLP runs."""


def _lowered_once(num_static: int) -> Callable[[Callable], Callable]:
    """Decorate a function so that identical calls in one program are lowered only once.

    The first `num_static` arguments are static. Inside a `shard_map`, such as that of `by_rows`, calls are inlined
    instead: libtpu 0.0.42 aborts if a function that is called twice contains another `shard_map`.
    """

    def decorate(function: Callable) -> Callable:
        jit = functools.partial(jax.jit, function, static_argnums=tuple(range(num_static)))
        shared, inlined = jit(), jit(inline=True)

        @functools.wraps(function)
        def call(*args: Any) -> Any:
            mesh = current()
            return (inlined if mesh is not None and mesh.manual_axes else shared)(*args)

        return call

    return decorate


def init_params(
    config: ModelConfig, key: Array, dtype: DTypeLike = "float32", *, scale: float = 0.02
) -> PyTree:
    """Create random params: normal matrices with standard deviation `scale`, zero biases, and norms with scale 1.

    >>> config = ModelConfig(vocab_size=32, hidden_size=16, intermediate_size=24, num_layers=1, num_heads=2)
    >>> init_params(config, jax.random.key(0))["layers"][0]["gate"].shape
    (24, 16)
    """
    return weights.build(config, weights.random_rows(weights.weights(config), key, dtype, scale))


def _norm(config: ModelConfig) -> Callable[[Array, Array], Array]:
    return functools.partial(rms_norm, eps=config.norm_eps, plus_one=config.norm_plus_one)


def _pre_norm(config: ModelConfig, layer: dict, x: Array, pre_norm: str) -> Array:
    """Return the input of attention or of the MLP: the residual stream x, normalised if the config has `pre_norms`.

    GLM-4 and Gemma also have `post_norms` (sandwich norms). OLMo 2 has only `post_norms` (reordered norm).
    """
    if not config.pre_norms:
        return x
    return _norm(config)(x, layer[pre_norm])


def _add(config: ModelConfig, layer: dict, x: Array, update: Array, post_norm: str) -> Array:
    """Add the output of attention or of the MLP to the residual stream x.

    If the config has `post_norms` or a `residual_multiplier`, apply them to the output first.
    """
    # `post_attention_layernorm` and `post_feedforward_layernorm` (OLMo 2, Gemma), `post_self_attn_layernorm` and
    # `post_mlp_layernorm` (GLM-4).
    if config.post_norms:
        update = _norm(config)(update, layer[post_norm])
    if config.residual_multiplier != 1:
        # Multiply in float32, because bfloat16 would round the multiplier.
        update = (update.astype(jnp.float32) * config.residual_multiplier).astype(update.dtype)
    return x + update


def _embed(config: ModelConfig, params: PyTree, tokens: Array) -> Array:
    """Return the input [B, N, E] of the first layer. Padding (NO_TOKEN) gets the embedding of a valid token."""
    x = embed(params["embed"], tokens)
    if config.embedding_multiplier != 1:
        # Round the factor to the dtype of the embeddings, as Gemma does.
        x = x * jnp.asarray(config.embedding_multiplier, x.dtype)
    return x


def _mlp(config: ModelConfig, layer: dict, x: Array) -> Array:
    # A model with experts may also have dense layers (`first_k_dense_replace`, `mlp_only_layers` in transformers).
    if "router" not in layer:
        return gated_mlp(layer, x, config.activation)
    update = experts_mlp(
        layer,
        x,
        config.activation,
        count=config.experts_per_token,
        normalize=config.normalize_experts,
        swiglu=config.swiglu,
        groups=(config.expert_groups, config.groups_per_token),
        multiplier=config.expert_multiplier,
    )
    if config.shared_expert_size:
        update += shared_expert(layer, x, config.activation)
    return update


def attention(config: ModelConfig, layer: dict, x: Array, rotation, attend: Attend, k_cache, v_cache):
    """Run the self-attention of one layer on x [B, N, E]; return its output [B, N, E] and the updated k and v caches.

    The projections determine the widths of the input and output, which may differ from `config.hidden_size`.
    """
    q, k, v, gate = _project(config, layer, x, rotation)
    scale, cap = _score_scale(config), config.attention_cap
    mixed, k_cache, v_cache = attend(
        q, k_cache, v_cache, (k, v), sinks=_sinks(layer, q), scale=scale, cap=cap
    )
    if gate is not None:
        mixed = mixed * jax.nn.sigmoid(gate).reshape(mixed.shape)
    return _out(config, layer, mixed), k_cache, v_cache


def _project(
    config: ModelConfig, layer: dict, x: Array, rotation
) -> tuple[Array, Array, Array, Array | None]:
    """Return queries [B, N, K, G, D], keys and values [B, N, K, D], and the output gates [B, N, K * G, D] or None.

    The number of heads is taken from the shapes of the matrices, because a shard has fewer heads.
    """
    if config.latent is not None:
        return *latent_attention.project(config, config.latent, layer, x, rotation), None
    heads, kv_heads = ("heads", config.num_heads), ("kv_heads", config.num_kv_heads)

    def project(name: str, axis_size: tuple[str, int]) -> Array:
        y = dense(x, layer[name], layer.get(f"{name}_bias"), outputs=axis_size)
        if config.whole_qk_norm and name != "v":
            y = rms_norm_heads(y, layer[f"{name}_norm"], config.norm_eps, config.head_dim)
        return y.reshape(*x.shape[:2], -1, config.head_dim)

    q, k, v = project("q", heads), project("k", kv_heads), project("v", kv_heads)
    gate = None
    if config.attention_gate:
        # Output gate (`attn_output_gate`): for each head, the matrix contains the rows of the query, followed by those
        # of the gate.
        q, gate = jnp.split(q.reshape(*x.shape[:2], -1, 2 * config.head_dim), 2, axis=-1)
    if config.qk_norm:
        norm = _norm(config)
        q, k = norm(q, layer["q_norm"]), norm(k, layer["k_norm"])
    if rotation is not None:
        q, k = (rotate(y, rotation.cos, rotation.sin, config.rope.interleaved) for y in (q, k))
        if rotation.query_factor is not None:
            q = q * rotation.query_factor.astype(q.dtype)
    # Query head k * G + g uses key-value head k.
    return q.reshape(*k.shape[:3], -1, config.head_dim), k, v, gate


def _score_scale(config: ModelConfig) -> float:
    # `hub.families` converts Granite's `attention_multiplier` m to a `query_scalar` of m ** -2.
    return (config.query_scalar or config.head_dim) ** -0.5


def _sinks(layer: dict, q: Array) -> Array | None:
    """Return the attention sinks f32[K, G] of a layer for queries [B, N, K, G, D], or None if it has no sinks."""
    if "sinks" not in layer:
        return None
    return layer["sinks"].astype(jnp.float32).reshape(q.shape[2:4])


def _out(config: ModelConfig, layer: dict, mixed: Array) -> Array:
    if config.latent is not None:
        return latent_attention.out(config, config.latent, layer, mixed)
    mixed = mixed.reshape(*mixed.shape[:2], -1)
    return dense(mixed, layer["o"], layer.get("o_bias"), inputs=("heads", config.num_heads))


@_lowered_once(2)
def run_layer(
    config: ModelConfig, sublayers: tuple[bool, bool], layer: dict, x: Array, rotation, attend, rows
):
    """Run one layer on x [B, N, E]; return its output [B, N, E] and its updated cache.

    The function is jitted, so identical layers are traced and lowered once, and XLA inlines each call. A loop over
    stacked layers would compile even faster, but would take 1.4 to 2 times as long per token on a CPU.

    Args:
      config: the model's config.
      sublayers: whether to run attention, and whether to run the MLP.
      layer: params of the layer.
      x: residual stream.
      rotation: rotation of queries and keys; None: no rotary embedding.
      attend: attention function of the layer; `delta.Span` for a recurrent layer.
      rows: cache of the layer: its k and v, or `DeltaRows`; None if attention does not run.
    """
    attends, has_mlp = sublayers
    if attends:
        with jax.named_scope("attention"):
            x_normed = _pre_norm(config, layer, x, "attention_norm")
            if isinstance(rows, DeltaRows):
                mixed, rows = delta_net(config, layer, x_normed, attend, rows)
            else:
                mixed, *rows = attention(config, layer, x_normed, rotation, attend, *rows)
            x = _add(config, layer, x, mixed, "attention_post_norm")
    if has_mlp:
        with jax.named_scope("mlp"):
            update = _mlp(config, layer, _pre_norm(config, layer, x, "mlp_norm"))
            x = hold_whole(_add(config, layer, x, update, "mlp_post_norm"))
    return x, rows


@_lowered_once(5)
def _ring_layer(
    config: ModelConfig,
    sublayers: tuple[bool, bool],
    axes: ring.Axes,
    form: str,
    window: int | None,
    layer: dict,
    x: Array,
    rotations: list,
    halves: list[list[Visible]],
    rows,
):
    """Run one layer with ring communication, on this device's part x [B, n, E] of the residual stream.

    `rotations` contains the rotation of each piece, and `halves` contains the visible slots of its two halves. Both are
    in the order of `ring.starts`.
    """
    attends, has_mlp = sublayers
    if attends:
        with jax.named_scope("attention"):
            pieces = ring.around(axes, _pre_norm(config, layer, x, "attention_norm"))
            projections = [
                _project(config, layer, piece, rotation)
                for piece, rotation in zip(pieces, rotations, strict=True)
            ]
            # Write the two halves of a piece separately: they may come from different devices, in slots that are not
            # adjacent.
            for (_, *new_rows, _), piece_halves in zip(projections, halves, strict=True):
                for half, visible in enumerate(piece_halves):
                    rows = [
                        kv_cache.write_slots(cached, jnp.split(part, 2, axis=1)[half], visible.slot)
                        for cached, part in zip(rows, new_rows, strict=True)
                    ]

            k, v = rows

            def mixed(q: Array, piece_halves: list[Visible]) -> Array:
                """Compute attention for the queries of a piece. All keys that they attend to are already cached."""
                scale, cap, sinks = _score_scale(config), config.attention_cap, _sinks(layer, q)
                outputs = []
                for part, visible in zip(jnp.split(q, 2, axis=1), piece_halves, strict=True):
                    attend = attending(form, visible, k.shape[1], window)
                    outputs.append(attend(part, k, v, None, sinks=sinks, scale=scale, cap=cap)[0])
                return _out(config, layer, jnp.concatenate(outputs, axis=1))

            parts = [
                functools.partial(mixed, q, piece_halves)
                for (q, *_), piece_halves in zip(projections, halves, strict=True)
            ]
            x = _add(config, layer, x, ring.summed(axes, parts), "attention_post_norm")
    if has_mlp:
        with jax.named_scope("mlp"):
            pieces = ring.around(axes, _pre_norm(config, layer, x, "mlp_norm"))
            parts = [functools.partial(_mlp, config, layer, piece) for piece in pieces]
            x = _add(config, layer, x, ring.summed(axes, parts), "mlp_post_norm")
    return x, rows


def _ring_axes(config: ModelConfig, layers: Sequence[dict], visible: Visible) -> ring.Axes:
    """Return the mesh axes for ring communication, or () if this forward pass should not use it.

    Ring communication is used for long prompt chunks on a TPU, if the layers can be sharded evenly.
    """
    causal = visible.seen is None and visible.seen_positions is None
    axes = alone("kv_heads", config.num_kv_heads) if on_tpu() and causal else ()
    same = alone("heads", config.num_heads) == alone("hidden", config.intermediate_size) == axes
    size, (batch, n) = devices_of("kv_heads", config.num_kv_heads), visible.positions.shape
    # A ring does not support output biases, which every device would add; experts, which are sharded differently;
    # `whole_qk_norm`, which needs all heads on one device; latent attention and gates, which are not implemented; and
    # recurrent layers, which need the tokens in order.
    unsuitable = config.o_bias or config.mlp_bias or config.num_experts or config.whole_qk_norm
    unsuitable = unsuitable or config.latent or config.attention_gate or config.delta
    if not (axes and same and in_order(axes)) or unsuitable:
        return ()
    long = batch * n >= RING_ROWS * size and n % (2 * size) == 0
    return axes if long and all(ring.divides(size, layer) for layer in layers) else ()


def _ring_layers(
    config: ModelConfig,
    form: str,
    feature_layers: tuple[int, ...],
    sublayer_mask: Sublayers,
    axes: ring.Axes,
    layers: Sequence[dict],
    x: Array,
    visible: Visible,
    cache: KVCache,
) -> tuple[Array, dict[int, Array], KVCache]:
    """Run all layers with ring communication on a prompt chunk x [B, N, E]; return what `_each_layer` returns.

    The caches of recurrent layers are not returned, because a model with a ring has none.
    """

    def on_device(layers: Sequence[dict], x: Array, first: Array, cache: KVCache):
        # For each piece, in the order of `ring.starts`, compute the `Visible` of its two halves and their positions.
        n = x.shape[1]
        halves = [
            [Visible.causal(first + start, n // 2) for start in piece_halves]
            for piece_halves in ring.starts(axes, n)
        ]
        positions = [
            jnp.concatenate([half_visible.positions for half_visible in piece_halves], axis=1)
            for piece_halves in halves
        ]
        ropes = _ropes(config)
        rotations = {
            rope: [rotation_at(piece_positions, rope, config.rotary_dim) for piece_positions in positions]
            for rope in dict.fromkeys(ropes)
        }

        def run(i: int, sublayers: tuple[bool, bool], x: Array, rows):
            window, rotation = config.windows[i], rotations[ropes[i]]
            return _ring_layer(config, sublayers, axes, form, window, layers[i], x, rotation, halves, rows)

        return _each_layer(run, feature_layers, sublayer_mask, x, cache)[:3]

    by_rows, by_heads = P(None, axes), P(None, None, axes)
    specs = (tuple(ring.specs(axes, layer) for layer in layers), by_rows, P(), by_heads)
    mapped = map_devices(on_device, specs, (by_rows, by_rows, by_heads))
    return mapped(tuple(layers), x, visible.first, cache)


def _ropes(config: ModelConfig) -> list[Rope | None]:
    """Return the rotary embedding of each layer, or None for layers without one (`no_rope_layers` in transformers)."""
    ropes = [config.rope if w is None else config.local_rope or config.rope for w in config.windows]
    return [None if i in config.nope_layers else rope for i, rope in enumerate(ropes)]


def _each_layer(
    run: Callable,
    feature_layers: tuple[int, ...],
    sublayer_mask: Sublayers,
    x: Array,
    cache: KVCache,
    delta: Mapping[int, DeltaRows] = types.MappingProxyType({}),
) -> tuple[Array, dict[int, Array], KVCache, dict[int, DeltaRows]]:
    """Run all layers; return the last layer's output, the outputs of `feature_layers`, and the updated caches.

    `cache` contains the caches of attention layers, and `delta` those of recurrent layers, by layer index.
    """
    ks, vs, outputs, new_delta = [], [], {}, {}
    for i, sublayers in enumerate(sublayer_mask):
        rows = delta.get(i)
        if rows is None and sublayers[0]:
            rows = (cache.k[len(ks)], cache.v[len(vs)])
        with jax.named_scope(f"layer{i}"):
            x, rows = run(i, sublayers, x, rows)
        if i in delta:
            new_delta[i] = rows
        elif rows is not None:
            ks.append(rows[0])
            vs.append(rows[1])
        if i in feature_layers:
            outputs[i] = x
    return x, outputs, KVCache(k=tuple(ks), v=tuple(vs)), new_delta


@_lowered_once(4)
def _forward(
    config: ModelConfig,
    form: str,
    feature_layers: tuple[int, ...],
    sublayer_mask: Sublayers,
    params: PyTree,
    tokens: Array,
    visible: Visible,
    cache: KVCache | RecurrentCache,
) -> ForwardOutput:
    norm = _norm(config)
    with jax.named_scope("embed"):
        x = _embed(config, params, tokens)
    layers = params["layers"]
    if isinstance(cache, RecurrentCache):
        kv, delta, span = cache.kv, cache.delta, Span.of(visible, cache)
    else:
        kv, delta, span = cache, {}, None
    axes = _ring_axes(config, layers, visible)
    if axes:
        x, outputs, kv = _ring_layers(
            config, form, feature_layers, sublayer_mask, axes, layers, x, visible, kv
        )
    else:
        ropes = _ropes(config)
        rotations = {
            rope: rotation_at(visible.positions, rope, config.rotary_dim) for rope in dict.fromkeys(ropes)
        }
        # Layers with the same window share a mask. Models may alternate between windows (`layer_types`).
        with jax.named_scope("mask"):
            attends = {
                window: attending(form, visible, kv.slots, window) for window in dict.fromkeys(config.windows)
            }

        def run(i: int, sublayers: tuple[bool, bool], x: Array, rows):
            attend = span if i in delta else attends[config.windows[i]]
            return run_layer(config, sublayers, layers[i], x, rotations[ropes[i]], attend, rows)

        x, outputs, kv, delta = _each_layer(run, feature_layers, sublayer_mask, x, kv, delta)
    features, cache = tuple(outputs[i] for i in feature_layers), kv
    if span is not None:
        cache = RecurrentCache(kv=kv, delta=delta, at=span.after())
    return ForwardOutput(hidden=norm(x, params["norm"]), features=features, cache=cache)


def language_model(
    config: ModelConfig,
    *,
    dtype: DTypeLike = "float32",
    cache_dtype: DTypeLike | None = None,
    feature_layers: Sequence[int] = (),
    prefill_chunk: int | None = None,
    attention: str = "auto",
) -> LanguageModel:
    """Return the pure functions of a transformer; see `types.LanguageModel` for their shapes.

    Args:
      config: static configuration of the model.
      dtype: dtype of the params, "float32" or "bfloat16".
      cache_dtype: dtype of the KV cache, "float32", "bfloat16" or "int8" (`cache.Int8Rows`); default: `dtype`.
      feature_layers: 0-based indices of layers whose outputs `forward` returns as `features`, in this order. The
        output of a layer is the residual stream [B, N, E] after it.
      prefill_chunk: number of prompt tokens per forward pass during prefill; None: chosen for the backend.
      attention: implementation of attention. "xla" uses XLA operations. "pallas" uses the kernel
        `kernels_pallas.tree_attention` on a TPU, which reads only the used slots of each row and needs no mask; on
        other platforms it is the same as "xla". "auto" uses the kernel on a TPU if it compiles, for batches of at least
        8 rows and for caches that XLA would read in blocks. Otherwise, "auto" uses XLA, or cuDNN on a GPU if that is
        faster. Unlike "auto", "pallas" has no gradient, and its caches have up to 127 more slots. The kernel has not
        run on a chip yet. "interpret" runs the kernel in Pallas' interpreter, for tests.

    Raises:
      MarsError: a feature layer does not exist, or `attention` is unknown.

    >>> config = ModelConfig(vocab_size=32, hidden_size=16, intermediate_size=24, num_layers=1, num_heads=2)
    >>> model, params = language_model(config), init_params(config, jax.random.key(0))
    >>> ids, start = jnp.asarray([[3, 5]], jnp.int32), jnp.zeros((1,), jnp.int32)
    >>> out = model.forward(params, ids, Visible.causal(start, 2), model.init_cache(1, 8))
    >>> model.unembed(params, out.hidden).shape
    (1, 2, 32)
    """
    if not (isinstance(attention, str) and attention in FORMS):
        raise MarsError(f"attention is {short_repr(attention)}: expected one of {', '.join(FORMS)}.")
    return _language_model(
        config,
        jnp.dtype(cache_dtype or dtype),
        tuple(feature_layers),
        prefill_chunk,
        attention,
        ((True, True),) * config.num_layers,
        1,
    )


@functools.lru_cache
def _language_model(
    config: ModelConfig,
    cache_dtype: DTypeLike,
    feature_layers: tuple[int, ...],
    prefill_chunk: int | None,
    form: str,
    sublayer_mask: Sublayers,
    draft_nodes: int,
) -> LanguageModel:
    """Build the functions of `language_model`. Results are cached by argument, so jit compiles each function once.

    `draft_nodes` is the number of nodes in the longest draft. Recurrent layers store the inputs of that many nodes.
    """
    if wrong := [layer for layer in feature_layers if not 0 <= layer < config.num_layers]:
        raise MarsError(
            f"feature layer {wrong[0]} does not exist: the model has layers 0 to {config.num_layers - 1}."
        )
    recurrent = config.delta.layers if config.delta else ()

    def init_cache(batch: int, slots: int) -> KVCache:
        # On CPUs and GPUs, round up to whole blocks. On a CPU, blocks then start at the same slots for every length, so
        # the order of summation does not depend on the length. On a GPU, aligned rows of scores are faster.
        pad_for_kernel = form != "xla"
        if form == "auto":
            # Small batches with short caches never use the kernel.
            pad_for_kernel = on_tpu() and (batch >= KERNEL_ROWS or slots > TURN_SLOTS)
        if pad_for_kernel:
            multiple = KERNEL_SLOTS
        elif on_tpu():
            multiple = 1
        else:
            multiple = BLOCK
        num_caches = sum(attends for attends, _ in sublayer_mask) - len(recurrent)
        padded_slots = (slots + multiple - 1) // multiple * multiple
        shape = (batch, padded_slots, config.num_kv_heads, config.head_dim)
        return kv_cache.init_cache(num_caches, shape, cache_dtype)

    @jax.named_scope("unembed")
    def unembed(params: PyTree, hidden: Array) -> Array:
        matrix = params["embed"] if config.tie_embeddings else params["unembed"]
        logits = dense(hidden, matrix, dtype=jnp.float32)
        # Granite's `logits_scaling` in transformers.
        if config.logit_divisor != 1:
            logits = logits / config.logit_divisor
        if config.logit_cap is not None:
            logits = soft_cap(logits, config.logit_cap)
        return logits

    def with_features(layers: tuple[int, ...]) -> LanguageModel:
        return _language_model(
            config, cache_dtype, tuple(layers), prefill_chunk, form, sublayer_mask, draft_nodes
        )

    def with_layers(mask: Sublayers) -> LanguageModel:
        mask = tuple((bool(attends), bool(has_mlp)) for attends, has_mlp in mask)
        if len(mask) != config.num_layers:
            raise MarsError(
                f"the mask has {len(mask)} layers and the model {config.num_layers}: give (attention, mlp) of each."
            )
        if not any(attends for attends, _ in mask):
            raise MarsError("the mask leaves no attention: keep the attention of at least one layer.")
        return _language_model(config, cache_dtype, feature_layers, prefill_chunk, form, mask, draft_nodes)

    def for_chains(nodes: int, chunk: int | None) -> LanguageModel:
        chunk = chunk or prefill_chunk
        return _language_model(config, cache_dtype, feature_layers, chunk, form, sublayer_mask, nodes)

    model = LanguageModel(
        init_cache=init_cache,
        forward=functools.partial(_forward, config, form, feature_layers, sublayer_mask),
        unembed=unembed,
        vocab_size=config.vocab_size,
        embed=functools.partial(_embed, config),
        with_features=with_features,
        with_layers=with_layers,
        prefill_chunk=prefill_chunk,
    )
    if not recurrent:
        return model
    return with_states(model, config, draft_nodes, cache_dtype, for_chains)
