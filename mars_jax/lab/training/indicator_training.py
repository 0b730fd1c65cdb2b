"""Train the head of `contrib.learned` on branches of texts, with the optimizer and the loop of the drafters.

n examples, E hidden size. Oracle: labels that a known function makes, in tests/lab/training/test_indicator.py.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mars_jax.contrib.models import indicator
from mars_jax.core.types import PyTree
from mars_jax.lab.training.loop import fit
from mars_jax.lab.training.recipe import muon, plot


class Examples(NamedTuple):
    """Tokens at which the runner-up was put in the best one's place."""

    hidden: np.ndarray  # f32[n, E]; of the target where it chose the token, after its final norm
    z1: np.ndarray  # f32[n]
    z2: np.ndarray  # f32[n]
    changed: np.ndarray  # f32[n]; 1 where the outcome of the text was another


def train(
    examples: Examples,
    work: str | os.PathLike[str],
    *,
    steps: int = 1000,
    rows: int = 256,
    learning_rate: float = 3e-3,
    seed: int = 0,
) -> PyTree:
    """Minimise the cross entropy of `changed`; killed and called again it continues bit for bit.

    Args:
      examples: see `Examples`.
      work: directory of checkpoints, log.jsonl and plot.png.
      steps, rows: of `rows` examples each, drawn again.
      learning_rate: the peak; see `recipe.muon`.
      seed: of the first params and of the draws.

    Returns:
      Params for `contrib.learned`.
    """

    def objective(params: PyTree, batch: Any):
        log_odds = indicator.logit(params, batch.hidden, batch.z1, batch.z2)
        loss = jnp.mean(optax.sigmoid_binary_cross_entropy(log_odds, batch.changed))
        right = jnp.mean(((log_odds > 0) == (batch.changed > 0.5)).astype(jnp.float32))
        return loss, {"right": right}

    def batch(step: int) -> Examples:
        drawn = np.random.default_rng((seed, step)).integers(0, len(examples.changed), rows)
        return Examples(*(column[drawn] for column in examples))

    work = Path(work)
    params = fit(
        objective,
        muon(learning_rate, steps),
        lambda: indicator.init_params(examples.hidden.shape[1], jax.random.key(seed)),
        batch,
        steps=steps,
        directory=work,
        tokens_per_step=rows,
        description="indicator",
    )
    panels = {"cross entropy": ("loss",), "right": ("right",)}
    plot(work / "log.jsonl", work / "plot.png", panels, tokens=rows)
    return params
