"""Objectives of training: next-token cross entropy, and the divergence of a draft from its target.

B rows, L tokens of a row, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from mars_jax.core.errors import MarsError
from mars_jax.core.types import ForwardOutput, LanguageModel, PyTree, Visible


def document_mask(segments: Array) -> Array:
    """bool[B, L, L]: a token sees itself and what comes before it in its own document, for segments i32[B, L].

    >>> document_mask(jnp.asarray([[0, 0, 1]]))[0].astype(int).tolist()
    [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
    """
    length = segments.shape[1]
    causal = jnp.tril(jnp.ones((length, length), bool))[None]
    return causal & (segments[:, :, None] == segments[:, None, :])


def predict(model: LanguageModel, params: PyTree, tokens: Array, segments: Array) -> Array:
    """Logits f32[B, L, V] for tokens and segments i32[B, L]: row j is the distribution of token j + 1."""
    return model.unembed(params, read(model, params, tokens, segments).hidden)


def read(model: LanguageModel, params: PyTree, tokens: Array, segments: Array) -> ForwardOutput:
    """The output of a model for tokens i32[B, L], each of which sees those of its segment i32[B, L] before it."""
    return model.forward(params, tokens, in_documents(segments), model.init_cache(*tokens.shape))


def in_documents(segments: Array) -> Visible:
    """Attention of texts without a cache: a token sees those before it in its own document, by segments i32[B, L]."""
    batch, length = segments.shape
    visible = Visible.causal(jnp.zeros((batch,), jnp.int32), length)
    return dataclasses.replace(visible, seen=document_mask(segments))


def cross_entropy(logits: Array, labels: Array) -> Array:
    """-log softmax(logits)[label] in nats, f32[B, L], for logits f32[B, L, V] and labels i32[B, L]."""
    # A comparison and a sum instead of a gather, whose derivative would be a scatter.
    ids = jnp.arange(logits.shape[-1], dtype=labels.dtype)[None, None]
    picked = jnp.sum(jnp.where(labels[..., None] == ids, logits, 0.0), axis=-1)
    return jax.nn.logsumexp(logits, axis=-1) - picked


def forward_kl(target_logits: Array, draft_logits: Array) -> Array:
    """KL(target || draft) in nats, f32[B, L], for logits f32[B, L, V] (arXiv 1503.02531; DistillSpec 2310.08461)."""
    p, log_p = jax.nn.softmax(target_logits), jax.nn.log_softmax(target_logits)
    return jnp.sum(p * (log_p - jax.nn.log_softmax(draft_logits)), axis=-1)


def reverse_kl(target_logits: Array, draft_logits: Array) -> Array:
    """KL(draft || target) in nats, f32[B, L], for logits f32[B, L, V] (DistillSpec 2310.08461; MiniLLM 2306.08543)."""
    return forward_kl(draft_logits, target_logits)


def total_variation(target_logits: Array, draft_logits: Array) -> Array:
    """TV(target, draft) in [0, 1], f32[B, L]: one minus the chance that rejection sampling accepts the draft.

    Source: arXiv 2211.17192, theorem 3.5.

    >>> tv = total_variation(jnp.zeros((1, 1, 2)), jnp.asarray([[[jnp.log(3.0), 0.0]]]))
    >>> round(tv.item(), 5)
    0.25
    """
    return 0.5 * jnp.sum(jnp.abs(jax.nn.softmax(target_logits) - jax.nn.softmax(draft_logits)), axis=-1)


Divergence = Callable[[Array, Array], Array]
"""(target logits, draft logits) f32[B, L, V] -> f32[B, L]."""

DIVERGENCES: dict[str, Divergence] = {"kl": forward_kl, "reverse_kl": reverse_kl, "tv": total_variation}
"""By name."""


def divergence(names: str) -> Divergence:
    """The sum of divergences, by names joined with `+`, such as `kl+tv`; a number and `*` before a name is its weight.

    Raises:
      MarsError: unknown name, or a weight that is no positive number.

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
