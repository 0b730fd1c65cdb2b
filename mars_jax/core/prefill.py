"""Fill a model's cache from ragged prompts, in chunks of a fixed shape.

Oracle: one forward over the whole prompt (tests/core/test_decode.py). B batch, T token buffer, S slots.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax

from mars_jax.core.types import ForwardOutput, LanguageModel, PyTree, Visible

CHUNK = 64
"""Tokens a prefill forward takes: on CPU enough to be bound by arithmetic, and short prompts waste little. Long
prompts on an accelerator want more; see `speculative_decoder`."""


def prefill(
    model: LanguageModel, params: PyTree, tokens: Array, count: Array, cache: PyTree, *, chunk: int = CHUNK
) -> PyTree:
    """Cache the first `count[b]` tokens of each row; slots past `count[b]` hold garbage, which nothing reads.

    Args:
      model, params: the model whose cache is filled.
      tokens: i32[B, T].
      count: i32[B]; 0 leaves a row untouched or garbage.
      cache: with at least T slots.
      chunk: tokens per forward.
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
    chunk: int = CHUNK,
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
      chunk: tokens per forward.
    """
    batch, buffer = tokens.shape
    chunk = min(chunk, buffer)

    def body(carry):
        index, cache, state = carry
        # What the last chunk computes twice comes out the same.
        first = jnp.minimum(index * chunk, buffer - chunk)
        start = jnp.broadcast_to(first, (batch,))
        piece = lax.dynamic_slice_in_dim(tokens, first, chunk, axis=1)
        output = model.forward(params, piece, Visible.causal(start, chunk), cache)
        return index + 1, output.cache, observe(state, start, output)

    chunks = (jnp.max(count) + chunk - 1) // chunk
    _, cache, state = lax.while_loop(lambda c: c[0] < chunks, body, (jnp.int32(0), cache, state))
    return cache, state
