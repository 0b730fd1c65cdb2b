"""A start compiles each program once, in parallel, and greedy programs contain no sampling code."""

from __future__ import annotations

import collections

import jax
import pytest

import mars_jax as mj
from mars_jax import drafters, verify
from mars_jax.core import decode, fake
from mars_jax.core.rule import LoadedRule
from mars_jax.serve.prepare import prepared
from mars_jax.serve.session import Session
from tests.helpers import slow_but


@pytest.fixture
def compiled():
    """Count how often each program is compiled, by name."""
    counts = collections.Counter()

    def listen(event, seconds, fun_name="", **_):
        if event.endswith("backend_compile_duration"):
            counts[fun_name] += 1

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield counts
    jax.monitoring.unregister_event_duration_listener(listen)


def session(vocab, rows=2):
    """Return a pair that no other test uses, so that none of its programs is compiled yet."""
    target = mj.Pretrained.from_parts(fake.hash_model(vocab_size=vocab), (), max_positions=256)
    rule = LoadedRule(verify.mars())
    return Session(target=target, drafter=drafters.load("ngram", target), rule=rule, batch_size=rows)


@pytest.mark.parametrize("loop", slow_but(["run", "stream", "queue"], "queue"))
def test_each_program_is_compiled_once(compiled, loop):
    made = session({"run": 37, "stream": 38, "queue": 39}[loop])
    requests = mj.make_requests(made.target, [[1, 2, 3], [4, 5], [6]][: 3 if loop == "queue" else 2])
    before = dict(compiled)
    done = list(getattr(made, loop)(requests))
    name = {"run": "run", "stream": "jitted_step", "queue": "advance"}[loop]
    new = {k: n - before.get(k, 0) for k, n in compiled.items()}
    assert new[f"jit({name})"] == 1, new
    assert new["jit(_start)"] <= 2, new  # one for all rows, and one for a row that starts later
    assert done


def test_a_queue_is_compiled_when_it_is_asked_for_and_not_while_it_runs(compiled):
    """Run a request per row, then more requests than rows, then several samples of a prompt. Each compiles more."""
    made = session(43)
    for prompts, samples in (([[1, 2, 3], [1, 2, 4]], 1), ([[1, 2], [4], [5, 6]], 1), ([[1, 2, 3], [2]], 2)):
        requests = mj.make_requests(made.target, prompts, samples=samples, temperature=1.0, max_new_tokens=4)
        before = dict(compiled)
        queue = made.queue(requests)
        ready = dict(compiled)
        assert ready != before and len(list(queue)) == len(requests)
        assert dict(compiled) == ready


@pytest.mark.slow
def test_greedy_requests_compile_nothing_of_drawing():
    """The greedy program also gives the tokens of a program that can sample."""
    made = session(41)

    def program(temperature):
        requests = mj.make_requests(made.target, [[1, 2, 3], [4, 5]], temperature=temperature)
        ready = prepared(made.target, made.drafter, requests, verify=made.rule)
        state = ready.start([0, 1])
        return decode.jitted_step.lower(ready.decoder, ready.params, state).as_text(), requests

    (greedy, first), (mixed, both) = program(0.0), program([0.0, 1.0])
    assert "threefry" in mixed and "threefry" not in greedy.replace("threefry_split", "")
    assert len(greedy) < 0.8 * len(mixed)
    assert made.run(first)[0].tokens == made.run(both)[0].tokens
