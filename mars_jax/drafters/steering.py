"""Steering of a draft by a constraint: each level is drafted from what may follow, and q is that of what is left.

B batch, W nodes of a level, k children of each, U draft vocabulary, V target vocabulary. Oracle: the masked target's
distribution by enumeration (tests/core/test_guide.py).

A sampled draft is masked before it is drawn and renormalised by that, so that its q is true: to take nodes out after
the draw would not be lossless.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from kernels_pallas import TopK
from mars_jax.core.guide import DEAD, Guide
from mars_jax.core.sampling import argmax
from mars_jax.core.types import NO_TOKEN


class Steering(NamedTuple):
    """A constraint as a drafter heeds it; without a guide it changes nothing, and nothing of it is compiled."""

    growth: Any  # the drafter: to_target and widen, as `grow.Growth` has them
    sample: bool
    guide: Guide | None

    @property
    def first(self) -> Array | None:
        """i32[B, 1]: the states of the committed text."""
        return None if self.guide is None else self.guide.state[:, None]

    def moved(self, states: Array | None, tokens: Array) -> Array | None:
        """i32[B, W * k]: the states of W nodes after the children of each, tokens i32[B, W * k]."""
        if self.guide is None or states is None:
            return None
        repeats = tokens.shape[1] // states.shape[1]
        return self.guide.moved(jnp.repeat(states, repeats, axis=1), tokens)

    def logits(self, logits: Array, states: Array | None) -> Array:
        """Logits f32[B, W, U] of what may follow W nodes; those of a sampled draft are f32[B, W, V].

        A sampled draft that can say nothing of what may follow draws from all of that alike.
        """
        wide = self.growth.widen(logits) if self.sample else logits
        if self.guide is None or states is None:
            return wide
        count = wide.shape[-1]
        ids = lambda: self.growth.to_target(jnp.arange(count, dtype=jnp.int32))  # noqa: E731
        # A draft model may have another tokenizer and as many tokens; then the tables are `narrowed` for it.
        own = not self.sample and (count != self.guide.vocab or self.guide.tables.narrow is not None)
        made = self.guide.masked(wide, states, ids=ids if own else None)
        if not self.sample:
            return made
        nothing = jnp.max(made, axis=-1, keepdims=True) == -jnp.inf
        return jnp.where(nothing, self.guide.masked(jnp.zeros_like(wide), states), made)

    def judged(self, plain: Array, logits: Array) -> Array:
        """By what a drafter tells how sure it is: its own logits, or what a constraint leaves of them."""
        return plain if self.guide is None else logits

    def tokens(self, best: Array, states: Array | None) -> Array:
        """i32[B, W, k] of the target's vocabulary: the best tokens of a greedy draft, those that may not follow as
        padding. Where it has none, its vocabulary being smaller, what is forced is first."""
        ids = self.growth.to_target(best)
        if self.guide is None or states is None:
            return ids
        # By the table, which is whole on every device, and not by their logits, which a mesh divides.
        to = self.moved(states, ids.reshape(*ids.shape[:1], -1))
        assert to is not None
        ids = jnp.where(to.reshape(ids.shape) != DEAD, ids, NO_TOKEN)
        return ids.at[..., 0].set(jnp.where(ids[..., 0] >= 0, ids[..., 0], self.guide.forced(states)))

    def best(self, logits: Array, states: Array | None) -> Array:
        """i32[B, W]: the best token alone, as `tokens`."""
        if self.guide is None:
            return self.growth.to_target(argmax(logits))
        return self.tokens(argmax(logits)[..., None], states)[..., 0]

    def only_allowed(self, log_q: Array, best: TopK, states: Array | None) -> Array:
        """f32[B, W, k]: log-probabilities of a greedy draft's best tokens, -inf of those that may not follow; where
        there are no others, what is forced is certain."""
        if self.guide is None or states is None:
            return log_q
        made = jnp.where(best.values > -jnp.inf, log_q, -jnp.inf)
        certain = (best.values[..., 0] == -jnp.inf) & (self.guide.forced(states) >= 0)
        return made.at[..., 0].set(jnp.where(certain, 0.0, made[..., 0]))
