"""`stream` lets the device run some steps ahead of the host. The results stay the same."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mars_jax import contrib, drafters, verify
from mars_jax.core import decode
from mars_jax.core.errors import MarsError
from mars_jax.core.metrics import accumulate, zero_stats
from tests.helpers import NO_WEIGHTS, begin, committed, ragged, slow_but
from tests.helpers.fake_drafters import SMALL, TARGET, VOCAB

WAYS = {
    "a chain, exact": (drafters.language_model(SMALL, 4), verify.exact()),
    "a tree, mars": (drafters.language_model(SMALL, tree=(3, 2, 1)), verify.mars(theta=0.5)),
    "a rule with state": (drafters.ngram(4), contrib.budget(gap=1.0)),
}


def started(drafter, rule):
    prompts, lengths = ragged([2, 9, 17], 48, VOCAB)
    settings = {"limit": [48, 30, 40], "temperature": [0.0, 1.0, 0.7], "stop_tokens": [[3], [], [5, 6]]}
    return begin(TARGET, drafter, rule, prompts, lengths, **settings)


def streamed(drafter, rule, ahead):
    """Return the steps, their accumulated counters, and the last state."""
    decoder, first = started(drafter, rule)
    stats, steps = zero_stats(3, decoder.max_depth, record=48), []
    for state, info in decode.stream(decoder, NO_WEIGHTS, first, ahead=ahead):
        stats = accumulate(stats, info, state.length)
        steps.append(jax.device_get(info))
    return steps, stats, state


@pytest.mark.parametrize("way", slow_but(WAYS, "a rule with state"))
def test_steps_past_the_end_change_nothing(way):
    ahead = decode.AHEAD
    steps, stats, state = streamed(*WAYS[way], ahead=0)
    assert steps[-1].num_emitted.any()
    more, counted, last = streamed(*WAYS[way], ahead=ahead)
    jax.tree.map(np.testing.assert_array_equal, more[: len(steps)], steps)
    assert len(more) == len(steps) + ahead
    assert not any(info.num_emitted.any() for info in more[len(steps) :])
    jax.tree.map(np.testing.assert_array_equal, counted, stats)
    assert committed(last) == committed(state)
    for name in ("tokens", "length", "done", "failed", "rule"):
        jax.tree.map(np.testing.assert_array_equal, getattr(last, name), getattr(state, name))


@pytest.mark.parametrize("ahead", [0, 2])
def test_rows_that_are_done_at_the_start_stay_as_they_are(ahead):
    decoder, state = started(*WAYS["a chain, exact"])
    before = committed(state)
    state = dataclasses.replace(state, done=jnp.ones((3,), bool))
    texts = [committed(after) for after, _ in decode.stream(decoder, NO_WEIGHTS, state, ahead=ahead)]
    assert texts == [before] * ahead


def test_only_accelerators_run_ahead_of_the_host():
    _, state = started(*WAYS["a chain, exact"])
    assert decode.look_ahead(state) == 0
    tpu = types.SimpleNamespace(devices=lambda: [types.SimpleNamespace(platform="tpu")])
    assert decode.look_ahead(types.SimpleNamespace(done=tpu)) == decode.AHEAD


def test_a_negative_number_of_steps_ahead_is_refused():
    decoder, state = started(*WAYS["a chain, exact"])
    with pytest.raises(MarsError, match="ahead is -1: expected a whole number of at least 0"):
        next(decode.stream(decoder, NO_WEIGHTS, state, ahead=-1))
