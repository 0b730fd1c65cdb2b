"""Gated DeltaNet layers, which have a recurrent state of fixed size instead of keys and values (arXiv 2412.06464).

The state of a head is a matrix S [K, V]. For a token with key k, value v, decay a (alpha) and learning rate b (beta),
the gated delta rule replaces the value that S stores under k: S = a S + k (b (v - a S^T k))^T. The output for a query q
is S^T q.

A token cannot be removed from a state, so drafted tokens must not enter the state before they are verified. The cache
therefore stores the state before the root of the last draft, and the inputs of the draft's nodes. The next forward pass
first updates the state with the accepted nodes. It then computes the outputs of its own nodes, without storing the
resulting state.

Tested against transformers' `modeling_qwen3_next.py` (tests/models/test_delta.py).

Dimensions: B batch, N nodes, L tokens, H key heads, G value heads per key head, K width of a key, V width of a value,
F = 2 K + G V inputs of the convolution per key head, T taps of the convolution, M nodes of the longest draft.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from mars_jax.core import struct
from mars_jax.core.axes import axes_here, map_devices
from mars_jax.core.cache import KVCache
from mars_jax.core.prefill import chunk_of
from mars_jax.core.types import LanguageModel, Visible
from mars_jax.models.config import ModelConfig
from mars_jax.models.layers import dense, rms_norm
from mars_jax.utils.errors import MarsError

CHUNK = 64
"""Tokens per chunk, as in transformers. Chunks are processed in sequence, and the tokens of a chunk in parallel."""
_EPS = 1e-6
"""Added to the squared norms of queries and keys, to avoid division by zero."""

# By default, a TPU rounds the inputs of a product to bfloat16. These rounding errors would accumulate in the state.
_matmul = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)


@struct.dataclass(kw_only=True)
class DeltaRows:
    """Cache of one layer: its state before token `RecurrentCache.at`, and the inputs of up to M tokens from `at` on."""

    logical_axes: ClassVar[tuple[str | None, ...]] = ("rows", "delta_heads")

    state: Array  # f32[B, H, G, K, V]
    inputs: Array  # [B, H, T - 1 + M, F]; inputs of the convolution, starting T - 1 tokens before `at`
    gates: Array  # f32[B, H, M, 2 G]; for each token from `at` on: G log decays, then G learning rates


@struct.dataclass(kw_only=True)
class RecurrentCache:
    """Cache of a model with recurrent layers. A forward pass may start at position `at` or up to M tokens later."""

    kv: KVCache  # cache of the attention layers
    delta: dict[int, DeltaRows]  # caches of the recurrent layers, by layer index
    at: Array  # i32[B]; number of tokens that the states include


class Span(NamedTuple):
    """Positions of the nodes of a forward pass, for recurrent layers. Attention layers use `Visible` instead."""

    first: Array  # i32[B]; position of the first node
    at: Array  # i32[B]; `RecurrentCache.at` before the forward pass
    # i32[B]; number of leading nodes to add to the state. None: the nodes are a draft, so the cache stores their inputs
    # and leaves the state unchanged.
    count: Array | None
    documents: Array | None  # i32[B, N]; `Visible.documents`

    @staticmethod
    def of(visible: Visible, cache: RecurrentCache) -> Span:
        """Return the span of a forward pass.

        More than M nodes cannot be a draft, so they are added to the state.

        Raises:
          MarsError: `visible.seen` is set but `visible.documents` is not. Either the nodes form a tree, or a row holds
            several documents that are not labelled.
        """
        if visible.seen is not None and visible.documents is None:
            raise MarsError(
                "the target has recurrent layers, which read one sequence: draft chains, without --tree, and set "
                "Visible.documents if a row holds several documents."
            )
        count, nodes = visible.count, visible.positions.shape[1]
        if count is None and nodes > next(iter(cache.delta.values())).gates.shape[2]:
            count = jnp.full_like(visible.first, nodes)
        return Span(visible.first, cache.at, count, visible.documents)

    def after(self) -> Array:
        """Return the value of `RecurrentCache.at` after the forward pass."""
        return self.first if self.count is None else self.first + self.count


def with_states(
    model: LanguageModel,
    config: ModelConfig,
    nodes: int,
    dtype: DTypeLike,
    for_chains: Callable[[int, int | None], LanguageModel],
) -> LanguageModel:
    """Return the model with a cache that also contains the states of the recurrent layers.

    Args:
      model: model whose cache is a `KVCache` of the attention layers.
      config: the model's config.
      nodes: M, the number of nodes in the longest draft.
      dtype: dtype of the cache. If "int8", the inputs of the convolution are stored in bfloat16.
      for_chains: value of `LanguageModel.for_chains`.
    """
    chunk, input_dtype = model.prefill_chunk or chunk_of(), jnp.dtype(dtype)
    if input_dtype == jnp.int8:
        input_dtype = jnp.dtype(jnp.bfloat16)
    delta = config.delta
    assert delta is not None
    heads, groups = delta.key_heads, delta.value_heads // delta.key_heads
    width = 2 * delta.key_dim + groups * delta.value_dim

    def init_cache(batch: int, slots: int) -> RecurrentCache:
        def rows() -> DeltaRows:
            return DeltaRows(
                state=jnp.zeros((batch, heads, groups, delta.key_dim, delta.value_dim), jnp.float32),
                inputs=jnp.zeros((batch, heads, delta.taps - 1 + nodes, width), input_dtype),
                gates=jnp.zeros((batch, heads, nodes, 2 * groups), jnp.float32),
            )

        # The last window of a prompt may end past the prompt (see `prefill`), so add room for one window.
        kv, at = model.init_cache(batch, slots + chunk), jnp.zeros((batch,), jnp.int32)
        return RecurrentCache(kv=kv, delta={layer: rows() for layer in delta.layers}, at=at)

    def keep(cache: RecurrentCache, count: Array) -> Array:
        # The state includes the tokens before `at`. To keep fewer tokens, prefill the row again from its start.
        return jnp.where(cache.at <= count, count, 0)

    return model._replace(
        init_cache=init_cache,
        slots=lambda cache: cache.kv.slots,
        prefill_chunk=chunk,
        with_layers=None,
        for_chains=for_chains,
        keep=keep,
    )


def delta_rule(
    state: Array,
    q: Array,
    k: Array,
    v: Array,
    log_decay: Array,
    rate: Array,
    documents: Array | None = None,
) -> tuple[Array, Array]:
    """Update the state with L tokens; return the new state and the tokens' outputs f32[B, H, G, L, V].

    A token with `log_decay` 0 and `rate` 0 does not change the state.

    Args:
      state: f32[B, H, G, K, V]; state before the first token.
      q, k: f32[B, H, L, K]; normalised queries and keys.
      v: f32[B, H, G, L, V]; values.
      log_decay, rate: f32[B, H, G, L]; logarithm of the decay a (alpha), and learning rate b (beta).
      documents: i32[B, L]; document of each token; None if all tokens belong to one document. `state` belongs to the
        first token's document, and the new state to the last token's document. Other documents start with an empty
        state.
    """
    length = q.shape[2]
    # Apply the rule chunk by chunk. With one token per chunk, this is the recurrence itself.
    size = min(length, CHUNK)
    # Each query and key head is shared by G value heads.
    q, k = (x[:, :, None] for x in (q, k))

    def chunks(x: Array, mode: str = "constant") -> Array:
        """Split axis 3 (tokens) into chunks along a new first axis. By default, pad the last chunk with zeros."""
        padding = [(0, 0)] * x.ndim
        padding[3] = 0, -length % size
        x = jnp.pad(x, padding, mode)
        return jnp.moveaxis(x.reshape(*x.shape[:3], -1, size, *x.shape[4:]), 3, 0)

    chunk_documents = None
    if documents is not None:
        chunk_documents = chunks(documents[:, None, None], "edge")
    prepared = _prepare(*(chunks(x) for x in (q, k, v, log_decay, rate)), documents=chunk_documents)
    state, outputs = lax.scan(_add_chunk, state, prepared)
    outputs = jnp.moveaxis(outputs, 0, 3)
    return state, outputs.reshape(*outputs.shape[:3], -1, outputs.shape[-1])[..., :length, :]


class _Chunk(NamedTuple):
    """Intermediate arrays of a chunk of L tokens that do not depend on the state (section 3.3 of the paper)."""

    q: Array  # f32[..., L, K]; queries, multiplied by the decay from the start of the chunk to the token
    k: Array  # f32[..., L, K]; keys, multiplied by the decay from the token to the end of the chunk
    scores: Array  # f32[..., L, L]; dot product of query i and key j, multiplied by the decay from j to i
    values: Array  # f32[..., L, V]; values that the tokens write if the state is zero
    reads: Array  # f32[..., L, K]; with state S, the tokens write `values - reads @ S`
    decay: Array  # f32[..., 1, 1]; decay of the state over the whole chunk


def _prepare(
    q: Array, k: Array, v: Array, log_decay: Array, rate: Array, *, documents: Array | None
) -> _Chunk:
    # `total` is the log decay from the start of the chunk to each token. `is_read` is True where token i can read the
    # writes of token j, so j <= i.
    total = jnp.cumsum(log_decay, axis=-1)
    length = total.shape[-1]
    is_read = jnp.tril(jnp.ones((1,) * (total.ndim - 1) + (length, length), bool))
    from_start, to_end = jnp.exp(total), jnp.exp(total[..., -1:] - total)
    if documents is not None:
        # At the start of a chunk, the state belongs to the document of the previous chunk's last token. At the start of
        # the first chunk, it belongs to the document of the first token.
        last_document = documents[..., -1:]
        state_document = jnp.concatenate([documents[:1, ..., :1], last_document[:-1]])
        is_read &= documents[..., :, None] == documents[..., None, :]
        from_start, to_end = (
            jnp.where(documents == state_document, from_start, 0),
            jnp.where(documents == last_document, to_end, 0),
        )
    decay = jnp.exp(jnp.where(is_read, total[..., :, None] - total[..., None, :], -jnp.inf))
    from_start, to_end, rate = from_start[..., None], to_end[..., None], rate[..., None]
    keys = k.swapaxes(-1, -2)
    # The WY representation of the paper, computed by the UT transform. The state returns a value for each token's key,
    # after the writes of all earlier tokens. The token writes its own value minus the returned value, times its
    # learning rate. If S is the state before the chunk:
    # write_i = b_i (v_i - exp(total_i) S^T k_i - sum over j < i of decay_ij (k_i . k_j) write_j).
    inverse = _unit_inverse(_matmul(k, keys) * decay * rate)
    return _Chunk(
        q=q * from_start,
        k=k * to_end,
        scores=_matmul(q, keys) * decay,
        values=_matmul(inverse, v * rate),
        reads=_matmul(inverse, k * (rate * from_start)),
        decay=from_start[..., -1:, :],
    )


def _unit_inverse(matrix: Array) -> Array:
    """Invert I + the strictly lower triangle of a matrix f32[..., L, L], by forward substitution.

    On a CPU, `lax.linalg.triangular_solve` takes 200 times as long.
    """
    length, below = matrix.shape[-1], jnp.tril(matrix, -1)

    def row(i: Array, inverse: Array) -> Array:
        """Replace row i of `inverse`, which is still row i of I, using the rows above it."""
        written = _matmul(lax.dynamic_index_in_dim(below, i, -2), inverse)
        new = lax.dynamic_index_in_dim(inverse, i, -2) - written
        return lax.dynamic_update_index_in_dim(inverse, new, i, -2)

    return lax.fori_loop(0, length, row, jnp.broadcast_to(jnp.eye(length), matrix.shape))


def _add_chunk(state: Array, chunk: _Chunk) -> tuple[Array, Array]:
    """Update the state with a chunk; return the new state and the outputs of the chunk's tokens."""
    writes = chunk.values - _matmul(chunk.reads, state)
    outputs = _matmul(chunk.q, state) + _matmul(chunk.scores, writes)
    return chunk.decay * state + _matmul(chunk.k.swapaxes(-1, -2), writes), outputs


def delta_net(
    config: ModelConfig, layer: dict, x: Array, span: Span, rows: DeltaRows
) -> tuple[Array, DeltaRows]:
    """Run a gated DeltaNet layer on x [B, N, E]; return its output [B, N, E] and its updated cache."""
    delta = config.delta
    assert delta is not None
    heads = ("delta_heads", delta.key_heads)

    def project(name: str) -> Array:
        y = dense(x, layer[name], outputs=heads)
        return y.reshape(*x.shape[:2], delta.key_heads, -1).swapaxes(1, 2)

    if "delta_qkvz" in layer:
        # Qwen3-Next fuses the projections, and stores the rows of one key head next to each other.
        groups = delta.value_heads // delta.key_heads
        inputs, z = jnp.split(project("delta_qkvz"), [2 * delta.key_dim + groups * delta.value_dim], axis=-1)
        b, a = jnp.split(project("delta_ba"), 2, axis=-1)
    else:
        inputs = jnp.concatenate([project(f"delta_{name}") for name in "qkv"], axis=-1)
        z, b, a = project("delta_z"), project("delta_b"), project("delta_a")
    by_head = [layer[f"delta_{name}_conv"].reshape(delta.key_heads, -1, delta.taps) for name in "qkv"]
    conv = jnp.concatenate(by_head, axis=1)
    # In transformers, these are `A_log` and `dt_bias`.
    offsets = [layer[f"delta_{name}"].reshape(delta.key_heads, -1) for name in ("log_rate", "bias")]
    mix, axes = functools.partial(_mix, config), axes_here("delta_heads", delta.key_heads)
    if axes:
        # Each device computes its own heads, without communication.
        split, whole = P(None, axes), P()
        mix = map_devices(mix, (P(axes), P(axes), whole, split, split, split, whole, split), (split, split))
    y, rows = mix(conv, offsets, layer["delta_norm"], inputs, z, (b, a), span, rows)
    y = y.swapaxes(1, 2).reshape(*x.shape[:2], -1)
    return dense(y, layer["delta_o"], inputs=heads), rows


def _mix(
    config: ModelConfig,
    conv: Array,
    offsets: list[Array],
    norm: Array,
    inputs: Array,
    z: Array,
    gates: tuple[Array, Array],
    span: Span,
    rows: DeltaRows,
) -> tuple[Array, DeltaRows]:
    """Return the gated outputs of all heads, and the layer's updated cache.

    Args:
      config: the model's config.
      conv: [H, F, T]; weights of the convolution.
      offsets: `A_log` and `dt_bias`, [H, G] each: logarithm of the decay rate, and bias of the time step.
      norm: [V]; weights of the output norm.
      inputs: [B, H, N, F]; inputs of the convolution.
      z: [B, H, N, G V]; output gates, before their activation.
      gates: [B, H, N, G] each; learning rates and time steps, before their activations.
      span: positions of the nodes.
      rows: cache of the layer.

    Returns:
      The outputs [B, H, N, G V], and the updated cache.
    """
    log_rate, bias = (x.astype(jnp.float32)[None, :, None] for x in offsets)
    b, a = (x.astype(jnp.float32) for x in gates)
    # Logarithm of the decay (alpha). The learning rate (beta) is the sigmoid of b.
    log_decay = -jnp.exp(log_rate) * jax.nn.softplus(a + bias)
    new_gates = jnp.concatenate([log_decay, jax.nn.sigmoid(b)], axis=-1)
    capacity, tail_length = rows.gates.shape[2], conv.shape[2] - 1

    # Commit the accepted path: update the state with the accepted nodes of the last draft. A row that starts at
    # position 0 has no draft and an empty state.
    accepted = span.first - span.at
    begins = (span.first == 0)[:, None, None, None]
    # A start outside the last draft would need a state that is not stored. Set the state to NaN, so that the row fails.
    lost = ((accepted < 0) | (accepted > capacity)) & (span.first > 0)
    state = jnp.where(begins[..., None], 0.0, rows.state)
    state = jnp.where(lost[:, None, None, None, None], jnp.nan, state)
    logged = jnp.where(begins, 0, rows.inputs)
    accepted = jnp.where(begins[:, 0, 0, 0], 0, jnp.clip(accepted, 0, capacity))
    # Set the inputs of rejected nodes to zero, because these inputs may be infinite or NaN.
    accepted_inputs = _first(logged, tail_length + accepted)
    state, _ = _read(config, conv, state, accepted_inputs, _first(rows.gates, accepted))

    def window(x: Array, start: Array, length: int) -> Array:
        """Return `length` tokens [B, H, length, ...] of x, beginning at token `start` i32[B]."""
        return jax.vmap(lambda x, start: lax.dynamic_slice_in_dim(x, start, length, axis=1))(x, start)

    # The convolution of the first node also reads the T - 1 inputs before it.
    inputs = jnp.concatenate([window(logged, accepted, tail_length), inputs.astype(logged.dtype)], axis=2)
    if span.count is None:
        _, outputs = _read(config, conv, state, inputs, new_gates, span.documents)
        kept_inputs, kept_gates = inputs, new_gates
    else:
        new_gates = _first(new_gates, span.count)
        state, outputs = _read(config, conv, state, inputs, new_gates, span.documents)
        kept_inputs, kept_gates = window(inputs, span.count, tail_length), new_gates[:, :, :0]

    def pad(x: Array, like: Array) -> Array:
        return jnp.pad(x, ((0, 0), (0, 0), (0, like.shape[2] - x.shape[2]), (0, 0)))

    rows = DeltaRows(state=state, inputs=pad(kept_inputs, rows.inputs), gates=pad(kept_gates, rows.gates))
    # Gated RMSNorm: normalise, then multiply by the activated output gate z.
    y = rms_norm(outputs, norm, config.norm_eps)  # f32[B, H, G, N, V]
    y = y.swapaxes(2, 3).reshape(z.shape) * jax.nn.silu(z.astype(jnp.float32))
    return y.astype(z.dtype), rows


def _first(x: Array, count: Array) -> Array:
    """Set x [B, H, L, .] to 0 after the first `count` i32[B] tokens. Tokens with gates of 0 do not change the state."""
    is_read = jnp.arange(x.shape[2], dtype=jnp.int32)[None] < count[:, None]
    return jnp.where(is_read[:, None, :, None], x, 0)


def _read(
    config: ModelConfig,
    conv: Array,
    state: Array,
    inputs: Array,
    gates: Array,
    documents: Array | None = None,
) -> tuple[Array, Array]:
    """Run the causal convolution (`conv1d`) on inputs [B, H, T - 1 + L, F], then `delta_rule` on its L outputs."""
    delta = config.delta
    assert delta is not None
    length = gates.shape[2]
    x, weight = inputs.astype(jnp.float32), conv.astype(jnp.float32)
    by_tap = [x[:, :, tap : tap + length] for tap in range(delta.taps)]
    if documents is not None:
        input_documents = jnp.pad(documents, ((0, 0), (delta.taps - 1, 0)))
        same_document = [input_documents[:, tap : tap + length] == documents for tap in range(delta.taps)]
        by_tap = [
            jnp.where(same[:, None, :, None], y, 0) for y, same in zip(by_tap, same_document, strict=True)
        ]
    products = [weight[None, :, None, :, tap] * y for tap, y in enumerate(by_tap)]
    q, k, v = jnp.split(jax.nn.silu(sum(products)), [delta.key_dim, 2 * delta.key_dim], axis=-1)
    # Normalise queries and keys to length 1.
    q, k = (y * lax.rsqrt(jnp.sum(jnp.square(y), axis=-1, keepdims=True) + _EPS) for y in (q, k))
    log_decay, rate = jnp.split(gates.swapaxes(2, 3), 2, axis=2)
    v = v.reshape(*v.shape[:3], -1, delta.value_dim).swapaxes(2, 3)
    return delta_rule(state, q * delta.key_dim**-0.5, k, v, log_decay, rate, documents)
