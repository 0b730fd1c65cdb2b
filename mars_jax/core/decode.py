"""Decoding loops (`run` on the device, `stream` on the host), and compiled versions of `Decoder.init` and `extend`.

Dimensions: B batch, D draft depth, T token buffer. Tested token by token against greedy autoregression of the same
model (tests/core/test_decode.py).
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from mars_jax.core.axes import by_rows
from mars_jax.core.decoder import Decoder as Decoder
from mars_jax.core.decoder import speculative_decoder as speculative_decoder
from mars_jax.core.donating import donating
from mars_jax.core.given import check_params, check_prompts, rows_of
from mars_jax.core.metrics import DecodeStats, accumulate, zero_stats
from mars_jax.core.rule import for_rows
from mars_jax.core.types import DecodeState, Params, Prompts, StepInfo
from mars_jax.utils.errors import check_count, check_type
from mars_jax.utils.settings import LARGEST_INT

_ABSENT = object()


def check_given(
    decoder: object, params: object, state: object = _ABSENT, *, max_steps: object = None, **_: object
) -> None:
    """Raise MarsError unless the arguments are a decoder, its weights, a decoding state, and a number of steps."""
    check_type("the decoder", decoder, Decoder, "the result of speculative_decoder")
    check_params(params)
    if state is not _ABSENT:
        rows_of(state)
    if max_steps is not None:
        check_number("max_steps", max_steps, 0)


def check_number(name: str, value: object, least: int = 1) -> None:
    """Raise MarsError unless `value` is a scalar integer array, or an int from `least` to the largest int32."""
    is_array = isinstance(value, Array | np.ndarray)
    if not (is_array and value.shape == () and jnp.issubdtype(value.dtype, jnp.integer)):
        check_count(name, value, least, LARGEST_INT)


@functools.partial(jax.jit, static_argnums=0)
def start_ready(decoder: Decoder, params: Params, prompts: Prompts) -> DecodeState:
    """Call the compiled `decoder.init` on prompts that `ready` has returned."""
    return decoder.init(params, prompts)


def start(decoder: Decoder, params: Params, prompts: Prompts) -> DecodeState:
    """Check the arguments and create a decoding state with the compiled `decoder.init`.

    Raises:
      MarsError: the prompts are invalid; see `Decoder.checked`.
    """
    check_given(decoder, params)
    return start_ready(decoder, params, ready(decoder, prompts))


def shapes(decoder: Decoder, params: Params, prompts: Prompts) -> DecodeState:
    """Return the shapes and dtypes of the state that `start` would return, as a tree of `jax.ShapeDtypeStruct`."""
    return start_ready.eval_shape(decoder, params, ready(decoder, prompts))


def ready(decoder: Decoder, prompts: Prompts) -> Prompts:
    """Check prompts on the host, where their values are concrete, and broadcast the rule's parameters to all rows.

    Scalar and array parameters then use the same compiled program.
    """
    check_prompts(prompts, decoder.vocab_size)
    return dataclasses.replace(prompts, rule=for_rows(prompts.rule, prompts.tokens.shape[0]))


def extend(
    decoder: Decoder, params: Params, state: DecodeState, prompts: Prompts
) -> tuple[DecodeState, Array]:
    """Check the arguments and continue every row with a new prompt, using the compiled `decoder.extend`.

    `state` is donated. Use `refill` instead in two cases: for a failed row, whose cache may contain non-finite values;
    and for a prompt of one token, for which a draft head would start from the features of the row's earlier tokens.

    Args:
      decoder, params: the result of `speculative_decoder`, and the weights.
      state: a state from `start`, `run`, `stream` or this function; its rows may be finished or unfinished.
      prompts: the full token sequence of every row, including the tokens that the state has already read.

    Returns:
      The state, which decodes to the same tokens as a state that `start` creates from these prompts, and the number of
      tokens read in each row, i32[B].

    >>> from mars_jax import drafters, fake, make_controls, verify
    >>> from mars_jax.core.types import keys_from_seeds
    >>> model, rule, keys = fake.hash_model(vocab_size=11), verify.exact(), keys_from_seeds(jnp.arange(1))
    >>> decoder = speculative_decoder(model, drafters.ngram(4), rule)
    >>> text = jnp.asarray([[3, 1, 4] + [0] * 29], jnp.int32)
    >>> prompts = lambda text, n, limit: Prompts(text, jnp.asarray([n]), make_controls(1, limit=limit), rule, keys)
    >>> state, _ = run(decoder, Params(()), start(decoder, Params(()), prompts(text, 3, 8)))
    >>> text = state.tokens.at[:, 8:10].set(5)  # the conversation so far, and a new turn of two tokens
    >>> state, num_read = extend(decoder, Params(()), state, prompts(text, 10, 16))
    >>> num_read.tolist()
    [2]
    """
    check_given(decoder, params, state)
    return _extend(decoder, params, state, ready(decoder, prompts))


@donating(2)
def _extend(
    decoder: Decoder, params: Params, state: DecodeState, prompts: Prompts
) -> tuple[DecodeState, Array]:
    return decoder.extend(params, state, prompts)


class _Decoding(NamedTuple):
    """Loop carry of `run`."""

    state: DecodeState
    stats: DecodeStats
    steps_left: Array | None  # i32[]; None if the number of steps is not limited


@donating(2, check=check_given, static_argnames="record")
def run(
    decoder: Decoder,
    params: Params,
    state: DecodeState,
    *,
    record: bool = False,
    max_steps: int | Array | None = None,
) -> tuple[DecodeState, DecodeStats]:
    """Run decoding steps until every row is done, in one `lax.while_loop` on the device. `state` is donated.

    Every step either adds at least one token to an unfinished row or ends the row, so the loop terminates.

    Args:
      decoder, params: the result of `speculative_decoder`, and the weights.
      state: a state from `start`.
      record: for every new token, also record its kind (how it was accepted) and its log-probabilities, in
        `DecodeStats.tokens`.
      max_steps: stop after at most this many steps, so that the caller can inspect the state and resume. The number is
        traced, so changing it does not trigger recompilation. None means no limit.

    Returns:
      The final state, and the counters of each row over these steps.
    """

    def loop(inputs: tuple[Params, Array | None], state: DecodeState) -> tuple[DecodeState, DecodeStats]:
        params, max_steps = inputs

        def body(carry: _Decoding) -> _Decoding:
            state, info = decoder.step(params, carry.state)
            with jax.named_scope("emit"):
                stats = accumulate(carry.stats, info, state.length)
                steps_left = None if carry.steps_left is None else carry.steps_left - 1
                return _Decoding(state, stats, steps_left)

        def keep_going(carry: _Decoding) -> Array:
            # Finished rows still take part in every step, but their tokens do not change.
            any_live = ~jnp.all(carry.state.done)
            return any_live if carry.steps_left is None else any_live & (carry.steps_left > 0)

        batch, buffer = rows_of(state), state.tokens.shape[1]
        record_width = buffer if record else None
        stats = zero_stats(batch, decoder.max_depth, record=record_width, num_top=decoder.top_log_probs)
        # The whole state is the loop carry, so XLA updates the caches in place.
        final_carry = lax.while_loop(keep_going, body, _Decoding(state, stats, max_steps))
        return final_carry.state, final_carry.stats

    if max_steps is not None:
        max_steps = jnp.asarray(max_steps, jnp.int32)
    # On a mesh, each device runs the loop for its own rows and stops when these rows are done.
    return by_rows(loop)((params, max_steps), state)


@donating(2, check=check_given)
def jitted_step(decoder: Decoder, params: Params, state: DecodeState) -> tuple[DecodeState, StepInfo]:
    """Run one step with the compiled `decoder.step`. `state` is donated."""
    return decoder.step(params, state)


AHEAD = 2
"""Number of steps that `stream` dispatches before the host reads the done flags: one to keep the accelerator busy while
the host processes an earlier step, and one more to absorb delays on the host."""


def look_ahead(state: DecodeState) -> int:
    """Return the default of `stream`'s argument `ahead`: 0 if the state is on a CPU, otherwise `AHEAD`.

    On a CPU, dispatching a step blocks until the step is computed (measured with jax 0.10), so dispatching ahead only
    costs time.
    """
    return 0 if next(iter(state.done.devices())).platform == "cpu" else AHEAD


def stream(
    decoder: Decoder, params: Params, state: DecodeState, *, ahead: int | None = None
) -> Iterator[tuple[DecodeState, StepInfo]]:
    """Run decoding steps in a Python loop and yield `(state, info)` after each step.

    `state` is donated, so use the yielded state afterwards. The host reads the done flags `ahead` steps late, so that
    the device need not wait for the host. The loop therefore yields `ahead` more steps after the last row has ended.
    These extra steps emit no tokens and leave the lengths, flags and rules unchanged. The number of steps depends only
    on the tokens and not on timing, so all processes of a multi-host run take the same number of steps.

    Args:
      decoder, params, state: as for `run`.
      ahead: number of steps by which the host lags behind the device. With 0, the host waits for each step before it
        starts the next one, and no steps past the end are yielded. Default: `look_ahead(state)`.

    Returns:
      An iterator over pairs `(state, info)`: the state after each step, and the `StepInfo` of the step.

    Raises:
      MarsError: `ahead` is below 0, or the state was already donated.
    """
    check_given(decoder, params, state)
    if ahead is None:
        ahead = look_ahead(state)
    check_count("ahead", ahead, 0)
    # `done_flags[0]` is the flag from `ahead` steps ago, so its copy has usually reached the host already.
    done_flags = collections.deque([_all_done(state)])
    # No flag is read during the first `ahead` steps, so that the queue of dispatched steps fills up.
    while len(done_flags) <= ahead or not bool(done_flags.popleft()):
        state, info = jitted_step(decoder, params, state)
        done_flags.append(_all_done(state))
        yield state, info


def _all_done(state: DecodeState) -> Array:
    """Compute whether all rows are done, as bool[], and start copying this flag to the host.

    The flag is a separate array, because the next step donates the arrays of the state.
    """
    all_done = jnp.all(state.done)
    all_done.copy_to_host_async()
    return all_done
