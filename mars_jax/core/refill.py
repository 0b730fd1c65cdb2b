"""Continuous batching: decode until some rows are done, replace them with new prompts, and continue.

Dimensions: B rows of the state, b new rows, T token buffer. Tested against decoding each row in a batch of one
(tests/core/test_insert.py).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from mars_jax.core.axes import by_rows, over_rows
from mars_jax.core.decode import check_given, check_number, ready
from mars_jax.core.decoder import Decoder
from mars_jax.core.donating import donating
from mars_jax.core.given import check_places, rows_of
from mars_jax.core.metrics import DecodeStats, accumulate
from mars_jax.core.metrics import zero_stats as zero_stats
from mars_jax.core.pick import in_rows
from mars_jax.core.types import DecodeState, Params, Prompts
from mars_jax.utils.errors import MarsError, check_type


class _Advancing(NamedTuple):
    """Loop carry of `advance`."""

    state: DecodeState
    stats: DecodeStats
    steps: Array  # i32[]; number of steps so far
    num_done: Array  # i32[]; number of finished rows on all devices


def _check(
    decoder: object, params: object, state: object, stats: object, ended: object = 1, most: object = 1
) -> None:
    check_given(decoder, params, state)
    check_type("stats", stats, DecodeStats, "the result of zero_stats or of an earlier call")
    check_number("ended", ended)
    check_number("most", most)


@donating(2, 3, check=_check)
def advance(
    decoder: Decoder,
    params: Params,
    state: DecodeState,
    stats: DecodeStats,
    ended: int | Array = 1,
    most: int | Array = 2**30,
) -> tuple[DecodeState, DecodeStats, Array]:
    """Run decoding steps until `ended` more rows are done. `state` and `stats` are donated.

    The loop also ends when all rows are done, or after `most` steps. On a mesh, the devices add up their counts of
    finished rows after every step, with a psum of one number.

    Args:
      decoder, params, state: as for `decode.run`.
      stats: counters to update, from `metrics.zero_stats` or an earlier call.
      ended: i32[]; number of additional rows that must finish before the loop ends, at least 1.
      most: i32[]; maximum number of steps, at least 1.

    Returns:
      The state, the counters, and the number of steps as i32[B], which is the same for every row.
    """

    def loop(
        inputs: tuple[Params, Array, Array], state: DecodeState, stats: DecodeStats
    ) -> tuple[DecodeState, DecodeStats, Array]:
        params, ended, max_steps = inputs
        batch = state.done.shape[0]
        total_rows = over_rows(jnp.int32(batch))

        def count_done(state: DecodeState) -> Array:
            return over_rows(jnp.sum(state.done, dtype=jnp.int32))

        # All devices must leave the loop after the same step, because each psum in the loop body waits for all of them.
        # The counts therefore include the rows of all devices. Rows that are already done, such as padding rows, do not
        # count towards `ended`.
        num_done_goal = jnp.minimum(count_done(state) + ended, total_rows)

        def keep_going(carry: _Advancing) -> Array:
            # If every row is done at the start, the loop ends immediately.
            return (carry.num_done < num_done_goal) & (carry.steps < max_steps)

        def body(carry: _Advancing) -> _Advancing:
            state, info = decoder.step(params, carry.state)
            with jax.named_scope("emit"):
                stats = accumulate(carry.stats, info, state.length)
                return _Advancing(state, stats, carry.steps + 1, count_done(state))

        initial_carry = _Advancing(state, stats, jnp.int32(0), count_done(state))
        final_carry = lax.while_loop(keep_going, body, initial_carry)
        return final_carry.state, final_carry.stats, jnp.broadcast_to(final_carry.steps, (batch,))

    inputs = (params, jnp.asarray(ended, jnp.int32), jnp.asarray(most, jnp.int32))
    return by_rows(loop)(inputs, state, stats)


def refill(
    decoder: Decoder,
    params: Params,
    state: DecodeState,
    stats: DecodeStats,
    rows: Array,
    prompts: Prompts,
    read: DecodeState | None = None,
) -> tuple[DecodeState, DecodeStats]:
    """Restart some rows with new prompts, using the compiled `decoder.insert`, and reset their counters.

    The arguments are checked first. `state` and `stats` are donated.

    Args:
      decoder, params, state, stats: as for `advance`.
      rows, prompts, read: as for `Decoder.insert`.
    """
    _check(decoder, params, state, stats)
    prompts = ready(decoder, prompts)
    check_places(rows, prompts.tokens.shape[0], rows_of(state))
    if read is not None:
        rows_of(read)
    return _refill(decoder, params, state, stats, rows, prompts, read)


@donating(2, 3)
def _refill(
    decoder: Decoder,
    params: Params,
    state: DecodeState,
    stats: DecodeStats,
    rows: Array,
    prompts: Prompts,
    read: DecodeState | None,
) -> tuple[DecodeState, DecodeStats]:
    state = decoder.insert(params, state, rows, prompts, read)
    batch, buffer = state.tokens.shape
    width = None if stats.tokens is None else buffer
    empty = zero_stats(batch, decoder.max_depth, record=width, num_top=decoder.top_log_probs)
    if jax.tree.map(jnp.shape, empty) != jax.tree.map(jnp.shape, stats):
        raise MarsError(
            f"stats are counters of other rows or of another drafter: begin with zero_stats({batch}, "
            f"{decoder.max_depth}), the rows of the state and the decoder's max_depth."
        )
    # bool[B], True for replaced rows. A row number of -1 matches no row.
    is_new = jnp.any(jnp.arange(batch, dtype=jnp.int32)[:, None] == rows[None], axis=1)
    return state, in_rows(is_new, empty, stats)


@functools.partial(jax.jit, donate_argnums=0)
def end(state: DecodeState, rows: Array) -> DecodeState:
    """Mark as done the rows for which `rows` bool[B] is True. `state` is donated."""
    return dataclasses.replace(state, done=state.done | rows)
