"""Fill a model's cache from ragged prompts, in chunks of a fixed shape.

Oracle: one forward over the whole prompt (tests/core/test_decode.py, tests/core/test_extend.py). B batch, T token
buffer, S slots.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax

from mars_jax.core.types import ForwardOutput, LanguageModel, PyTree, Visible

CHUNK, LONG_CHUNK, LONG = 64, 256, 1024
"""Tokens of a chunk on CPU, where some dozens are bound by arithmetic already and a short prompt wastes little of them;
of one in a long buffer, whose cache is read fewer times then; and from how many tokens on a buffer is long."""
WIDE_CHUNK = 512
"""Tokens of a chunk elsewhere: a pass over the weights takes as long as the arithmetic of 166 (v5p) to 560 (v6e)."""


def chunk_of(buffer: int) -> int:
    """Tokens of a prefill forward in a buffer of so many, on the default backend.

    >>> chunk_of(256) if jax.default_backend() == "cpu" else 64
    64
    """
    if jax.default_backend() != "cpu":
        return WIDE_CHUNK
    return CHUNK if buffer < LONG else LONG_CHUNK


def prefill(
    model: LanguageModel,
    params: PyTree,
    tokens: Array,
    count: Array,
    cache: PyTree,
    *,
    chunk: int | None = None,
) -> PyTree:
    """Cache the first `count[b]` tokens of each row; slots past `count[b]` hold garbage, which nothing reads.

    Args:
      model, params: the model whose cache is filled.
      tokens: i32[B, T].
      count: i32[B]; 0 leaves a row untouched or garbage.
      cache: with at least T slots.
      chunk: tokens per forward; None takes the model's `prefill_chunk`, and where that is None `chunk_of`.
    """
    return observed_prefill(model, params, tokens, count, cache, (), lambda state, *_: state, chunk=chunk)[0]


def observed_prefill(
    model: LanguageModel,
    params: PyTree,
    tokens: Array,
    count: Array,
    cache: PyTree,
    state: PyTree,
    observe: Callable[[PyTree, Array, ForwardOutput], PyTree],
    *,
    chunk: int | None = None,
) -> tuple[PyTree, PyTree]:
    """`prefill`, with `state = observe(state, first i32[B], output)` folded over the chunks' outputs.

    The number of chunks is a value and not a shape, so prompts of any length share one compilation.

    Args:
      model, params: the model whose cache is filled.
      tokens: i32[B, T].
      count: i32[B]; 0 leaves a row untouched or garbage.
      cache: with at least T slots.
      state: where the fold begins.
      observe: gets the output for the positions `first .. first + n - 1`. Chunks come in order, but the last one
        slides back to stay inside the buffer and shows some positions again.
      chunk: as in `prefill`.
    """
    batch, buffer = tokens.shape
    size = min(chunk or model.prefill_chunk or chunk_of(buffer), buffer)

    def body(carry):
        index, cache, state = carry
        # What the last chunk computes twice comes out the same.
        first = jnp.minimum(index * size, buffer - size)
        start = jnp.broadcast_to(first, (batch,))
        piece = lax.dynamic_slice_in_dim(tokens, first, size, axis=1)
        output = model.forward(params, piece, Visible.causal(start, size), cache)
        return index + 1, output.cache, observe(state, start, output)

    chunks = (jnp.max(count) + size - 1) // size
    _, cache, state = lax.while_loop(lambda c: c[0] < chunks, body, (jnp.int32(0), cache, state))
    return cache, state


def prefill_from(
    model: LanguageModel,
    params: PyTree,
    tokens: Array,
    first: Array,
    count: Array,
    cache: PyTree,
    state: PyTree = (),
    observe: Callable[[PyTree, Array, ForwardOutput], PyTree] | None = None,
    *,
    chunk: int | None = None,
) -> tuple[PyTree, PyTree]:
    """`observed_prefill` of a cache that holds the first `first[b]` tokens of each row already; gives cache and state.

    Every row has a window of its own, which begins where its cache ends.

    Args:
      model, params, tokens, count, cache: as there; a row whose `first` is not below its `count` is complete.
      first: i32[B], at least 0.
      state, observe: the fold over the outputs, if any. A window slides back to stay inside the buffer, and rows that
        are complete see windows after their text while others are read.
      chunk: tokens per forward; None takes the model's `prefill_chunk`, and where that is None `CHUNK` on a CPU, since
        what is new of a text is seldom long, and `WIDE_CHUNK` elsewhere.
    """
    buffer = tokens.shape[1]
    usual = CHUNK if jax.default_backend() == "cpu" else WIDE_CHUNK
    size = min(chunk or model.prefill_chunk or usual, buffer)

    def body(carry):
        at, cache, state = carry
        # What is fed again at the buffer's end comes out the same, and what is fed past a text is overwritten.
        start = jnp.minimum(at, buffer - size)
        window = jax.vmap(lambda row, begin: lax.dynamic_slice_in_dim(row, begin, size))(tokens, start)
        output = model.forward(params, window, Visible.causal(start, size), cache)
        return start + size, output.cache, state if observe is None else observe(state, start, output)

    _, cache, state = lax.while_loop(lambda c: jnp.any(c[0] < count), body, (first, cache, state))
    return cache, state
