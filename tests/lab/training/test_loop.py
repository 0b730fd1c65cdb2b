"""The training loop: it learns, and a kill does it no harm."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mars_jax.core.errors import MarsError
from mars_jax.lab.training.loop import fit

STEPS = 6


@pytest.fixture(autouse=True)
def _as_optax_needs_it():
    """optax mixes its step counter, an integer, with floats."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def objective(params, batch):
    error = jnp.mean((batch @ params["w"] - jnp.sum(batch, axis=1)) ** 2)
    return error, {"size": jnp.sum(params["w"] ** 2)}


def batches(step):
    return np.random.default_rng(step).normal(size=(8, 3)).astype(np.float32)


def train(directory, steps=STEPS, batches=batches, decay=0.0):
    return fit(
        objective,
        optax.adam(0.1),
        lambda: {"w": jnp.zeros((3,))},
        batches,
        steps=steps,
        directory=directory,
        tokens_per_step=8,
        save_every=2,
        decay=decay,
    )


class Killed(Exception):
    pass


@pytest.mark.slow
@pytest.mark.parametrize("at", [1, 3, 4])
def test_killed_and_restarted_it_continues_bit_for_bit(tmp_path, at):
    def until(step):
        if step == at:
            raise Killed
        return batches(step)

    whole = train(tmp_path / "whole")
    with pytest.raises(Killed):
        train(tmp_path / "killed", batches=until)
    resumed = train(tmp_path / "killed")
    np.testing.assert_array_equal(resumed["w"], whole["w"])
    logs = [
        [json.loads(line) for line in (tmp_path / name / "log.jsonl").read_text().splitlines()]
        for name in ("whole", "killed")
    ]
    for log in logs:
        assert [row["step"] for row in log] == list(range(1, STEPS + 1))
        for row in log:
            del row["tokens_per_s"]
    assert logs[0] == logs[1]
    assert logs[0][-1]["loss"] < logs[0][0]["loss"]


def test_a_finished_run_is_not_run_again(tmp_path):
    first = train(tmp_path)

    def never(step):
        raise AssertionError("no step is left")

    again = train(tmp_path, batches=never)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), first, again))


def test_the_number_of_steps_may_change_until_the_rate_falls(tmp_path):
    def until(step):
        if step == 4:
            raise Killed
        return batches(step)

    with pytest.raises(Killed):
        train(tmp_path, 10, until, decay=0.5)
    with pytest.raises(
        MarsError, match=r"has done 4 steps \(32 tokens\), which is more than 3: give it more"
    ):
        train(tmp_path, 3, decay=0.5)
    train(tmp_path, 8, decay=0.5)
    with pytest.raises(
        MarsError, match=r"is of 8 steps and .* falls from step 4 on, .* the 64 tokens that it had"
    ):
        train(tmp_path, 20, decay=0.5)
    train(tmp_path, 8, decay=0.5)  # as before
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 8
