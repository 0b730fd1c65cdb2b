"""Token automata on the device, for constraints on the output and for spans that limit relaxed acceptance.

A constraint masks the target's logits at every node before the rule reads them. Every rule therefore respects the
constraint, and a lossless rule samples from the masked target distribution. A span marks the nodes at which a lossy
rule must be strict.

Dimensions: B batch, N nodes, P entries per row, S states, C token classes, G groups, R bit rows, W words per bit row, V
vocabulary, U draft vocabulary, M stop tokens. Tested against transformers with a masking logits processor, and against
enumeration (tests/core/test_guide.py).

All constraints of a batch share one set of tables. Each row of the batch has a state and a group, which selects its map
from tokens to classes. In state 0 (FREE) every token is allowed; in state 1 (DEAD) no token is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from mars_jax.core import struct
from mars_jax.core.axes import map_devices, vocabulary_axes
from mars_jax.core.controls import is_stop
from mars_jax.core.pick import pick
from mars_jax.core.types import (
    NO_TOKEN,
    Controls,
    DecodeState,
    DraftTree,
    GuideStates,
    Narrow,
    Params,
    Tables,
    Verdict,
)
from mars_jax.utils.errors import MarsError

FREE, DEAD = 0, 1
BITS = 32
"""Bits per word. Bit k of word j represents token k W + j, so shifting all words by k unpacks W consecutive tokens."""


@struct.dataclass(kw_only=True)
class Guide:
    """The automata of a batch, and the current state of each row."""

    tables: Tables
    group: Array  # i32[B]; row of `Tables.classes`
    state: Array  # i32[B]; the state after the last committed token
    stop_tokens: Array  # i32[B, M]; stop tokens, which accepting states allow and which lead to FREE

    @property
    def vocab(self) -> int:
        """V, the size of the target's vocabulary."""
        return self.tables.classes.shape[1]

    def moved(self, states: Array, tokens: Array) -> Array:
        """Return the automaton states, i32[B, P], after reading `tokens` i32[B, P] in `states` i32[B, P].

        A forbidden token leads to DEAD. Padding (NO_TOKEN) leads to FREE, because no token after it is used.
        """
        tables = self.tables
        # Padding uses the class of token 0 here; its next state is replaced at the end.
        token_class = tables.classes.at[self.group[:, None], jnp.maximum(tokens, 0)].get(mode="clip")
        transitions = tables.next.at[states, token_class.astype(jnp.int32)]
        next_states = transitions.get(mode="promise_in_bounds").astype(jnp.int32)
        is_stop_token = is_stop(tokens, self.stop_tokens)
        # A stop token without text (class 0) leaves the state unchanged. Any other stop token first advances the state
        # by its text.
        may_end = tables.accepting[jnp.where(token_class == 0, states, next_states)]
        next_states = jnp.where(is_stop_token, jnp.where(may_end & (states != DEAD), FREE, DEAD), next_states)
        return jnp.where(tokens < 0, FREE, next_states)

    def along(self, tree: DraftTree) -> Array:
        """Return the state after each node of a tree, i32[B, N]; DEAD from a path's first forbidden token onwards."""
        if tree.is_chain:
            # In a chain, node i follows node i - 1, so each state is computed from the previous one.
            states = [self.state[:, None]]
            for i in range(1, tree.tokens.shape[1]):
                states.append(self.moved(states[-1], tree.tokens[:, i : i + 1]))
            return jnp.concatenate(states, axis=1)
        states = jnp.broadcast_to(self.state[:, None], tree.tokens.shape)
        parents = jnp.maximum(tree.parents, 0)
        # Compute the states level by level, from the states of the parents.
        for depth in range(1, tree.max_depth + 1):
            states = jnp.where(tree.depths == depth, self.moved(pick(states, parents), tree.tokens), states)
        return states

    def words(self, states: Array) -> Array:
        """Return bit masks u32[B, P, W] of the tokens that are allowed in states i32[B, P], including stop tokens."""
        # States that allow the same tokens share a row of bits.
        words = self.tables.bits[self.tables.rows[states]]
        num_words = words.shape[-1]
        word_index = jnp.arange(num_words, dtype=jnp.int32)[None, None]
        for stop_token, is_allowed in self._stops(states):
            # Token t is bit t // W of word t % W. Rows with different stop tokens share the tables, so set or clear the
            # bits of a row's stop tokens here.
            is_stop_word = (word_index == stop_token % num_words) & (stop_token >= 0)
            bit = jnp.uint32(1) << (jnp.maximum(stop_token, 0) // num_words).astype(jnp.uint32)
            words = jnp.where(is_stop_word, jnp.where(is_allowed, words | bit, words & ~bit), words)
        return words

    def _stops(self, states: Array) -> Iterator[tuple[Array, Array]]:
        """Yield each stop token i32[B, 1, 1] and whether it is allowed in states i32[B, P], as bool[B, P, 1]."""
        for m in range(self.stop_tokens.shape[1]):
            stop = self.stop_tokens[:, m, None]
            is_allowed = self.moved(states, jnp.broadcast_to(stop, states.shape)) != DEAD
            yield stop[..., None], is_allowed[..., None]

    def masked(self, logits: Array, states: Array, *, ids: Callable[[], Array] | None = None) -> Array:
        """Set to -inf the logits f32[B, P, V] of tokens that are forbidden in states i32[B, P].

        Args:
          logits: logits over the target's vocabulary, or f32[B, P, U] over a draft vocabulary.
          states: automaton states. Nothing is masked in state DEAD, because logits below a dead node are never read.
          ids: function that returns the target's token id of every draft token, i32[U]. `ids` is called only if
            `Tables.narrow` is not set; every draft level then gathers U single bits.
        """
        # Use the bit rows for the draft vocabulary if the tables contain them.
        if ids is not None and (narrow := self.tables.narrow) is not None:
            may_follow = _unpacked(narrow.bits[self.tables.rows[states]])[..., : logits.shape[-1]]
            for stop, is_allowed in self._stops(states):
                is_stop_token = (narrow.ids[None, None] == stop) & (stop >= 0)
                may_follow = jnp.where(is_stop_token, is_allowed, may_follow)
            return jnp.where(may_follow, logits, -jnp.inf)
        words = self.words(states)
        if ids is not None:
            return jnp.where(_unpacked(words)[..., ids()], logits, -jnp.inf)
        axes = vocabulary_axes(logits.shape[-1])
        if not axes:
            return lax.platform_dependent(words, logits, cpu=_mask_by_words, default=_mask)

        def local(part: Array, words: Array) -> Array:
            # Each device unpacks all bits and masks its own shard of the vocabulary.
            size = part.shape[-1]
            first = lax.axis_index(axes) * size
            return jnp.where(lax.dynamic_slice_in_dim(_unpacked(words), first, size, axis=-1), part, -jnp.inf)

        logits_spec = P(None, None, axes)
        return map_devices(local, (logits_spec, P()), logits_spec)(logits, words)

    def forced(self, states: Array) -> Array:
        """Return the first token of the text that must follow each state, i32[B, P], or NO_TOKEN."""
        return self.tables.forced[states]

    def steered(self, tree: DraftTree, *, fill: bool) -> DraftTree:
        """Replace the forbidden nodes of a draft, and all nodes below them, with padding.

        A sampled draft stays unchanged, because removing a node would change its distribution q. The masked target
        assigns probability 0 to a forbidden node, so a rule that uses q rejects the node and stays lossless.

        Args:
          tree: the draft.
          fill: replace drafted tokens with forced tokens. Use this only for chains of stateless drafters, because the
            cache of a drafter does not contain tokens that it did not draft.
        """
        if tree.draft_logits is not None:
            return tree
        # All nodes below a forbidden node are DEAD as well, so a test of each node's state removes whole subtrees.
        if not tree.is_chain:
            return dataclasses.replace(
                tree, tokens=jnp.where(self.along(tree) == DEAD, NO_TOKEN, tree.tokens)
            )
        # Update two values along the chain: the state after the previous token, i32[B, 1], and whether all previous
        # tokens are valid, bool[B, 1].
        state, is_valid = self.state[:, None], jnp.ones_like(self.state[:, None], bool)
        follows_draft = is_valid
        columns = [tree.tokens[:, :1]]
        for i in range(1, tree.tokens.shape[1]):
            token = tree.tokens[:, i : i + 1]
            if fill:
                forced = jnp.where(is_valid, self.forced(state), NO_TOKEN)
                # Once a forced token differs from the drafted one, the remaining drafted tokens no longer fit their
                # context.
                follows_draft &= (forced < 0) | (token == forced)
                token = jnp.where(forced >= 0, forced, jnp.where(follows_draft, token, NO_TOKEN))
            next_state = self.moved(state, token)
            is_valid &= (token >= 0) & (next_state != DEAD)
            # Padding has the state FREE, and all nodes below it are padding as well.
            state = jnp.where(is_valid, next_state, FREE)
            columns.append(jnp.where(is_valid, token, NO_TOKEN))
        tokens = jnp.concatenate(columns, axis=1)
        # A forced token is not trusted, because the drafter did not draft it.
        trusted = None if tree.trusted is None else tree.trusted & (tokens == tree.tokens)
        return dataclasses.replace(tree, tokens=tokens, trusted=trusted)

    def on(self, tree: DraftTree) -> Followed:
        """Advance the automata along the paths of a draft tree."""
        return Followed(self, self.along(tree))


class Followed(NamedTuple):
    """A guide with its states at every node of a draft tree."""

    guide: Guide
    states: Array  # i32[B, N]; see `Guide.along`

    def masked(self, logits: Array) -> Array:
        """Set to -inf the logits f32[B, N, V] of forbidden tokens."""
        return self.guide.masked(logits, self.states)

    @property
    def strict(self) -> Array:
        """bool[B, N], True if rules must not relax the acceptance of the node's children."""
        return self.guide.tables.strict[self.states]

    def after(self, verdict: Verdict) -> Array:
        """Return the state of each row after the accepted path and `next_token`, i32[B]."""
        return self.guide.moved(pick(self.states, verdict.path[:, -1:]), verdict.next_token[:, None])[:, 0]

    def ended(self, verdict: Verdict) -> Array:
        """Return bool[B], True if no token may follow a row's accepted path, not even a stop token."""
        is_closed = self.guide.tables.closed[pick(self.states, verdict.path[:, -1:])[:, 0]]
        return is_closed & jnp.all(self.guide.stop_tokens < 0, axis=1)


def _bits(words: Array) -> Array:
    """Unpack the bits of words u32[..., W] into bool[..., 32, W]."""
    shift = jnp.arange(BITS, dtype=jnp.uint32).reshape((1,) * (words.ndim - 1) + (BITS, 1))
    return ((words[..., None, :] >> shift) & jnp.uint32(1)) != 0


def _unpacked(words: Array) -> Array:
    """Unpack the bits of words u32[..., W] into bool[..., 32 W], in the order of token ids."""
    return _bits(words).reshape(*words.shape[:-1], -1)


def _mask(words: Array, logits: Array) -> Array:
    """Set to -inf those logits f32[..., V] whose bit in `words` u32[..., W] is 0."""
    return jnp.where(_unpacked(words)[..., : logits.shape[-1]], logits, -jnp.inf)


def _mask_by_words(words: Array, logits: Array) -> Array:
    """Compute `_mask` with logits reshaped to [..., 32, W], so that a CPU needs no index arithmetic in its loops."""
    if logits.shape[-1] != BITS * words.shape[-1]:
        return _mask(words, logits)
    logits_by_word = logits.reshape(*words.shape[:-1], BITS, words.shape[-1])
    return jnp.where(_bits(words), logits_by_word, -jnp.inf).reshape(logits.shape)


@jax.jit
def narrowed(tables: Tables, ids: Array) -> Tables:
    """Add bit masks for a draft vocabulary to the tables; `ids` i32[U] holds the target's token id of each draft token.

    Each draft level can then read one row of bits, instead of gathering U single bits, which is slow on a TPU.
    """
    num_words = (ids.shape[0] + BITS - 1) // BITS
    shift = jnp.arange(BITS, dtype=jnp.uint32)[:, None]

    def of_row(words: Array) -> Array:
        # As described at `BITS`, bit k of word j represents draft token k W + j, so row k of the reshaped array
        # contains bit k of every word.
        bits = jnp.pad(_unpacked(words)[ids], (0, BITS * num_words - ids.shape[0])).reshape(BITS, num_words)
        return jnp.sum(bits.astype(jnp.uint32) << shift, axis=0, dtype=jnp.uint32)

    return dataclasses.replace(tables, narrow=Narrow(ids=ids, bits=lax.map(of_row, tables.bits)))


def guide_of(kind: str, params: Params, state: DecodeState) -> Guide | None:
    """Return the guide of the given kind ("constraint" or "span") for one step; None if no row has one.

    Raises:
      MarsError: some rows have such a guide, but `params` contains no tables for it.
    """
    rows = getattr(state.controls.guides, kind, None)
    if rows is None:
        return None
    tables = getattr(params.guides, kind, None)
    if tables is None:
        raise MarsError(
            f"the rows have a {kind} and Params.guides has no tables for it: give those that constraints.compiled "
            "returns."
        )
    stop_tokens = state.controls.stop_tokens
    # A span does not restrict stop tokens.
    if kind == "span":
        stop_tokens = jnp.full_like(stop_tokens[:, :1], NO_TOKEN)
    return Guide(tables=tables, group=rows.group, state=getattr(state.guides, kind), stop_tokens=stop_tokens)


def first_states(controls: Controls) -> GuideStates | None:
    """Return the initial automaton states of new rows, as copies that share no buffer with the controls."""
    guides = controls.guides
    if guides is None:
        return None
    return GuideStates(
        constraint=guides.constraint and jnp.copy(guides.constraint.start),
        span=guides.span and jnp.copy(guides.span.start),
    )
