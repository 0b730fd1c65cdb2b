"""A drafter whose drafts a proxy vouches for: the target is asked where the proxy is unsure.

Sources: TriSpec 2601.23180, VIA-SD 2606.12243. B batch, K tokens of an inner draft, M of the whole one, T token buffer,
V vocabulary.
Oracle: the same loop in Python, model by model from empty caches (tests/contrib/test_cascade.py).

The invariants: the inner drafter's own, as of a row of the trusted length; and the proxy's cache is valid in
`[0, length - 1)`, as a target's is. So every token that can be committed without another round is one that was fed.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from mars_jax.contrib.drafters.gates import GATES
from mars_jax.core.controls import is_stop
from mars_jax.core.drafter import STOPS, TRUSTS, Drafter, DraftInput
from mars_jax.core.errors import MarsError, check_count
from mars_jax.core.limits import DRAFT_TOKENS
from mars_jax.core.prefill import caught_up, chunk_of, prefill
from mars_jax.core.sampling import is_greedy
from mars_jax.core.tree import chain, last_token
from mars_jax.core.types import NO_TOKEN, DraftTree, LanguageModel, Params, PyTree, Visible


class CascadeParams(NamedTuple):
    """`Params.draft` of a cascade."""

    inner: PyTree  # weights of the inner drafter
    proxy: PyTree  # weights of the proxy
    # What the gate reads, see `gates`: of "margin" the least difference of probabilities, f32[]; of "ratio" (accept,
    # escalate). Values, so that changing them compiles nothing.
    gate: Any = np.float32(0.5)


def cascade(
    inner: Drafter, proxy: LanguageModel, num_draft_tokens: int = 24, *, gate: str = "margin"
) -> Drafter:
    """Draft with `inner`, let a proxy verify, and ask the target where the proxy is unsure: TriSpec (arXiv 2601.23180)
    with the gate "margin" and a small model as proxy, VIA-SD (arXiv 2606.12243) with the gate "ratio" and the target
    itself without some of its layers, `LanguageModel.with_layers`.

    In each round the proxy reads the inner draft x. Let t_a be the first place where the gate puts the proxy's own
    token a for x, and t_m the first where it is unsure; see `gates`. If t_a < t_m, x before t_a and a stand without a
    word of the target, and another round follows. Else x before t_m stands, and the target verifies the rest. A draft
    that is full ends too. What stands is *trusted*: taken without a test, and known by its kind in `StepInfo`, beside
    what the target thinks of it (regret).

    Lossy by design under every rule. Rows above temperature 0, strict rows, and a rule's `exact_prefix` trust
    nothing, so they get what the rule gives for the inner draft; so does every row where the gate's number is above
    1. A stop token is never trusted, nor one that the request forbids: the target verifies it. Biases and penalties of
    a request are not the proxy's, and trusted tokens know nothing of them. Where rows wait for others they repeat
    their last round, so that their tokens are those that they would have alone.

    Args:
      inner: drafts chains without sampling, from the tokens alone: `language_model(...)` or `ngram(...)`.
      proxy: a model between drafter and target, of the same vocabulary.
      num_draft_tokens: M, the most tokens of a step, trusted ones included; at least K + 1.
      gate: "margin" or "ratio"; its numbers are `CascadeParams.gate`.

    Raises:
      MarsError: another kind of inner drafter, another vocabulary, no room for a round, or an unknown gate.

    >>> from mars_jax.core.fake import hash_model
    >>> from mars_jax.drafters import ngram
    >>> cascade(ngram(4), hash_model(vocab_size=11), 16).num_nodes
    17
    """
    if inner.reads is not None:
        raise MarsError(
            f"the drafter '{inner.name}' reads the target's layers, of which a cascade has none while it drafts: draft "
            "with a model or with n-grams."
        )
    if inner.num_nodes != inner.max_depth + 1 or inner.max_depth < 1:
        raise MarsError(f"the drafter '{inner.name}' drafts no chain: give a cascade a drafter of chains.")
    if inner.vocab_size is not None and inner.vocab_size != proxy.vocab_size:
        raise MarsError(
            f"the drafter '{inner.name}' has a vocabulary of {inner.vocab_size} tokens and the proxy one of "
            f"{proxy.vocab_size}: use models that share a tokenizer."
        )
    check_count("num_draft_tokens", num_draft_tokens, most=DRAFT_TOKENS)
    if num_draft_tokens < inner.max_depth + 1:
        raise MarsError(
            f"num_draft_tokens is {num_draft_tokens}: a round of '{inner.name}' can give {inner.max_depth + 1} tokens; "
            "ask for at least as many."
        )
    if gate not in GATES:
        raise MarsError(f"gate is {gate!r}: expected one of {', '.join(GATES)}.")
    return _cascade(inner, proxy, num_draft_tokens, gate)


class CascadeState(NamedTuple):
    """State of a cascade between two steps."""

    inner: PyTree  # of the inner drafter
    cache: PyTree  # the proxy's own
    rounds: Array  # i32[B]; forwards of the proxy that were a row's own, since it began


class _Round(NamedTuple):
    """The draft as it grows; [B, ...] each."""

    tokens: Array  # i32[B, T + M]; committed, then what is trusted
    begin: Array  # i32[B]; tokens that were trusted before the last round
    trusted: Array  # i32[B]; and after it
    drafted: Array  # i32[B, M]; the draft: what is trusted, then what is not
    waits: Array  # bool[B]; for the target
    state: CascadeState


@functools.lru_cache
def _cascade(inner: Drafter, proxy: LanguageModel, most: int, gate: str) -> Drafter:
    k, judge = inner.max_depth, GATES[gate].judge

    def inner_params(params: Params) -> Params:
        return Params(target=params.target, draft=params.draft.inner)

    def widened(tokens: Array) -> Array:
        # Trusted tokens may reach past the buffer, where nothing is emitted.
        return jnp.pad(tokens, ((0, 0), (0, most)))

    def init(params: Params, tokens: Array, length: Array) -> CascadeState:
        tokens = widened(tokens)
        cache = proxy.init_cache(tokens.shape[0], tokens.shape[1] + k + 1)
        cache, _ = prefill(proxy, params.draft.proxy, tokens, jnp.zeros_like(length), length - 1, cache)
        return CascadeState(inner.init(inner_params(params), tokens, length), cache, jnp.zeros_like(length))

    def catch_up(
        params: Params, state: CascadeState, tokens: Array, cached: Array, length: Array
    ) -> CascadeState:
        tokens = widened(tokens)
        chunk = proxy.prefill_chunk or chunk_of()
        cache, _ = prefill(proxy, params.draft.proxy, tokens, cached, length - 1, state.cache, chunk=chunk)
        draft = caught_up(inner, inner_params(params), state.inner, tokens, cached, length)
        return CascadeState(draft, cache, jnp.zeros_like(length))

    def propose(params: Params, state: CascadeState, given: DraftInput) -> tuple[DraftTree, CascadeState]:
        controls, batch = given.controls, given.tokens.shape[0]
        may_trust = is_greedy(controls) & ~controls.strict
        place = jnp.arange(k + 1, dtype=jnp.int32)[None]

        def play(at: _Round) -> _Round:
            length = given.length + at.begin
            asked = DraftInput(keys=given.keys, tokens=at.tokens, length=length, controls=controls)
            tree, draft = inner.propose(inner_params(params), at.state.inner, asked)
            if not tree.is_chain or tree.draft_logits is not None:
                raise MarsError(
                    f"the drafter '{inner.name}' samples: give a cascade a drafter that does not."
                )
            output = proxy.forward(
                params.draft.proxy, tree.tokens, Visible.causal(length - 1, k + 1), at.state.cache
            )
            logits = proxy.unembed(params.draft.proxy, output.hidden)
            x = jnp.concatenate([tree.tokens[:, 1:], jnp.full((batch, 1), NO_TOKEN, jnp.int32)], axis=1)
            said = judge(logits, x, params.draft.gate)
            differs, unsure = _first(said.differs), _first(said.unsure)
            decided = (differs < unsure) & may_trust
            own = jnp.where(place < differs[:, None], x, said.own)  # what the proxy would say
            count = jnp.where(decided, differs + 1, jnp.where(may_trust, unsure, 0))
            stop = _first(is_stop(own, controls.stop_tokens))
            stopped = decided & (stop < count)
            # Without room for another round the proxy's own token, which no cache has seen, is left to the target.
            full = decided & ~stopped & (at.begin + count + k + 1 > most)
            count = jnp.where(full, count - 1, jnp.minimum(count, stop))
            rest = jnp.where(stopped[:, None], jnp.where(place <= differs[:, None], own, NO_TOKEN), x)
            # A row that goes on, or has no room, leaves nothing for the target to test.
            rest = jnp.where((decided & ~stopped)[:, None], NO_TOKEN, rest)
            new = jnp.where(place < count[:, None], own, rest)
            active = ~at.waits
            return _Round(
                tokens=_put(at.tokens, length, own, active[:, None] & (place < count[:, None])),
                begin=jnp.where(active & decided & ~stopped & ~full, at.begin + count, at.begin),
                trusted=jnp.where(active, at.begin + count, at.trusted),
                drafted=_put(at.drafted, at.begin, new, active[:, None] & jnp.ones_like(place, bool)),
                waits=at.waits | ~decided | stopped | full,
                state=CascadeState(draft, output.cache, at.state.rounds + active.astype(jnp.int32)),
            )

        none = jnp.zeros((batch,), jnp.int32)
        start = _Round(
            tokens=widened(given.tokens),
            begin=none,
            trusted=none,
            drafted=jnp.full((batch, most), NO_TOKEN, jnp.int32),
            waits=jnp.zeros((batch,), bool),
            state=state,
        )
        end = lax.while_loop(lambda at: ~jnp.all(at.waits), play, start)
        tree = chain(jnp.concatenate([last_token(given), end.drafted], axis=1))
        trusted = (tree.depths > 0) & (tree.depths <= end.trusted[:, None])
        return dataclasses.replace(tree, trusted=trusted), end.state

    return Drafter(
        init=init,
        propose=propose,
        update=lambda params, state, tree, verdict, output, length: state,
        num_nodes=most + 1,
        max_depth=most,
        vocab_size=proxy.vocab_size,
        traits=(TRUSTS, *(trait for trait in inner.traits if trait == STOPS)),
        catch_up=catch_up,
        name=f"cascade({inner.name}, {gate}, {most})",
    )


def _first(where: Array) -> Array:
    """Return i32[B]: the first place of bool[B, P]; P where there is none."""
    n = where.shape[1]
    return jnp.min(jnp.where(where, jnp.arange(n, dtype=jnp.int32)[None], n), axis=1)


def _put(values: Array, first: Array, new: Array, chosen: Array) -> Array:
    """Return values [B, M] with new [B, P] from place `first` i32[B] on, where chosen bool[B, P]."""
    place = first[:, None] + jnp.arange(new.shape[1], dtype=jnp.int32)[None]
    place = jnp.where(chosen, place, values.shape[1])
    return jax.vmap(lambda row, at, put: row.at[at].set(put, mode="drop"))(values, place, new)
