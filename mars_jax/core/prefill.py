"""Fill a model's cache from ragged prompts, in chunks of a fixed shape.

Oracle: one forward over the whole prompt (tests/core/test_decode.py, tests/core/test_extend.py). B batch, T token
buffer, S slots.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax

from mars_jax.core.drafter import Drafter
from mars_jax.core.mesh import current, on_cpu, on_tpu, size_of
from mars_jax.core.types import ForwardOutput, LanguageModel, Params, PyTree, Visible

CHUNK, LONG_CHUNK, LONG = 64, 256, 1024
"""Tokens of a chunk on CPU, where some dozens are bound by arithmetic already and a short prompt wastes little of them;
of one in a long buffer, whose cache is read fewer times then; and from how many tokens on a buffer is long."""
WIDE_CHUNK = 512
"""Tokens of a chunk elsewhere: a pass over the weights takes as long as the arithmetic of 166 (v5p) to 560 (v6e)."""
RING_CHUNK, RING_LONG = 2048, 4096
"""Tokens of all rows in a chunk that a TPU's devices share, so that each has enough to multiply while others send
(`models/ring.py`); and from how many tokens on a buffer is worth such chunks, of which a short prompt fills little.
Models that pass nothing around, such as mixtures, have no gain from them."""


def chunk_of(buffer: int = 0, rows: int = 1) -> int:
    """Tokens of a prefill forward of so many rows in a buffer of so many tokens, where it is traced for.

    The default serves where what is new of a text is seldom long, whatever the buffer.

    >>> chunk_of(256) if on_cpu() else 64
    64
    """
    shared = size_of("model", current()) > 1 and size_of("data", current()) == 1
    if on_tpu() and buffer >= RING_LONG and shared:
        # A power of two, which divides over devices.
        return max(RING_CHUNK >> (rows - 1).bit_length(), WIDE_CHUNK)
    if not on_cpu():
        return WIDE_CHUNK
    return CHUNK if buffer < LONG else LONG_CHUNK


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
    """Cache the tokens `first[b] .. count[b] - 1` of each row, window by window; gives the cache and the state.

    Every row has a window of its own, which begins where its cache ends. The number of windows is a value and not a
    shape, so prompts of any length share one compilation. Slots past `count[b]` hold garbage, which nothing reads.

    Args:
      model, params: the model whose cache is filled.
      tokens: i32[B, T].
      first: i32[B], at least 0; the cache holds the tokens before it.
      count: i32[B]; a row whose `first` is not below it is complete.
      cache: with at least T slots.
      state: where a fold over the outputs begins.
      observe: the fold, `state = observe(state, at i32[B], output)`, of the output for the positions from `at` on.
        Windows come in order. One slides back to stay inside the buffer and shows some positions again, and rows that
        are complete see windows after their text while others are read.
      chunk: tokens per forward; None takes the model's `prefill_chunk`, and where that is None `chunk_of`.
    """
    buffer = tokens.shape[1]
    size = min(chunk or model.prefill_chunk or chunk_of(buffer, len(tokens)), buffer)

    def body(carry: tuple[Array, PyTree, PyTree]) -> tuple[Array, PyTree, PyTree]:
        at, cache, state = carry
        # The window slides back to stay inside of the buffer. What is fed again at the buffer's end comes out the same,
        # as a key depends on the tokens up to its own alone. What is fed past a text is overwritten by later steps.
        start = jnp.minimum(at, buffer - size)
        # i32[B, size], each row from a place of its own.
        window = jax.vmap(lambda row, begin: lax.dynamic_slice_in_dim(row, begin, size))(tokens, start)
        output = model.forward(params, window, Visible.causal(start, size), cache)
        return start + size, output.cache, state if observe is None else observe(state, start, output)

    # Rows that are complete go along until the last one is: their windows write past their text, where nothing reads.
    _, cache, state = lax.while_loop(lambda c: jnp.any(c[0] < count), body, (first, cache, state))
    return cache, state


def observing(
    drafter: Drafter, params: Params, tokens: Array, length: Array
) -> Callable[[PyTree, Array, ForwardOutput], PyTree] | None:
    """The fold by which a drafter reads the target's outputs of texts i32[B, T] of `length` i32[B].

    It is None for a drafter that does not read its target.
    """
    reads = drafter.reads
    if reads is None:
        return None
    return lambda state, first, output: reads.observe(params, state, tokens, first, length, output)


def caught_up(
    drafter: Drafter, params: Params, state: PyTree, tokens: Array, cached: Array, length: Array
) -> PyTree:
    """Return the draft state after reading tokens i32[B, T] from `cached` i32[B] up to `length` i32[B].

    A coupled drafter reads them through `Reads.observe` instead.
    """
    if drafter.catch_up is not None:
        return drafter.catch_up(params, state, tokens, cached, length)
    return state if drafter.reads is not None else drafter.init(params, tokens, length)
