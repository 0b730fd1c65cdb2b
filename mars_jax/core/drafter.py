"""The interface of drafters: pure functions that propose draft trees and update the drafter's state.

The module contains no logic to test. Dimensions: B batch, T token buffer, N tree nodes, D tree depth, n tokens per
chunk.
"""

from __future__ import annotations

import dataclasses

from jax import Array

from mars_jax.core import struct
from mars_jax.core.guide import Guide
from mars_jax.core.types import Controls, DraftTree, ForwardOutput, Params, PyTree, Verdict


@struct.dataclass(kw_only=True)
class DraftInput:
    """The input of `Drafter.propose`: one struct, so that new fields do not change the signature of any drafter."""

    keys: Array  # key[B]; different in every step
    tokens: Array  # i32[B, T]; the first `length` tokens of a row are committed
    length: Array  # i32[B]; number of committed tokens
    controls: Controls  # per-request settings, [B] each
    guide: Guide | None = None  # the constraint; forbidden nodes will be removed from the draft
    # True if the rule reads `DraftTree.hidden`. A drafter without hidden states leaves that field None.
    hidden: bool = struct.field(pytree_node=False, default=False)


class Drafter:
    """The base class of drafters: pure methods that draft trees, and a state whose leaves are [B, ...].

    Subclasses are frozen dataclasses with hashable fields, so that equal drafters share compiled programs. A drafter
    that drafts chains must define `max_depth` and `propose`. A drafter with state must also define `init` and `update`.

    Example: a stateless drafter that repeats the last token.

    >>> import dataclasses
    >>> import jax.numpy as jnp
    >>> from mars_jax.core.controls import make_controls
    >>> from mars_jax.core.tree import chain, last_token
    >>> from mars_jax.core.types import keys_from_seeds
    >>> @dataclasses.dataclass(frozen=True)
    ... class Echo(Drafter):
    ...     max_depth: int = 1
    ...     def propose(self, params, state, inputs):
    ...         token = last_token(inputs)  # the root of every draft
    ...         return chain(jnp.repeat(token, self.num_nodes, axis=1)), state
    >>> inputs = DraftInput(keys=keys_from_seeds(jnp.arange(1)), tokens=jnp.asarray([[3, 1, 4, 0]]),
    ...                     length=jnp.asarray([3]), controls=make_controls(1, limit=4))
    >>> Echo().propose(Params(()), (), inputs)[0].tokens.tolist()
    [[4, 4]]
    """

    max_depth: int
    """D, the maximum depth of a draft: the number of drafted tokens on its longest path."""
    vocab_size: int | None = None
    """Size of the target's vocabulary; None if the drafter only copies tokens from the row."""
    reads: tuple[int, ...] | None = None
    """Target layers whose outputs are passed to `observe` and `update`. An empty tuple passes only the final hidden
    states. None means that the drafter does not read its target."""
    stops: bool = False
    """True if the drafter respects `Controls.draft_stop`."""
    sparse: bool = False
    """True if drafts often contain only padding. In a step in which no row has a draft, a CPU evaluates the target only
    at the root."""
    trusts: bool = False
    """True if the drafter's trees may contain `trusted` nodes. No rule is lossless with such a drafter."""
    resizes: bool = False
    """True if the drafter can draft chains of any length from the same state; see `resized`."""

    @property
    def num_nodes(self) -> int:
        """N, the number of nodes including the root. The default is correct for a chain."""
        return self.max_depth + 1

    @property
    def name(self) -> str:
        """Name of the drafter in reports and messages."""
        return f"{type(self).__name__.lower()}({self.max_depth})"

    @property
    def lags(self) -> bool:
        """True if the drafter overrides `catch_up` to read tokens that were committed without a draft."""
        return type(self).catch_up is not Drafter.catch_up

    def resized(self, length: int) -> Drafter:
        """Return a copy of this drafter with a different chain length (`num_draft_tokens`). `resizes` must be True."""
        return dataclasses.replace(self, num_draft_tokens=length)  # pyright: ignore[reportArgumentType]

    def init(self, params: Params, tokens: Array, length: Array) -> PyTree:
        """Return the drafter's initial state for prompts in `tokens` i32[B, T], whose lengths are `length` i32[B].

        If the target has recurrent layers and `reads` is not None, `tokens` is wider by one prefill chunk.
        """
        return ()

    def propose(self, params: Params, state: PyTree, inputs: DraftInput) -> tuple[DraftTree, PyTree]:
        """Return a draft tree, whose root is the last committed token, and the drafter's new state."""
        raise NotImplementedError

    def update(
        self,
        params: Params,
        state: PyTree,
        tree: DraftTree,
        verdict: Verdict,
        output: ForwardOutput,
        length: Array,
    ) -> PyTree:
        """Return the drafter's state after the rule has verified a draft.

        Args:
          params, state, tree, verdict: the weights, the state after drafting, the draft, and the rule's verdict on the
            draft.
          output: the target's output at the nodes of the tree.
          length: i32[B]; number of committed tokens before the step.
        """
        return state

    def observe(
        self, params: Params, state: PyTree, tokens: Array, first: Array, length: Array, output: ForwardOutput
    ) -> PyTree:
        """Return the drafter's state after the target has read a chunk of the prompt. Only called if `reads` is set.

        Args:
          params, state: the weights and the drafter's state.
          tokens: i32[B, T]; the prompts.
          first: i32[B]; the first of the chunk's n positions. Ignore positions from `length` - 1 onwards.
          length: i32[B]; lengths of the prompts.
          output: the target's output at the positions of the chunk.
        """
        raise NotImplementedError

    def catch_up(self, params: Params, state: PyTree, tokens: Array, cached: Array, length: Array) -> PyTree:
        """Return the drafter's state after reading the tokens [cached, length) of each row, which are new to it.

        `tokens` is i32[B, T], and `cached` and `length` are i32[B]. Override this method if the drafter has a cache
        that `observe` does not fill. `catch_up` is called when a row continues with a new prompt, and after steps
        without a draft. By default, a drafter without `reads` calls `init` on the whole row.
        """
        return state if self.reads is not None else self.init(params, tokens, length)
