"""Gated DeltaNet: attention with a recurrent state of fixed size instead of keys and values (arXiv 2412.06464).

The state of a head is a matrix S [K, V]. By the gated delta rule, token t with key k, value v, decay a (alpha) and
learning rate b (beta) replaces what S holds for its key: S = a S + k (b (v - a S^T k))^T. Its output is S^T q.

A state cannot drop a token, so it must not read a draft before the verdict. The cache keeps the state before the root
of the last draft, and the inputs of the draft's nodes. The next forward first reads the accepted nodes into the state.
It then computes the outputs of its own nodes, without storing the state after them.

Oracle: transformers' `modeling_qwen3_next.py` (tests/models/test_delta.py). B batch, N nodes, L tokens, H key heads,
G value heads of each key head, K and V widths of a key and a value, F = 2 K + G V inputs of the convolution per key
head, T its taps, M nodes of the longest draft.
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
"""Tokens per chunk, as in transformers. Chunks are computed in sequence, the tokens of a chunk in parallel."""
_EPS = 1e-6
"""Added to the squared norms of queries and keys."""

# By default a TPU rounds factors to bfloat16, and the rounding errors would accumulate in the state.
_matmul = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)


@struct.dataclass(kw_only=True)
class DeltaRows:
    """Cache of one layer: its state before token `RecurrentCache.at`, and the inputs of up to M tokens from `at` on."""

    logical_axes: ClassVar[tuple[str | None, ...]] = ("rows", "delta_heads")

    state: Array  # f32[B, H, G, K, V]
    inputs: Array  # [B, H, T - 1 + M, F]; inputs of the convolution, which begin T - 1 tokens before `at`
    gates: Array  # f32[B, H, M, 2 G]; logarithms of the decays, then learning rates


@struct.dataclass(kw_only=True)
class RecurrentCache:
    """Cache of a model with recurrent layers. A forward may start at `at` or up to M tokens later."""

    kv: KVCache  # for the layers with attention
    delta: dict[int, DeltaRows]  # for the recurrent layers, by layer number
    at: Array  # i32[B]; number of tokens in the states


class Span(NamedTuple):
    """The place of a forward's nodes in their rows. Recurrent layers read it as attention reads `Visible`."""

    first: Array  # i32[B]; position of the first node
    at: Array  # i32[B]; as in the cache
    # i32[B]; number of nodes to read into the state; None: the nodes are a draft, and the cache keeps their inputs
    count: Array | None
    documents: Array | None  # i32[B, N]; as in `Visible`

    @staticmethod
    def of(visible: Visible, cache: RecurrentCache) -> Span:
        """Return the span of a forward. If there are more than M nodes, they are not a draft but tokens of the row.

        Raises:
          MarsError: the nodes form a tree, or `seen` separates documents and `documents` is None.
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
        """Return `RecurrentCache.at` after the forward."""
        return self.first if self.count is None else self.first + self.count


def with_states(
    model: LanguageModel,
    config: ModelConfig,
    nodes: int,
    dtype: DTypeLike,
    for_chains: Callable[[int, int | None], LanguageModel],
) -> LanguageModel:
    """Return a model whose cache also has the states of its recurrent layers.

    Args:
      model: the model, with a `KVCache` of its other layers.
      config: its config.
      nodes: M.
      dtype: dtype of the cache; "int8" keeps the inputs of the convolution in bfloat16.
      for_chains: `LanguageModel.for_chains`.
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

        # A prompt's last window does not slide back (see `prefill`), so the cache needs room for one more window.
        kv, at = model.init_cache(batch, slots + chunk), jnp.zeros((batch,), jnp.int32)
        return RecurrentCache(kv=kv, delta={layer: rows() for layer in delta.layers}, at=at)

    def keep(cache: RecurrentCache, count: Array) -> Array:
        # The state includes the tokens before `at`. To drop any of them, read the row again from its start.
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
    """Read L tokens into the state; return the new state and the output of each token, f32[B, H, G, L, V].

    A token with `log_decay` 0 and `rate` 0 leaves the state unchanged.

    Args:
      state: f32[B, H, G, K, V].
      q, k: f32[B, H, L, K].
      v: f32[B, H, G, L, V].
      log_decay, rate: f32[B, H, G, L]; log a (alpha) and b (beta).
      documents: i32[B, L]; document of each token. A document does not read the state of the one before it. `state`
        belongs to the first token's document, and the new state to the last token's. None: there is one document.
    """
    length = q.shape[2]
    # The chunked form of the rule; a chunk of one token is the recurrent form.
    size = min(length, CHUNK)
    # A query or key head serves G value heads.
    q, k = (x[:, :, None] for x in (q, k))

    def chunks(x: Array, mode: str = "constant") -> Array:
        """Split the tokens on axis 3 into chunks, on a new first axis; pad the last chunk with gates of 0."""
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
    """The parts of L tokens that do not depend on the state (section 3.3 of the paper)."""

    q: Array  # f32[..., L, K]; queries, times the decay from the start of the chunk
    k: Array  # f32[..., L, K]; keys, times the decay to the end of the chunk
    scores: Array  # f32[..., L, L]; product of query i and key j, times the decay from j to i
    values: Array  # f32[..., L, V]; values that the tokens write to a zero state
    reads: Array  # f32[..., L, K]; with a state S, the tokens write `values - reads @ S`
    decay: Array  # f32[..., 1, 1]; decay of the state over the chunk


def _prepare(
    q: Array, k: Array, v: Array, log_decay: Array, rate: Array, *, documents: Array | None
) -> _Chunk:
    # Log decay from the start of the chunk to each token; decay from token j to token i, which is 0 if j > i.
    total = jnp.cumsum(log_decay, axis=-1)
    length = total.shape[-1]
    is_read = jnp.tril(jnp.ones((1,) * (total.ndim - 1) + (length, length), bool))
    from_start, to_end = jnp.exp(total), jnp.exp(total[..., -1:] - total)
    if documents is not None:
        # The state at the start of a chunk belongs to the document of the last token of the previous chunk. Before the
        # first chunk it belongs to the document of the first token.
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
    # The WY representation, computed by the UT transform.
    # A token writes its value minus the state's value for its key, to which earlier writes add. With S at the start:
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
    """Return the inverse of I plus the strictly lower part of a matrix f32[..., L, L], by forward substitution.

    `lax.linalg.triangular_solve` takes 200 times as long on a CPU.
    """
    length, below = matrix.shape[-1], jnp.tril(matrix, -1)

    def row(i: Array, inverse: Array) -> Array:
        """Compute row i from the rows before it. Rows not computed yet are those of I."""
        written = _matmul(lax.dynamic_index_in_dim(below, i, -2), inverse)
        new = lax.dynamic_index_in_dim(inverse, i, -2) - written
        return lax.dynamic_update_index_in_dim(inverse, new, i, -2)

    return lax.fori_loop(0, length, row, jnp.broadcast_to(jnp.eye(length), matrix.shape))


def _add_chunk(state: Array, chunk: _Chunk) -> tuple[Array, Array]:
    """Read a chunk into the state; return the new state and the outputs of the tokens."""
    writes = chunk.values - _matmul(chunk.reads, state)
    outputs = _matmul(chunk.q, state) + _matmul(chunk.scores, writes)
    return chunk.decay * state + _matmul(chunk.k.swapaxes(-1, -2), writes), outputs


def delta_net(
    config: ModelConfig, layer: dict, x: Array, span: Span, rows: DeltaRows
) -> tuple[Array, DeltaRows]:
    """Run a gated DeltaNet layer on x [B, N, E]; return [B, N, E] and the layer's cache."""
    delta = config.delta
    assert delta is not None
    heads = ("delta_heads", delta.key_heads)

    def project(name: str) -> Array:
        y = dense(x, layer[name], outputs=heads)
        return y.reshape(*x.shape[:2], delta.key_heads, -1).swapaxes(1, 2)

    if "delta_qkvz" in layer:
        # Qwen3-Next stores the rows of a key head together.
        groups = delta.value_heads // delta.key_heads
        inputs, z = jnp.split(project("delta_qkvz"), [2 * delta.key_dim + groups * delta.value_dim], axis=-1)
        b, a = jnp.split(project("delta_ba"), 2, axis=-1)
    else:
        inputs = jnp.concatenate([project(f"delta_{name}") for name in "qkv"], axis=-1)
        z, b, a = project("delta_z"), project("delta_b"), project("delta_a")
    by_head = [layer[f"delta_{name}_conv"].reshape(delta.key_heads, -1, delta.taps) for name in "qkv"]
    conv = jnp.concatenate(by_head, axis=1)
    # `A_log` and `dt_bias`.
    offsets = [layer[f"delta_{name}"].reshape(delta.key_heads, -1) for name in ("log_rate", "bias")]
    mix, axes = functools.partial(_mix, config), axes_here("delta_heads", delta.key_heads)
    if axes:
        # Each device runs its own heads, without communication.
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
    """Return the gated outputs [B, H, N, G V] of each head, and the cache.

    Args:
      config: the model's config.
      conv: [H, F, T].
      offsets: [H, G] each; log of the decay's speed, and bias of its time step.
      norm: [V].
      inputs, z: [B, H, N, F] and [B, H, N, G V].
      gates: [B, H, N, G] each; learning rates and time steps, before their activations.
      span, rows: as for `delta_net`.
    """
    log_rate, bias = (x.astype(jnp.float32)[None, :, None] for x in offsets)
    b, a = (x.astype(jnp.float32) for x in gates)
    # The logarithm of the decay (alpha), and the learning rate (beta).
    log_decay = -jnp.exp(log_rate) * jax.nn.softplus(a + bias)
    new_gates = jnp.concatenate([log_decay, jax.nn.sigmoid(b)], axis=-1)
    capacity, tail_length = rows.gates.shape[2], conv.shape[2] - 1

    # Commit the accepted path: read the accepted nodes of the last draft into the state. A row at its start has no
    # draft and no state.
    accepted = span.first - span.at
    begins = (span.first == 0)[:, None, None, None]
    # A start outside the draft would need a state that no longer exists. NaN ends the row as failed.
    lost = ((accepted < 0) | (accepted > capacity)) & (span.first > 0)
    state = jnp.where(begins[..., None], 0.0, rows.state)
    state = jnp.where(lost[:, None, None, None, None], jnp.nan, state)
    logged = jnp.where(begins, 0, rows.inputs)
    accepted = jnp.where(begins[:, 0, 0, 0], 0, jnp.clip(accepted, 0, capacity))
    # Zero the inputs of rejected nodes, so that non-finite numbers there are harmless.
    accepted_inputs = _first(logged, tail_length + accepted)
    state, _ = _read(config, conv, state, accepted_inputs, _first(rows.gates, accepted))

    def window(x: Array, start: Array, length: int) -> Array:
        """Slice [B, H, length, ...] of x from token `start` i32[B] on."""
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
    # Gated RMSNorm: the norm, then the output gate z.
    y = rms_norm(outputs, norm, config.norm_eps)  # f32[B, H, G, N, V]
    y = y.swapaxes(2, 3).reshape(z.shape) * jax.nn.silu(z.astype(jnp.float32))
    return y.astype(z.dtype), rows


def _first(x: Array, count: Array) -> Array:
    """Set x [B, H, L, .] to 0 after the first `count` i32[B] tokens. Tokens with gates of 0 do not change a state."""
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
    """Run the short causal convolution (`conv1d`) on inputs [B, H, T - 1 + L, F] and `delta_rule` on its L tokens."""
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
    # L2 norm of queries and keys.
    q, k = (y * lax.rsqrt(jnp.sum(jnp.square(y), axis=-1, keepdims=True) + _EPS) for y in (q, k))
    log_decay, rate = jnp.split(gates.swapaxes(2, 3), 2, axis=2)
    v = v.reshape(*v.shape[:3], -1, delta.value_dim).swapaxes(2, 3)
    return delta_rule(state, q * delta.key_dim**-0.5, k, v, log_decay, rate, documents)
