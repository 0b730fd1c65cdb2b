"""The interface of drafters: pure functions that propose a tree, and hear what became of it.

Oracle: none, it holds no logic. B batch, T token buffer, N nodes of a tree, D its depth, n tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from jax import Array

from mars_jax.core import struct
from mars_jax.core.guide import Guide
from mars_jax.core.types import Controls, DraftTree, ForwardOutput, Params, PyTree, Verdict

STOPS, SPARSE, TRUSTS = "stops", "sparse", "trusts"
"""Traits of drafters. `STOPS`: heeds `Controls.draft_stop`. `SPARSE`: often drafts nothing at all, as chains of
padding; where no row has a draft, a CPU then forwards the root alone. `TRUSTS`: its trees may have `trusted` nodes, so
that no rule is lossless with it."""


@struct.dataclass(kw_only=True)
class DraftInput:
    """The input of a draft. New fields change no drafter's signature."""

    keys: Array  # key[B]; fresh in every step
    tokens: Array  # i32[B, T]; committed below `length`
    length: Array  # i32[B]; committed tokens
    controls: Controls  # of the rows, [B]
    guide: Guide | None = None  # what a constraint lets follow; a draft that does not heed it loses nodes
    # The rule reads `DraftTree.hidden`; a drafter that has none leaves it out.
    hidden: bool = struct.field(pytree_node=False, default=False)


class Propose(Protocol):
    """Draft a tree under the last committed token."""

    def __call__(self, params: Params, state: PyTree, given: DraftInput, /) -> tuple[DraftTree, PyTree]: ...


class Update(Protocol):
    """The draft state after a verdict; length i32[B] is that before the step, output the target's over the tree."""

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
    """While the prompt is read: the target's output at the n positions from first i32[B] on; those at length - 1 and
    after it mean nothing."""

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

    # Layers whose outputs `observe` and `Drafter.update` get; none of them: the final hidden state.
    layers: tuple[int, ...]
    observe: Observe


class Drafter(NamedTuple):
    """A source of draft trees: pure functions over a state whose leaves are [B, ...].

    A drafter without a state that repeats the last token:

    >>> import jax.numpy as jnp
    >>> from mars_jax.core.controls import make_controls
    >>> from mars_jax.core.tree import chain, last_token
    >>> from mars_jax.core.types import keys_from_seeds
    >>> def propose(params, state, given):
    ...     token = last_token(given)  # the root of every draft
    ...     return chain(jnp.concatenate([token, token], axis=1)), state
    >>> echo = Drafter(init=lambda params, tokens, length: (), propose=propose,
    ...                update=lambda params, state, *heard: state, num_nodes=2, max_depth=1, name="echo")
    >>> given = DraftInput(keys=keys_from_seeds(jnp.arange(1)), tokens=jnp.asarray([[3, 1, 4, 0]]),
    ...                    length=jnp.asarray([3]), controls=make_controls(1, limit=4))
    >>> echo.propose(Params(()), (), given)[0].tokens.tolist()
    [[4, 4]]
    """

    init: Callable[[Params, Array, Array], PyTree]  # (params, tokens i32[B, T], length i32[B]) -> draft state
    propose: Propose  # (params, state, `DraftInput`) -> (tree, state)
    update: Update  # (params, state, tree, verdict, output, length) -> state
    num_nodes: int  # N, static; the root is one of them
    max_depth: int  # D, static
    reads: Reads | None = None  # hears what the target computes of a prompt; see `Reads`
    vocab_size: int | None = None  # None: drafts only tokens it has seen
    # (params, state, tokens i32[B, T], cached i32[B], length i32[B]) -> state: for a drafter with a cache that
    # `reads` does not fill, feeds the committed tokens from `cached` on: steps without a draft left them out, or the
    # row goes on with another text (`Decoder.extend`). A drafter with neither reads all of such a text again
    catch_up: Callable[[Params, PyTree, Array, Array, Array], PyTree] | None = None
    traits: tuple[str, ...] = ()  # of STOPS, SPARSE and TRUSTS
    name: str = "drafter"  # for reports
