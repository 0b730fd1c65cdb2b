"""Constrained drafting: each level is drafted from the allowed tokens, and q is renormalised over them.

B batch, W nodes per level, k children per node, U draft vocabulary, V target vocabulary. Oracle: the masked target's
distribution by enumeration (tests/core/test_guide.py).

The logits of a sampled draft are masked before the draw, so that q is the distribution that the draft was drawn from.
Removing nodes after the draw would not be lossless.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from mars_jax.core.guide import DEAD, Guide
from mars_jax.core.sampling import TopKEntries, argmax
from mars_jax.core.types import NO_TOKEN


class Steering(NamedTuple):
    """A constraint applied to a draft. Without a guide it is the identity and adds nothing to the program."""

    growth: Any  # the drafter's `grow.Growth`, for its `to_target` and `widen`
    sample: bool
    guide: Guide | None

    @property
    def first(self) -> Array | None:
        """The states i32[B, 1] after the committed tokens."""
        return None if self.guide is None else self.guide.state[:, None]

    def moved(self, states: Array | None, tokens: Array) -> Array | None:
        """Return the states i32[B, W * k] after `tokens` i32[B, W * k], the k children of each of W nodes."""
        if self.guide is None or states is None:
            return None
        num_children = tokens.shape[1] // states.shape[1]
        return self.guide.moved(jnp.repeat(states, num_children, axis=1), tokens)

    def logits(self, logits: Array, states: Array | None) -> Array:
        """Return the logits f32[B, W, U] of W nodes with forbidden tokens at -inf; f32[B, W, V] for a sampled draft.

        If a sampled draft gives no probability to any allowed token, its q is uniform over the allowed tokens.
        """
        if self.sample:
            logits = self.growth.widen(logits)
        if self.guide is None or states is None:
            return logits
        vocab = logits.shape[-1]

        def token_ids() -> Array:
            return self.growth.to_target(jnp.arange(vocab, dtype=jnp.int32))

        # The mask needs token ids if the draft vocabulary has a different size. It also needs them for a vocabulary of
        # the same size from a different tokenizer, for which `guide.narrowed` has set `tables.narrow`.
        narrowed = not self.sample and (vocab != self.guide.vocab or self.guide.tables.narrow is not None)
        masked_logits = self.guide.masked(logits, states, ids=token_ids if narrowed else None)
        if not self.sample:
            return masked_logits
        # bool[B, W, 1]: q has no mass on allowed tokens. Masked zeros are the logits of a uniform q over those tokens.
        none_allowed = jnp.max(masked_logits, axis=-1, keepdims=True) == -jnp.inf
        return jnp.where(none_allowed, self.guide.masked(jnp.zeros_like(logits), states), masked_logits)

    def confidence_logits(self, raw_logits: Array, logits: Array) -> Array:
        """Return the logits that decide whether a drafter stops: its own, or under a guide the constrained ones."""
        return raw_logits if self.guide is None else logits

    def tokens(self, best: Array, states: Array | None) -> Array:
        """Return the best tokens of a greedy draft, i32[B, W, k] in the target's vocabulary, padded with NO_TOKEN.

        Forbidden tokens become padding. A smaller draft vocabulary may contain no allowed token; the first token is
        then the one that the constraint forces, if any.
        """
        ids = self.growth.to_target(best)
        if self.guide is None or states is None:
            return ids
        # Read the table, which is replicated on every device, and not the logits, which are sharded on a mesh.
        next_states = self.moved(states, ids.reshape(*ids.shape[:1], -1))
        assert next_states is not None
        ids = jnp.where(next_states.reshape(ids.shape) != DEAD, ids, NO_TOKEN)
        return ids.at[..., 0].set(jnp.where(ids[..., 0] >= 0, ids[..., 0], self.guide.forced(states)))

    def best(self, logits: Array, states: Array | None) -> Array:
        """Return the best token of each node, i32[B, W], with the replacements that `tokens` makes."""
        if self.guide is None:
            return self.growth.to_target(argmax(logits))
        return self.tokens(argmax(logits)[..., None], states)[..., 0]

    def only_allowed(self, log_q: Array, best: TopKEntries, states: Array | None) -> Array:
        """Return the log-probabilities f32[B, W, k] of a greedy draft's best tokens, -inf for forbidden ones.

        If all are forbidden and the constraint forces a token, `tokens` puts it first, and its log-probability is 0.
        """
        if self.guide is None or states is None:
            return log_q
        # The values are from `logits`, so forbidden tokens have -inf.
        allowed_log_q = jnp.where(best.values > -jnp.inf, log_q, -jnp.inf)
        is_forced = (best.values[..., 0] == -jnp.inf) & (self.guide.forced(states) >= 0)
        return allowed_log_q.at[..., 0].set(jnp.where(is_forced, 0.0, allowed_log_q[..., 0]))
