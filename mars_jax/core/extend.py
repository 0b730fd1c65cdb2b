"""A running state goes on with other prompts, and reads only what it does not hold: the turns of a conversation.

B rows, T token buffer, t width of the prompts. Oracle: `init` of the same prompts (tests/core/test_extend.py).

The longest common beginning of a row's committed tokens and its new prompt stays in the caches; what comes after it is
read. So callers need not say what is new: where a chat template writes an earlier turn differently, the beginning is
shorter, and the tokens are those of a fresh state all the same. A key or value depends on the tokens up to its own
alone, so what is held is what a fresh state would hold, up to rounding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from mars_jax.core.drafter import Drafter
from mars_jax.core.errors import MarsError
from mars_jax.core.given import begun, check_same, rows_of
from mars_jax.core.pick import leading
from mars_jax.core.prefill import chunk_of, observing, prefill
from mars_jax.core.types import DecodeState, LanguageModel, Params, Prompts, PyTree


def extended(
    target: LanguageModel,
    drafter: Drafter,
    chunk: int | None,
    check_cache: Callable[[DecodeState], None],
    params: Params,
    state: DecodeState,
    prompts: Prompts,
) -> tuple[DecodeState, Array]:
    """`Decoder.extend` of a decoder's parts, for prompts as wide as the state's token buffer.

    A head's entry for the last token that both texts have depends on the token after it. So that token is read again
    for a drafter that reads its target. `check_cache` raises MarsError for a state with another target's cache.
    """
    tokens, length = prompts.tokens, prompts.length
    again = 0 if drafter.reads is None else 1
    check_cache(state)
    check_same("draft", state.draft, jax.eval_shape(drafter.init, params, tokens, length))
    held = common(state, tokens, length)
    # The last committed token is in no cache yet, and the last one of the prompt will be in none.
    # So the target's cache is kept up to `first`, and `[first, length - 1)` is read: as in every state, the last token
    # is left to the next step as its root.
    first = jnp.minimum(held - again, jnp.minimum(state.length - 1, length - 1 - again))
    first = jnp.maximum(first, 0)
    # Models that draft lag one token more, and feed their last two tokens in every step.
    draft = caught_up(drafter, params, state.draft, tokens, jnp.maximum(held - 2, 0), length)
    cache, draft = prefill(
        target,
        params.target,
        tokens,
        first,
        length - 1,
        state.cache,
        draft,
        observing(drafter, params, tokens, length),
        chunk=chunk or target.prefill_chunk or chunk_of(),
    )
    return begun(prompts, cache, draft), jnp.maximum(length - 1 - first, 0)


def padded_to(state: DecodeState, prompts: Prompts) -> Prompts:
    """The prompts, one for each row of a state, as wide as its token buffer.

    Raises:
      MarsError: another number of prompts, or wider ones.
    """
    batch, buffer = rows_of(state), state.tokens.shape[1]
    count, width = prompts.tokens.shape
    if count != batch or width > buffer:
        raise MarsError(
            f"the prompts are {[count, width]} and the state has {batch} rows of {buffer} tokens: give one prompt for "
            "each row, at most as wide."
        )
    return dataclasses.replace(prompts, tokens=jnp.pad(prompts.tokens, ((0, 0), (0, buffer - width))))


def common(state: DecodeState, prompts: Array, lengths: Array) -> Array:
    """i32[B]: how many tokens at the beginning of each prompt i32[B, T] the row has committed already."""
    place = jnp.arange(prompts.shape[1], dtype=jnp.int32)[None]
    # Past either length the buffers hold no text, so equal numbers there mean nothing.
    same = (prompts == state.tokens) & (place < jnp.minimum(state.length, lengths)[:, None])
    return leading(same)


def caught_up(
    drafter: Drafter, params: Params, state: PyTree, tokens: Array, cached: Array, length: Array
) -> PyTree:
    """The state of a drafter that has read the first `cached` i32[B] of `length` i32[B] tokens i32[B, T], and now reads
    the others; but for what `Reads.observe` tells it."""
    if drafter.catch_up is not None:
        return drafter.catch_up(params, state, tokens, cached, length)
    return state if drafter.reads is not None else drafter.init(params, tokens, length)
