"""What other thresholds would accept, replayed: exact where nothing is relaxed, and up to the first relaxed token."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

import mars_jax as mj
from mars_jax.core.rule import LoadedRule
from mars_jax.lab.evaluate.benchmark import rehearsal
from mars_jax.serve.requests import make_requests
from mars_jax.serve.session import Session
from mars_jax.specs import RuleChoice

PROMPTS = ("the sea", "a story", "of the sun")
THETAS = (math.inf, 0.9, 0.5, 0.2)


SHAPES = {"chain": {"num_draft_tokens": 3}, "tree": {"tree": (2, 2)}}


@pytest.mark.parametrize(("shape", "temperature"), [*itertools.product(SHAPES, [0.0, 0.7])])
@pytest.mark.slow
def test_a_replay_is_a_decode_until_something_is_relaxed(target, shape, temperature):
    shape = SHAPES[shape]
    # It drafts for itself, so that sampling decides.
    name, target = f"model:{target}", mj.load(str(target))
    drafter = mj.drafters.load(name, target, **shape)
    requests = make_requests(target, PROMPTS, temperature=temperature, seed=[5, 6, 7], max_new_tokens=24)
    rule = mj.verify.mars(theta=0.9)
    session = Session(target=target, drafter=drafter, rule=LoadedRule(rule), batch_size=2)
    counted = rehearsal.walks(session, requests, THETAS, lambda count: None)
    done = [
        c
        for i in (0, 2)
        for c in Session.of(target, drafter, mj.verify.exact(), batch_size=2).run(requests[i : i + 2])
    ]
    assert [text[0] for text in counted] == [(c.metrics.steps, c.metrics.emitted) for c in done]
    # A looser threshold walks at least as far from any place, though its walk may meet worse places.
    taus = rehearsal.taus(rehearsal.as_json(THETAS, counted))["tau"]
    if temperature:
        assert taus[0] < taus[-1]
    for number, request in enumerate(requests):
        events = list(Session.of(target, drafter, mj.verify.mars(theta=0.5)).stream([request]))
        if all(kind != "relaxed" for event in events for kind, _ in event.pieces):
            assert counted[number][2][0] == len(events)


def test_a_replay_is_counted_by_hand():
    made = rehearsal.as_json([math.inf, 0.9], [[(4, 8), (2, 8)], [(2, 2), (1, 2)]])
    assert made == {"thetas": ["inf", 0.9], "steps": [[4, 2], [2, 1]], "tokens": [8, 2]}
    found = rehearsal.taus(made)
    assert found["problems"] == 2 and found["tau"] == [10 / 6, 10 / 3]
    for tau, (low, high) in zip(found["tau"], found["interval"], strict=True):
        assert low < tau < high
    assert found["interval"] == np.asarray([[1, 2], [2, 4]]).tolist()  # one text or the other, twice
    alone = rehearsal.taus(rehearsal.as_json([math.inf], [[(4, 8)]]))
    assert alone["tau"] == [2.0] and alone["interval"] == [None]


@pytest.mark.parametrize(
    ("choice", "measured", "expected"),
    [
        (
            RuleChoice("mars", {"margin": "gap"}),
            [1.1],
            [math.inf, 0.1, 0.3, 0.7, 1.1, 1.25, 1.75, 2.5, 4.0, 6.0],
        ),
        (
            RuleChoice("mars", {}),
            [0.9, 0.83],
            [math.inf, 0.98, 0.94, 0.9, 0.86, 0.83, 0.82, 0.75, 0.65, 0.55],
        ),
        (RuleChoice("exact", {}), [], []),
        (RuleChoice("typical", {}), [], []),
    ],
)
def test_thresholds_go_from_strict_to_loose(choice, measured, expected):
    assert rehearsal.thetas_of(choice, mj.drafters.loaded(mj.drafters.ngram(4), None), measured) == expected


def test_drafts_that_are_not_judged_place_by_place_are_not_replayed():
    plain = mj.drafters.load("ngram", None, num_draft_tokens=4)
    choice = RuleChoice("mars", {})
    assert rehearsal.thetas_of(choice, plain, [0.9])
    trusted = plain._replace(drafter=plain.drafter._replace(traits=("trusts",)))
    assert rehearsal.thetas_of(choice, trusted, [0.9]) == []
    assert rehearsal.thetas_of(choice, mj.drafters.sized(plain), [0.9]) == []
