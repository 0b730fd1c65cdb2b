"""A wrapper that runs a drafter only in steps that draft. Such a step first fills the gap in the drafter's cache.

To fill the gap, a draft model processes the missing tokens. A head also needs the target's features at these tokens, so
the state stores the features of the last P tokens. If more than P tokens are missing, for example after a long prompt,
the head's cache is restarted from those P tokens. B batch, T token buffer, P features, E hidden size.

Tested against the state of a drafter that runs in every step (tests/core/test_extend.py, tests/drafters/test_sized.py).
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
"""P, the number of tokens whose features are stored. On a CPU, a head processes 32 tokens at once in about the time of
three single tokens."""


class SizedParams(NamedTuple):
    """`Params.draft` of a drafter with several lengths."""

    weights: PyTree  # params of the wrapped drafter
    costs: Array | np.ndarray  # f32[n]; cost of a step at each length, in any unit; 0: not measured yet


def _inner(params: Params) -> Params:
    """Replace the draft weights in `params` with those of the wrapped drafter."""
    return params._replace(draft=params.draft.weights)


@struct.dataclass(kw_only=True)
class SkippingState:
    """Draft state shared by all lengths of a `Skipping` drafter."""

    draft: PyTree  # state of the wrapped drafter
    origin: Array  # i32[B]; position of the token in slot 0 of a head's cache; earlier tokens are not cached
    cached: Array  # i32[B]; position of the first committed token that is missing from the drafter's cache
    # The target's output, without its cache, at tokens that the drafter has not processed. Its leaves are [B, P, E],
    # with token t in entry t % P. None for a drafter that does not read the target's features.
    features: ForwardOutput | None
    counts: PyTree = ()  # used by `drafters.sized` to choose a length


@dataclasses.dataclass(frozen=True)
class Skipping(Drafter):
    """A drafter that drafts chains of one length, possibly 0.

    Drafters of different lengths share one state and one `SizedParams`.

    >>> from mars_jax.drafters.ngram import ngram
    >>> skipping = Skipping(ngram(4), ngram(4))
    >>> skipping.resized(2).max_depth, skipping.resized(0).max_depth
    (2, 0)
    """

    longest: Drafter  # drafter of the longest chain; its state has room for all lengths
    size: Drafter  # drafter of the current length; `none()` for length 0
    target: LanguageModel | None = None  # target whose features the drafter reads

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
            # Add slots for a window of P tokens that starts near the end of the buffer.
            tokens = jnp.pad(tokens, ((0, 0), (0, FEATURES)))
        draft = self.longest.init(_inner(params), tokens, length)
        # At this point, a head's cache is empty. `observe` stores the features that the head's first draft will
        # process.
        cached = self._complete(length) * int(features is None)
        origin = jnp.zeros_like(length)
        return SkippingState(draft=draft, origin=origin, cached=cached, features=features)

    def _complete(self, length: Array) -> Array:
        """Return how many tokens a complete cache contains, i32[B]: length - 1 for a head, length - 2 for a model."""
        return jnp.maximum(length - 1 - int(self.longest.lags), 0)

    def _no_features(self, params: Params, tokens: Array, length: Array) -> ForwardOutput:
        """Return an all-zero `SkippingState.features`."""
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
        # Only record which cached tokens are still valid; the next draft processes the tokens that the cache lacks.
        if self.reads is not None:
            # The old and new token sequences share `cached` + 2 tokens. `observe` is then called with the features of
            # later tokens.
            cached = jnp.minimum(cached + 1, self._complete(length))
        origin, cached = jnp.minimum(state.origin, cached), jnp.minimum(state.cached, cached)
        return dataclasses.replace(state, origin=origin, cached=cached)

    def _read_features(self, params: Params, state: SkippingState, inputs: DraftInput) -> SkippingState:
        """Run the head on the stored features of up to P tokens if its cache, which begins at `origin`, is incomplete.

        Use a loop of at most one iteration, which updates its carry in place. XLA would copy a cache passed through
        `lax.cond`.
        """
        end = state.origin + self._complete(inputs.length)

        def read(state: SkippingState) -> SkippingState:
            entries = (state.cached[:, None] + jnp.arange(FEATURES, dtype=jnp.int32)[None]) % FEATURES
            output = jax.tree.map(lambda x: pick(x, entries), state.features)
            # Entries after the last stored feature are garbage, but their cache slots are overwritten before they are
            # read.
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
            # The head's cache begins at `origin`, so shift the tokens to begin there too.
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
            # A drafter that cannot catch up must process the root even in steps without a draft.
            drafter = self.size if self.max_depth > 0 else self.longest
            draft = drafter.update(_inner(params), state.draft, tree, verdict, output, length - state.origin)
            cached = self._complete(length + verdict.num_accepted + 1)
            return dataclasses.replace(state, draft=draft, cached=cached)
        if state.features is None:
            return state
        # The only node is the root, at position `length - 1`.
        return _keep(state, length - 1, length, output)


def _keep(state: SkippingState, first: Array, end: Array, output: ForwardOutput) -> SkippingState:
    """Store the features of the last P tokens before `end` i32[B]; `output` starts at position `first` i32[B].

    If a head's cache lacks more than P tokens before `end`, restart it from the last P tokens.
    """
    position = first[:, None] + jnp.arange(output.hidden.shape[1], dtype=jnp.int32)[None]
    is_kept = (position < end[:, None]) & (position >= end[:, None] - FEATURES)
    # Other tokens map to an index past the end, and the scatter drops them.
    entries = jnp.where(is_kept, position % FEATURES, FEATURES)
    write = jax.vmap(lambda kept, new, entries: kept.at[entries].set(new, mode="drop"))
    features = jax.tree.map(
        lambda kept, new: write(kept, new, entries), state.features, output._replace(cache=())
    )
    # The head's cache entries from `first` on may belong to the row's previous prompt.
    valid = jnp.minimum(state.cached, first)
    cached = jnp.maximum(valid, end - FEATURES)
    origin = jnp.where(cached > valid, cached, jnp.minimum(state.origin, valid))
    return dataclasses.replace(state, origin=origin, cached=cached, features=features)
