"""A small head that says how much of the target a mixture of target and draft is to have at a position.

E hidden size of the target, F of the draft, W width, V vocabulary. Source: DIVERSED, arXiv 2604.07622, whose head reads
the hidden states of both models; this one reads both entropies and the distance of the two distributions as well.
Oracles: the formula, in tests/contrib/test_diversed.py; held-out rewards, in
scripts/results/eval_systems.json of commit 5336526.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from mars_jax.core.types import PyTree

WIDTH = 64
START = 2.0
"""Log odds before any training: the target has 88% of the mixture."""


def init_params(hidden_size: int, key: Array, *, width: int = WIDTH, draft_hidden_size: int = 0) -> PyTree:
    """Make random params, float32: one hidden layer on what both models know, and three signals straight to the output.

    Args:
      hidden_size: E.
      key: of the draws.
      width: W.
      draft_hidden_size: F; 0: the head does not read the draft's hidden states, and any drafter goes with it.

    >>> {name: leaf.shape for name, leaf in init_params(8, jax.random.key(0), width=4, draft_hidden_size=6).items()}
    {'inner': (4, 8), 'outer': (4,), 'signals': (3,), 'bias': (), 'drafted': (4, 6)}
    """
    made = {
        "inner": jax.random.normal(key, (width, hidden_size)) * hidden_size**-0.5,
        "outer": jnp.zeros((width,)),
        "signals": jnp.zeros((3,)),
        "bias": jnp.full((), START),
    }
    if draft_hidden_size:
        of_draft = jax.random.normal(jax.random.fold_in(key, 1), (width, draft_hidden_size))
        made["drafted"] = of_draft * draft_hidden_size**-0.5
    return made


def logit(params: PyTree, hidden: Array, log_p: Array, log_q: Array, drafted: Array | None = None) -> Array:
    """Return log odds f32[...] of the target's weight.

    Args:
      params: from `init_params`.
      hidden: [..., E]; of the target, after its final norm.
      log_p, log_q: f32[..., V]; normalised, of target and draft; -inf for what cannot be drawn.
      drafted: [..., F]; of the draft, after its final norm; where the params read it.

    >>> params = init_params(8, jax.random.key(0))
    >>> p = jax.nn.log_softmax(jnp.ones((3, 5)))
    >>> [round(float(x), 2) for x in logit(params, jnp.ones((3, 8)), p, p)]
    [2.0, 2.0, 2.0]
    """
    inner = _read(hidden, params["inner"])
    if "drafted" in params:
        assert drafted is not None, "the head reads the draft's hidden states"
        inner += _read(drafted, params["drafted"])
    inner = jax.nn.gelu(inner)
    p, q = jnp.exp(log_p), jnp.exp(log_q)
    signals = jnp.stack(
        [_entropy(p, log_p), _entropy(q, log_q), 0.5 * jnp.sum(jnp.abs(p - q), axis=-1)], axis=-1
    )
    direct = jnp.einsum("...s,s->...", signals, params["signals"])
    return jnp.einsum("...w,w->...", inner, params["outer"]) + direct + params["bias"]


def _read(hidden: Array, matrix: Array) -> Array:
    """Return f32[..., W] of hidden states [..., E], whose scale says nothing."""
    x = hidden.astype(jnp.float32)
    x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)
    return jnp.einsum("...e,we->...w", x, matrix)


def _entropy(p: Array, log_p: Array) -> Array:
    """Return the entropy f32[...], in nats."""
    return -jnp.sum(jnp.where(p > 0, p * jnp.where(p > 0, log_p, 0.0), 0.0), axis=-1)
