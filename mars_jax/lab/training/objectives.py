"""Divergences of a drafter's distribution from its target's, and functions that the losses of several heads use.

B rows, L tokens per row, V vocabulary, W draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from mars_jax.core.types import PyTree
from mars_jax.utils.errors import MarsError

FADE = 0.8
"""Weight of a draft token relative to the previous one (the EAGLE-3 and Medusa recipes)."""


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
"""Maps (target logits, draft logits), both f32[B, L, V], to f32[B, L]."""

DIVERGENCES: dict[str, Divergence] = {"kl": forward_kl, "reverse_kl": reverse_kl, "tv": total_variation}


def divergence(names: str) -> Divergence:
    """Return the sum of divergences named in a string such as `kl+tv` or `kl+0.5*tv`.

    Raises:
      MarsError: a name is unknown, or a weight is not a positive number.

    >>> z = jnp.zeros((1, 1, 2)), jnp.asarray([[[jnp.log(3.0), 0.0]]])
    >>> round((divergence("kl+2*tv")(*z) - divergence("kl")(*z)).item(), 5)
    0.5
    """
    # Pairs of (weight, divergence), the terms of the sum.
    weighted_terms: list[tuple[float, Divergence]] = []
    for part in names.split("+"):
        weight_text, star, name = part.strip().rpartition("*")
        try:
            factor = float(weight_text) if star else 1.0
        except ValueError:
            factor = 0.0
        if name.strip() not in DIVERGENCES or not 0 < factor < float("inf"):
            raise MarsError(
                f"the loss '{names}' is not known: expected one or more of {', '.join(DIVERGENCES)}, such as kl+tv or "
                "kl+0.5*tv."
            )
        weighted_terms.append((factor, DIVERGENCES[name.strip()]))

    def total(target_logits: Array, draft_logits: Array) -> Array:
        return sum((w * f(target_logits, draft_logits) for w, f in weighted_terms), start=jnp.float32(0))  # pyright: ignore

    return total


def cast(params: PyTree, dtype: DTypeLike, ids: Array | None = None) -> PyTree:
    """Cast float32 params to the dtype of the computation, and add the draft vocabulary i32[W] if there is one."""
    return with_ids(jax.tree.map(lambda x: x.astype(dtype), params), ids)


def with_ids(params: PyTree, ids: Array | None) -> PyTree:
    """Add the draft vocabulary i32[W], which is not trained, to the params; do nothing if there is none."""
    if ids is None:
        return params
    return {**params, "ids": ids}


def select(values: Array, ids: Array | None, axis: int = -1) -> Array:
    """Select the tokens of the draft vocabulary i32[W], if there is one, along an axis of size V."""
    if ids is None:
        return values
    return jnp.take(values, ids, axis=axis)


def masked_mean(values: Array, valid: Array, axis: tuple[int, ...] | None = None) -> Array:
    """Return the mean of the valid values over some axes, by default all; 0 if no value is valid."""
    valid_sum = jnp.sum(jnp.where(valid, values, 0.0), axis=axis)
    return valid_sum / jnp.maximum(jnp.sum(valid, axis=axis, dtype=jnp.float32), 1.0)


def chain_mean(values: Iterable[Array], fade: float = FADE) -> Array:
    """Return the weighted mean of the values of a chain, one f32[] per token. Token j has weight fade**j.

    >>> round(chain_mean([jnp.float32(1.0), jnp.float32(4.0)], fade=0.5).item(), 5)
    2.0
    """
    weighted_values = [fade**j * value for j, value in enumerate(values)]
    return sum(weighted_values, jnp.float32(0)) / sum(fade**j for j in range(len(weighted_values)))


def chain_figures(losses: Iterable[Array], accepted: Iterable[Array]) -> dict[str, Array]:
    """Return a chain's metrics for the log: the loss and the share of accepted drafts at each position."""
    figures = {f"loss_{j}": loss for j, loss in enumerate(losses, start=1)}
    return figures | {f"accept_{j}": share for j, share in enumerate(accepted, start=1)}
