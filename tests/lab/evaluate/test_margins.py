"""Decisions by margin, against the counters of the same decoding and the target's own scores of its texts."""

from __future__ import annotations

import numpy as np
import pytest

import mars_jax as mj
from mars_jax.lab.evaluate.benchmark.margins import KINDS, edges_of, histograms, margin_of, observe
from mars_jax.serve import likelihood
from mars_jax.serve.requests import make_requests
from mars_jax.serve.session import Session

PROMPTS = ("the sea", "a story", "of the sun")


def session(target, drafter, rule, rows):
    return Session(target=target, drafter=drafter, rule=mj.verify.LoadedRule(rule), batch_size=rows)


@pytest.mark.parametrize("theta", [np.inf, 0.2])
@pytest.mark.parametrize("draft", ["chain", "tree"])
@pytest.mark.slow
def test_every_decision_is_counted_with_its_margin(target, draft, theta):
    # It drafts for itself, so that sampling decides.
    name, target = f"model:{target}", mj.load(str(target))
    shape = {"tree": (2, 2)} if draft == "tree" else {"num_draft_tokens": 2}
    drafter = mj.drafters.load(name, target, **shape)
    rule = mj.verify.mars(theta=theta)
    # Rows of different ends in batches that are not full.
    requests = make_requests(target, PROMPTS, temperature=0.7, seed=[5, 6, 7], max_new_tokens=24)
    seen = observe(session(target, drafter, rule, 2), requests)
    found = seen.decisions
    done = [
        c for i in (0, 2) for c in Session.of(target, drafter, rule, batch_size=2).run(requests[i : i + 2])
    ]
    assert seen.tokens == [list(c.tokens) for c in done]
    assert [k.count("relaxed") for k in seen.kinds] == [c.metrics.accepted_relaxed for c in done]
    assert [k.count("exact") for k in seen.kinds] == [c.metrics.accepted_exact for c in done]
    count = {kind: len(found[kind][0]) for kind in KINDS}
    assert count["accepted"] == sum(c.metrics.accepted_exact for c in done) > 0
    assert count["relaxed"] == sum(c.metrics.accepted_relaxed for c in done)
    assert bool(count["relaxed"]) == (theta < np.inf)
    # Of 2 tokens; a step that took both rejects nothing, and the last one of a row may be cut short.
    short = sum(sum(c.metrics.depth_histogram[:2]) for c in done)
    assert short - len(done) <= count["rejected"] <= short
    scored = likelihood.score(
        target, [(*r.prompt_tokens, *c.tokens) for r, c in zip(requests, done, strict=True)]
    )
    pairs = np.concatenate([np.stack([s.z1, s.z2], axis=1) for s in scored])
    for z1, z2 in found.values():
        for decided in zip(z1, z2, strict=True):
            assert np.abs(pairs - decided).max(axis=1).min() < 1e-4
    if theta < np.inf:
        assert (margin_of("ratio", *found["relaxed"]) > theta).all()


@pytest.mark.slow
def test_the_decisions_of_a_chain_are_in_the_order_of_its_text(target):
    name, target = f"model:{target}", mj.load(str(target))
    drafter = mj.drafters.load(name, target, num_draft_tokens=2)
    [request] = make_requests(target, PROMPTS[:1], temperature=1.0, seed=[5], max_new_tokens=40)
    rule = mj.verify.mars(theta=0.9)
    events = list(Session.of(target, drafter, rule).stream([request]))
    text = [*request.prompt_tokens, *(t for event in events for t in event.tokens)]
    [scored] = likelihood.score(target, [text])
    expected, at = {kind: [] for kind in KINDS}, len(request.prompt_tokens) - 1
    for event in events:
        for kind, _ in event.pieces:
            if kind != "corrected" or len(event.pieces) < 3:  # else it is the token after both drafts
                name = {"exact": "accepted", "relaxed": "relaxed", "corrected": "rejected"}[kind]
                expected[name].append((scored.z1[at], scored.z2[at]))
            at += 1
    assert all(expected.values())
    found = observe(session(target, drafter, rule, 1), [request]).decisions
    for kind, (z1, z2) in found.items():
        np.testing.assert_allclose(np.stack([z1, z2], axis=1), expected[kind], atol=1e-4)


@pytest.mark.slow
def test_where_nothing_was_drafted_nothing_was_rejected(target):
    target = mj.load(str(target))
    drafter = mj.drafters.load("ngram", target)
    requests = make_requests(target, PROMPTS, temperature=1.0, seed=[5, 6, 7], max_new_tokens=24)
    found = observe(session(target, drafter, mj.verify.exact(), 3), requests).decisions
    done = Session.of(target, drafter, mj.verify.exact(), batch_size=len(requests)).run(requests)
    undrafted = sum(c.metrics.depth_histogram[0] for c in done)
    assert len(found["accepted"][0]) == sum(c.metrics.accepted_exact for c in done)
    assert len(found["rejected"][0]) < undrafted


def test_histograms_hold_everything():
    z1, z2 = np.asarray([10.0, 10.0, -1.0, 2.0]), np.asarray([9.9, -3.0, -2.0, 2.0])
    found = dict.fromkeys(KINDS, (z1, z2))
    expected = {"ratio": [0.99, 0, 0, 1], "gap": [0.1, 13, 1, 0]}
    for margin, values in expected.items():
        np.testing.assert_allclose(margin_of(margin, z1, z2), values)
        made = histograms(margin, found)
        assert made["edges"] == edges_of(margin).tolist()
        assert all(sum(made[kind]) == 4 for kind in KINDS)
    assert histograms("gap", found)["accepted"][-1] == 1  # all that is wider
