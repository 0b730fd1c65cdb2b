"""Emit the tokens of the accepted path, find where they end, and say what each of them is.

B batch, N nodes, D depth, T token buffer, V vocabulary. Oracle: greedy autoregression of the same model, token for
token (tests/core/test_decode.py).
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import Array

from mars_jax.core.controls import is_stop
from mars_jax.core.logprobs import log_probs
from mars_jax.core.pick import append
from mars_jax.core.rule import facts
from mars_jax.core.sampling import at_tokens
from mars_jax.core.tree import gather_path, said
from mars_jax.core.types import (
    CORRECTED,
    EXACT,
    NO_KIND,
    NO_TOKEN,
    RELAXED,
    TRUSTED,
    Controls,
    DecodeState,
    DraftTree,
    StepInfo,
    Verdict,
)


def emit(
    state: DecodeState,
    tree: DraftTree,
    verdict: Verdict,
    logits: Array,
    decided: Array,
    trusted: Array | None = None,
    ended: Array | None = None,
) -> tuple[DecodeState, StepInfo]:
    """Append the accepted path and `next_token`, cut at the first stop token and at the limit.

    Args:
      state: before the step.
      tree: what was drafted.
      verdict: of the rule.
      logits: f32[B, N, V]; the target's.
      decided: f32[B, N, V]; those with the edits of the request, by which the rule has decided.
      trusted: i32[B]; the tokens that were taken without a test, or None where the drafter asks for no trust.
      ended: bool[B]; the row's constraint lets nothing follow the path; or None where there is no constraint.

    Returns:
      The state with the new tokens, its cache, draft and rule as they were, and what the step did.
    """
    buffer = state.tokens.shape[1]
    # Entry d of what is emitted is the token after d accepted ones, so D drafted tokens and `next_token` make D + 1.
    place = jnp.arange(tree.max_depth + 1, dtype=jnp.int32)[None]  # i32[1, D + 1]
    emitted = said(tree, verdict)

    # Broken weights show as a top logit that is no number. The row stops there instead of emitting token 0; what is not
    # on the path decided nothing, and so breaks nothing.
    top = gather_path(jnp.max(logits, axis=-1), verdict.path)  # f32[B, D + 1]
    broken = jnp.any(~jnp.isfinite(top), axis=1) & ~state.done
    if state.controls.edits is not None:  # edits may leave no token to choose
        left = gather_path(jnp.max(decided, axis=-1), verdict.path)
        none = jnp.any(~jnp.isfinite(left), axis=1)
        broken |= (none if ended is None else none & ~ended) & ~state.done

    # A limit above the buffer cannot be reached, and nothing may be written past the buffer's end.
    room = jnp.minimum(state.controls.limit, buffer) - state.length
    count, stops = _cut(verdict, emitted, state.controls, place, room)
    if ended is not None:  # nothing follows the path, so there is no token after it
        count = jnp.where(ended, jnp.minimum(count, verdict.num_accepted), count)
    count = jnp.where(state.done | broken, 0, count)
    written = place < count[:, None]
    tokens = append(state.tokens, state.length, emitted, count)
    length = state.length + count

    lossless = facts(state.rule).lossless and trusted is None
    # Entry d is predicted by the d-th node of the path: its row of logits is p(. | the text before that token).
    at_node = at_tokens(logits, verdict.path, jnp.maximum(emitted, 0))
    along = log_probs(gather_path(logits, verdict.path), emitted, state.controls, lossless)
    if decided is not logits:
        # Edits and constraints change what is drawn from; the log-probabilities of the model itself stay raw.
        of_law = log_probs(gather_path(decided, verdict.path), emitted, state.controls, lossless)
        along = along._replace(processed_log_prob=of_law.processed_log_prob)
    info = StepInfo(
        verdict=verdict,
        emitted=jnp.where(written, emitted, NO_TOKEN),
        num_emitted=count,
        num_proposed=jnp.sum(tree.tokens[:, 1:] != NO_TOKEN, axis=1, dtype=jnp.int32),
        kind=jnp.where(written, _kinds(verdict, place, trusted), NO_KIND),
        regret=jnp.where(written, top - at_node, 0.0),
        **{name: jnp.where(written, value, 0.0) for name, value in along._asdict().items()},
    )
    done = state.done | broken | jnp.any(stops & written, axis=1)
    done |= length >= jnp.minimum(state.controls.limit, buffer)
    if ended is not None:
        done |= ended
    next_state = dataclasses.replace(
        state, tokens=tokens, length=length, done=done, failed=state.failed | broken
    )
    return next_state, info


def _cut(
    verdict: Verdict, emitted: Array, controls: Controls, place: Array, room: Array
) -> tuple[Array, Array]:
    """The number of emitted tokens, i32[B], and which of them are stop tokens, bool[B, D + 1]."""
    # Entries after `next_token`, number `num_accepted`, are repetitions and no text.
    stops = is_stop(emitted, controls.stop_tokens) & (place <= verdict.num_accepted[:, None])
    # The stop token is emitted too, hence `place + 1`; D + 1 where there is none.
    until_stop = jnp.min(jnp.where(stops, place + 1, place.shape[1]), axis=1)
    return jnp.minimum(jnp.minimum(verdict.num_accepted + 1, until_stop), room), stops


def _kinds(verdict: Verdict, place: Array, trusted: Array | None) -> Array:
    """i32[B, D + 1]: TRUSTED, then EXACT or RELAXED on the path, CORRECTED after it."""
    # Edge d of the D edges leads to entry d; the last entry has no edge, and is CORRECTED at best.
    relaxed = jnp.pad(verdict.relaxed, ((0, 0), (0, 1)))
    drafted = jnp.where(relaxed, RELAXED, EXACT).astype(jnp.int32)
    if trusted is not None:
        drafted = jnp.where(place < trusted[:, None], TRUSTED, drafted)
    return jnp.where(place < verdict.num_accepted[:, None], drafted, CORRECTED)
