"""A start compiles each program once, in parallel, and greedy programs contain no sampling code."""

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


def make_session(vocab, rows=2):
    """Return a pair that no other test uses, so that none of its programs is compiled yet."""
    target = mj.Pretrained.from_parts(fake.hash_model(vocab_size=vocab), (), max_positions=256)
    rule = LoadedRule(verify.mars())
    return Session(target=target, drafter=drafters.load("ngram", target), loaded_rule=rule, batch_size=rows)


@pytest.mark.parametrize("method", slow_but(["decode", "stream", "queue"], "queue"))
def test_each_program_is_compiled_once(compiled, method):
    session = make_session({"decode": 37, "stream": 38, "queue": 39}[method])
    requests = mj.make_requests(session.target, [[1, 2, 3], [4, 5], [6]])
    counts_before = dict(compiled)
    result = getattr(session, method)(requests)
    assert len(result.tokens if method == "decode" else list(result)) >= 3
    new = {k: n - counts_before.get(k, 0) for k, n in compiled.items()}
    assert new["jit(advance)"] == 1, new
    assert new["jit(start_ready)"] <= 2, new  # one for all rows, one for a row that starts later


@pytest.mark.slow
def test_decoding_compiles_nothing_after_a_warm_up(compiled):
    """Decode a request per row, more requests than rows, and several samples of a prompt. Each compiles programs."""
    session = make_session(43)
    for prompts, samples in (([[1, 2, 3], [1, 2, 4]], 1), ([[1, 2], [4], [5, 6]], 1), ([[1, 2, 3], [2]], 2)):
        options = {"samples": samples, "temperature": 1.0, "max_new_tokens": 4}
        requests = mj.make_requests(session.target, prompts, **options)
        counts_before = dict(compiled)
        session.warm_up(requests)
        warm_counts = dict(compiled)
        assert warm_counts != counts_before and len(session.decode(requests).tokens) == len(requests)
        assert dict(compiled) == warm_counts


@pytest.mark.slow
def test_thresholds_and_batches_of_one_width_share_a_program(compiled):
    session = make_session(44)
    requests = mj.make_requests(session.target, [[1, 2, 3], [4, 5], [6]], max_new_tokens=8)
    session.using(LoadedRule(verify.mars(theta=0.5))).decode(requests)
    counts_before = dict(compiled)
    session.using(LoadedRule(verify.mars(theta=0.9))).decode(requests)
    assert dict(compiled) == counts_before
    session.using(LoadedRule(verify.exact())).decode(requests)
    session.decode(mj.make_requests(session.target, [[1, 2]], max_new_tokens=70))  # a wider buffer
    assert compiled["jit(advance)"] - counts_before["jit(advance)"] == 2


@pytest.mark.slow
def test_greedy_requests_compile_nothing_of_drawing():
    """The greedy program also gives the tokens of a program that can sample."""
    session = make_session(41)

    def program(temperature):
        requests = mj.make_requests(session.target, [[1, 2, 3], [4, 5]], temperature=temperature)
        ready = prepared(session.target, session.drafter, requests, verify=session.loaded_rule)
        state = ready.start([0, 1])
        return decode.jitted_step.lower(ready.decoder, ready.params, state).as_text(), requests

    (greedy, first), (mixed, both) = program(0.0), program([0.0, 1.0])
    assert "threefry" in mixed and "threefry" not in greedy.replace("threefry_split", "")
    assert len(greedy) < 0.8 * len(mixed)
    assert session.decode(first).tokens[0] == session.decode(both).tokens[0]
