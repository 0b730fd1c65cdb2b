"""A drafter that skips steps: steps without a draft do not run it, and the next draft first completes its cache.

A draft model then reads the missing tokens. A head also needs the target's features of these tokens, so the state keeps
the features of the last P tokens. If more are missing, also in the prompt, the head's cache starts again with those P.
B batch, T token buffer, P features, E hidden size.

Oracle: a state that skipped no step (tests/core/test_extend.py, tests/drafters/test_sized.py).
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from mars_jax.core import struct
from mars_jax.core.drafter import Drafter, DraftInput
from mars_jax.core.pick import pick
from mars_jax.core.types import DraftTree, ForwardOutput, LanguageModel, Params, PyTree, Visible
from mars_jax.drafters.none import none
from mars_jax.utils.errors import MarsError

FEATURES = 32
"""P. On a CPU, a head reads 32 tokens at once in about the time of three single tokens."""


class SizedParams(NamedTuple):
    """`Params.draft` of a drafter with several lengths."""

    weights: PyTree  # params of the wrapped drafter
    costs: Array | np.ndarray  # f32[n]; cost of a step at each length, in any unit; 0: not measured yet


def _inner(params: Params) -> Params:
    """Return the params of the wrapped drafter."""
    return params._replace(draft=params.draft.weights)


@struct.dataclass(kw_only=True)
class SkippingState:
    """Draft state shared by all lengths of a `Skipping` drafter."""

    draft: PyTree  # state of the wrapped drafter
    origin: Array  # i32[B]; index of the token in slot 0 of a head's cache; earlier tokens are not cached
    cached: Array  # i32[B]; the drafter's cache holds the committed tokens before this one
    # The target's output, without its cache, at tokens that the drafter has not read; leaves [B, P, E], with token t in
    # entry t % P. None for a drafter that does not read its target.
    features: ForwardOutput | None
    counts: PyTree = ()  # used by `drafters.sized` to choose a length


@dataclasses.dataclass(frozen=True)
class Skipping(Drafter):
    """A drafter of chains at one of several lengths, which may be 0. All lengths share one state and `SizedParams`.

    >>> from mars_jax.drafters.ngram import ngram
    >>> skipping = Skipping(ngram(4), ngram(4))
    >>> skipping.resized(2).max_depth, skipping.resized(0).max_depth
    (2, 0)
    """

    longest: Drafter  # the drafter with the most tokens; its state has room for all lengths
    size: Drafter  # the drafter of this length; `none()` skips the step
    target: LanguageModel | None = None  # the target with the features that the drafter reads

    @property
    def max_depth(self) -> int:
        return self.size.max_depth

    @property
    def vocab_size(self) -> int | None:
        return self.longest.vocab_size

    @property
    def reads(self) -> tuple[int, ...] | None:
        return self.longest.reads

    @property
    def stops(self) -> bool:
        return self.longest.stops

    def resized(self, length: int) -> Skipping:
        size = none()
        if length > 0:
            size = self.longest.resized(length)
        return Skipping(self.longest, size, self.target)

    def init(self, params: Params, tokens: Array, length: Array) -> Any:
        features = None
        if self.reads is not None:
            features = self._no_features(params, tokens, length)
            # Leave room for a window of P tokens at the end of the buffer.
            tokens = jnp.pad(tokens, ((0, 0), (0, FEATURES)))
        draft = self.longest.init(_inner(params), tokens, length)
        # A head has read nothing yet; `observe` keeps the features that its first draft reads.
        cached = self._complete(length) * int(features is None)
        origin = jnp.zeros_like(length)
        return SkippingState(draft=draft, origin=origin, cached=cached, features=features)

    def _complete(self, length: Array) -> Array:
        """Return i32[B], the size of a complete cache. A head's ends 1 token before the length, a model's 2 tokens."""
        return jnp.maximum(length - 1 - int(self.longest.lags), 0)

    def _no_features(self, params: Params, tokens: Array, length: Array) -> ForwardOutput:
        """Return zeros in the shapes of `SkippingState.features`."""
        target = self.target
        if target is None:
            raise MarsError(
                "a head with adaptive length needs its target: make the decoder with "
                "LoadedDrafter.decoder(target, rule)."
            )

        def forward() -> ForwardOutput:
            cache = target.init_cache(*tokens.shape)
            return target.forward(params.target, tokens[:, :1], Visible.causal(length, 1), cache)

        output_shapes = jax.eval_shape(forward)._replace(cache=())
        return jax.tree.map(
            lambda x: jnp.zeros((len(tokens), FEATURES, *x.shape[2:]), x.dtype), output_shapes
        )

    def observe(self, params: Params, state: SkippingState, *chunk: Any) -> SkippingState:
        _, first, length, output = chunk
        return _keep(state, first, jnp.minimum(first + output.hidden.shape[1], length - 1), output)

    def catch_up(
        self, params: Params, state: SkippingState, tokens: Array, cached: Array, length: Array
    ) -> SkippingState:
        # The next draft reads the missing tokens.
        if self.reads is not None:
            # The old and the new text share `cached` + 2 tokens. `observe` then gets the features of later tokens.
            cached = jnp.minimum(cached + 1, self._complete(length))
        origin, cached = jnp.minimum(state.origin, cached), jnp.minimum(state.cached, cached)
        return dataclasses.replace(state, origin=origin, cached=cached)

    def _read_features(self, params: Params, state: SkippingState, inputs: DraftInput) -> SkippingState:
        """Let the head read the features of up to P tokens if its cache, which begins at `origin`, is incomplete.

        This is a loop of at most one iteration, because a loop updates its carry in place, whereas XLA copies a cache
        that goes through a `lax.cond`.
        """
        end = state.origin + self._complete(inputs.length)

        def read(state: SkippingState) -> SkippingState:
            entries = (state.cached[:, None] + jnp.arange(FEATURES, dtype=jnp.int32)[None]) % FEATURES
            output = jax.tree.map(lambda x: pick(x, entries), state.features)
            # Entries past the last kept feature are garbage, but their slots are overwritten before they are read.
            slot = state.cached - state.origin
            draft = self.longest.observe(
                _inner(params), state.draft, inputs.tokens, slot, inputs.length, output
            )
            return dataclasses.replace(state, draft=draft, cached=jnp.maximum(state.cached, end))

        return lax.while_loop(lambda state: jnp.any(state.cached < end), read, state)

    def propose(
        self, params: Params, state: SkippingState, inputs: DraftInput
    ) -> tuple[DraftTree, SkippingState]:
        if self.reads is not None and self.max_depth > 0:
            # The head's cache begins at `origin`, so the head sees only the tokens from there on.
            tokens = jax.vmap(lambda row, start: jnp.roll(row, -start))(inputs.tokens, state.origin)
            inputs = dataclasses.replace(inputs, tokens=tokens, length=inputs.length - state.origin)
            state = self._read_features(params, state, inputs)
        elif self.size.lags:
            draft = self.size.catch_up(
                _inner(params), state.draft, inputs.tokens, state.cached, inputs.length
            )
            state = dataclasses.replace(state, draft=draft)
        tree, draft = self.size.propose(_inner(params), state.draft, inputs)
        return tree, dataclasses.replace(state, draft=draft)

    def update(self, params: Params, state: SkippingState, *step: Any) -> SkippingState:
        tree, verdict, output, length = step
        if self.max_depth > 0 or not (self.longest.lags or self.reads is not None):
            # In a step without a draft, a drafter that cannot skip steps still reads the root.
            drafter = self.size if self.max_depth > 0 else self.longest
            draft = drafter.update(_inner(params), state.draft, tree, verdict, output, length - state.origin)
            cached = self._complete(length + verdict.num_accepted + 1)
            return dataclasses.replace(state, draft=draft, cached=cached)
        if state.features is None:
            return state
        # The only node is the root, at position `length - 1`.
        return _keep(state, length - 1, length, output)


def _keep(state: SkippingState, first: Array, end: Array, output: ForwardOutput) -> SkippingState:
    """Keep the features of the last P tokens before `end` i32[B]; `output` begins at `first` i32[B].

    If a head's cache misses more than P tokens before `end`, it starts again with the last P.
    """
    position = first[:, None] + jnp.arange(output.hidden.shape[1], dtype=jnp.int32)[None]
    is_kept = (position < end[:, None]) & (position >= end[:, None] - FEATURES)
    # Other tokens map past the end, where scatter drops them.
    entries = jnp.where(is_kept, position % FEATURES, FEATURES)
    write = jax.vmap(lambda kept, new, entries: kept.at[entries].set(new, mode="drop"))
    features = jax.tree.map(
        lambda kept, new: write(kept, new, entries), state.features, output._replace(cache=())
    )
    # Tokens from `first` on in the head's cache may belong to a previous text.
    valid = jnp.minimum(state.cached, first)
    cached = jnp.maximum(valid, end - FEATURES)
    origin = jnp.where(cached > valid, cached, jnp.minimum(state.origin, valid))
    return dataclasses.replace(state, origin=origin, cached=cached, features=features)
