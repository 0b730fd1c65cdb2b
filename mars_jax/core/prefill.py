"""Prefill: fill a model's cache from ragged prompts, in chunks of a fixed shape.

Oracle: one forward over the whole prompt (tests/core/test_decode.py, tests/core/test_extend.py). B batch, T token
buffer, S slots.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from mars_jax.core.axes import current, on_cpu, on_tpu, size_of
from mars_jax.core.drafter import Drafter
from mars_jax.core.types import ForwardOutput, LanguageModel, Params, PyTree, Visible

CHUNK, LONG_CHUNK, LONG = 64, 256, 1024
"""On a CPU: tokens per chunk, tokens per chunk for long buffers, and the buffer length that counts as long. A few dozen
tokens are already compute-bound, and small chunks waste little on a short prompt; larger chunks read a long cache less
often."""
WIDE_CHUNK = 512
"""Tokens per chunk on accelerators, where reading the weights takes as long as the arithmetic of 166 (v5p) to 560 (v6e)
tokens."""
RING_CHUNK, RING_LONG = 2048, 4096
"""Tokens per chunk over all rows, if the devices of a TPU mesh share the chunk, so that arithmetic hides the
communication (`models/ring.py`); and the minimum buffer length for such chunks, which short prompts would leave mostly
empty. Models without ring communication, such as mixtures of experts, do not benefit."""


def chunk_of(buffer: int = 0, rows: int = 1) -> int:
    """Return the number of tokens per prefill forward for a buffer length and number of rows, on the current devices.

    The default `buffer` suits extensions of any length, because their new part is usually short.

    >>> chunk_of(256) if on_cpu() else 64
    64
    """
    shares_chunk = size_of("model", current()) > 1 and size_of("data", current()) == 1
    if on_tpu() and buffer >= RING_LONG and shares_chunk:
        # A power of two splits evenly over the devices.
        return max(RING_CHUNK >> (rows - 1).bit_length(), WIDE_CHUNK)
    if not on_cpu():
        return WIDE_CHUNK
    return CHUNK if buffer < LONG else LONG_CHUNK


class _Reading(NamedTuple):
    """Loop carry of `prefill`."""

    next_start: Array  # i32[B]; the cache holds the tokens before it
    cache: PyTree
    state: PyTree  # result of `observe` so far


def prefill(
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
    """Cache the tokens `first[b] .. count[b] - 1` of each row, window by window; return the cache and the state.

    Each row's window begins where its cache ends. The number of windows is a traced value, so prompts of any length
    share one compilation. Slots past `count[b]` hold garbage that is never read.

    Args:
      model, params: the model whose cache is filled.
      tokens: i32[B, T].
      first: i32[B], at least 0; the cache holds the tokens before it.
      count: i32[B]; a row is complete if `first >= count`.
      cache: with at least T slots.
      state: initial value of a fold over the outputs.
      observe: the fold, `state = observe(state, start i32[B], output)`; the output covers the positions from `start`
        on. Windows are passed in order. The last one may slide back to stay inside the buffer, and then repeats
        positions. Complete rows get windows past their end until all rows are complete. Windows of recurrent
        models do not slide back: the last one may end past the buffer, and complete rows get windows without tokens.
      chunk: tokens per forward. Default: the model's `prefill_chunk`, or else `chunk_of`.
    """
    buffer = tokens.shape[1]
    chunk_size = min(chunk or model.prefill_chunk or chunk_of(buffer, len(tokens)), buffer)

    is_recurrent = model.for_chains is not None
    if is_recurrent:
        # The cache has room for windows of up to `model.prefill_chunk` tokens past the buffer.
        chunk_size = min(chunk_size, model.prefill_chunk or chunk_size)
        tokens = jnp.pad(tokens, ((0, 0), (0, chunk_size)))

    def body(carry: _Reading) -> _Reading:
        # Slide the last window back to stay inside the buffer. Tokens fed twice produce the same keys, since a key
        # depends only on its own and earlier tokens. Later steps overwrite the slots past the end of a row.
        start = jnp.minimum(carry.next_start, buffer - chunk_size)
        if is_recurrent:
            # A state must not read a token twice, so windows do not slide back. The cache has room past the buffer.
            start = jnp.minimum(carry.next_start, jnp.maximum(first, count))
        # i32[B, chunk_size]; each row has its own start.
        window = jax.vmap(lambda row, begin: lax.dynamic_slice_in_dim(row, begin, chunk_size))(tokens, start)
        visible = Visible.causal(start, chunk_size)
        if is_recurrent:
            visible = dataclasses.replace(visible, count=jnp.clip(count - start, 0, chunk_size))
        output = model.forward(params, window, visible, carry.cache)
        state = carry.state if observe is None else observe(carry.state, start, output)
        return _Reading(start + chunk_size, output.cache, state)

    # Complete rows keep running until all rows are complete; their windows write garbage past their end.
    end = lax.while_loop(lambda carry: jnp.any(carry.next_start < count), body, _Reading(first, cache, state))
    return end.cache, end.state


def observing(
    drafter: Drafter, params: Params, tokens: Array, length: Array
) -> Callable[[PyTree, Array, ForwardOutput], PyTree] | None:
    """Return the fold by which a drafter reads the target's outputs on tokens i32[B, T] of `length` i32[B].

    Return None for a drafter that does not read its target.
    """
    if drafter.reads is None:
        return None
    return lambda state, first, output: drafter.observe(params, state, tokens, first, length, output)
