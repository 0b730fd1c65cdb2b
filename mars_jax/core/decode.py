"""The loops over a decoder's step: `run` on the device, `stream` from the host; and `start` and `extend`, compiled.

B batch, D depth, T token buffer. Oracle: greedy autoregression of the same model, token for token
(tests/core/test_decode.py).
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from mars_jax.core.decoder import Decoder as Decoder
from mars_jax.core.decoder import speculative_decoder as speculative_decoder
from mars_jax.core.donating import donating
from mars_jax.core.errors import check_count, check_type
from mars_jax.core.given import check_asked, check_params, check_prompts, rows_of
from mars_jax.core.mesh import by_rows
from mars_jax.core.metrics import DecodeStats, accumulate, zero_stats
from mars_jax.core.rule import for_rows
from mars_jax.core.settings import LARGEST_INT
from mars_jax.core.types import DecodeState, Params, Prompts, StepInfo

_ABSENT = object()


def check_given(decoder: Any, params: Any, state: Any = _ABSENT, *, max_steps: Any = None, **_: Any) -> None:
    """Raise MarsError for anything but a decoder, its weights, a state, and a whole number of steps."""
    check_type("the decoder", decoder, Decoder, "what speculative_decoder gives")
    check_params(params)
    if state is not _ABSENT:
        rows_of(state)
    if max_steps is not None:
        check_number("max_steps", max_steps, 0)


def check_number(name: str, value: Any, least: int = 1) -> None:
    """Raise MarsError for anything but a number of steps or rows that fits i32: Python's, or an array i32[]."""
    if (
        isinstance(value, Array | np.ndarray)
        and value.shape == ()
        and jnp.issubdtype(value.dtype, jnp.integer)
    ):
        return
    check_count(name, value, least, LARGEST_INT)


@functools.partial(jax.jit, static_argnums=0)
def _start(decoder: Decoder, params: Params, prompts: Prompts) -> DecodeState:
    return decoder.init(params, prompts)


def start(decoder: Decoder, params: Params, prompts: Prompts) -> DecodeState:
    """`decoder.init`, checked and compiled. A number of the rule may be one value or one per row.

    Raises:
      MarsError: as `Decoder.checked`.
    """
    check_given(decoder, params)
    return _start(decoder, params, ready(decoder, prompts))


def shapes(decoder: Decoder, params: Params, prompts: Prompts) -> DecodeState:
    """The state that `start` gives for these arguments, as `jax.ShapeDtypeStruct`."""
    return _start.eval_shape(decoder, params, ready(decoder, prompts))


def ready(decoder: Decoder, prompts: Prompts) -> Prompts:
    """The prompts of a program, checked where values are seen.

    A number of the rule becomes one per row, so that one number and several compile the same program.
    """
    check_asked(prompts)
    check_prompts(prompts.tokens, prompts.length, decoder.vocab_size)
    return dataclasses.replace(prompts, rule=for_rows(prompts.rule, prompts.tokens.shape[0]))


def extend(
    decoder: Decoder, params: Params, state: DecodeState, prompts: Prompts
) -> tuple[DecodeState, Array]:
    """`decoder.extend`, checked and compiled. `state` is donated.

    A row that failed holds what is not finite, and starts again by `insert`, as does a row that goes on with a prompt
    of a single token: what a head would draft from in its first step is still that of the text before.

    Args:
      decoder, params: from `speculative_decoder`, and the weights.
      state: of B rows, from `start`, `run`, `stream` or this function, done or not.
      prompts: of these rows, the whole texts, whatever of them is new.

    Returns:
      The state, which decodes what `start` of these prompts would, and how many tokens of each prompt were read.

    >>> from mars_jax import drafters, fake, make_controls, verify
    >>> from mars_jax.core.types import keys_from_seeds
    >>> model, rule, keys = fake.hash_model(vocab_size=11), verify.exact(), keys_from_seeds(jnp.arange(1))
    >>> decoder = speculative_decoder(model, drafters.ngram(4), rule)
    >>> text = jnp.asarray([[3, 1, 4] + [0] * 29], jnp.int32)
    >>> asked = lambda text, n, limit: Prompts(text, jnp.asarray([n]), make_controls(1, limit=limit), rule, keys)
    >>> state, _ = run(decoder, Params(()), start(decoder, Params(()), asked(text, 3, 8)))
    >>> text = state.tokens.at[:, 8:10].set(5)  # what was said, and a turn of two tokens
    >>> state, read = extend(decoder, Params(()), state, asked(text, 10, 16))
    >>> read.tolist()
    [2]
    """
    check_given(decoder, params, state)
    return _extend(decoder, params, state, ready(decoder, prompts))


@donating(2)
def _extend(
    decoder: Decoder, params: Params, state: DecodeState, prompts: Prompts
) -> tuple[DecodeState, Array]:
    return decoder.extend(params, state, prompts)


@donating(2, check=check_given, static_argnames="record")
def run(
    decoder: Decoder,
    params: Params,
    state: DecodeState,
    *,
    record: bool = False,
    max_steps: Any = None,
) -> tuple[DecodeState, DecodeStats]:
    """Step until every row is done, in one `lax.while_loop` on the device. `state` is donated.

    Each step adds a token to every live row or ends it, so the loop ends.

    Args:
      decoder, params: from `speculative_decoder`, and the weights.
      state: from `start`.
      record: also keep what each new token was: `DecodeStats.tokens`.
      max_steps: i32[]; stop after so many steps at most, so that the caller can look at the state and go on. A
        value, so another number compiles nothing. None: no bound.

    Returns:
      The final state and the per-row counters of these steps.
    """

    def loop(given: tuple[Params, Any], state: DecodeState) -> tuple[DecodeState, DecodeStats]:
        params, most = given

        def body(carry: tuple[DecodeState, DecodeStats, Any]) -> tuple[DecodeState, DecodeStats, Any]:
            state, stats, left = carry
            state, info = decoder.step(params, state)
            with jax.named_scope("emit"):
                return state, accumulate(stats, info, state.length), None if left is None else left - 1

        def going(carry: tuple[DecodeState, DecodeStats, Any]) -> Array:
            live = ~jnp.all(carry[0].done)
            return live if carry[2] is None else live & (carry[2] > 0)

        batch, buffer = rows_of(state), state.tokens.shape[1]
        stats = zero_stats(batch, decoder.max_depth, record=buffer if record else None)
        return lax.while_loop(going, body, (state, stats, most))[:2]

    return by_rows(loop)((params, None if max_steps is None else jnp.asarray(max_steps, jnp.int32)), state)


@donating(2, check=check_given)
def jitted_step(decoder: Decoder, params: Params, state: DecodeState) -> tuple[DecodeState, StepInfo]:
    """`decoder.step`, compiled, with `state` donated."""
    return decoder.step(params, state)


AHEAD = 2
"""Steps that `stream` lets an accelerator be ahead of the flags that the host has read: one to compute while the host
is busy with an earlier one, and one more for when the host is late."""


def look_ahead(state: DecodeState) -> int:
    """The default of `ahead`: 0 for a state on a CPU, else `AHEAD`.

    There a step is computed before the call returns, as measured with jax 0.10, so steps past the end would cost time
    and win none.
    """
    return 0 if next(iter(state.done.devices())).platform == "cpu" else AHEAD


def stream(
    decoder: Decoder, params: Params, state: DecodeState, *, ahead: int | None = None
) -> Iterator[tuple[DecodeState, StepInfo]]:
    """Step in a Python loop, yielding `(state, info)` after each step. `state` is donated: use the one that is yielded.

    The host checks whether all rows are done `ahead` steps late, so that the device need not wait for it. Therefore
    `ahead` more steps are yielded after the last row has ended; they emit nothing, and change no token, length, flag
    or rule. The number of steps depends on the tokens alone and not on time: processes that decode as one
    take the same.

    Args:
      decoder, params, state: as for `run`.
      ahead: 0 waits for each step before the next one, and yields none past the end; default `look_ahead(state)`.

    Returns:
      (the state after a step, what the step did), step after step.

    Raises:
      MarsError: `ahead` is below 0, or the state was given away before.
    """
    check_given(decoder, params, state)
    if ahead is None:
        ahead = look_ahead(state)
    check_count("ahead", ahead, 0)
    flags = collections.deque([_all_done(state)])
    while len(flags) <= ahead or not bool(flags.popleft()):
        state, info = jitted_step(decoder, params, state)
        flags.append(_all_done(state))
        yield state, info


def _all_done(state: DecodeState) -> Array:
    """bool[], on its way to the host; an array of its own, since the next step takes the state's."""
    flag = jnp.all(state.done)
    flag.copy_to_host_async()
    return flag
