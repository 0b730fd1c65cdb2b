"""Drafting under an output constraint: each level is drafted from the allowed tokens, and q is renormalised over them.

B batch, W nodes per level, k children per node, U draft vocabulary, V target vocabulary. Tested against the
distribution of the masked target, computed by enumeration (tests/core/test_guide.py).

For a sampled draft, the logits are masked before tokens are drawn, so that q is the distribution they were drawn from.
Removing forbidden nodes afterwards would not be lossless.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from mars_jax.core.guide import DEAD, Guide
from mars_jax.core.sampling import TopKEntries, argmax
from mars_jax.core.types import NO_TOKEN


class Steering(NamedTuple):
    """The constraint to apply while drafting. Without a guide, its methods constrain nothing."""

    growth: Any  # the drafter's `grow.Growth`; only `to_target` and `widen` are used
    sample: bool
    guide: Guide | None

    @property
    def first(self) -> Array | None:
        """The automaton states i32[B, 1] after the committed tokens."""
        return None if self.guide is None else self.guide.state[:, None]

    def moved(self, states: Array | None, tokens: Array) -> Array | None:
        """Return the automaton states i32[B, W * k] after `tokens` i32[B, W * k], the k children of each of W nodes."""
        if self.guide is None or states is None:
            return None
        num_children = tokens.shape[1] // states.shape[1]
        return self.guide.moved(jnp.repeat(states, num_children, axis=1), tokens)

    def logits(self, logits: Array, states: Array | None) -> Array:
        """Set the logits of forbidden tokens to -inf. The result is f32[B, W, U], or f32[B, W, V] for a sampled draft.

        If the drafter assigns probability 0 to all allowed tokens in a sampled draft, q is uniform over the allowed
        tokens.
        """
        if self.sample:
            logits = self.growth.widen(logits)
        if self.guide is None or states is None:
            return logits
        vocab = logits.shape[-1]

        def token_ids() -> Array:
            return self.growth.to_target(jnp.arange(vocab, dtype=jnp.int32))

        # The mask needs target token ids if the drafter's vocabulary has a different size or belongs to a different
        # tokenizer. For a different tokenizer, `guide.narrowed` has set `tables.narrow`.
        narrowed = not self.sample and (vocab != self.guide.vocab or self.guide.tables.narrow is not None)
        masked_logits = self.guide.masked(logits, states, ids=token_ids if narrowed else None)
        if not self.sample:
            return masked_logits
        # bool[B, W, 1]: q has no mass on allowed tokens. All-zero logits, once masked, give a uniform q over those
        # tokens.
        none_allowed = jnp.max(masked_logits, axis=-1, keepdims=True) == -jnp.inf
        return jnp.where(none_allowed, self.guide.masked(jnp.zeros_like(logits), states), masked_logits)

    def confidence_logits(self, raw_logits: Array, logits: Array) -> Array:
        """Return the logits that decide whether drafting stops early: the constrained ones if there is a guide."""
        return raw_logits if self.guide is None else logits

    def tokens(self, best: Array, states: Array | None) -> Array:
        """Convert the best tokens of a greedy draft to target token ids i32[B, W, k], padded with NO_TOKEN.

        Forbidden tokens become padding. A small draft vocabulary may contain no allowed token. If the constraint then
        forces a single token, that token becomes the first.
        """
        ids = self.growth.to_target(best)
        if self.guide is None or states is None:
            return ids
        # Look up forbidden tokens in the constraint's table, which is replicated, and not in the logits, which a mesh
        # shards.
        next_states = self.moved(states, ids.reshape(*ids.shape[:1], -1))
        assert next_states is not None
        ids = jnp.where(next_states.reshape(ids.shape) != DEAD, ids, NO_TOKEN)
        return ids.at[..., 0].set(jnp.where(ids[..., 0] >= 0, ids[..., 0], self.guide.forced(states)))

    def best(self, logits: Array, states: Array | None) -> Array:
        """Return the best token of each node, i32[B, W], after the replacements that `tokens` makes."""
        if self.guide is None:
            return self.growth.to_target(argmax(logits))
        return self.tokens(argmax(logits)[..., None], states)[..., 0]

    def only_allowed(self, log_q: Array, best: TopKEntries, states: Array | None) -> Array:
        """Set the log-probabilities f32[B, W, k] of a greedy draft's best tokens to -inf where a token is forbidden.

        If all of them are forbidden and the constraint forces a token, `tokens` puts that token first, and its
        log-probability becomes 0.
        """
        if self.guide is None or states is None:
            return log_q
        # `best` was computed from masked logits, so the values of forbidden tokens are -inf.
        allowed_log_q = jnp.where(best.values > -jnp.inf, log_q, -jnp.inf)
        is_forced = (best.values[..., 0] == -jnp.inf) & (self.guide.forced(states) >= 0)
        return allowed_log_q.at[..., 0].set(jnp.where(is_forced, 0.0, allowed_log_q[..., 0]))
