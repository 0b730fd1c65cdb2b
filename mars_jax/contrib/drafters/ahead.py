"""Drafting while the target verifies: drafter and target on devices of their own, the next draft begun on a guess.

Source: PEARL 2408.11850 (pre-verify and post-verify). B batch, K tokens of a draft, T token buffer. Oracle: the plain
loop, token for token (tests/contrib/test_ahead.py).

The drafter drafts K + 1 tokens; the target gets the first K. While it verifies them, the drafter goes on as if all of
them held and the last were the token that the target adds. Where that comes true for every live row, the next draft
is there when the verdict is, and a step costs the longer of the two instead of their sum; else the drafter drafts again
from what was committed. A chain that a small model drafts afresh overwrites what it cached on a wrong guess, so
nothing has to be taken back. Under a lossless rule the tokens are those of the plain loop, whatever was guessed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mars_jax.core import decode
from mars_jax.core.decoder import Decoder
from mars_jax.core.drafter import STOPS, Drafter, DraftInput
from mars_jax.core.errors import MarsError
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


class Ahead(NamedTuple):
    """A decode that drafts ahead; see `ahead`."""

    decoder: Decoder  # of the target; its drafts are handed to it
    drafter: Drafter  # of K + 1 tokens
    handed: Drafter  # of K tokens; what the target sees of it


@dataclasses.dataclass
class Guesses:
    """Counts of steps, and of those whose next draft was there when the verdict was."""

    steps: int = 0
    held: int = 0


def ahead(target: LanguageModel, drafter: Drafter, verify: Rule) -> Ahead:
    """Pair a target and a drafter that work at the same time.

    Args:
      target: the model whose text this is.
      drafter: of chains of K + 1 tokens, deterministic and by itself: a small model, for one. K is at least 1.
      verify: the rule.

    Raises:
      MarsError: the drafter reads its target, draws its drafts, or drafts no chain of at least 2.

    >>> from mars_jax import drafters, fake, verify
    >>> model = fake.hash_model(vocab_size=11)
    >>> ahead(model, drafters.language_model(model, 4), verify.exact()).decoder.max_depth
    3
    """
    handed = handed_by(drafter, target)
    return Ahead(decode.speculative_decoder(target, handed, verify), drafter, handed)


def handed_by(drafter: Drafter, target: LanguageModel) -> Drafter:
    """Make the drafter of K tokens that the target sees of one of K + 1.

    Raises:
      MarsError: as `ahead`.
    """
    if drafter.reads is not None:
        raise MarsError(
            f"the drafter '{drafter.name}' reads what its target computes, and cannot draft while it does: draft with "
            "a small model."
        )
    if drafter.num_nodes != drafter.max_depth + 1 or drafter.max_depth < 2:
        raise MarsError(
            f"the drafter '{drafter.name}' drafts no chain of at least 2 tokens, the last of which is the guess: give "
            "it num_draft_tokens of 2 or more, and no tree."
        )
    return _handed(drafter.max_depth - 1, target.vocab_size, STOPS in drafter.traits)


@functools.lru_cache
def _handed(length: int, vocab: int, stoppable: bool) -> Drafter:
    """Make a drafter whose state is the draft, which the caller puts there."""

    def propose(params: Params, state: Array, given: DraftInput) -> tuple[DraftTree, Array]:
        return chain(jnp.concatenate([last_token(given), state], axis=1)), state

    return Drafter(
        init=lambda params, tokens, length_: jnp.full((tokens.shape[0], length), NO_TOKEN, jnp.int32),
        propose=propose,
        update=lambda params, state, *_: state,
        num_nodes=length + 1,
        max_depth=length,
        vocab_size=vocab,
        traits=(STOPS,) if stoppable else (),
        name=f"handed({length})",
    )


class Committed(NamedTuple):
    """The text as far as the drafter knows it."""

    tokens: Array  # i32[B, T]
    length: Array  # i32[B]


@functools.partial(jax.jit, static_argnums=0)
def _begin(drafter: Drafter, params: PyTree, text: Committed) -> PyTree:
    return drafter.init(Params((), params), *text)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _draft(
    drafter: Drafter, params: PyTree, state: PyTree, text: Committed, controls: Controls, keys: Array
) -> tuple[Array, Committed, PyTree]:
    """Make the draft i32[B, K + 1], the text as if all of it held, and the drafter's state."""
    given = DraftInput(keys=keys, tokens=text.tokens, length=text.length, controls=controls)
    tree, state = drafter.propose(Params((), params), state, given)
    if tree.draft_logits is not None:
        raise MarsError(f"the drafter '{drafter.name}' draws its drafts: make it with sample=False.")
    drafted = tree.tokens[:, 1:]
    buffer = text.tokens.shape[1]
    row = jnp.arange(drafted.shape[0], dtype=jnp.int32)[:, None]
    place = text.length[:, None] + jnp.arange(drafted.shape[1], dtype=jnp.int32)[None]
    tokens = text.tokens.at[row, place].set(jnp.maximum(drafted, 0), mode="drop")
    return drafted, Committed(tokens, jnp.minimum(text.length + drafted.shape[1], buffer)), state


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _verify(
    decoder: Decoder, params: PyTree, state: DecodeState, handed: Array
) -> tuple[DecodeState, StepInfo, Committed, Array]:
    """Step with a draft i32[B, K]; return the text after it too, and which rows are done then."""
    state, info = decoder.step(params, dataclasses.replace(state, draft=handed))
    text = Committed(jnp.copy(state.tokens), jnp.copy(state.length))
    return state, info, text, jnp.copy(state.done)


@jax.jit
def _flags(info: StepInfo, done: Array, guessed: tuple[Array, ...]) -> tuple[Array, Array]:
    """Tell whether all live rows said the guess, arrays i32[B, ...] side by side, and whether all rows are done."""
    said = jnp.concatenate(guessed, axis=1)
    length = said.shape[1]
    held = (info.num_emitted == length) & jnp.all(info.emitted[:, :length] == said, axis=1)
    return jnp.all(held | done), jnp.all(done)


def stream(
    made: Ahead,
    params: Params,
    state: DecodeState,
    *,
    draft_device: Any,
    pre_verify: bool = False,
    guesses: Guesses | None = None,
) -> Iterator[tuple[DecodeState, StepInfo]]:
    """`decode.stream` whose drafts are made ahead, elsewhere. `state` is donated: use the one that is yielded.

    Drafter and target wait for each other once a step: the host reads one flag of the verdict while the drafter is busy
    with the next draft.

    Args:
      made: from `ahead`.
      params: of both; the target's where `state` is, the drafter's wherever they are.
      state: of `made.decoder`, from `decode.start`.
      draft_device: where the drafter works, another place than the target's: a device, or a mesh over which
        its weights are divided already.
      pre_verify: while a draft is made again after a wrong guess, the target says one token without one. If that is
        the first of the new draft, the rest of it is verified next. It pays where a draft takes about as long as the
        target's forward. A lossless rule's tokens stay the same; there are more steps.
      guesses: counts here how many steps there were, and in how many the next draft was there.

    Raises:
      MarsError: the drafter draws its drafts.
    """
    guesses = Guesses() if guesses is None else guesses
    there = _Drafter(made.drafter, params.draft, state, draft_device)
    of_target, where = params._replace(draft=()), state.draft.sharding
    nothing = jax.device_put(jnp.full_like(state.draft, NO_TOKEN), where)
    drafted, guessed = there.draft(Committed(jnp.copy(state.tokens), jnp.copy(state.length)))
    # Of a draft the last token is the guess. Where its first one is said already the others are handed over, and the
    # guess is the first of the draft after it.
    first_said, finished = False, bool(jnp.all(state.done))
    while not finished:
        handed = jax.device_put(there.part(drafted, slice(1, None) if first_said else slice(-1)), where)
        state, info, text, done = _verify(made.decoder, of_target, state, handed)
        # On its way before the verdict is there.
        following, after = there.draft(guessed)
        last = there.part(following, slice(1)) if first_said else there.part(drafted, slice(-1, None))
        guess = jax.device_put(last, where)
        right, finish = _flags(info, done, (handed, guess))
        guesses.steps += 1
        yield state, info
        finished = bool(finish)
        if bool(right):
            (drafted, guessed), guesses.held = (following, after), guesses.held + 1
            continue
        first_said = False
        if not finished:
            drafted, guessed = there.draft(text)
        if pre_verify and not finished:
            state, info, text, done = _verify(made.decoder, of_target, state, nothing)
            right, finish = _flags(info, done, (jax.device_put(there.part(drafted, slice(1)), where),))
            guesses.steps += 1
            yield state, info
            finished, first_said = bool(finish), bool(right)
            if not (finished or first_said):
                drafted, guessed = there.draft(text)


class _Drafter:
    """The drafter where it works, with its state."""

    def __init__(self, drafter: Drafter, params: PyTree, state: DecodeState, where: Any):
        self._mesh = where if isinstance(where, Mesh) else None
        self._place = where if self._mesh is None else NamedSharding(self._mesh, PartitionSpec())
        self._drafter = drafter
        self._params = params if self._mesh is not None else jax.device_put(params, self._place)
        given = (state.controls, state.keys, Committed(state.tokens, state.length))
        # Copies: the state's own buffers are the next step's.
        given = jax.tree.map(jnp.copy, given)
        self._controls, self._keys, text = jax.device_put(given, self._place)
        with self._here():
            self._state = _begin(drafter, self._params, text)

    def _here(self) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext() if self._mesh is None else jax.set_mesh(self._mesh)

    def part(self, drafted: Array, columns: slice) -> Array:
        """Return columns of a draft; the loop runs in the target's mesh, where a draft is not."""
        with self._here():
            return drafted[:, columns]

    def draft(self, text: Committed) -> tuple[Array, Committed]:
        """Make the draft i32[B, K + 1] after a text, and the text as if all of it held."""
        text = jax.device_put(text, self._place)
        with self._here():
            drafted, guessed, self._state = _draft(
                self._drafter, self._params, self._state, text, self._controls, self._keys
            )
        return drafted, guessed


_count = jax.jit(accumulate, donate_argnums=0)


def run_ahead(
    made: Ahead,
    params: Params,
    prompts: Prompts,
    *,
    draft_device: Any,
    pre_verify: bool = False,
) -> tuple[DecodeState, DecodeStats, Guesses]:
    """Decode prompts to their end.

    Args:
      made: from `ahead`.
      params, draft_device, pre_verify: as for `stream`.
      prompts: on the target's device.

    Returns:
      The final state, the counters of each row, and how many guesses held.
    """
    state = decode.start(made.decoder, params._replace(draft=()), prompts)
    guesses = Guesses()
    where = next(iter(state.tokens.devices()))
    stats = jax.device_put(zero_stats(prompts.tokens.shape[0], made.decoder.max_depth), where)
    options = {"draft_device": draft_device, "pre_verify": pre_verify, "guesses": guesses}
    for now, info in stream(made, params, state, **options):
        state, stats = now, _count(stats, info, now.length)
    return state, stats, guesses
