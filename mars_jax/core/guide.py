"""Automata that follow the text on the device: what may be said next, and where rules may relax.

A constraint masks the target's logits at every node before the rule sees them, so every rule honours it without
knowing, and a lossless one is lossless for the masked target. A span says at which nodes a lossy rule is strict.

B batch, N nodes, S states, C classes of tokens, G groups, R rows of bits, W words of a row, V vocabulary, U vocabulary
of a draft, M stop tokens.
Oracles: transformers with a processor that masks, and enumeration (tests/core/test_guide.py).

The tables of all constraints of a batch are one: a row knows its state, and to which group of token classes it belongs.
State 0 is free, where anything may follow; state 1 is dead.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from mars_jax.core import struct
from mars_jax.core.controls import is_stop
from mars_jax.core.errors import MarsError
from mars_jax.core.mesh import map_devices, vocabulary_axes
from mars_jax.core.pick import pick
from mars_jax.core.types import NO_TOKEN, Controls, DecodeState, DraftTree, Guides, Params, Verdict

FREE, DEAD = 0, 1
BITS = 32
"""Bits of a word. Bit k of word j is token k W + j, so a row unpacks into stretches of W tokens by shifts."""


@struct.dataclass(kw_only=True)
class Tables:
    """Automata over tokens. Made by `constraints.compiled`; equal shapes share what is compiled."""

    next: Array  # u16[S, C]
    classes: Array  # u16[G, V]; class 0 leads nowhere
    bits: Array  # u32[R, W]; which tokens may follow
    rows: Array  # i32[S]; the row of bits of each state
    forced: Array  # i32[S]; where text is forced the token that says it, else NO_TOKEN
    accepting: Array  # bool[S]; the text may end here
    closed: Array  # bool[S]; it may end, and nothing else may follow
    strict: Array  # bool[S]; of spans: rules relax nothing here
    narrow: Any = None  # `Narrow` of the drafter, where it has a vocabulary of its own; see `narrowed`


@struct.dataclass(kw_only=True)
class Narrow:
    """Which tokens of a draft's own vocabulary, of U tokens, may follow."""

    ids: Array  # i32[U]; the target's
    bits: Array  # u32[R, ceil(U / 32)]; as `Tables.bits`


@struct.dataclass(kw_only=True)
class Tracked:
    """The first states of the rows of a batch, and their groups of token classes."""

    start: Array  # i32[B]; a state: FREE for a row without
    group: Array  # i32[B]


@struct.dataclass(kw_only=True)
class Guide:
    """One automaton, and where the rows of a batch are in it."""

    tables: Tables
    group: Array  # i32[B]
    state: Array  # i32[B]; after the last committed token
    stop_tokens: Array  # i32[B, M]; each may come where the text may end, and after it anything

    @property
    def vocab(self) -> int:
        return self.tables.classes.shape[1]

    def moved(self, states: Array, tokens: Array) -> Array:
        """i32[B, P]: the states after tokens i32[B, P] in states i32[B, P]; DEAD where a token may not follow. No token
        is no text, and frees what comes after it."""
        t = self.tables
        kind = t.classes.at[self.group[:, None], jnp.maximum(tokens, 0)].get(mode="clip")
        to = t.next.at[states, kind.astype(jnp.int32)].get(mode="promise_in_bounds").astype(jnp.int32)
        stops = is_stop(tokens, self.stop_tokens)
        ends = t.accepting[jnp.where(kind == 0, states, to)]
        to = jnp.where(stops, jnp.where(ends & (states != DEAD), FREE, DEAD), to)
        return jnp.where(tokens < 0, FREE, to)

    def along(self, tree: DraftTree) -> Array:
        """i32[B, N]: the state after each node of a tree; DEAD from a token on that may not follow."""
        if tree.is_chain:
            states = [self.state[:, None]]
            for i in range(1, tree.tokens.shape[1]):
                states.append(self.moved(states[-1], tree.tokens[:, i : i + 1]))
            return jnp.concatenate(states, axis=1)
        states = jnp.broadcast_to(self.state[:, None], tree.tokens.shape)
        parents = jnp.maximum(tree.parents, 0)
        for depth in range(1, tree.max_depth + 1):
            states = jnp.where(tree.depths == depth, self.moved(pick(states, parents), tree.tokens), states)
        return states

    def words(self, states: Array) -> Array:
        """u32[B, P, W]: the tokens that may follow in states i32[B, P], stop tokens among them."""
        words = self.tables.bits[self.tables.rows[states]]
        width = words.shape[-1]
        place = jnp.arange(width, dtype=jnp.int32)[None, None]
        for stop, may in self._stops(states):
            here = (place == stop % width) & (stop >= 0)
            bit = jnp.uint32(1) << (jnp.maximum(stop, 0) // width).astype(jnp.uint32)
            words = jnp.where(here, jnp.where(may, words | bit, words & ~bit), words)
        return words

    def _stops(self, states: Array) -> Iterator[tuple[Array, Array]]:
        """Each stop token i32[B, 1, 1], and whether it may follow in states i32[B, P]: bool[B, P, 1]."""
        for m in range(self.stop_tokens.shape[1]):
            stop = self.stop_tokens[:, m, None]
            may = self.moved(states, jnp.broadcast_to(stop, states.shape)) != DEAD
            yield stop[..., None], may[..., None]

    def masked(self, logits: Array, states: Array, *, ids: Callable[[], Array] | None = None) -> Array:
        """Logits f32[B, P, V] in states i32[B, P], -inf where a token may not follow.

        Args:
          logits: of the target's vocabulary, or f32[B, P, U] of a draft's own.
          states: DEAD masks nothing, as nothing reads what follows it.
          ids: gives the target's tokens i32[U] of that vocabulary. Without `Tables.narrow` the bits of each are picked
            one by one, at every level of a draft.
        """
        if ids is not None and (narrow := self.tables.narrow) is not None:
            may_follow = _unpacked(narrow.bits[self.tables.rows[states]])[..., : logits.shape[-1]]
            for stop, may in self._stops(states):
                may_follow = jnp.where((narrow.ids[None, None] == stop) & (stop >= 0), may, may_follow)
            return jnp.where(may_follow, logits, -jnp.inf)
        words = self.words(states)
        if ids is not None:
            return jnp.where(_unpacked(words)[..., ids()], logits, -jnp.inf)
        axes = vocabulary_axes(logits.shape[-1])
        if not axes:
            return lax.platform_dependent(words, logits, cpu=_kept_by_words, default=_kept)

        def local(part: Array, words: Array) -> Array:
            size = part.shape[-1]
            first = lax.axis_index(axes) * size
            return jnp.where(lax.dynamic_slice_in_dim(_unpacked(words), first, size, axis=-1), part, -jnp.inf)

        spec = P(None, None, axes)
        return map_devices(local, (spec, P()), spec)(logits, words)

    def forced(self, states: Array) -> Array:
        """i32[B, P]: the token that says what must follow, or NO_TOKEN."""
        return self.tables.forced[states]

    def steered(self, tree: DraftTree, *, fill: bool) -> DraftTree:
        """A draft without the nodes that may not follow; they and what is under them become padding.

        A sampled draft stays as it is: the masked target gives such a node the probability 0, and a rule that knows q
        refuses it as it does any other, which is lossless; to take it out would not be.

        Args:
          tree: as drafted.
          fill: put in what is forced, instead of what was drafted; for chains of a drafter that keeps no state.
        """
        if tree.draft_logits is not None:
            return tree
        if not tree.is_chain:
            return dataclasses.replace(
                tree, tokens=jnp.where(self.along(tree) == DEAD, NO_TOKEN, tree.tokens)
            )
        state, going = self.state[:, None], jnp.ones_like(self.state[:, None], bool)
        drafted = going
        made = [tree.tokens[:, :1]]
        for i in range(1, tree.tokens.shape[1]):
            token = tree.tokens[:, i : i + 1]
            if fill:
                must = jnp.where(going, self.forced(state), NO_TOKEN)
                # After another token than the drafted one, what was drafted further on follows nothing.
                drafted &= (must < 0) | (token == must)
                token = jnp.where(must >= 0, must, jnp.where(drafted, token, NO_TOKEN))
            to = self.moved(state, token)
            going &= (token >= 0) & (to != DEAD)
            state = jnp.where(going, to, FREE)
            made.append(jnp.where(going, token, NO_TOKEN))
        tokens = jnp.concatenate(made, axis=1)
        trusted = None if tree.trusted is None else tree.trusted & (tokens == tree.tokens)
        return dataclasses.replace(tree, tokens=tokens, trusted=trusted)

    def on(self, tree: DraftTree) -> Followed:
        """The guide at the nodes of a tree."""
        return Followed(self, self.along(tree))


class Followed(NamedTuple):
    """A guide at the nodes of a tree."""

    guide: Guide
    states: Array  # i32[B, N]; see `Guide.along`

    def masked(self, logits: Array) -> Array:
        """f32[B, N, V], -inf where a token may not follow."""
        return self.guide.masked(logits, self.states)

    @property
    def strict(self) -> Array:
        """bool[B, N]: rules relax nothing below these nodes."""
        return self.guide.tables.strict[self.states]

    def after(self, verdict: Verdict) -> Array:
        """i32[B]: the state after what a step accepted, and the token after that."""
        return self.guide.moved(pick(self.states, verdict.path[:, -1:]), verdict.next_token[:, None])[:, 0]

    def ended(self, verdict: Verdict) -> Array:
        """bool[B]: after what a step accepted nothing may follow, and no stop token is there to say so."""
        closed = self.guide.tables.closed[pick(self.states, verdict.path[:, -1:])[:, 0]]
        return closed & jnp.all(self.guide.stop_tokens < 0, axis=1)


def _bits(words: Array) -> Array:
    """bool[..., 32, W] of words u32[..., W]."""
    shift = jnp.arange(BITS, dtype=jnp.uint32).reshape((1,) * (words.ndim - 1) + (BITS, 1))
    return ((words[..., None, :] >> shift) & jnp.uint32(1)) != 0


def _unpacked(words: Array) -> Array:
    """bool[..., 32 W] of words u32[..., W]."""
    return _bits(words).reshape(*words.shape[:-1], -1)


def _kept(words: Array, logits: Array) -> Array:
    """Logits f32[..., V], -inf where the bit of words u32[..., W] is 0."""
    return jnp.where(_unpacked(words)[..., : logits.shape[-1]], logits, -jnp.inf)


def _kept_by_words(words: Array, logits: Array) -> Array:
    """The same, with the logits seen as 32 stretches of W: on a CPU a loop without an index to work out."""
    if logits.shape[-1] != BITS * words.shape[-1]:
        return _kept(words, logits)
    parts = logits.reshape(*words.shape[:-1], BITS, words.shape[-1])
    return jnp.where(_bits(words), parts, -jnp.inf).reshape(logits.shape)


@jax.jit
def narrowed(tables: Tables, ids: Array) -> Tables:
    """Tables that hold the bits of a draft's own vocabulary too, whose tokens i32[U] are the target's `ids`.

    A draft level then reads a row, where without them it picks U bits one by one, which a TPU does badly.
    """
    width = -(-ids.shape[0] // BITS)
    place = jnp.arange(BITS, dtype=jnp.uint32)[:, None]

    def of_row(words: Array) -> Array:
        own = jnp.pad(_unpacked(words)[ids], (0, BITS * width - ids.shape[0])).reshape(BITS, width)
        return jnp.sum(own.astype(jnp.uint32) << place, axis=0, dtype=jnp.uint32)

    return dataclasses.replace(tables, narrow=Narrow(ids=ids, bits=lax.map(of_row, tables.bits)))


def guide_of(what: str, params: Params, state: DecodeState) -> Guide | None:
    """The guide "constraint" or "span" of a step; None where no row asks for one.

    Raises:
      MarsError: rows have one, and there are no tables for it.
    """
    rows = getattr(state.controls.guides, what, None)
    if rows is None:
        return None
    tables = getattr(params.guides, what, None)
    if tables is None:
        raise MarsError(
            f"the rows have a {what} and Params.guides has no tables of it: give those that constraints.compiled made."
        )
    stops = state.controls.stop_tokens
    # A span says nothing of what ends a text.
    stops = stops if what == "constraint" else jnp.full_like(stops[:, :1], NO_TOKEN)
    return Guide(tables=tables, group=rows.group, state=getattr(state.guides, what), stop_tokens=stops)


def first_states(controls: Controls) -> Guides | None:
    """The states of rows that begin, each in an array of its own."""

    def begun(rows: Tracked | None) -> Array | None:
        return None if rows is None else jnp.copy(rows.start)

    guides = controls.guides
    return None if guides is None else Guides(constraint=begun(guides.constraint), span=begun(guides.span))
