"""Runs of a bounded number of steps, and states saved to disk, continue as one `run` does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mars_jax import drafters, hub, verify
from mars_jax.core import decode
from mars_jax.core.axes import parse_mesh, state_shardings
from mars_jax.utils.errors import MarsError
from mars_jax.utils.hosts import put
from tests.helpers import NO_WEIGHTS, begin, committed, ragged
from tests.helpers.fake_drafters import SMALL, TARGET, VOCAB

DRAFTER, RULE = drafters.language_model(SMALL, tree=(2, 1, 1)), verify.mars(theta=0.5, max_relaxed_run=1)
DECODER = decode.speculative_decoder(TARGET, DRAFTER, RULE, prefill_chunk=16)


def begun(rows=4):
    prompts, lengths = ragged([1, 6, 12, 17][:rows], 40, VOCAB)
    settings = {"temperature": [0.0, 0.9, 0.0, 1.3][:rows], "stop_tokens": [[3]] * rows}
    return begin(TARGET, DRAFTER, RULE, prompts, lengths, **settings)[1]


@pytest.fixture(scope="module")
def single_run():
    """Return (tokens, steps of the longest row)."""
    state, stats = decode.run(DECODER, NO_WEIGHTS, begun())
    return committed(state), int(stats.steps.max())


def test_bounded_runs_take_the_steps_of_one_run(single_run):
    tokens, steps = single_run
    state, steps_taken = begun(), 0
    compiled = decode.run._cache_size()
    for max_steps in (1, 3, 2, 1000):
        state, stats = decode.run(DECODER, NO_WEIGHTS, state, max_steps=max_steps)
        assert int(stats.steps.max()) == min(max_steps, steps - steps_taken)
        steps_taken += int(stats.steps.max())
    assert committed(state) == tokens and steps_taken == steps
    assert decode.run._cache_size() <= compiled + 1, "another bound compiles nothing"


def test_a_restored_state_equals_the_saved_one(tmp_path):
    hub.save_state(tmp_path / "state", begun())
    restored = hub.restore_state(tmp_path / "state", jax.eval_shape(lambda s: s, begun()))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(*map(_as_numbers, (a, b))), restored, begun())


def _as_numbers(leaf):
    return jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf


@pytest.mark.slow
def test_a_state_goes_through_disk_and_onto_a_mesh(single_run, tmp_path):
    state, _ = decode.run(DECODER, NO_WEIGHTS, begun(), max_steps=2)
    hub.save_state(tmp_path / "state", state)
    restored = hub.restore_state(tmp_path / "state", jax.eval_shape(lambda s: s, begun()))
    assert committed(decode.run(DECODER, NO_WEIGHTS, restored)[0]) == single_run[0]
    mesh = parse_mesh("data=4")
    shapes = jax.eval_shape(lambda s: s, state)
    divided = hub.restore_state(tmp_path / "state", put(state, state_shardings(shapes, mesh)))
    assert divided.tokens.sharding.spec[0] == "data"
    with jax.set_mesh(mesh):
        assert committed(decode.run(DECODER, NO_WEIGHTS, divided)[0]) == single_run[0]
    with pytest.raises(MarsError, match="choose the name of a new folder"):
        hub.save_state(tmp_path / "state", state)
    with pytest.raises(MarsError, match="of a different decoder or with other shapes"):
        hub.restore_state(tmp_path / "state", begun(2))
    with pytest.raises(MarsError, match="expected a folder that save_state wrote"):
        hub.restore_state(tmp_path / "nothing", state)
