"""Emission of the accepted path: append its tokens, stop at a stop token or limit, and classify each token.

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
      tree: the draft.
      verdict: of the rule.
      logits: f32[B, N, V]; raw target logits.
      decided: f32[B, N, V]; target logits with edits and constraints, which the rule has judged.
      trusted: i32[B]; number of tokens accepted without a test, or None if the drafter has no trusted nodes.
      ended: bool[B]; the row's constraint allows no token after the path. None without a constraint.

    Returns:
      The state with the new tokens (its cache, draft and rule unchanged), and the `StepInfo`.
    """
    buffer = state.tokens.shape[1]
    # Entry d of `emitted` is the token after d accepted ones: D drafted tokens and `next_token` make D + 1.
    place = jnp.arange(tree.max_depth + 1, dtype=jnp.int32)[None]  # i32[1, D + 1]
    emitted = said(tree, verdict)

    # Broken weights give a non-finite top logit. Stop the row instead of emitting token 0. Non-finite logits off the
    # accepted path are harmless: no decision depends on them.
    top = gather_path(jnp.max(logits, axis=-1), verdict.path)  # f32[B, D + 1]
    broken = jnp.any(~jnp.isfinite(top), axis=1) & ~state.done
    if state.controls.edits is not None:  # edits may ban every token
        top_decided = gather_path(jnp.max(decided, axis=-1), verdict.path)
        all_banned = jnp.any(~jnp.isfinite(top_decided), axis=1)
        broken |= (all_banned if ended is None else all_banned & ~ended) & ~state.done

    # Never write past the end of the buffer, even if the limit is larger.
    room = jnp.minimum(state.controls.limit, buffer) - state.length
    count, stops = _cut(verdict, emitted, state.controls, place, room)
    if ended is not None:  # the constraint allows no `next_token`
        count = jnp.where(ended, jnp.minimum(count, verdict.num_accepted), count)
    count = jnp.where(state.done | broken, 0, count)
    written = place < count[:, None]
    tokens = append(state.tokens, state.length, emitted, count)
    length = state.length + count

    lossless = state.rule.lossless and trusted is None
    # Node d of the path predicts entry d: its row of logits is p(. | the text before that token).
    emitted_logit = at_tokens(logits, verdict.path, jnp.maximum(emitted, 0))
    logprobs = log_probs(gather_path(logits, verdict.path), emitted, state.controls, lossless)
    if decided is not logits:
        # Edits and constraints change the sampling distribution; the other log-probabilities stay those of the model.
        sampled_from = log_probs(gather_path(decided, verdict.path), emitted, state.controls, lossless)
        logprobs = logprobs._replace(processed_log_prob=sampled_from.processed_log_prob)
    info = StepInfo(
        verdict=verdict,
        emitted=jnp.where(written, emitted, NO_TOKEN),
        num_emitted=count,
        num_proposed=jnp.sum(tree.tokens[:, 1:] != NO_TOKEN, axis=1, dtype=jnp.int32),
        kind=jnp.where(written, _kinds(verdict, place, trusted), NO_KIND),
        regret=jnp.where(written, top - emitted_logit, 0.0),
        **{name: jnp.where(written, value, 0.0) for name, value in logprobs._asdict().items()},
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
    """Return the number of tokens to emit, i32[B], and which of them are stop tokens, bool[B, D + 1]."""
    # `next_token` is entry `num_accepted`; later entries are padding.
    stops = is_stop(emitted, controls.stop_tokens) & (place <= verdict.num_accepted[:, None])
    # Emit the stop token too (`place + 1`); D + 1 without a stop token.
    until_stop = jnp.min(jnp.where(stops, place + 1, place.shape[1]), axis=1)
    return jnp.minimum(jnp.minimum(verdict.num_accepted + 1, until_stop), room), stops


def _kinds(verdict: Verdict, place: Array, trusted: Array | None) -> Array:
    """Return i32[B, D + 1]: TRUSTED, then EXACT or RELAXED on the path, CORRECTED after it."""
    # Edge d of the D edges leads to entry d; the last entry has no edge, so it can only be CORRECTED.
    relaxed = jnp.pad(verdict.relaxed, ((0, 0), (0, 1)))
    drafted = jnp.where(relaxed, RELAXED, EXACT).astype(jnp.int32)
    if trusted is not None:
        drafted = jnp.where(place < trusted[:, None], TRUSTED, drafted)
    return jnp.where(place < verdict.num_accepted[:, None], drafted, CORRECTED)
