"""A cascade of verifiers: a proxy model verifies the draft, and the target verifies only where the proxy is unsure.

Sources: TriSpec 2601.23180, VIA-SD 2606.12243. B batch, K tokens per inner draft, M per full draft, P positions of a
round, T token buffer, V vocabulary.
Tested against the same loop in Python, which runs every model from an empty cache (tests/contrib/test_cascade.py).

Invariants: the inner drafter's invariant holds if trusted tokens are counted in a row's length. Slots `[0, length - 1)`
of the proxy's cache are valid, as in a target's cache. So every token that can be committed without another round has
already been fed to the proxy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from mars_jax.contrib.drafters.ahead import check_drafts_alone
from mars_jax.core.controls import is_stop
from mars_jax.core.drafter import Drafter, DraftInput
from mars_jax.core.given import check_draft_model
from mars_jax.core.prefill import chunk_of, prefill
from mars_jax.core.sampling import argmax, at_tokens, is_greedy, top_k_logits
from mars_jax.core.tree import chain, last_token
from mars_jax.core.types import NO_TOKEN, DraftTree, LanguageModel, Params, PyTree, Visible
from mars_jax.utils.errors import MarsError, check_count
from mars_jax.utils.limits import DRAFT_TOKENS


class ProxyVerdict(NamedTuple):
    """The verdict of a proxy at P positions; each field is [B, P]."""

    token: Array  # i32; the proxy's most probable token
    differs: Array  # bool; True if `token` replaces the drafted token or NO_TOKEN
    unsure: Array  # bool; True if the target must decide


def margin_gate(logits: Array, drafted: Array, least: ArrayLike) -> ProxyVerdict:
    """Apply TriSpec's gate (arXiv 2601.23180): the proxy is sure if its top two probabilities differ enough.

    `least` f32[] is the minimum difference. If it is above 1, the proxy is never sure.
    """
    top_two = top_k_logits(logits, 2)
    p = jnp.exp(top_two.values - top_two.logsumexp[..., None])
    best_token = argmax(logits)
    # The comparison is negated, so that the proxy is unsure if a probability is NaN.
    return ProxyVerdict(best_token, drafted != best_token, ~(p[..., 0] - p[..., 1] >= least))


def ratio_gate(logits: Array, drafted: Array, bounds: tuple[ArrayLike, ArrayLike]) -> ProxyVerdict:
    """Apply VIA-SD's gate (arXiv 2606.12243) to r = q'(x) / max q', for drafted tokens x and the slim verifier's q'.

    `bounds` are (accept, escalate), f32[] each. If r >= accept, x is accepted. If accept > r >= escalate, the slim
    verifier's best token replaces x. Otherwise the target decides; with `escalate` above 1, it always does. If x is
    padding, the verifier's best token is used, with r = 1. The published bounds (0.5, 0.3) leave the middle range
    nearly unused. Reimplementations use (0.6, 0.3), which is also the default in `system_files`.
    """
    accept, escalate = bounds
    best_token = argmax(logits)
    batch, num_positions = drafted.shape
    position_index = jnp.broadcast_to(jnp.arange(num_positions, dtype=jnp.int32), (batch, num_positions))
    judged_tokens = jnp.where(drafted == NO_TOKEN, best_token, drafted)
    r = jnp.exp(at_tokens(logits, position_index, judged_tokens) - jnp.max(logits, axis=-1))
    return ProxyVerdict(best_token, (drafted == NO_TOKEN) | ~(r >= accept), ~(r >= escalate))


GATES: Mapping[str, Callable[..., ProxyVerdict]] = {"margin": margin_gate, "ratio": ratio_gate}
"""Functions that decide for a proxy, keyed by name: (logits f32[B, P, V], drafted i32[B, P], thresholds) -> verdict."""


class CascadeParams(NamedTuple):
    """`Params.draft` of a cascade."""

    inner: PyTree  # weights of the inner drafter
    proxy: PyTree  # weights of the proxy
    # Thresholds of the gate: for "margin", the minimum difference between the proxy's top two probabilities, f32[]; for
    # "ratio", the pair (accept, escalate). They are arrays, so that changing them does not trigger recompilation.
    gate: PyTree = np.float32(0.5)


class CascadeState(NamedTuple):
    """Draft state of a cascade."""

    inner: PyTree  # state of the inner drafter
    cache: PyTree  # cache of the proxy
    rounds: Array  # i32[B]; number of rounds since the row started, not counting those in which it waited


class _Round(NamedTuple):
    """Loop carry: the growing draft; each array is [B, ...]."""

    tokens: Array  # i32[B, T + M]; committed tokens, followed by trusted ones
    begin: Array  # i32[B]; number of trusted tokens before the last round
    trusted: Array  # i32[B]; number of trusted tokens after the last round
    drafted: Array  # i32[B, M]; the draft: trusted tokens, followed by those that the target must verify
    waits: Array  # bool[B]; True if the row's draft is complete and waits for the target
    state: CascadeState


@dataclasses.dataclass(frozen=True)
class Cascade(Drafter):
    """A drafter with a proxy model that verifies its drafts and leaves only unsure decisions to the target.

    With the gate "margin" and a small model as proxy, this is TriSpec (arXiv 2601.23180). With the gate "ratio" and a
    proxy that consists of some of the target's layers (`LanguageModel.with_layers`), it is VIA-SD (arXiv 2606.12243).

    In each round, the inner drafter drafts tokens x, and the proxy scores them. Let t_a be the first position at which
    the gate replaces x with the proxy's token a, and t_m the first at which the proxy is unsure (see `GATES`). If t_a <
    t_m, the tokens of x before t_a and the token a are trusted, and another round follows unless the draft is full.
    Otherwise the tokens of x before t_m are trusted, and the target verifies the remaining ones. *Trusted* tokens are
    emitted without verification. `StepInfo` marks them by their kind and reports the target's regret for them.

    The drafter is lossy under every rule. No tokens are trusted in rows above temperature 0, in strict
    rows, or within a rule's `exact_prefix`; in these cases, the rule verifies the inner draft. The same holds for every
    row if the gate's threshold is above 1. Stop tokens and tokens that the request forbids are never trusted: the
    target verifies them. The proxy ignores a request's biases and penalties, so they do not affect trusted tokens. A
    row that waits for others repeats its last round, so its tokens do not depend on the batch.

    Raises:
      MarsError: the inner drafter does not draft greedy chains from the tokens alone, the vocabularies differ,
        `num_draft_tokens` is too small for a round, or the gate is unknown.

    >>> from mars_jax.core.fake import hash_model
    >>> from mars_jax.drafters import ngram
    >>> cascade(ngram(4), hash_model(vocab_size=11), 16).num_nodes
    17
    """

    inner: Drafter  # drafter of greedy chains that needs only the tokens, such as `language_model(...)` or `ngram(...)`
    proxy: LanguageModel  # model between the drafter and the target in size, with the same vocabulary
    num_draft_tokens: int = 24  # M, maximum number of tokens per step, trusted ones included; at least K + 1
    # "margin" or "ratio"; its thresholds are `CascadeParams.gate`.
    gate: str = dataclasses.field(default="margin", kw_only=True)

    trusts = True

    def __post_init__(self):
        inner, proxy, limit = self.inner, self.proxy, self.num_draft_tokens
        check_draft_model(proxy)
        check_drafts_alone(inner, 1)
        if inner.vocab_size is not None and inner.vocab_size != proxy.vocab_size:
            raise MarsError(
                f"the drafter '{inner.name}' has a vocabulary of {inner.vocab_size} tokens and the proxy one of "
                f"{proxy.vocab_size}: use models that share a tokenizer."
            )
        check_count("num_draft_tokens", limit, most=DRAFT_TOKENS)
        if limit < inner.max_depth + 1:
            raise MarsError(
                f"num_draft_tokens is {limit}: a round of '{inner.name}' can give {inner.max_depth + 1} tokens: set "
                "num_draft_tokens to at least that number."
            )
        if self.gate not in GATES:
            raise MarsError(f"gate is {self.gate!r}: expected one of {', '.join(GATES)}.")

    @property
    def max_depth(self) -> int:
        return self.num_draft_tokens

    @property
    def vocab_size(self) -> int:
        return self.proxy.vocab_size

    @property
    def stops(self) -> bool:
        return self.inner.stops

    @property
    def name(self) -> str:
        return f"cascade({self.inner.name}, {self.gate}, {self.num_draft_tokens})"

    def _widen(self, tokens: Array) -> Array:
        # Widen the buffer, because trusted tokens may extend past its end. Those past the end are never emitted.
        return jnp.pad(tokens, ((0, 0), (0, self.num_draft_tokens)))

    def init(self, params: Params, tokens: Array, length: Array) -> CascadeState:
        tokens = self._widen(tokens)
        cache = self.proxy.init_cache(tokens.shape[0], tokens.shape[1] + self.inner.max_depth + 1)
        cache, _ = prefill(self.proxy, params.draft.proxy, tokens, jnp.zeros_like(length), length - 1, cache)
        inner_state = self.inner.init(_inner_params(params), tokens, length)
        return CascadeState(inner_state, cache, jnp.zeros_like(length))

    def catch_up(
        self, params: Params, state: CascadeState, tokens: Array, cached: Array, length: Array
    ) -> CascadeState:
        tokens = self._widen(tokens)
        chunk_size = self.proxy.prefill_chunk or chunk_of()
        cache, _ = prefill(
            self.proxy, params.draft.proxy, tokens, cached, length - 1, state.cache, chunk=chunk_size
        )
        inner_state = self.inner.catch_up(_inner_params(params), state.inner, tokens, cached, length)
        return CascadeState(inner_state, cache, jnp.zeros_like(length))

    def propose(
        self, params: Params, state: CascadeState, inputs: DraftInput
    ) -> tuple[DraftTree, CascadeState]:
        inner, proxy, judge = self.inner, self.proxy, GATES[self.gate]
        k, limit, inner_params = inner.max_depth, self.num_draft_tokens, _inner_params(params)
        controls, batch = inputs.controls, inputs.tokens.shape[0]
        may_trust = is_greedy(controls) & ~controls.strict
        place = jnp.arange(k + 1, dtype=jnp.int32)[None]

        def play_round(carry: _Round) -> _Round:
            length = inputs.length + carry.begin
            draft_input = DraftInput(keys=inputs.keys, tokens=carry.tokens, length=length, controls=controls)
            tree, inner_state = inner.propose(inner_params, carry.state.inner, draft_input)
            if not tree.is_chain or tree.draft_logits is not None:
                raise MarsError(f"the drafter '{inner.name}' samples: give a cascade one that does not.")
            output = proxy.forward(
                params.draft.proxy, tree.tokens, Visible.causal(length - 1, k + 1), carry.state.cache
            )
            logits = proxy.unembed(params.draft.proxy, output.hidden)
            # `logits[:, i]` scores the drafted token x[:, i]. The last logits score no drafted token.
            x = jnp.concatenate([tree.tokens[:, 1:], jnp.full((batch, 1), NO_TOKEN, jnp.int32)], axis=1)
            verdict = judge(logits, x, params.draft.gate)
            # t_a, the first position at which the proxy's token replaces x, and t_m, the first at which the proxy is
            # unsure.
            replaced_at, unsure_at = _first(verdict.differs), _first(verdict.unsure)
            decides = (replaced_at < unsure_at) & may_trust
            # The draft as corrected by the proxy: x before the first correction, and the proxy's tokens from there on.
            proxy_tokens = jnp.where(place < replaced_at[:, None], x, verdict.token)
            num_new = jnp.where(decides, replaced_at + 1, jnp.where(may_trust, unsure_at, 0))
            stop_at = _first(is_stop(proxy_tokens, controls.stop_tokens))
            stops = decides & (stop_at < num_new)
            # If there is no room for another round, drop the proxy's own last token, which is in no cache. The target
            # then chooses the token at that position.
            out_of_room = decides & ~stops & (carry.begin + num_new + k + 1 > limit)
            num_new = jnp.where(out_of_room, num_new - 1, jnp.minimum(num_new, stop_at))
            # Trusted tokens end before a stop token, and the target then verifies the proxy's tokens from there on.
            # Otherwise, the target verifies x.
            target_draft = jnp.where(
                stops[:, None], jnp.where(place <= replaced_at[:, None], proxy_tokens, NO_TOKEN), x
            )
            # A row that continues with another round, or whose draft is full, has no tokens for the target to verify.
            target_draft = jnp.where((decides & ~stops)[:, None], NO_TOKEN, target_draft)
            row_draft = jnp.where(place < num_new[:, None], proxy_tokens, target_draft)
            active = ~carry.waits
            return _Round(
                tokens=_put(carry.tokens, length, proxy_tokens, active[:, None] & (place < num_new[:, None])),
                begin=jnp.where(active & decides & ~stops & ~out_of_room, carry.begin + num_new, carry.begin),
                trusted=jnp.where(active, carry.begin + num_new, carry.trusted),
                drafted=_put(
                    carry.drafted, carry.begin, row_draft, active[:, None] & jnp.ones_like(place, bool)
                ),
                waits=carry.waits | ~decides | stops | out_of_room,
                state=CascadeState(inner_state, output.cache, carry.state.rounds + active.astype(jnp.int32)),
            )

        zero_counts = jnp.zeros((batch,), jnp.int32)
        first_round = _Round(
            tokens=self._widen(inputs.tokens),
            begin=zero_counts,
            trusted=zero_counts,
            drafted=jnp.full((batch, limit), NO_TOKEN, jnp.int32),
            waits=jnp.zeros((batch,), bool),
            state=state,
        )
        last_round = lax.while_loop(lambda current: ~jnp.all(current.waits), play_round, first_round)
        tree = chain(jnp.concatenate([last_token(inputs), last_round.drafted], axis=1))
        is_trusted = (tree.depths > 0) & (tree.depths <= last_round.trusted[:, None])
        return dataclasses.replace(tree, trusted=is_trusted), last_round.state


cascade = Cascade


def _inner_params(params: Params) -> Params:
    return Params(target=params.target, draft=params.draft.inner)


def _first(mask: Array) -> Array:
    """Return the index i32[B] of the first True in mask bool[B, P]; P if there is none."""
    n = mask.shape[1]
    return jnp.min(jnp.where(mask, jnp.arange(n, dtype=jnp.int32)[None], n), axis=1)


def _put(values: Array, first: Array, new: Array, mask: Array) -> Array:
    """Write new [B, P] into values [B, M], starting at index `first` i32[B], but only where mask bool[B, P] is True."""
    write_indices = first[:, None] + jnp.arange(new.shape[1], dtype=jnp.int32)[None]
    write_indices = jnp.where(mask, write_indices, values.shape[1])
    return jax.vmap(lambda row, indices, updates: row.at[indices].set(updates, mode="drop"))(
        values, write_indices, new
    )
