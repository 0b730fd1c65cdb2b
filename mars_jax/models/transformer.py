"""One decoder-only transformer that covers the supported families by its config.

Oracle: the same checkpoint in PyTorch transformers (tests/models). B batch, N tokens, S cache slots, E hidden
size, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec as P

from mars_jax.core import cache as kv_cache
from mars_jax.core.errors import MarsError, short_repr
from mars_jax.core.mesh import alone, devices_of, hold_whole, in_order, map_devices, on_tpu
from mars_jax.core.types import ForwardOutput, KVCache, LanguageModel, PyTree, Visible
from mars_jax.models import ring, weights
from mars_jax.models.attention import BLOCK, FORMS, KERNEL_ROWS, KERNEL_SLOTS, TURN_SLOTS, Attend, attending
from mars_jax.models.config import ModelConfig
from mars_jax.models.layers import dense, embed, gated_mlp, rms_norm, soft_cap
from mars_jax.models.moe import experts_mlp
from mars_jax.models.rope import Rope, angles, rotate

RING_ROWS = 256
"""Rows of each device from which on a prompt's chunk goes around a ring. With fewer, a device would rather wait for the
weights that it multiplies each piece by."""

Sublayers = tuple[tuple[bool, bool], ...]
"""For every layer, whether its attention is there and whether its MLP is."""


def init_params(config: ModelConfig, key: Array, dtype="float32", *, scale: float = 0.02) -> PyTree:
    """Make random params: normal matrices of standard deviation `scale`, zero biases, norms of scale 1.

    >>> config = ModelConfig(vocab_size=32, hidden_size=16, intermediate_size=24, num_layers=1, num_heads=2)
    >>> init_params(config, jax.random.key(0))["layers"][0]["gate"].shape
    (24, 16)
    """
    return weights.build(config, weights.random_rows(weights.weights(config), key, dtype, scale))


def _norm(config: ModelConfig) -> Callable[[Array, Array], Array]:
    return functools.partial(rms_norm, eps=config.norm_eps, plus_one=config.norm_plus_one)


def _embed(config: ModelConfig, params: PyTree, tokens: Array) -> Array:
    """Return the input of the first layer: [B, N, E]. Padding, NO_TOKEN, is clipped to a token."""
    x = embed(params["embed"], tokens)
    # The factor is rounded to the dtype first, as in the oracle.
    return x * jnp.asarray(config.hidden_size**0.5, x.dtype) if config.scale_embeddings else x


def _mlp(config: ModelConfig, layer: dict, x: Array) -> Array:
    if "router" not in layer:
        return gated_mlp(layer, x, config.activation)
    return experts_mlp(
        layer, x, config.activation, count=config.experts_per_token, normalize=config.normalize_experts
    )


def attention(config: ModelConfig, layer: dict, x: Array, rotation, attend: Attend, k_cache, v_cache):
    """Self-attention of one layer: x [B, N, E] -> ([B, N, E], k_cache, v_cache), with the new rows in the caches.

    The projections set the width of x and of what is returned; `config` sets the heads.
    """
    q, k, v = _project(config, layer, x, rotation)
    mixed, k_cache, v_cache = attend(q, k_cache, v_cache, (k, v), **_scores(config))
    return _out(config, layer, mixed), k_cache, v_cache


def _project(config: ModelConfig, layer: dict, x: Array, rotation) -> tuple[Array, Array, Array]:
    """Return queries [B, N, K, G, D], keys and values [B, N, K, D] of as many heads as the matrices have."""
    many = {
        "q": _heads(config),
        "k": ("kv_heads", config.num_kv_heads),
        "v": ("kv_heads", config.num_kv_heads),
    }
    q, k, v = (
        dense(x, layer[name], layer.get(f"{name}_bias"), outputs=things).reshape(
            *x.shape[:2], -1, config.head_dim
        )
        for name, things in many.items()
    )
    if config.qk_norm:
        norm = _norm(config)
        q, k = norm(q, layer["q_norm"]), norm(k, layer["k_norm"])
    q, k = rotate(q, *rotation), rotate(k, *rotation)
    return q.reshape(*k.shape[:3], -1, config.head_dim), k, v


def _scores(config: ModelConfig) -> dict[str, Any]:
    return {"scale": (config.query_scalar or config.head_dim) ** -0.5, "cap": config.attention_cap}


def _heads(config: ModelConfig) -> tuple[str, int]:
    return "heads", config.num_heads


def _out(config: ModelConfig, layer: dict, mixed: Array) -> Array:
    mixed = mixed.reshape(*mixed.shape[:2], -1)
    return dense(mixed, layer["o"], layer.get("o_bias"), inputs=_heads(config))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _layer(config: ModelConfig, here: tuple[bool, bool], layer: dict, x: Array, rotation, attend, rows):
    """Run one layer, of which `here` says what is there: x [B, N, E] and its rows of the cache, None without attention.

    Under jit, so that equal layers are traced and lowered once; XLA writes each out where it stands, as it would
    without. A loop over stacked layers would compile sooner still, and takes 1.4 to 2 times as long a token on CPU.
    """
    norm = _norm(config)
    attends, has_mlp = here
    if attends:
        with jax.named_scope("attention"):
            x_normed, (k, v) = norm(x, layer["attention_norm"]), rows
            mixed, *rows = attention(config, layer, x_normed, rotation, attend, k, v)
            x = x + (norm(mixed, layer["attention_post_norm"]) if config.post_norms else mixed)
    if has_mlp:
        with jax.named_scope("mlp"):
            change = _mlp(config, layer, norm(x, layer["mlp_norm"]))
            x = hold_whole(x + (norm(change, layer["mlp_post_norm"]) if config.post_norms else change))
    return x, rows


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _ring_layer(
    config: ModelConfig,
    here: tuple[bool, bool],
    axes: ring.Axes,
    form: str,
    window: int | None,
    layer: dict,
    x: Array,
    rotations: list,
    halves: list[list[Visible]],
    rows,
):
    """Run `_layer` on x [B, n, E] of each device, for the rotations of the pieces and what their halves see."""
    norm = _norm(config)
    attends, has_mlp = here
    if attends:
        with jax.named_scope("attention"):
            pieces = ring.around(axes, norm(x, layer["attention_norm"]))
            made = [
                _project(config, layer, piece, rotation)
                for piece, rotation in zip(pieces, rotations, strict=True)
            ]
            for (_, *new), two in zip(made, halves, strict=True):
                for at, seen in enumerate(two):
                    rows = [
                        kv_cache.write(old, jnp.split(part, 2, axis=1)[at], seen.slot)
                        for old, part in zip(rows, new, strict=True)
                    ]

            k, v = rows

            def mixed(q: Array, two: list[Visible]) -> Array:
                """Attend with a piece's queries; all that they see is in the cache."""
                found = [
                    attending(form, seen, k.shape[1], window)(part, k, v, None, **_scores(config))[0]
                    for part, seen in zip(jnp.split(q, 2, axis=1), two, strict=True)
                ]
                return _out(config, layer, jnp.concatenate(found, axis=1))

            parts = [functools.partial(mixed, q, two) for (q, *_), two in zip(made, halves, strict=True)]
            change = ring.summed(axes, parts)
            x = x + (norm(change, layer["attention_post_norm"]) if config.post_norms else change)
    if has_mlp:
        with jax.named_scope("mlp"):
            pieces = ring.around(axes, norm(x, layer["mlp_norm"]))
            change = ring.summed(axes, [functools.partial(_mlp, config, layer, piece) for piece in pieces])
            x = x + (norm(change, layer["mlp_post_norm"]) if config.post_norms else change)
    return x, rows


def _ring_axes(config: ModelConfig, layers: Sequence[dict], visible: Visible) -> ring.Axes:
    """Return the axes of a mesh around which rows go: a prompt's chunk on a TPU, whose layers divide whole."""
    causal = visible.seen is None and visible.seen_positions is None
    axes = alone("kv_heads", config.num_kv_heads) if on_tpu() and causal else ()
    same = all(
        alone(*things) == axes
        for things in (("heads", config.num_heads), ("hidden", config.intermediate_size))
    )
    size, (batch, n) = devices_of("kv_heads", config.num_kv_heads), visible.positions.shape
    # A bias after the sum would be added once for each device, and experts go to devices in their own way.
    if not (axes and same and in_order(axes)) or config.o_bias or config.mlp_bias or config.num_experts:
        return ()
    long = batch * n >= RING_ROWS * size and n % (2 * size) == 0
    return axes if long and all(ring.divides(size, layer) for layer in layers) else ()


def _ring_layers(
    config: ModelConfig,
    form: str,
    feature_layers: tuple[int, ...],
    kept: Sublayers,
    axes: ring.Axes,
    layers: Sequence[dict],
    x: Array,
    visible: Visible,
    cache: KVCache,
) -> tuple[Array, dict[int, Array], KVCache]:
    """Run the layers of `_forward` on a prompt's chunk x [B, N, E], whose rows devices pass around."""

    def on_device(layers: Sequence[dict], x: Array, first: Array, cache: KVCache):
        n = x.shape[1]
        halves = [[Visible.causal(first + at, n // 2) for at in two] for two in ring.starts(axes, n)]
        positions = [jnp.concatenate([seen.positions for seen in two], axis=1) for two in halves]
        ropes = _ropes(config)
        rotations = {
            rope: [angles(of, rope, config.head_dim) for of in positions] for rope in dict.fromkeys(ropes)
        }

        def run(i: int, here: tuple[bool, bool], x: Array, rows):
            window, turns = config.windows[i], rotations[ropes[i]]
            return _ring_layer(config, here, axes, form, window, layers[i], x, turns, halves, rows)

        return _each_layer(run, feature_layers, kept, x, cache)

    by_rows, by_heads = P(None, axes), P(None, None, axes)
    specs = (tuple(ring.specs(axes, layer) for layer in layers), by_rows, P(), by_heads)
    mapped = map_devices(on_device, specs, (by_rows, by_rows, by_heads))
    return mapped(tuple(layers), x, visible.first, cache)


def _ropes(config: ModelConfig) -> list[Rope]:
    """Return the rotation of each layer."""
    return [config.rope if w is None else config.local_rope or config.rope for w in config.windows]


def _each_layer(
    run: Callable, feature_layers: tuple[int, ...], kept: Sublayers, x: Array, cache: KVCache
) -> tuple[Array, dict[int, Array], KVCache]:
    """Run layer after layer: their output, those of `feature_layers`, and the cache."""
    ks, vs, outputs = [], [], {}
    for i, here in enumerate(kept):
        rows = (cache.k[len(ks)], cache.v[len(vs)]) if here[0] else None
        with jax.named_scope(f"layer{i}"):
            x, rows = run(i, here, x, rows)
        if rows is not None:
            ks.append(rows[0])
            vs.append(rows[1])
        if i in feature_layers:
            outputs[i] = x
    return x, outputs, KVCache(k=tuple(ks), v=tuple(vs))


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _forward(
    config: ModelConfig,
    form: str,
    feature_layers: tuple[int, ...],
    kept: Sublayers,
    params: PyTree,
    tokens: Array,
    visible: Visible,
    cache: KVCache,
) -> ForwardOutput:
    norm = _norm(config)
    with jax.named_scope("embed"):
        x = _embed(config, params, tokens)
    layers = params["layers"]
    axes = _ring_axes(config, layers, visible)
    if axes:
        x, outputs, cache = _ring_layers(config, form, feature_layers, kept, axes, layers, x, visible, cache)
    else:
        ropes = _ropes(config)
        rotations = {rope: angles(visible.positions, rope, config.head_dim) for rope in dict.fromkeys(ropes)}
        with jax.named_scope("mask"):
            attends = {
                window: attending(form, visible, cache.slots, window)
                for window in dict.fromkeys(config.windows)
            }

        def run(i: int, here: tuple[bool, bool], x: Array, rows):
            return _layer(config, here, layers[i], x, rotations[ropes[i]], attends[config.windows[i]], rows)

        x, outputs, cache = _each_layer(run, feature_layers, kept, x, cache)
    features = tuple(outputs[i] for i in feature_layers)
    return ForwardOutput(hidden=norm(x, params["norm"]), features=features, cache=cache)


def language_model(
    config: ModelConfig,
    *,
    dtype="float32",
    cache_dtype=None,
    feature_layers: Sequence[int] = (),
    prefill_chunk: int | None = None,
    attention: str = "auto",
) -> LanguageModel:
    """Return the pure functions of a transformer; see `types.LanguageModel` for their shapes.

    Args:
      config: its static description.
      dtype: of the params, "float32" or "bfloat16".
      cache_dtype: of the key-value cache, "float32", "bfloat16" or "int8" (`cache.Int8Rows`); default: `dtype`.
      feature_layers: layers, 0-based, whose outputs (the residual stream after the layer, [B, N, E])
        `forward` returns as `features`, in this order.
      prefill_chunk: prompt tokens per forward while a prompt is read; None: what suits the backend.
      attention: "xla", or "pallas": on TPU the kernel `kernels_pallas.tree_attention`, which reads of each row only its
        own slots and needs no mask, and "xla" on other platforms. "auto" is the kernel on a TPU where it compiles, for
        steps of 8 rows or more and for caches that XLA would read in turns, and "xla" elsewhere. The kernel named has
        no gradient, which "auto" has, and its caches hold up to 127 slots more. No chip has run it yet.
        "interpret" is the kernel in Pallas' interpreter, for tests.

    Raises:
      MarsError: a feature layer that the model does not have, or an unknown attention.

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
    )


@functools.lru_cache
def _language_model(
    config: ModelConfig,
    cache_dtype,
    feature_layers: tuple[int, ...],
    prefill_chunk: int | None,
    form: str,
    kept: Sublayers,
) -> LanguageModel:
    """Cached, so that equal models are the same functions and a jitted caller compiles once."""
    if wrong := [layer for layer in feature_layers if not 0 <= layer < config.num_layers]:
        raise MarsError(
            f"feature layer {wrong[0]} does not exist: the model has layers 0 to {config.num_layers - 1}."
        )

    def init_cache(batch: int, slots: int) -> KVCache:
        # On a CPU a block begins at the same slots in a buffer of any length, so that a sum over it has one order. On a
        # GPU rows of scores that are aligned take less time.
        kernel = form != "xla"
        if form == "auto":  # which fewer rows of short buffers never take
            kernel = on_tpu() and (batch >= KERNEL_ROWS or slots > TURN_SLOTS)
        whole = KERNEL_SLOTS if kernel else 1 if on_tpu() else BLOCK
        return kv_cache.init_cache(
            layers=sum(attends for attends, _ in kept),
            batch=batch,
            slots=-(-slots // whole) * whole,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=cache_dtype,
        )

    @jax.named_scope("unembed")
    def unembed(params: PyTree, hidden: Array) -> Array:
        logits = dense(hidden, params["embed" if config.tie_embeddings else "unembed"], dtype=jnp.float32)
        return logits if config.logit_cap is None else soft_cap(logits, config.logit_cap)

    def with_features(layers: tuple[int, ...]) -> LanguageModel:
        return _language_model(config, cache_dtype, tuple(layers), prefill_chunk, form, kept)

    def with_layers(mask: Sublayers) -> LanguageModel:
        mask = tuple((bool(attends), bool(has_mlp)) for attends, has_mlp in mask)
        if len(mask) != config.num_layers:
            raise MarsError(
                f"the mask has {len(mask)} layers and the model {config.num_layers}: give (attention, mlp) of each."
            )
        if not any(attends for attends, _ in mask):
            raise MarsError("the mask leaves no attention: keep that of one layer at least.")
        return _language_model(config, cache_dtype, feature_layers, prefill_chunk, form, mask)

    return LanguageModel(
        init_cache=init_cache,
        forward=functools.partial(_forward, config, form, feature_layers, kept),
        unembed=unembed,
        vocab_size=config.vocab_size,
        embed=functools.partial(_embed, config),
        with_features=with_features,
        with_layers=with_layers,
        prefill_chunk=prefill_chunk,
    )
