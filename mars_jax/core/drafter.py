"""The interface of drafters: pure functions that propose a tree and update their state from its verdict.

Oracle: none, the module has no logic. B batch, T token buffer, N tree nodes, D tree depth, n tokens per chunk.
"""

from __future__ import annotations

import dataclasses

from jax import Array

from mars_jax.core import struct
from mars_jax.core.guide import Guide
from mars_jax.core.types import Controls, DraftTree, ForwardOutput, Params, PyTree, Verdict


@struct.dataclass(kw_only=True)
class DraftInput:
    """The input of `Drafter.propose`. New fields can be added without changing any drafter's signature."""

    keys: Array  # key[B]; different in every step
    tokens: Array  # i32[B, T]; committed below `length`
    length: Array  # i32[B]; committed tokens
    controls: Controls  # controls of the rows, [B]
    guide: Guide | None = None  # the rows' constraint; nodes that it forbids are removed from the draft
    # Whether the rule reads `DraftTree.hidden`; a drafter without hidden states omits it.
    hidden: bool = struct.field(pytree_node=False, default=False)


class Drafter:
    """A source of draft trees: pure methods over a state whose leaves are [B, ...].

    Subclasses are frozen dataclasses of hashable fields, so that equal drafters share their compiled programs. A chain
    drafter must define `max_depth` and `propose`, and if it has state, also `init` and `update`.

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
    """D, the longest path below the root."""
    vocab_size: int | None = None
    """Size of the target's vocabulary; None: the drafter drafts only tokens of the row."""
    reads: tuple[int, ...] | None = None
    """Target layers whose outputs are passed to `observe` and `update`; if empty, they get the final hidden state.
    None: the drafter does not read its target."""
    stops: bool = False
    """Respects `Controls.draft_stop`."""
    sparse: bool = False
    """Its chains are often all padding. If no row has a draft, a CPU forwards only the root."""
    trusts: bool = False
    """Its trees may have `trusted` nodes, so no rule is lossless with it."""
    resizes: bool = False
    """Drafts chains of any length from the same state; see `resized`."""

    @property
    def num_nodes(self) -> int:
        """N, including the root. By default the draft is a chain."""
        return self.max_depth + 1

    @property
    def name(self) -> str:
        """Name in reports and messages."""
        return f"{type(self).__name__.lower()}({self.max_depth})"

    @property
    def lags(self) -> bool:
        """True if the drafter overrides `catch_up`, which reads the tokens of steps without a draft."""
        return type(self).catch_up is not Drafter.catch_up

    def resized(self, length: int) -> Drafter:
        """Return this drafter, which must have `resizes` set, with a different chain length (`num_draft_tokens`)."""
        return dataclasses.replace(self, num_draft_tokens=length)  # pyright: ignore[reportArgumentType]

    def init(self, params: Params, tokens: Array, length: Array) -> PyTree:
        """Return the state for prompts of `length` i32[B] in tokens i32[B, T].

        If the target has recurrent layers and `reads` is set, the buffer is wider, with room for a chunk past T.
        """
        return ()

    def propose(self, params: Params, state: PyTree, inputs: DraftInput) -> tuple[DraftTree, PyTree]:
        """Return a tree whose root is the last committed token, and the new state."""
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
        """Return the state after a verdict.

        Args:
          params, state, tree, verdict: inputs and results of the step.
          output: the target's output over the tree.
          length: i32[B]; the length before the step.
        """
        return state

    def observe(
        self, params: Params, state: PyTree, tokens: Array, first: Array, length: Array, output: ForwardOutput
    ) -> PyTree:
        """Return the state after the target's forward on a chunk of the prompt. Called only if `reads` is not None.

        Args:
          params, state: weights, and the drafter's state.
          tokens: i32[B, T], the prompts.
          first: i32[B]; the chunk's n positions begin here. Ignore those from `length` - 1 on.
          length: i32[B]; the length of the prompts.
          output: the target's output over the chunk.
        """
        raise NotImplementedError

    def catch_up(self, params: Params, state: PyTree, tokens: Array, cached: Array, length: Array) -> PyTree:
        """Return the state after the tokens i32[B, T] from `cached` i32[B] up to `length` i32[B] were committed.

        Override this method if the drafter has a cache that `observe` does not fill. It is called when a row continues
        with a new prompt, and after steps without a draft. By default, a drafter without `reads` calls `init` on the
        whole row.
        """
        return state if self.reads is not None else self.init(params, tokens, length)
