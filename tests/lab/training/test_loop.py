"""Tests of the training loop: it learns, and a killed run continues from its last checkpoint."""

import json

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mars_jax.contrib.teaching import Training
from mars_jax.lab.training.loop import fit
from mars_jax.utils.errors import MarsError

pytestmark = pytest.mark.usefixtures("standard_promotion")
STEPS = 6


def loss(params, batch, teacher):
    error = jnp.mean((batch @ params["w"] - jnp.sum(batch, axis=1)) ** 2)
    return error, {"size": jnp.sum(params["w"] ** 2)}


def example(number):
    return np.random.default_rng(number).normal(size=3).astype(np.float32)


def train(directory, steps=STEPS, prepare=lambda params, batch: batch, **options):
    batches = grain.MapDataset.source(range(16)).map(example).seed(0).shuffle().repeat().batch(8)
    training = Training(lambda: {"w": jnp.zeros((3,))}, loss, batches, optimizer=optax.adam(0.1), steps=steps)
    return fit(training, directory, prepare=prepare, save_every=2, **options)


class Killed(Exception):
    pass


def killing_at(step):
    """Return a `prepare` that raises `Killed` at a step."""
    count = iter(range(100))

    def prepare(params, batch):
        if next(count) == step:
            raise Killed
        return batch

    return prepare


def log_of(folder):
    """Return the rows of the log without their times."""
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name != "tokens_per_s"} for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 3, 4])
def test_a_killed_run_continues_bit_for_bit(tmp_path, step):
    uninterrupted = train(tmp_path / "whole")
    with pytest.raises(Killed):
        train(tmp_path / "killed", prepare=killing_at(step))
    resumed = train(tmp_path / "killed")
    np.testing.assert_array_equal(resumed["w"], uninterrupted["w"])
    log = log_of(tmp_path / "killed")
    assert log == log_of(tmp_path / "whole") and [row["step"] for row in log] == list(range(1, STEPS + 1))
    assert log[-1]["loss"] < log[0]["loss"]


def test_a_run_without_time_left_ends_after_a_step_and_continues_bit_for_bit(tmp_path):
    uninterrupted = train(tmp_path / "whole")
    train(tmp_path / "short", minutes=1e-9)
    assert [row["step"] for row in log_of(tmp_path / "short")] == [1]
    jax.tree.map(np.testing.assert_array_equal, train(tmp_path / "short"), uninterrupted)


def test_a_finished_run_is_not_run_again(tmp_path):
    first = train(tmp_path)
    second = train(tmp_path, prepare=killing_at(0))
    jax.tree.map(np.testing.assert_array_equal, first, second)


def test_another_number_of_steps_is_another_training(tmp_path):
    train(tmp_path, steps=2)
    with pytest.raises(MarsError, match="has 2 steps and this one has 3: give it the same number of tokens"):
        train(tmp_path, steps=3)
