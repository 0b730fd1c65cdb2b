"""The indicator learns what a known function labels, and begins again where it was killed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mars_jax.contrib.models import indicator
from mars_jax.lab.training.indicator_training import Examples, train


def made(count, seed):
    """The outcome changes where one direction of the features and the margin say so together."""
    rng = np.random.default_rng(seed)
    hidden = rng.normal(size=(count, 12)).astype(np.float32)
    z1 = rng.uniform(4, 12, count).astype(np.float32)
    z2 = (z1 - rng.exponential(1.5, count)).astype(np.float32)
    changed = (2 * np.maximum(hidden[:, 0], 0) + 0.4 * (z1 - z2) > 1.4).astype(np.float32)
    return Examples(hidden, z1, z2, changed)


@pytest.mark.slow
def test_a_known_function_is_learned_better_than_the_margin_says_it(tmp_path):
    pytest.importorskip("matplotlib")
    options = {"steps": 250, "rows": 128, "learning_rate": 1e-2}
    with jax.numpy_dtype_promotion("standard"):  # optax's counters
        head = train(made(4000, 0), tmp_path / "run", **options)
        again = train(made(4000, 0), tmp_path / "run", **options)  # finished: it only reads
    held = made(2000, 1)
    said = np.asarray(indicator.logit(head, *map(jnp.asarray, held[:3]))) > 0
    right = np.mean(said == (held.changed > 0.5))
    gap = held.z1 - held.z2
    by_margin = max(
        np.mean((gap > t) == (held.changed > 0.5)) for t in np.quantile(gap, np.linspace(0, 1, 99))
    )
    assert right > 0.9 and right > by_margin + 0.03
    assert (tmp_path / "run" / "plot.png").exists()
    assert all(
        np.array_equal(a, b) for a, b in zip(jax.tree.leaves(head), jax.tree.leaves(again), strict=True)
    )
