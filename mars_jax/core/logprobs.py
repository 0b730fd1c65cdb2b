"""Log-probabilities of the tokens that a step emits, under the target.

Oracle: teacher forcing by transformers (tests/serve). B batch, P nodes of a path, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from mars_jax.core.mesh import over_vocabulary
from mars_jax.core.sampling import at_tokens, divisor, process
from mars_jax.core.sums import total
from mars_jax.core.types import Controls


class LogProbs(NamedTuple):
    """Three log-probabilities in nats, f32[B, P] each; see `types.StepInfo`."""

    log_prob: Array
    temperature_log_prob: Array
    processed_log_prob: Array


def log_probs(logits: Array, tokens: Array, controls: Controls, lossless: bool) -> LogProbs:
    """Compute the three log-probabilities of one token at each node.

    Args:
      logits: f32[B, P, V]; raw target logits.
      tokens: i32[B, P]; negative ids count as token 0.
      controls: of the rows.
      lossless: whether the rule is lossless. If not, `processed_log_prob` is NaN except in strict rows.

    >>> from mars_jax.core.controls import make_controls
    >>> z = jnp.log(jnp.asarray([[[0.5, 0.25, 0.25]]]))
    >>> controls = make_controls(1, limit=8, temperature=1.0, top_k=1)
    >>> [round(float(x[0, 0]), 4) for x in log_probs(z, jnp.asarray([[0]]), controls, True)]
    [-0.6931, -0.6931, 0.0]
    """
    z = logits.astype(jnp.float32)
    nodes = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    tokens = jnp.maximum(tokens, 0)

    def of_token(z: Array) -> Array:
        top = jnp.max(z, axis=-1)
        # Sum each shard locally, then join them with one psum: halving a sharded vocabulary would exchange its halves
        # between devices that may run different numbers of steps.
        sums = over_vocabulary(
            lambda axes, part: jax.lax.psum(total(part), axes), total, jnp.exp(z - top[..., None])
        )
        return at_tokens(z, nodes, tokens) - top - jnp.log(sums)

    # Shifting before dividing keeps a small temperature from turning the largest logit into inf.
    scaled = (z - jnp.max(z, axis=-1, keepdims=True)) / divisor(controls)[:, None, None]
    processed = of_token(process(z, controls))
    if not lossless:
        processed = jnp.where(controls.strict[:, None], processed, jnp.nan)
    return LogProbs(of_token(z), of_token(scaled), processed)


def entropy(logits: Array) -> Array:
    """Compute the entropy of softmax(logits) in nats: [..., V] -> f32[...].

    >>> round(float(entropy(jnp.zeros((4,)))), 4)
    1.3863
    """
    log_p = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    return -jnp.sum(jnp.where(jnp.isfinite(log_p), jnp.exp(log_p) * log_p, 0.0), axis=-1)
