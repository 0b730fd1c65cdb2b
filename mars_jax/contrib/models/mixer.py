"""A small head that predicts, at each position, the target's weight in a mixture of target and draft.

E hidden size of the target, F of the draft, W width, V vocabulary. Source: DIVERSED, arXiv 2604.07622, whose head takes
the hidden states of both models as input. This head also uses the entropies of both distributions and their total
variation distance. Tested against the formula, in tests/contrib/test_diversed.py; held-out rewards are in
scripts/results/eval_systems.json of commit 5336526.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from mars_jax.core.types import PyTree

WIDTH = 64
START = 2.0
"""Initial log odds, which correspond to a target weight of 88%."""


def init_params(hidden_size: int, key: Array, *, width: int = WIDTH, draft_hidden_size: int = 0) -> PyTree:
    """Initialise random float32 params: a hidden layer on the hidden states, and a linear term for three signals.

    Args:
      hidden_size: E, hidden size of the target.
      key: random key.
      width: W, width of the hidden layer.
      draft_hidden_size: F, hidden size of the draft. If it is 0, the head does not use the draft's hidden states and
        works with any drafter.

    >>> {name: leaf.shape for name, leaf in init_params(8, jax.random.key(0), width=4, draft_hidden_size=6).items()}
    {'inner': (4, 8), 'outer': (4,), 'signals': (3,), 'bias': (), 'drafted': (4, 6)}
    """
    params = {
        "inner": jax.random.normal(key, (width, hidden_size)) * hidden_size**-0.5,
        "outer": jnp.zeros((width,)),
        "signals": jnp.zeros((3,)),
        "bias": jnp.full((), START),
    }
    if draft_hidden_size:
        draft_matrix = jax.random.normal(jax.random.fold_in(key, 1), (width, draft_hidden_size))
        params["drafted"] = draft_matrix * draft_hidden_size**-0.5
    return params


def weight_log_odds(
    params: PyTree, hidden: Array, log_p: Array, log_q: Array, drafted: Array | None = None
) -> Array:
    """Return the log odds f32[...] of the target's weight in the mixture.

    Args:
      params: params of the head.
      hidden: [..., E]; the target's hidden states after its final norm.
      log_p, log_q: f32[..., V]; normalised log-probabilities of target and draft; -inf for excluded tokens.
      drafted: [..., F]; the draft's hidden states after its final norm; needed only if the head uses them.

    >>> params = init_params(8, jax.random.key(0))
    >>> p = jax.nn.log_softmax(jnp.ones((3, 5)))
    >>> [round(float(x), 2) for x in weight_log_odds(params, jnp.ones((3, 8)), p, p)]
    [2.0, 2.0, 2.0]
    """
    activations = project(hidden, params["inner"])
    if "drafted" in params:
        assert drafted is not None, "the head reads the draft's hidden states"
        activations += project(drafted, params["drafted"])
    activations = jax.nn.gelu(activations)
    p, q = jnp.exp(log_p), jnp.exp(log_q)
    # The three signals: the entropies of p and q, and their total variation distance.
    signals = jnp.stack(
        [_entropy(p, log_p), _entropy(q, log_q), 0.5 * jnp.sum(jnp.abs(p - q), axis=-1)], axis=-1
    )
    signal_term = jnp.einsum("...s,s->...", signals, params["signals"])
    return jnp.einsum("...w,w->...", activations, params["outer"]) + signal_term + params["bias"]


def project(hidden: Array, matrix: Array) -> Array:
    """Normalise hidden states [..., E] to unit RMS and project them to f32[..., W]."""
    x = hidden.astype(jnp.float32)
    x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)
    return jnp.einsum("...e,we->...w", x, matrix)


def _entropy(p: Array, log_p: Array) -> Array:
    """Return the entropy f32[...] of a distribution, in nats."""
    return -jnp.sum(jnp.where(p > 0, p * jnp.where(p > 0, log_p, 0.0), 0.0), axis=-1)
