"""A small model that drafts until a classifier rejects one of its tokens, which the target then verifies.

Source: SPRINTER 2502.04557. B batch, M tokens per draft, E hidden size of the small model, T token buffer. Tested
against the same loop in Python, starting from empty caches (tests/contrib/test_sprinter.py).

Invariant, as in `drafters.model`: slots `[0, length - 2)` of the KV cache are valid, because every trusted token has
been fed to the model.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from mars_jax.core.controls import is_stop
from mars_jax.core.drafter import Drafter, DraftInput
from mars_jax.core.given import check_draft_model
from mars_jax.core.prefill import chunk_of, prefill
from mars_jax.core.sampling import argmax, is_greedy, process, sample_processed
from mars_jax.core.tree import chain, last_token
from mars_jax.core.types import NO_TOKEN, DraftTree, LanguageModel, Params, PyTree, Visible
from mars_jax.drafters.model import feed_last
from mars_jax.utils.errors import check_count
from mars_jax.utils.limits import DRAFT_TOKENS


class SprinterParams(NamedTuple):
    """`Params.draft` of a `Sprinter` drafter."""

    model: PyTree  # weights of the small model
    weight: Array  # f32[E]; weight of the classifier, whose input is the hidden state at a drafted token
    bias: Array  # f32[]; bias of the classifier
    # f32[]; the target verifies tokens whose predicted probability of acceptance is below this threshold. If it is
    # above 1, the target verifies all tokens. It is an array, so that changing it does not trigger recompilation.
    threshold: ArrayLike = np.float32(0.5)


def chance(params: SprinterParams, hidden: Array) -> Array:
    """Return sigmoid(w . h + b), f32[...]: the probability that a token with hidden state h [..., E] is accepted."""
    log_odds = jnp.einsum("...e,e->...", hidden.astype(jnp.float32), params.weight) + params.bias
    return jax.nn.sigmoid(log_odds)


class _DraftCarry(NamedTuple):
    """Loop carry: the draft so far. Each row is at the current depth or has finished."""

    depth: Array  # i32[]; depth of the last drafted tokens
    last: Array  # i32[B, 1]; the last drafted tokens; NO_TOKEN in rows that have finished
    tokens: Array  # i32[B, M]
    trusted: Array  # i32[B]
    cache: PyTree
    drawn_from: Array  # f32[B, M + 1, V]; [B, 0, V] if the draft is greedy


@dataclasses.dataclass(frozen=True)
class Sprinter(Drafter):
    """A small model that drafts until a classifier rejects one of its tokens.

    Source: SPRINTER (arXiv 2502.04557). The tokens before the rejected one are *trusted*: they are emitted without
    verification. `StepInfo` marks them by their kind and reports the target's regret for them. The rule verifies the
    rejected token, and the target adds one token. If no token is rejected, the draft ends after `num_draft_tokens`, and
    the rule verifies the last token. The drafter is lossy under every rule, because trusted tokens follow the small
    model's distribution.

    No tokens are trusted in strict rows or within a rule's `exact_prefix`. If the threshold is above 1, no tokens are
    trusted at all, and each row drafts one token per step. Stop tokens and tokens that the request forbids are never
    trusted. Without `sample`, drafts are greedy, so no tokens are trusted in rows with a temperature above 0. Rows wait
    for the longest draft in the batch, but their tokens do not depend on it.

    Raises:
      MarsError: M is below 1 or above `DRAFT_TOKENS`.

    >>> from mars_jax.core.fake import hash_model
    >>> sprinter(hash_model(vocab_size=11)).num_nodes
    21
    """

    model: LanguageModel  # the small model, which must have the target's vocabulary
    num_draft_tokens: int = 20  # M, the maximum number of drafted tokens per step; 20 in the paper
    # Whether to sample the draft with the request's settings and pass its true q to the rule.
    sample: bool = dataclasses.field(default=False, kw_only=True)

    trusts = True

    def __post_init__(self):
        check_count("num_draft_tokens", self.num_draft_tokens, most=DRAFT_TOKENS)
        check_draft_model(self.model)

    @property
    def max_depth(self) -> int:
        return self.num_draft_tokens

    @property
    def vocab_size(self) -> int:
        return self.model.vocab_size

    @property
    def name(self) -> str:
        return f"sprinter({self.num_draft_tokens}{', sampled' if self.sample else ''})"

    def init(self, params: Params, tokens: Array, length: Array) -> PyTree:
        cache = self.model.init_cache(tokens.shape[0], tokens.shape[1] + self.num_draft_tokens + 2)
        return prefill(self.model, params.draft.model, tokens, jnp.zeros_like(length), length - 2, cache)[0]

    def catch_up(self, params: Params, state: PyTree, tokens: Array, cached: Array, length: Array) -> PyTree:
        chunk_size = self.model.prefill_chunk or chunk_of()
        return prefill(self.model, params.draft.model, tokens, cached, length - 2, state, chunk=chunk_size)[0]

    def propose(self, params: Params, state: PyTree, inputs: DraftInput) -> tuple[DraftTree, PyTree]:
        model_weights, controls, max_tokens = params.draft.model, inputs.controls, self.num_draft_tokens
        batch = inputs.tokens.shape[0]
        # Strict rows also draft until the classifier rejects a token, but the rule verifies all of their tokens.
        if self.sample:
            may_trust, num_recorded = jnp.ones((batch,), bool), max_tokens + 1
        else:
            # Greedy drafts do not record logits.
            may_trust, num_recorded = is_greedy(controls), 0

        def should_continue(run: _DraftCarry) -> Array:
            return (run.depth < max_tokens) & jnp.any(run.last != NO_TOKEN)

        def extend(run: _DraftCarry) -> _DraftCarry:
            visible = Visible.causal(inputs.length + run.depth - 1, 1)
            with jax.named_scope("level"):
                output = self.model.forward(model_weights, run.last, visible, run.cache)
                logits = self.model.unembed(model_weights, output.hidden)
            is_sure = chance(params.draft, output.hidden)[:, 0] >= params.draft.threshold
            is_stop_token = is_stop(run.last, controls.stop_tokens)[:, 0]
            is_trusted = (run.last[:, 0] != NO_TOKEN) & is_sure & ~is_stop_token & may_trust
            next_token, drawn_from = self._pick(inputs, logits, run.depth + 1)
            next_token = jnp.where(is_trusted[:, None], next_token, NO_TOKEN)
            return _DraftCarry(
                depth=run.depth + 1,
                last=next_token,
                tokens=_put(run.tokens, next_token, run.depth),
                trusted=run.trusted + is_trusted.astype(jnp.int32),
                cache=output.cache,
                drawn_from=_put(run.drawn_from, drawn_from, run.depth),
            )

        hidden, cache = feed_last(self.model, model_weights, state, inputs.tokens, inputs.length)
        logits = self.model.unembed(model_weights, hidden)
        next_token, drawn_from = self._pick(inputs, logits, jnp.int32(1))
        first_carry = _DraftCarry(
            depth=jnp.int32(1),
            last=next_token,
            tokens=_put(jnp.full((batch, max_tokens), NO_TOKEN, jnp.int32), next_token, jnp.int32(0)),
            trusted=jnp.zeros((batch,), jnp.int32),
            cache=cache,
            drawn_from=_put(
                jnp.zeros((batch, num_recorded, logits.shape[-1]), jnp.float32), drawn_from, jnp.int32(0)
            ),
        )
        last_carry = lax.while_loop(should_continue, extend, first_carry)
        tokens = jnp.concatenate([last_token(inputs), last_carry.tokens], axis=1)
        tree = chain(tokens, last_carry.drawn_from if self.sample else None)
        is_trusted = (tree.depths > 0) & (tree.depths <= last_carry.trusted[:, None])
        return dataclasses.replace(tree, trusted=is_trusted), last_carry.cache

    def _pick(self, inputs: DraftInput, logits: Array, depth: Array) -> tuple[Array, Array]:
        """Return the next token i32[B, 1], and the logits f32[B, 1, V] that it was drawn from."""
        if not self.sample:
            return argmax(logits), logits
        q_logits = process(logits, inputs.controls)
        depth_keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(inputs.keys, depth)
        return sample_processed(depth_keys, jnp.zeros((len(logits), 1), jnp.int32), q_logits), q_logits


sprinter = Sprinter


def _put(values: Array, entry: Array, index: Array) -> Array:
    """Write entry [B, 1, ...] into values [B, R, ...] at `index` i32[]; do nothing if R is 0."""
    return lax.dynamic_update_slice_in_dim(values, entry, index, axis=1) if values.shape[1] else values
