"""`stream` lets the device be some steps ahead of the host, and that changes nothing but when the host waits."""

from __future__ import annotations

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mars_jax import contrib, drafters, verify
from mars_jax.core import decode, fake
from mars_jax.core.controls import make_controls
from mars_jax.core.errors import MarsError
from mars_jax.core.metrics import accumulate, zero_stats
from mars_jax.core.types import Prompts, keys_from_seeds
from tests.helpers import NO_WEIGHTS, committed, ragged, slow_but

VOCAB = 13
TARGET = fake.hash_model(vocab_size=VOCAB, agree=0.8)
SMALL = fake.hash_model(vocab_size=VOCAB, seed=5, agree=0.8)
WAYS = {
    "a chain, exact": (drafters.language_model(SMALL, 4), verify.exact()),
    "a tree, mars": (drafters.language_model(SMALL, tree=(3, 2, 1)), verify.mars(theta=0.5)),
    "a rule with state": (drafters.ngram(4), contrib.budget(gap=1.0)),
}


def started(drafter, rule):
    prompts, lengths = ragged([2, 9, 17], 48, VOCAB)
    controls = make_controls(
        3, limit=[48, 30, 40], temperature=[0.0, 1.0, 0.7], stop_tokens=[[3], [], [5, 6]]
    )
    keys = keys_from_seeds(jnp.arange(3, dtype=jnp.uint32))
    decoder = decode.speculative_decoder(TARGET, drafter, rule, prefill_chunk=16)
    return decoder, decode.start(decoder, NO_WEIGHTS, Prompts(prompts, lengths, controls, rule, keys))


def streamed(drafter, rule, ahead):
    """The steps, what they add up to, and the last state."""
    decoder, first = started(drafter, rule)
    stats, steps = zero_stats(3, decoder.max_depth, record=48), []
    for state, info in decode.stream(decoder, NO_WEIGHTS, first, ahead=ahead):
        stats = accumulate(stats, info, state.length)
        steps.append(jax.device_get(info))
    return steps, stats, state


@pytest.mark.parametrize("way", slow_but(WAYS, "a rule with state"))
@pytest.mark.parametrize("ahead", slow_but([1, decode.AHEAD, 5], decode.AHEAD))
def test_steps_past_the_end_change_nothing(way, ahead):
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


def test_rows_that_are_done_at_the_start_stay_as_they_are():
    decoder, state = started(*WAYS["a chain, exact"])
    before = committed(state)
    state = dataclasses.replace(state, done=jnp.ones((3,), bool))
    steps = list(decode.stream(decoder, NO_WEIGHTS, state, ahead=2))
    assert len(steps) == 2 and committed(steps[-1][0]) == before
    decoder, state = started(*WAYS["a chain, exact"])
    state = dataclasses.replace(state, done=jnp.ones((3,), bool))
    assert list(decode.stream(decoder, NO_WEIGHTS, state, ahead=0)) == []


@pytest.mark.parametrize("ahead", [0, 1, decode.AHEAD])
def test_the_flag_that_is_read_is_that_of_a_step_so_far_back(monkeypatch, ahead):
    given, read = [], []

    class Flag:
        def __init__(self, state):
            self.step = len(given)

        def __bool__(self):
            read.append((self.step, len(given)))
            return self.step == 7

    def step(decoder, params, state):
        given.append(state)
        return state, "info"

    monkeypatch.setattr(decode, "_all_done", Flag)
    monkeypatch.setattr(decode, "jitted_step", step)
    monkeypatch.setattr(decode, "check_given", lambda *given: None)
    assert len(list(decode.stream(None, None, "state", ahead=ahead))) == 7 + ahead
    assert read == [(step, step + ahead) for step in range(8)]


def test_a_cpu_gains_nothing_from_looking_ahead():
    _, state = started(*WAYS["a chain, exact"])
    assert decode.look_ahead(state) == 0
    tpu = types.SimpleNamespace(devices=lambda: [types.SimpleNamespace(platform="tpu")])
    assert decode.look_ahead(types.SimpleNamespace(done=tpu)) == decode.AHEAD


def test_no_step_is_ahead_by_less_than_none():
    decoder, state = started(*WAYS["a chain, exact"])
    with pytest.raises(MarsError, match="ahead is -1: expected a whole number of at least 0"):
        next(decode.stream(decoder, NO_WEIGHTS, state, ahead=-1))
