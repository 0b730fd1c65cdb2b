"""A running state goes on with other prompts, and reads only what it does not hold: the turns of a conversation.

B rows, T token buffer, t width of the prompts. Oracle: `init` of the same prompts (tests/core/test_extend.py).

The longest common beginning of a row's committed tokens and its new prompt stays in the caches; what comes after it is
read. So nobody has to say what is new: where a chat template writes an earlier turn differently, the beginning is
shorter, and the tokens are those of a fresh state all the same. A key or value depends on the tokens up to its own
alone, so what is held is what a fresh state would hold, up to rounding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from mars_jax.core import mesh as meshes
from mars_jax.core.errors import MarsError
from mars_jax.core.given import check_prompts, check_same, rows_of
from mars_jax.core.guide import first_states
from mars_jax.core.prefill import prefill_from
from mars_jax.core.types import Controls, Decoder, DecodeState, Drafter, LanguageModel, Params, PyTree


def extend_by(
    target: LanguageModel,
    drafter: Drafter,
    check_cache: Callable[[DecodeState], None],
    *,
    chunk: int | None,
) -> Callable:
    """`Decoder.extend` of a decoder. `check_cache` raises MarsError for a state with another target's.

    What a head keeps of the last token that both texts have depends on the token after it, so with a drafter that
    reads its target (`Drafter.observe`) that one is read again.
    """
    observe = drafter.observe or (lambda params, state, *_: state)
    again = 0 if drafter.observe is None else 1

    def go_on(
        params: Params,
        state: DecodeState,
        prompts: Array,
        lengths: Array,
        controls: Controls,
        rule: PyTree,
        keys: Array,
    ) -> tuple[DecodeState, Array]:
        buffer = state.tokens.shape[1]
        check_cache(state)
        check_same("draft", state.draft, jax.eval_shape(drafter.init, params, prompts, lengths))
        held = common(state, prompts, lengths)
        # The last committed token is in no cache yet, and the last one of the prompt will be in none.
        first = jnp.minimum(held - again, jnp.minimum(state.length - 1, lengths - 1 - again))
        first = jnp.maximum(first, 0)
        # Models that draft lag one token more, and feed their last two tokens in every step.
        draft = caught_up(drafter, params, state.draft, prompts, jnp.maximum(held - 2, 0), lengths)
        cache, draft = prefill_from(
            target,
            params.target,
            prompts,
            first,
            lengths - 1,
            state.cache,
            draft,
            lambda draft, at, output: observe(params, draft, prompts, at, lengths, output),
            chunk=chunk,
        )
        made = DecodeState(
            tokens=prompts,
            length=lengths,
            prompt_length=jnp.copy(lengths),
            done=lengths >= jnp.minimum(controls.limit, buffer),
            failed=jnp.zeros_like(state.failed),
            cache=cache,
            draft=draft,
            controls=controls,
            rule=rule,
            keys=keys,
            guides=first_states(controls),
        )
        return made, jnp.maximum(lengths - 1 - first, 0)

    def extend(
        params: Params,
        state: DecodeState,
        prompts: Array,
        lengths: Array,
        controls: Controls,
        rule: PyTree,
        keys: Array,
    ) -> tuple[DecodeState, Array]:
        batch, buffer = rows_of(state), state.tokens.shape[1]
        if prompts.shape[0] != batch or prompts.shape[1] > buffer:
            raise MarsError(
                f"the prompts are {list(prompts.shape)} and the state has {batch} rows of {buffer} tokens: give one "
                "prompt for each row, at most as wide."
            )
        # Copies: loops take the state's buffers, and the caller keeps what it gave.
        controls, rule, keys = jax.tree.map(jnp.copy, (controls, rule, keys))
        prompts = jnp.pad(jnp.asarray(prompts, jnp.int32), ((0, 0), (0, buffer - prompts.shape[1])))
        lengths = jnp.array(lengths, jnp.int32)
        return meshes.by_rows(go_on)(params, state, prompts, lengths, controls, rule, keys)

    return extend


def common(state: DecodeState, prompts: Array, lengths: Array) -> Array:
    """i32[B]: how many tokens at the beginning of each prompt i32[B, T] the row has committed already."""
    place = jnp.arange(prompts.shape[1], dtype=jnp.int32)[None]
    same = (prompts == state.tokens) & (place < jnp.minimum(state.length, lengths)[:, None])
    return jnp.sum(jnp.cumprod(same.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)


def caught_up(
    drafter: Drafter, params: Params, state: PyTree, tokens: Array, cached: Array, length: Array
) -> PyTree:
    """The state of a drafter that has read the first `cached` i32[B] of `length` i32[B] tokens i32[B, T], and now reads
    the others; but for what `observe` tells it."""
    if drafter.catch_up is not None:
        return drafter.catch_up(params, state, tokens, cached, length)
    return state if drafter.observe is not None else drafter.init(params, tokens, length)


def extend(
    decoder: Decoder,
    params: Params,
    state: DecodeState,
    prompts: Array,
    lengths: Array,
    controls: Controls,
    rule: PyTree,
    keys: Array,
) -> tuple[DecodeState, Array]:
    """`decoder.extend`, checked and compiled. `state` is donated.

    A row that failed holds what is not finite, and starts anew by `insert`, as does one that goes on with a prompt of a
    single token: what a head would draft from in its first step is still that of the text before.

    Args:
      decoder, params: from `speculative_decoder`, and the weights.
      state: of B rows, from `start`, `run`, `stream` or this function, done or not.
      prompts: i32[B, t] with t at most T, left-aligned: the whole texts, whatever of them is new.
      lengths: i32[B].
      controls, rule, keys: as for `Decoder.init`.

    Returns:
      The state, which decodes what `start` of these prompts would, and how many tokens of each prompt were read.

    >>> from mars_jax import drafters, fake, verify
    >>> from mars_jax.core import decode
    >>> from mars_jax.core.controls import make_controls
    >>> from mars_jax.core.types import keys_from_seeds
    >>> model, rule, keys = fake.hash_model(vocab_size=11), verify.exact(), keys_from_seeds(jnp.arange(1))
    >>> decoder = decode.speculative_decoder(model, drafters.ngram(4), rule)
    >>> text = jnp.asarray([[3, 1, 4] + [0] * 29], jnp.int32)
    >>> one = lambda n: jnp.asarray([n], jnp.int32)
    >>> state = decode.start(decoder, Params(()), text, one(3), make_controls(1, limit=8), rule, keys)
    >>> state, _ = decode.run(decoder, Params(()), state)
    >>> text = state.tokens.at[:, 8:10].set(5)  # what was said, and a turn of two tokens
    >>> state, read = extend(decoder, Params(()), state, text, one(10), make_controls(1, limit=16), rule, keys)
    >>> read.tolist()
    [2]
    """
    check_prompts(prompts, lengths, decoder.vocab_size)
    return _extend(decoder, params, state, prompts, lengths, controls, rule, keys)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _extend(decoder: Decoder, params: Params, state: DecodeState, *rest: Any) -> tuple[DecodeState, Array]:
    return decoder.extend(params, state, *rest)
