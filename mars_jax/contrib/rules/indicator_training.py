"""Training of the head of `contrib.learned` on branched completions.

n examples, E hidden size. `mars_jax.lab.training.loop.fit` runs it and `contrib.save` writes the params.
Oracle: labels of a known function, in tests/contrib/test_indicator_training.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
from jax import Array

from mars_jax.contrib.models import indicator
from mars_jax.contrib.teaching import Training, binary_loss, shuffled
from mars_jax.core.types import PyTree


class IndicatorExamples(NamedTuple):
    """Tokens at which the runner-up replaced the best token."""

    hidden: Any  # f32[n, E]; the target's final hidden state from which it chose the token
    z1: Any  # f32[n]; its largest raw logit
    z2: Any  # f32[n]; its second largest raw logit
    changed: Any  # f32[n]; 1 if the outcome of the completion changed


def indicator_head_training(
    examples: IndicatorExamples, optimizer: Any, *, steps: int = 1000, rows: int = 256, seed: int = 0
) -> Training:
    """Return the training of a head with the cross entropy of `changed`.

    Args:
      examples: see `IndicatorExamples`.
      optimizer: an optax optimizer, such as `mars_jax.lab.training.loop.muon(3e-3, steps)`.
      steps, rows: number of steps, each on `rows` examples.
      seed: seed of the initial params and of the order of examples.
    """

    def loss(params: PyTree, batch: IndicatorExamples, _: PyTree) -> tuple[Array, dict[str, Array]]:
        log_odds = indicator.harm_log_odds(params, batch.hidden, batch.z1, batch.z2)
        return binary_loss(log_odds, batch.changed)

    return Training(
        init=lambda: indicator.init_params(examples.hidden.shape[1], jax.random.key(seed)),
        loss=loss,
        batches=shuffled(examples, rows, seed),
        optimizer=optimizer,
        steps=steps,
        step_tokens=rows,
    )
