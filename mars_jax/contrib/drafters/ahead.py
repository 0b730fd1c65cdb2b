"""Parallel drafting: while the target verifies a draft, the drafter guesses the verdict and drafts on its own devices.

Source: PEARL 2408.11850 (pre-verify and post-verify). B batch, K tokens per draft, T token buffer. Tested against the
sequential loop, token for token (tests/contrib/test_ahead.py).

The drafter drafts K + 1 tokens and passes the first K to the target. While the target verifies them, the drafter
continues drafting as if the target had accepted all K and then emitted token K + 1. If that guess is right for every
live row, the next draft is ready as soon as the verdict is, and a step takes as long as the slower of drafting and
verification, not as long as both together. Otherwise the drafter drafts again from the committed tokens. This
overwrites the cache entries of the wrong guess, so no rollback is needed. With a lossless rule, the emitted tokens are
the same as in the sequential loop, whether the guesses are right or wrong.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mars_jax.core import decode
from mars_jax.core.decoder import Decoder
from mars_jax.core.drafter import Drafter, DraftInput
from mars_jax.core.metrics import DecodeStats, accumulate, zero_stats
from mars_jax.core.rule import Rule
from mars_jax.core.tree import chain, last_token
from mars_jax.core.types import (
    NO_TOKEN,
    Controls,
    DecodeState,
    DraftTree,
    LanguageModel,
    Params,
    Prompts,
    PyTree,
    StepInfo,
)
from mars_jax.utils.errors import MarsError

DraftDevice = Any
"""A `jax.Device` or a `Mesh`. It is `Any` because pyright does not accept `jax.Device` as a type."""


class Ahead(NamedTuple):
    """A target and a drafter that run in parallel; see `ahead`."""

    decoder: Decoder  # decoder of the target; the caller fills in its K-token drafts
    drafter: Drafter  # drafter that proposes K + 1 tokens


@dataclasses.dataclass
class Guesses:
    """Numbers of decoding steps and of correct guesses."""

    steps: int = 0
    held: int = 0  # steps with a correct guess, after which the next draft was already available


def ahead(target: LanguageModel, drafter: Drafter, verify: Rule) -> Ahead:
    """Pair a target and a drafter to run in parallel.

    Args:
      target: the model that verifies.
      drafter: drafts greedy chains of K + 1 tokens, with K at least 1, without the target's outputs; for example, a
        small model.
      verify: the verification rule.

    Raises:
      MarsError: the drafter uses the target's outputs or does not draft chains of at least 2 tokens; see also
        `speculative_decoder`.

    >>> from mars_jax import drafters, fake, verify
    >>> model = fake.hash_model(vocab_size=11)
    >>> ahead(model, drafters.language_model(model, 4), verify.exact()).decoder.max_depth
    3
    """
    return Ahead(decode.speculative_decoder(target, handed_by(drafter, target), verify), drafter)


def handed_by(drafter: Drafter, target: LanguageModel) -> Drafter:
    """Return a K-token drafter to pair with the target. The caller fills in its drafts from a (K + 1)-token drafter.

    Raises:
      MarsError: see `ahead`.
    """
    check_drafts_alone(drafter, 2)  # the last token is the guess
    return Handed(drafter.max_depth - 1, target.vocab_size, drafter.stops)


def check_drafts_alone(drafter: Drafter, least: int) -> None:
    """Raise MarsError unless a drafter drafts chains of at least `least` tokens without the target's outputs."""
    if drafter.reads is not None or drafter.num_nodes != drafter.max_depth + 1 or drafter.max_depth < least:
        raise MarsError(
            f"the drafter '{drafter.name}' drafts no chain of {least} or more tokens without its target's outputs: "
            f"draft with a small model or n-grams, num_draft_tokens of {least} or more, and no tree."
        )


@dataclasses.dataclass(frozen=True)
class Handed(Drafter):
    """A drafter that proposes the tokens stored in its state, i32[B, K], which the caller sets."""

    max_depth: int  # K
    vocab_size: int  # vocabulary size of the target
    stops: bool  # whether the drafter that supplies the tokens supports `Controls.draft_stop`

    def init(self, params: Params, tokens: Array, length: Array) -> Array:
        return jnp.full((tokens.shape[0], self.max_depth), NO_TOKEN, jnp.int32)

    def propose(self, params: Params, state: Array, inputs: DraftInput) -> tuple[DraftTree, Array]:
        return chain(jnp.concatenate([last_token(inputs), state], axis=1)), state


class Committed(NamedTuple):
    """The tokens that the drafter assumes are committed."""

    tokens: Array  # i32[B, T]
    length: Array  # i32[B]


@functools.partial(jax.jit, static_argnums=0)
def _begin(drafter: Drafter, params: PyTree, text: Committed) -> PyTree:
    return drafter.init(Params((), params), *text)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _draft(
    drafter: Drafter, params: PyTree, state: PyTree, text: Committed, controls: Controls, keys: Array
) -> tuple[Array, Committed, PyTree]:
    """Return the draft i32[B, K + 1], the committed tokens if all of it is accepted, and the drafter's new state."""
    draft_input = DraftInput(keys=keys, tokens=text.tokens, length=text.length, controls=controls)
    tree, state = drafter.propose(Params((), params), state, draft_input)
    if tree.draft_logits is not None:
        raise MarsError(f"the drafter '{drafter.name}' draws its drafts: make it with sample=False.")
    new_tokens = tree.tokens[:, 1:]
    # Append the draft to the committed tokens. Tokens past the end of the buffer are dropped.
    buffer = text.tokens.shape[1]
    row_index = jnp.arange(new_tokens.shape[0], dtype=jnp.int32)[:, None]
    positions = text.length[:, None] + jnp.arange(new_tokens.shape[1], dtype=jnp.int32)[None]
    tokens = text.tokens.at[row_index, positions].set(jnp.maximum(new_tokens, 0), mode="drop")
    return new_tokens, Committed(tokens, jnp.minimum(text.length + new_tokens.shape[1], buffer)), state


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _verify(
    decoder: Decoder, params: PyTree, state: DecodeState, handed: Array
) -> tuple[DecodeState, StepInfo, Committed, Array]:
    """Run a step with the draft i32[B, K]. Also return copies of the committed tokens and of the mask of done rows."""
    state, info = decoder.step(params, dataclasses.replace(state, draft=handed))
    text = Committed(jnp.copy(state.tokens), jnp.copy(state.length))
    return state, info, text, jnp.copy(state.done)


@jax.jit
def _flags(info: StepInfo, done_rows: Array, guessed: tuple[Array, ...]) -> tuple[Array, Array]:
    """Return whether all live rows emitted the guessed tokens, and whether all rows are done.

    `guessed` contains arrays i32[B, ...] of consecutive tokens.
    """
    guessed_tokens = jnp.concatenate(guessed, axis=1)
    length = guessed_tokens.shape[1]
    is_right = (info.num_emitted == length) & jnp.all(info.emitted[:, :length] == guessed_tokens, axis=1)
    return jnp.all(is_right | done_rows), jnp.all(done_rows)


def stream_ahead(
    pair: Ahead,
    params: Params,
    state: DecodeState,
    *,
    draft_device: DraftDevice,
    pre_verify: bool = False,
    guesses: Guesses | None = None,
) -> Iterator[tuple[DecodeState, StepInfo]]:
    """Yield the steps of a batch as `decode.stream` does, but draft while the target verifies.

    `state` is donated, so use only the yielded states. Drafter and target synchronise once per step, when the host
    reads whether the guess was right. Meanwhile the next draft is already being computed.

    Args:
      pair: target and drafter, from `ahead`.
      params: params of both models. The target's params must be on the devices of `state`; the drafter's may be on any
        devices.
      state: initial state of `pair.decoder`, from `decode.start`.
      draft_device: device of the drafter, different from the target's, or a mesh over which the drafter's weights are
        already sharded.
      pre_verify: after a wrong guess, let the target decode one token without a draft while the drafter drafts again.
        If that token equals the first of the new draft, the target verifies the remaining ones next. This is worthwhile
        if drafting takes about as long as a forward pass of the target. With a lossless rule, the emitted tokens do not
        change, but decoding takes more steps.
      guesses: counters to increment for each step and each correct guess.

    Raises:
      MarsError: the drafter samples its drafts.
    """
    guesses = guesses or Guesses()
    remote = _Drafter(pair.drafter, params.draft, state, draft_device)
    target_params = params._replace(draft=())
    no_draft = jax.device_put(jnp.full_like(state.draft, NO_TOKEN), state.draft.sharding)
    draft, assumed_text = remote.draft(Committed(jnp.copy(state.tokens), jnp.copy(state.length)))
    # Usually the target verifies all draft tokens but the last, which is the guess. If pre-verify has already emitted
    # the first token, the target verifies the remaining ones, and the guess is the first token of the next draft.
    first_known, finished = False, bool(jnp.all(state.done))
    while not finished:
        # Select K of the K + 1 tokens: drop the first, which is already committed, or the last, which is the guess.
        handed_columns = slice(1, None) if first_known else slice(-1)
        handed_tokens = remote.part(draft, handed_columns)
        state, info, committed, done_rows = _verify(pair.decoder, target_params, state, handed_tokens)
        # Start the next draft before the target's verification has finished.
        next_draft, next_assumed_text = remote.draft(assumed_text)
        if first_known:
            guess = remote.part(next_draft, slice(1))
        else:
            guess = remote.part(draft, slice(-1, None))
        is_right, all_done = _flags(info, done_rows, (handed_tokens, guess))
        guesses.steps += 1
        yield state, info
        finished = bool(all_done)
        if bool(is_right):
            draft, assumed_text = next_draft, next_assumed_text
            guesses.held += 1
            continue
        first_known = False
        if not finished:
            draft, assumed_text = remote.draft(committed)
        if pre_verify and not finished:
            state, info, committed, done_rows = _verify(pair.decoder, target_params, state, no_draft)
            is_right, all_done = _flags(info, done_rows, (remote.part(draft, slice(1)),))
            guesses.steps += 1
            yield state, info
            finished, first_known = bool(all_done), bool(is_right)
            if not (finished or first_known):
                draft, assumed_text = remote.draft(committed)


class _Drafter:
    """A drafter that runs on its own devices, and its state."""

    def __init__(self, drafter: Drafter, params: PyTree, state: DecodeState, draft_device: DraftDevice):
        self._drafter, self._target_sharding = drafter, state.draft.sharding
        # Context manager under which the drafter's arrays are used.
        self._here: Callable[[], contextlib.AbstractContextManager]
        if isinstance(draft_device, Mesh):
            self._here = functools.partial(jax.set_mesh, draft_device)
            self._params, self._place = params, NamedSharding(draft_device, PartitionSpec())
        else:
            self._here = contextlib.nullcontext
            self._params, self._place = jax.device_put(params, draft_device), draft_device
        # Copy the inputs, because the next step donates the state's buffers.
        draft_inputs = (state.controls, state.keys, Committed(state.tokens, state.length))
        copied_inputs = jax.tree.map(jnp.copy, draft_inputs)
        self._controls, self._keys, text = jax.device_put(copied_inputs, self._place)
        with self._here():
            self._state = _begin(drafter, self._params, text)

    def part(self, drafted: Array, columns: slice) -> Array:
        """Move columns of a draft to the target's devices.

        The loop runs under the target's mesh, so switch to the drafter's mesh for slicing.
        """
        with self._here():
            part = drafted[:, columns]
        return jax.device_put(part, self._target_sharding)

    def draft(self, text: Committed) -> tuple[Array, Committed]:
        """Return the draft i32[B, K + 1] after `text`, and the committed tokens if all of it is accepted."""
        text = jax.device_put(text, self._place)
        with self._here():
            drafted_tokens, assumed_text, self._state = _draft(
                self._drafter, self._params, self._state, text, self._controls, self._keys
            )
        return drafted_tokens, assumed_text


_count = jax.jit(accumulate, donate_argnums=0)


def run_ahead(
    pair: Ahead, params: Params, prompts: Prompts, *, draft_device: DraftDevice, pre_verify: bool = False
) -> tuple[DecodeState, DecodeStats, Guesses]:
    """Decode prompts to completion, drafting in parallel.

    Args:
      pair: target and drafter, from `ahead`.
      params, draft_device, pre_verify: as for `stream_ahead`.
      prompts: the prompts, on the target's device.

    Returns:
      The final state, the counters of each row, and the numbers of steps and correct guesses.
    """
    state = decode.start(pair.decoder, params._replace(draft=()), prompts)
    guesses = Guesses()
    device = next(iter(state.tokens.devices()))
    stats = jax.device_put(zero_stats(prompts.tokens.shape[0], pair.decoder.max_depth), device)
    steps = stream_ahead(
        pair, params, state, draft_device=draft_device, pre_verify=pre_verify, guesses=guesses
    )
    for next_state, info in steps:
        state, stats = next_state, _count(stats, info, next_state.length)
    return state, stats, guesses
