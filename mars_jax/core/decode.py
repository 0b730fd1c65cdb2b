"""The step: draft, one target forward, verify, commit, emit. And the two loops over it.

B batch, N nodes, D depth, T token buffer, S slots, V vocabulary. Oracle: greedy autoregression of the same model,
token for token (tests/core/test_decode.py).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax import Array, lax

from mars_jax.core.cache import commit
from mars_jax.core.errors import MarsError
from mars_jax.core.mesh import by_rows
from mars_jax.core.metrics import DecodeStats, accumulate, zero_stats
from mars_jax.core.prefill import CHUNK, observed_prefill
from mars_jax.core.sampling import at_tokens
from mars_jax.core.tree import attention_mask, gather_path
from mars_jax.core.types import (
    NO_TOKEN,
    Controls,
    Decoder,
    DecodeState,
    Drafter,
    DraftTree,
    LanguageModel,
    Params,
    StepInfo,
    Verdict,
    Verifier,
)


@functools.lru_cache(maxsize=64)
def speculative_decoder(
    target: LanguageModel, drafter: Drafter, verify: Verifier, *, prefill_chunk: int = CHUNK
) -> Decoder:
    """Speculative decoding (Leviathan et al. 2211.17192) with any drafter and any verifier, as two pure functions.

    Equal arguments give the same `Decoder`, so whatever was compiled for it is found again.

    Args:
      target: the model whose text this is.
      drafter: proposes the trees; `drafters.none()` for plain autoregression.
      verify: decides how far to walk; see `mars_jax.verify`.
      prefill_chunk: prompt tokens per prefill forward; some hundreds where prompts are long and an accelerator
        is to be filled.

    Returns:
      `Decoder(init, step, max_depth)`:
      `init(params, prompts i32[B, T], lengths i32[B], controls, keys key[B]) -> DecodeState` takes the prompts left-
      aligned in the token buffer, whose width T bounds prompt and continuation together;
      `step(params, state) -> (state, StepInfo)` advances every live row by 1 to D + 1 tokens. Both are
      transformable; jit and donate at the outermost edge, or use `run` and `stream`.

    Raises:
      MarsError: the drafter speaks another vocabulary than the target, or needs features that it does not give.

    Example:
      >>> from mars_jax import drafters, fake, verify
      >>> from mars_jax.core.controls import make_controls
      >>> model = fake.hash_model(vocab_size=11)
      >>> decoder = speculative_decoder(model, drafters.ngram(4), verify.mars())
      >>> state = decoder.init(Params(target=()), jnp.ones((1, 32), jnp.int32), jnp.array([3], jnp.int32),
      ...                      make_controls(1, limit=32), jax.vmap(jax.random.key)(jnp.arange(1)))
      >>> state = jax.lax.while_loop(lambda s: ~jnp.all(s.done), lambda s: decoder.step(Params(()), s)[0], state)
      >>> int(state.length[0])
      32
    """
    if drafter.vocab_size is not None and drafter.vocab_size != target.vocab_size:
        raise MarsError(
            f"the drafter '{drafter.name}' has a vocabulary of {drafter.vocab_size} tokens and the target one of "
            f"{target.vocab_size}: pair models that share a tokenizer."
        )

    if drafter.feature_layers:
        if target.with_features is None:
            raise MarsError(
                f"the drafter '{drafter.name}' reads the outputs of the target's layers {drafter.feature_layers}, and "
                "this target gives none: set LanguageModel.with_features."
            )
        target = target.with_features(drafter.feature_layers)
    observe = drafter.observe or (lambda params, state, *_: state)

    def init(params: Params, prompts: Array, lengths: Array, controls: Controls, keys: Array) -> DecodeState:
        batch, buffer = prompts.shape
        # Copies: `run` and `stream` take the state's buffers, and the caller keeps what it gave.
        prompts, lengths = jnp.array(prompts, jnp.int32), jnp.array(lengths, jnp.int32)
        controls, keys = jax.tree.map(jnp.copy, (controls, keys))
        cache = target.init_cache(batch, buffer + drafter.num_nodes)
        cache, draft = observed_prefill(
            target,
            params.target,
            prompts,
            lengths - 1,
            cache,
            drafter.init(params, prompts, lengths),
            lambda state, first, output: observe(params, state, prompts, first, lengths, output),
            chunk=prefill_chunk,
        )
        return DecodeState(
            tokens=prompts,
            length=lengths,
            done=lengths >= jnp.minimum(controls.limit, buffer),
            failed=jnp.zeros((batch,), bool),
            cache=cache,
            draft=draft,
            controls=controls,
            keys=keys,
        )

    def step(params: Params, state: DecodeState) -> tuple[DecodeState, StepInfo]:
        start = state.length - 1
        # The key depends on the position alone, so a row draws the same numbers alone and in any batch.
        step_keys = jax.vmap(jax.random.fold_in)(state.keys, state.length)
        draft_keys, verify_keys = jnp.unstack(jax.vmap(jax.random.split)(step_keys), axis=1)
        tree, draft = drafter.propose(
            params, draft_keys, state.draft, state.tokens, state.length, state.controls
        )
        mask = attention_mask(tree, start, state.cache.slots)
        output = target.forward(
            params.target, tree.tokens, start[:, None] + tree.depths, mask, state.cache, start
        )
        logits = target.unembed(params.target, output.hidden)
        learned = (output.hidden, params.verify) if getattr(verify, "reads_hidden", False) else ()
        verdict = verify(verify_keys, tree, logits, state.controls, *learned)
        draft = drafter.update(params, draft, tree, verdict, output, state.length)
        next_state, info = _emit(state, tree, verdict, logits)
        cache = output.cache if tree.is_chain else commit(output.cache, start, verdict.path)
        return dataclasses.replace(next_state, cache=cache, draft=draft), info

    return Decoder(init=by_rows(init), step=by_rows(step), max_depth=drafter.max_depth)


def _emit(
    state: DecodeState, tree: DraftTree, verdict: Verdict, logits: Array
) -> tuple[DecodeState, StepInfo]:
    """Append the accepted path and `next_token`, cut at the first stop token and at the limit."""
    buffer = state.tokens.shape[1]
    place = jnp.arange(tree.max_depth + 1, dtype=jnp.int32)[None]  # i32[1, D + 1]
    accepted = verdict.num_accepted[:, None]
    drafted = gather_path(tree.tokens, verdict.path)
    drafted = jnp.concatenate([drafted[:, 1:], drafted[:, -1:]], axis=1)
    emitted = jnp.where(place < accepted, drafted, verdict.next_token[:, None])

    # Broken weights show as a top logit that is no number. The row stops there instead of emitting token 0.
    top = jnp.max(logits, axis=-1)  # f32[B, N]
    broken = jnp.any(~jnp.isfinite(top) & (tree.tokens != NO_TOKEN), axis=1) & ~state.done

    stops = state.controls.stop_tokens
    is_stop = jnp.any((emitted[:, :, None] == stops[:, None, :]) & (stops >= 0)[:, None, :], axis=2)
    is_stop &= place <= accepted
    until_stop = jnp.min(jnp.where(is_stop, place + 1, tree.max_depth + 1), axis=1)
    room = jnp.minimum(state.controls.limit, buffer) - state.length
    count = jnp.minimum(jnp.minimum(verdict.num_accepted + 1, until_stop), room)
    count = jnp.where(state.done | broken, 0, count)

    written = place < count[:, None]
    where = jnp.where(written, state.length[:, None] + place, buffer)
    tokens = jax.vmap(lambda row, at, new: row.at[at].set(new, mode="drop"))(state.tokens, where, emitted)
    stopped = jnp.any(is_stop & written, axis=1)
    length = state.length + count

    at_node = at_tokens(logits, verdict.path, jnp.maximum(emitted, 0))
    regret = jnp.where(written, gather_path(top, verdict.path) - at_node, 0.0)
    info = StepInfo(
        verdict=verdict,
        emitted=jnp.where(written, emitted, NO_TOKEN),
        num_emitted=count,
        num_proposed=jnp.sum(tree.tokens[:, 1:] != NO_TOKEN, axis=1, dtype=jnp.int32),
        regret=regret,
    )
    done = state.done | broken | stopped | (length >= jnp.minimum(state.controls.limit, buffer))
    next_state = dataclasses.replace(
        state, tokens=tokens, length=length, done=done, failed=state.failed | broken
    )
    return next_state, info


@functools.partial(jax.jit, static_argnums=0)
def start(
    decoder: Decoder, params: Params, prompts: Array, lengths: Array, controls: Controls, keys: Array
) -> DecodeState:
    """`decoder.init`, compiled."""
    return decoder.init(params, prompts, lengths, controls, keys)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def run(decoder: Decoder, params: Params, state: DecodeState) -> tuple[DecodeState, DecodeStats]:
    """Step until every row is done, in one `lax.while_loop` on the device. `state` is donated.

    Returns the final state and the per-row counters. Each step adds a token to every live row or ends it, so
    the loop ends.
    """

    def loop(params: Params, state: DecodeState) -> tuple[DecodeState, DecodeStats]:
        def body(carry: tuple[DecodeState, DecodeStats]) -> tuple[DecodeState, DecodeStats]:
            state, info = decoder.step(params, carry[0])
            return state, accumulate(carry[1], info)

        stats = zero_stats(state.tokens.shape[0], decoder.max_depth)
        return lax.while_loop(lambda carry: ~jnp.all(carry[0].done), body, (state, stats))

    return by_rows(loop)(params, state)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def jitted_step(decoder: Decoder, params: Params, state: DecodeState) -> tuple[DecodeState, StepInfo]:
    """`decoder.step`, compiled, with `state` donated."""
    return decoder.step(params, state)


def stream(decoder: Decoder, params: Params, state: DecodeState) -> Iterator[tuple[DecodeState, StepInfo]]:
    """The same step in a Python loop, yielding after each one. `state` is donated: use the one that is yielded."""
    while not bool(jnp.all(state.done)):
        state, info = jitted_step(decoder, params, state)
        yield state, info
