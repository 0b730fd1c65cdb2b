"""The interface of drafters: pure functions that propose a tree and update their state from its verdict.

Oracle: none, the module has no logic. B batch, T token buffer, N nodes of a tree, D its depth, n tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from jax import Array

from mars_jax.core import struct
from mars_jax.core.guide import Guide
from mars_jax.core.types import Controls, DraftTree, ForwardOutput, Params, PyTree, Verdict

STOPS, SPARSE, TRUSTS = "stops", "sparse", "trusts"
"""Traits of drafters. `STOPS`: respects `Controls.draft_stop`. `SPARSE`: its chains are often all padding; if no row
has a draft, a CPU forwards only the root. `TRUSTS`: its trees may have `trusted` nodes, so no rule is lossless with
it."""


@struct.dataclass(kw_only=True)
class DraftInput:
    """The input of a draft. New fields change no drafter's signature."""

    keys: Array  # key[B]; fresh in every step
    tokens: Array  # i32[B, T]; committed below `length`
    length: Array  # i32[B]; committed tokens
    controls: Controls  # of the rows, [B]
    guide: Guide | None = None  # the rows' constraint; nodes that it forbids are removed from the draft
    # Whether the rule reads `DraftTree.hidden`; a drafter without hidden states omits it.
    hidden: bool = struct.field(pytree_node=False, default=False)


class Propose(Protocol):
    """Draft a tree whose root is the last committed token."""

    def __call__(self, params: Params, state: PyTree, given: DraftInput, /) -> tuple[DraftTree, PyTree]: ...


class Update(Protocol):
    """Update the draft state by a verdict; length i32[B] is from before the step, output the target's over the tree."""

    def __call__(
        self,
        params: Params,
        state: PyTree,
        tree: DraftTree,
        verdict: Verdict,
        output: ForwardOutput,
        length: Array,
        /,
    ) -> PyTree: ...


class Observe(Protocol):
    """Read the target's output on a prompt chunk: n positions from first i32[B] on; ignore those from length - 1 on."""

    def __call__(
        self,
        params: Params,
        state: PyTree,
        tokens: Array,
        first: Array,
        length: Array,
        output: ForwardOutput,
        /,
    ) -> PyTree: ...


class Reads(NamedTuple):
    """The layers of the target that a coupled drafter reads, and how it reads them."""

    # Layers whose outputs `observe` and `Drafter.update` get; if empty, they get the final hidden state.
    layers: tuple[int, ...]
    observe: Observe


class Drafter(NamedTuple):
    """A source of draft trees: pure functions over a state whose leaves are [B, ...].

    Example: a stateless drafter that repeats the last token.

    >>> import jax.numpy as jnp
    >>> from mars_jax.core.controls import make_controls
    >>> from mars_jax.core.tree import chain, last_token
    >>> from mars_jax.core.types import keys_from_seeds
    >>> def propose(params, state, inputs):
    ...     token = last_token(inputs)  # the root of every draft
    ...     return chain(jnp.concatenate([token, token], axis=1)), state
    >>> echo = Drafter(init=lambda params, tokens, length: (), propose=propose,
    ...                update=lambda params, state, *results: state, num_nodes=2, max_depth=1, name="echo")
    >>> inputs = DraftInput(keys=keys_from_seeds(jnp.arange(1)), tokens=jnp.asarray([[3, 1, 4, 0]]),
    ...                     length=jnp.asarray([3]), controls=make_controls(1, limit=4))
    >>> echo.propose(Params(()), (), inputs)[0].tokens.tolist()
    [[4, 4]]
    """

    init: Callable[[Params, Array, Array], PyTree]  # (params, tokens i32[B, T], length i32[B]) -> draft state
    propose: Propose  # (params, state, `DraftInput`) -> (tree, state)
    update: Update  # (params, state, tree, verdict, output, length) -> state
    num_nodes: int  # N, static; includes the root
    max_depth: int  # D, static
    reads: Reads | None = None  # the target features that a coupled drafter reads
    vocab_size: int | None = None  # None: drafts only tokens of the text
    # (params, state, tokens i32[B, T], cached i32[B], length i32[B]) -> state. For a drafter with a cache that `reads`
    # does not fill: feed the committed tokens from `cached` on, after steps without a draft or when the row continues
    # with another text (`Decoder.extend`). A drafter without `reads` and `catch_up` rereads such a text from the start
    catch_up: Callable[[Params, PyTree, Array, Array, Array], PyTree] | None = None
    traits: tuple[str, ...] = ()  # any of STOPS, SPARSE and TRUSTS
    name: str = "drafter"  # for reports
