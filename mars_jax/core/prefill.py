"""Prefill: fill a model's cache from prompts of different lengths, in chunks of a fixed size.

Dimensions: B batch, T token buffer. Tested against a single forward pass over the whole prompt
(tests/core/test_decode.py, tests/core/test_extend.py).
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
"""Chunk sizes on a CPU: tokens per chunk, tokens per chunk for long buffers, and the minimum length of a long buffer. A
chunk of a few dozen tokens is already compute-bound, and small chunks waste little time on a short prompt. Larger
chunks read a long cache less often."""
WIDE_CHUNK = 512
"""Tokens per chunk on accelerators. Reading the weights takes as long as the arithmetic for 166 tokens on a TPU v5p and
560 tokens on a TPU v6e."""
RING_CHUNK, RING_LONG = 2048, 4096
"""Tokens per chunk, summed over the rows, if the devices of a TPU mesh split each chunk between them, and the minimum
buffer length for such chunks. These chunks are large enough for arithmetic to hide the communication
(`models/ring.py`), but a short prompt would leave them mostly empty. Models without ring communication, such as
mixtures of experts, do not benefit."""


def chunk_of(buffer: int = 0, rows: int = 1) -> int:
    """Return the number of prompt tokens per forward pass, given the length of the token buffer and the number of rows.

    When extending existing rows, keep `buffer`'s default, because usually only a few of their tokens are new.

    >>> chunk_of(256) if on_cpu() else 64
    64
    """
    shares_chunk = size_of("model", current()) > 1 and size_of("data", current()) == 1
    if on_tpu() and buffer >= RING_LONG and shares_chunk:
        # Use a power of two, which splits evenly over the usual numbers of devices.
        return max(RING_CHUNK >> (rows - 1).bit_length(), WIDE_CHUNK)
    if not on_cpu():
        return WIDE_CHUNK
    return CHUNK if buffer < LONG else LONG_CHUNK


class _Reading(NamedTuple):
    """Loop carry of `prefill`."""

    next_start: Array  # i32[B]; first token of each row that is not in the cache yet
    cache: PyTree
    state: PyTree  # result of the latest call to `observe`


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
    """Add the tokens `first[b] .. count[b] - 1` of each row to the cache, and return the cache and the state.

    The tokens are read in windows of a fixed size. Each row's next window begins at its first token that is not cached.
    The number of windows is traced, so prompts of all lengths share one compiled program. Slots from `count[b]` on
    contain garbage that is never read.

    Args:
      model, params: the model whose cache is filled.
      tokens: i32[B, T].
      first: i32[B], at least 0; number of tokens of each row that are already in the cache.
      count: i32[B]; number of tokens of each row that must be in the cache afterwards. A row with `first >= count` is
        already complete.
      cache: the model's cache, with at least T slots.
      state: initial state that `observe` updates, such as a drafter's state.
      observe: function that is called after every window, as in `state = observe(state, start, output)`. `start` i32[B]
        is the first position of each row's window. Windows are passed to `observe` in order. The last window may begin
        earlier to stay inside the buffer; it then overlaps the window before it. Until all rows are complete, the
        windows of a complete row continue past the row's end. For recurrent models, the last window may instead end
        past the buffer, and complete rows get windows without tokens.
      chunk: tokens per window. Default: the model's `prefill_chunk` if set, otherwise `chunk_of`.
    """
    buffer = tokens.shape[1]
    chunk_size = min(chunk or model.prefill_chunk or chunk_of(buffer, len(tokens)), buffer)

    is_recurrent = model.for_chains is not None
    if is_recurrent:
        # The cache has room for windows of up to `model.prefill_chunk` tokens past the buffer.
        chunk_size = min(chunk_size, model.prefill_chunk or chunk_size)
        tokens = jnp.pad(tokens, ((0, 0), (0, chunk_size)))

    def body(carry: _Reading) -> _Reading:
        # The last window begins earlier if it would extend past the buffer. Tokens that are read twice produce the same
        # keys, because a key depends only on its own token and earlier ones. Later steps overwrite the slots past the
        # end of a row.
        start = jnp.minimum(carry.next_start, buffer - chunk_size)
        if is_recurrent:
            # A recurrent state must not read a token twice, so windows never begin earlier. The cache has room past the
            # buffer.
            start = jnp.minimum(carry.next_start, jnp.maximum(first, count))
        # i32[B, chunk_size]; windows begin at different positions in different rows.
        window = jax.vmap(lambda row, begin: lax.dynamic_slice_in_dim(row, begin, chunk_size))(tokens, start)
        visible = Visible.causal(start, chunk_size)
        if is_recurrent:
            visible = dataclasses.replace(visible, count=jnp.clip(count - start, 0, chunk_size))
        output = model.forward(params, window, visible, carry.cache)
        state = carry.state if observe is None else observe(carry.state, start, output)
        return _Reading(start + chunk_size, output.cache, state)

    # The loop runs until all rows are complete. Until then, a row that is already complete gets windows past its end,
    # which write garbage there.
    end = lax.while_loop(lambda carry: jnp.any(carry.next_start < count), body, _Reading(first, cache, state))
    return end.cache, end.state


def observing(
    drafter: Drafter, params: Params, tokens: Array, length: Array
) -> Callable[[PyTree, Array, ForwardOutput], PyTree] | None:
    """Return the argument `observe` of `prefill` that lets a drafter read the target's outputs on the prompts.

    `tokens` are i32[B, T], and `length` is i32[B]. Return None for a drafter that does not read its target.
    """
    if drafter.reads is None:
        return None
    return lambda state, first, output: drafter.observe(params, state, tokens, first, length, output)
