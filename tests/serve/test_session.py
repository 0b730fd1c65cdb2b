"""A session: what it compiles once, and that its batches are what `generate` gives."""

from __future__ import annotations

import dataclasses

import pytest

import mars_jax as mj
from mars_jax import drafters, verify
from mars_jax.core.errors import MarsError
from mars_jax.serve import session as sessions
from mars_jax.serve.requests import make_requests
from mars_jax.serve.session import Session
from tests.matrix.world import target as target_of

WORDS = ("the sea", "a story", "of the sun")


@pytest.fixture
def pair():
    target = target_of("float32", None, None)  # whose one layer compiles soon
    return Session(target=target, drafter=drafters.load("ngram", target, num_draft_tokens=3), batch_size=2)


@pytest.fixture
def compiled(monkeypatch):
    """The batches that are compiled, as they are."""
    found = []

    def counting(session, requests, stream, compiled=sessions.Session._compile):
        found.append({"stream": stream})
        compiled(session, requests, stream)

    monkeypatch.setattr(sessions.Session, "_compile", counting)
    return found


def requests(target, **options):
    return make_requests(target, WORDS, **{"max_new_tokens": 8} | options)


@pytest.mark.slow
def test_a_rule_with_a_number_for_each_request_deals_them_out(pair):
    loose = [0.1, 0.99, 0.1]
    asked = requests(pair.target, max_new_tokens=24)
    given = pair.using(verify.LoadedRule(verify.mars(theta=loose)))
    found = [c.tokens for batch in given.batches(asked) for c in batch.session.run(batch.requests)]
    alone = [
        mj.generate(pair.target, pair.drafter, word, verify=verify.mars(theta=theta), max_new_tokens=24)
        for word, theta in zip(WORDS, loose, strict=True)
    ]
    assert found == [result.tokens[0] for result in alone]


def test_more_requests_than_rows_are_refused(pair):
    asked = requests(pair.target)
    alone = dataclasses.replace(pair, batch_size=1)
    with pytest.raises(MarsError, match=f"there are {len(asked)} requests for 1 rows: give them to `decode`"):
        alone.run(asked)


def test_each_shape_is_compiled_once(pair, compiled):
    asked = requests(pair.target)
    for theta in (0.5, 0.9):
        with_theta = pair.using(verify.load("mars", theta=theta))
        for batch in with_theta.batches(asked):
            batch.session.run(batch.requests)
    assert len(compiled) == 1  # thresholds and batches of one width share it
    pair.run(asked[:2])
    assert len(compiled) == 2  # another rule
    assert list(pair.stream(asked[:2])) and compiled[-1]["stream"]
    pair.run(requests(pair.target, max_new_tokens=70)[:2])
    assert len(compiled) == 4  # a wider buffer


def test_the_target_alone_is_one_session(pair, compiled):
    alone = pair.autoregressive
    assert alone is pair.autoregressive and alone.rule_name == "exact"
    [plain], [drafted] = alone.run(requests(pair.target)[:1]), pair.run(requests(pair.target)[:1])
    assert plain.tokens == drafted.tokens and plain.metrics.tau == 1.0
    assert len(compiled) == 2
