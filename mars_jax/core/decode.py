"""The step: draft, one target forward, verify, commit, emit. And the two loops over it.

B batch, N nodes, D depth, T token buffer, S slots, V vocabulary. Oracle: greedy autoregression of the same model,
token for token (tests/core/test_decode.py).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import Tracer

from mars_jax.core import rules
from mars_jax.core.emit import emit
from mars_jax.core.errors import MarsError
from mars_jax.core.evidence import Evidence
from mars_jax.core.mesh import by_rows
from mars_jax.core.metrics import DecodeStats, accumulate, zero_stats
from mars_jax.core.prefill import CHUNK, observed_prefill
from mars_jax.core.tree import visible
from mars_jax.core.types import (
    KEY_IMPL,
    Controls,
    Decoder,
    DecodeState,
    Drafter,
    DraftInput,
    LanguageModel,
    Params,
    PyTree,
    StepInfo,
    Verifier,
)


def speculative_decoder(
    target: LanguageModel, drafter: Drafter, verify: Verifier, *, prefill_chunk: int = CHUNK
) -> Decoder:
    """Speculative decoding (Leviathan et al. 2211.17192) with any drafter and any verifier, as two pure functions.

    Equal arguments give the same `Decoder`, so whatever was compiled for it is found again. Of `verify` only the
    structure counts: rules that differ in numbers are one decoder, and `init` puts the numbers into the state.

    Args:
      target: the model whose text this is.
      drafter: proposes the trees; `drafters.none()` for plain autoregression.
      verify: decides how far to walk; see `mars_jax.verify`.
      prefill_chunk: prompt tokens per prefill forward; some hundreds where prompts are long and an accelerator
        is to be filled.

    Returns:
      `Decoder(init, step, max_depth)`:
      `init(params, prompts i32[B, T], lengths i32[B], controls, rule, keys key[B]) -> DecodeState` takes the prompts
      left-aligned in the token buffer, whose width T bounds prompt and continuation together, and a rule of the
      structure of `verify`, whose numbers are one value or one per row;
      `step(params, state) -> (state, StepInfo)` advances every live row by 1 to D + 1 tokens. Both are
      transformable; jit and donate at the outermost edge, or use `run` and `stream`.

    Raises:
      MarsError: the drafter speaks another vocabulary than the target, or needs features that it does not give; the
        rule is none. `init`: a rule of another structure, keys of another generator than `keys_from_seeds` gives, or,
        where they can be seen, lengths outside of 1 .. T.

    Example:
      >>> from mars_jax import drafters, fake, verify
      >>> from mars_jax.core.controls import make_controls
      >>> model = fake.hash_model(vocab_size=11)
      >>> from mars_jax.core.types import keys_from_seeds
      >>> rule = verify.mars(theta=0.9)
      >>> decoder = speculative_decoder(model, drafters.ngram(4), rule)
      >>> state = decoder.init(Params(target=()), jnp.ones((1, 32), jnp.int32), jnp.array([3], jnp.int32),
      ...                      make_controls(1, limit=32), rule, keys_from_seeds(jnp.arange(1)))
      >>> state = jax.lax.while_loop(lambda s: ~jnp.all(s.done), lambda s: decoder.step(Params(()), s)[0], state)
      >>> int(state.length[0])
      32
    """
    return _decoder(target, drafter, rules.structure(verify), prefill_chunk)


@functools.lru_cache(maxsize=64)
def _decoder(target: LanguageModel, drafter: Drafter, structure: Any, prefill_chunk: int) -> Decoder:
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

    def init(
        params: Params, prompts: Array, lengths: Array, controls: Controls, rule: PyTree, keys: Array
    ) -> DecodeState:
        batch, buffer = prompts.shape
        # Copies: `run` and `stream` take the state's buffers, and the caller keeps what it gave.
        prompts, lengths = jnp.array(prompts, jnp.int32), jnp.array(lengths, jnp.int32)
        controls, rule, keys = jax.tree.map(jnp.copy, (controls, rule, keys))
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
            # An array of its own: a loop that is given the state may not be given one buffer twice.
            prompt_length=jnp.copy(lengths),
            done=lengths >= jnp.minimum(controls.limit, buffer),
            failed=jnp.zeros((batch,), bool),
            cache=cache,
            draft=draft,
            controls=controls,
            rule=rule,
            keys=keys,
        )

    def checked_init(
        params: Params, prompts: Array, lengths: Array, controls: Controls, rule: PyTree, keys: Array
    ) -> DecodeState:
        if rules.structure(rule) != structure:
            raise MarsError(
                f"the rule {rules.name_of(rule)} is not of the structure that this decoder was made for: give "
                "speculative_decoder the same rule; only its numbers may differ."
            )
        _check_rows(prompts, lengths, keys)
        rule = rules.for_rows(rule, prompts.shape[0])
        return by_rows(init)(params, prompts, lengths, controls, rule, keys)

    def step(params: Params, state: DecodeState) -> tuple[DecodeState, StepInfo]:
        start = state.length - 1
        # Draws of the target depend on the position alone, so that a row gives the same text alone, in any batch, and
        # after any deterministic draft. A draft's own draws are fresh in every step.
        draft_keys, verify_keys = jnp.unstack(jax.vmap(jax.random.split)(state.keys), axis=1)
        draft_keys = jax.vmap(jax.random.fold_in)(draft_keys, state.length)
        given = DraftInput(keys=draft_keys, tokens=state.tokens, length=state.length, controls=state.controls)
        # The names are what a profiler and `planning.cost` see of the step; they change nothing in the program.
        with jax.named_scope("draft"):
            tree, draft = drafter.propose(params, state.draft, given)
        with jax.named_scope("target"):
            output = target.forward(params.target, tree.tokens, visible(tree, start), state.cache)
            logits = target.unembed(params.target, output.hidden)
        evidence = Evidence(
            keys=verify_keys,
            start=start,
            prompt_length=state.prompt_length,
            tree=tree,
            logits=logits,
            hidden=output.hidden,
            controls=state.controls,
            params=params.verify,
        )
        with jax.named_scope("verify"):
            verdict, rule = state.rule(evidence)
        with jax.named_scope("update"):
            draft = drafter.update(params, draft, tree, verdict, output, state.length)
        with jax.named_scope("emit"):
            next_state, info = emit(state, tree, verdict, logits)
        with jax.named_scope("commit"):
            cache = output.cache if tree.is_chain else target.commit(output.cache, start, verdict.path)
        rule = jax.tree.map(functools.partial(_unless_done, state.done), rule, state.rule)
        return dataclasses.replace(next_state, cache=cache, draft=draft, rule=rule), info

    return Decoder(init=checked_init, step=by_rows(step), max_depth=drafter.max_depth)


def _check_rows(prompts: Array, lengths: Array, keys: Array) -> None:
    """Raise MarsError for keys that would tie a row to its batch, and for lengths that are no lengths."""
    if not jnp.issubdtype(keys.dtype, jax.dtypes.prng_key) or str(jax.random.key_impl(keys)) != KEY_IMPL:
        raise MarsError(
            f"keys are of dtype {keys.dtype}: expected typed keys of {KEY_IMPL}, as keys_from_seeds makes them; with "
            "other generators a row would draw other numbers in a batch than alone."
        )
    buffer = prompts.shape[1]
    if isinstance(lengths, Tracer) or (isinstance(lengths, Array) and not lengths.is_fully_addressable):
        return
    given = np.asarray(lengths)
    if np.any(wrong := (given < 1) | (given > buffer)):
        raise MarsError(
            f"a prompt has the length {given[wrong][0]}: expected 1 to {buffer}, the width of the token buffer."
        )


def _unless_done(done: Array, new: Array, old: Array) -> Array:
    """A rule's state moves on in live rows only."""
    if new is old:
        return old
    return jnp.where(done.reshape((-1,) + (1,) * (new.ndim - 1)), old, new)


def start(
    decoder: Decoder,
    params: Params,
    prompts: Array,
    lengths: Array,
    controls: Controls,
    rule: PyTree,
    keys: Array,
) -> DecodeState:
    """`decoder.init`, checked and compiled. A number of the rule may be one value or one per row."""
    _check_rows(prompts, lengths, keys)
    rule = rules.for_rows(rule, prompts.shape[0])
    return _start(decoder, params, prompts, lengths, controls, rule, keys)


@functools.partial(jax.jit, static_argnums=0)
def _start(decoder: Decoder, *arguments: Any) -> DecodeState:
    return decoder.init(*arguments)


@functools.partial(jax.jit, static_argnums=0, static_argnames="record", donate_argnums=2)
def run(
    decoder: Decoder, params: Params, state: DecodeState, *, record: bool = False
) -> tuple[DecodeState, DecodeStats]:
    """Step until every row is done, in one `lax.while_loop` on the device. `state` is donated.

    Each step adds a token to every live row or ends it, so the loop ends.

    Args:
      decoder, params: from `speculative_decoder`, and the weights.
      state: from `start`.
      record: also keep what each new token was: `DecodeStats.tokens`.

    Returns:
      The final state and the per-row counters.
    """

    def loop(params: Params, state: DecodeState) -> tuple[DecodeState, DecodeStats]:
        def body(carry: tuple[DecodeState, DecodeStats]) -> tuple[DecodeState, DecodeStats]:
            state, info = decoder.step(params, carry[0])
            with jax.named_scope("emit"):
                return state, accumulate(carry[1], info)

        batch, buffer = state.tokens.shape
        stats = zero_stats(batch, decoder.max_depth, record=buffer if record else None)
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
