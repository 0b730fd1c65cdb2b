"""A small head that predicts whether accepting the runner-up would change a completion's outcome, and its training.

n examples, E hidden size, W width. `mars_jax.lab.training.loop.fit` trains the head, and `contrib.save` writes its
params. Tested against labels computed by a known function, in tests/contrib/test_indicator_training.py, and against
held-out completions, in scripts/results/eval_indicator.json of commit 2bb9d2d.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from mars_jax.contrib.models.mixer import project
from mars_jax.contrib.teaching import Training, binary_loss, shuffled
from mars_jax.core.types import PyTree

WIDTH = 64
WORST_GAP = 10.0
"""Value at which the gap is clipped, in nats. Larger gaps carry no more information."""


def init_params(hidden_size: int, key: Array, *, width: int = WIDTH) -> PyTree:
    """Initialise random float32 params: a hidden layer on the target's hidden state, and a linear term for the margin.

    >>> init_params(8, jax.random.key(0), width=4)["inner"].shape
    (4, 8)
    """
    inner_key, outer_key = jax.random.split(key)
    return {
        "inner": jax.random.normal(inner_key, (width, hidden_size)) * hidden_size**-0.5,
        "outer": jax.random.normal(outer_key, (width,)) * 0.1 * width**-0.5,
        "margin": jnp.zeros((2,)),
        "bias": jnp.zeros(()),
    }


def harm_log_odds(params: PyTree, hidden: Array, z1: Array, z2: Array) -> Array:
    """Return the log odds f32[...] that the outcome changes if the runner-up replaces the target's best token.

    Args:
      params: params of the head.
      hidden: [..., E]; the target's hidden states after its final norm.
      z1, z2: f32[...]; the target's two largest raw logits.

    >>> params = init_params(8, jax.random.key(0))
    >>> harm_log_odds(params, jnp.ones((3, 8)), jnp.ones((3,)), jnp.zeros((3,))).shape
    (3,)
    """
    activations = jax.nn.gelu(project(hidden, params["inner"]))
    # The two margins of `mars`: the gap z1 - z2, and the ratio z2 / z1, which is 0 unless z1 is positive.
    gap = jnp.minimum(z1 - z2, WORST_GAP)
    clipped_ratio = jnp.where(z1 > 0, jnp.clip(z2 / jnp.where(z1 > 0, z1, 1.0), 0.0, 1.0), 0.0)
    margin_term = params["margin"][0] * gap + params["margin"][1] * (1 - clipped_ratio)
    return jnp.einsum("...w,w->...", activations, params["outer"]) + margin_term + params["bias"]


class IndicatorExamples(NamedTuple):
    """Training examples: n positions at which the runner-up replaced the target's best token."""

    hidden: Any  # f32[n, E]; the target's final hidden state at the position
    z1: Any  # f32[n]; the largest raw logit
    z2: Any  # f32[n]; the second largest raw logit
    changed: Any  # f32[n]; 1 if the outcome of the completion changed


def indicator_head_training(
    examples: IndicatorExamples, optimizer: Any, *, steps: int = 1000, rows: int = 256, seed: int = 0
) -> Training:
    """Return the training setup that fits a head to the labels `changed` by binary cross entropy.

    Args:
      examples: training examples.
      optimizer: an optax optimizer, such as `mars_jax.lab.training.loop.muon(3e-3, steps)`.
      steps, rows: number of training steps, and number of examples per step.
      seed: seed that determines the initial params and the order of the examples.
    """

    def loss(params: PyTree, batch: IndicatorExamples, _: PyTree) -> tuple[Array, dict[str, Array]]:
        log_odds = harm_log_odds(params, batch.hidden, batch.z1, batch.z2)
        return binary_loss(log_odds, batch.changed)

    return Training(
        init=lambda: init_params(examples.hidden.shape[1], jax.random.key(seed)),
        loss=loss,
        batches=shuffled(examples, rows, seed),
        optimizer=optimizer,
        steps=steps,
        step_tokens=rows,
    )
