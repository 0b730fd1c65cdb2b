"""The indicator learns the labels of a known function."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mars_jax.contrib.models import indicator
from mars_jax.contrib.models.indicator import IndicatorExamples, indicator_head_training
from mars_jax.lab.training.loop import fit, muon


def labelled_examples(count, seed):
    """Return examples whose outcome depends on one direction of the features together with the margin."""
    rng = np.random.default_rng(seed)
    hidden = rng.normal(size=(count, 12)).astype(np.float32)
    z1 = rng.uniform(4, 12, count).astype(np.float32)
    z2 = (z1 - rng.exponential(1.5, count)).astype(np.float32)
    changed = (2 * np.maximum(hidden[:, 0], 0) + 0.4 * (z1 - z2) > 1.4).astype(np.float32)
    return IndicatorExamples(hidden, z1, z2, changed)


@pytest.mark.slow
def test_a_known_function_is_learned_better_than_from_the_margin(tmp_path):
    course = indicator_head_training(labelled_examples(4000, 0), muon(1e-2, 250), steps=250, rows=128)
    with jax.numpy_dtype_promotion("standard"):  # for optax's counters
        head = fit(course, tmp_path)
    test = labelled_examples(2000, 1)
    positive = np.asarray(indicator.harm_log_odds(head, *map(jnp.asarray, test[:3]))) > 0
    right = np.mean(positive == (test.changed > 0.5))
    gap = test.z1 - test.z2
    thresholds = np.quantile(gap, np.linspace(0, 1, 99))
    by_margin = max(np.mean((gap > t) == (test.changed > 0.5)) for t in thresholds)
    assert right > 0.9 and right > by_margin + 0.03
