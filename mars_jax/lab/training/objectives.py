"""Divergences of a drafter's distribution from its target's. B rows, L tokens of a row, V vocabulary."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from mars_jax.core.errors import MarsError


def forward_kl(target_logits: Array, draft_logits: Array) -> Array:
    """Return KL(target || draft) in nats, f32[B, L], for logits f32[B, L, V] (DistillSpec 2310.08461)."""
    p, log_p = jax.nn.softmax(target_logits), jax.nn.log_softmax(target_logits)
    return jnp.sum(p * (log_p - jax.nn.log_softmax(draft_logits)), axis=-1)


def reverse_kl(target_logits: Array, draft_logits: Array) -> Array:
    """Return KL(draft || target) in nats, f32[B, L], for logits f32[B, L, V] (MiniLLM 2306.08543)."""
    return forward_kl(draft_logits, target_logits)


def total_variation(target_logits: Array, draft_logits: Array) -> Array:
    """Return TV(target, draft) in [0, 1], f32[B, L]: one minus the probability that rejection accepts the draft.

    Source: arXiv 2211.17192, theorem 3.5.

    >>> tv = total_variation(jnp.zeros((1, 1, 2)), jnp.asarray([[[jnp.log(3.0), 0.0]]]))
    >>> round(tv.item(), 5)
    0.25
    """
    return 0.5 * jnp.sum(jnp.abs(jax.nn.softmax(target_logits) - jax.nn.softmax(draft_logits)), axis=-1)


Divergence = Callable[[Array, Array], Array]
"""(target logits, draft logits) f32[B, L, V] -> f32[B, L]."""

DIVERGENCES: dict[str, Divergence] = {"kl": forward_kl, "reverse_kl": reverse_kl, "tv": total_variation}


def divergence(names: str) -> Divergence:
    """Return a sum of divergences from names joined with `+`, such as `kl+tv` or `kl+0.5*tv`.

    Raises:
      MarsError: an unknown name, or a weight that is not a positive number.

    >>> z = jnp.zeros((1, 1, 2)), jnp.asarray([[[jnp.log(3.0), 0.0]]])
    >>> round((divergence("kl+2*tv")(*z) - divergence("kl")(*z)).item(), 5)
    0.5
    """
    parts: list[tuple[float, Divergence]] = []
    for part in names.split("+"):
        weight, star, name = part.strip().rpartition("*")
        try:
            factor = float(weight) if star else 1.0
        except ValueError:
            factor = 0.0
        if name.strip() not in DIVERGENCES or not 0 < factor < float("inf"):
            raise MarsError(
                f"the loss '{names}' is not known: expected one or more of {', '.join(DIVERGENCES)}, such as kl+tv or "
                "kl+0.5*tv."
            )
        parts.append((factor, DIVERGENCES[name.strip()]))

    def total(target_logits: Array, draft_logits: Array) -> Array:
        return sum((w * f(target_logits, draft_logits) for w, f in parts), start=jnp.float32(0))  # pyright: ignore

    return total
