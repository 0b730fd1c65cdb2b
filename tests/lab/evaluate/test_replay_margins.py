"""What any theta would accept, from a log of one decode: exact where a decode keeps to the logged text."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pytest

import mars_jax as mj
from mars_jax.core.rule import LoadedRule
from mars_jax.serve.requests import make_requests
from mars_jax.serve.session import Session

SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"
NEW = 12


@pytest.fixture
def margins(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("smollm2_margins")


@pytest.mark.slow
def test_a_replay_of_exact_is_a_decode_with_exact(margins, tmp_path):
    """Step for step, for chains shorter than the logged ones, greedy and drawn; and for `mars` up to the first token
    that it relaxes, since there the texts part."""
    target = mj.load("tiny/target", dtype="float32")
    given = [target.encode(text) for text in ("Once upon a time", "There was a dog")]
    long, short = (
        Session(
            target=target,
            drafter=mj.drafters.load("eagle:tiny/eagle3", target, num_draft_tokens=n),
            batch_size=2,
        )
        for n in (4, 2)
    )
    for temperature in (0.0, 1.0):
        logged = margins.log(long, given, temperature=temperature, new=NEW)
        requests = make_requests(target, given, temperature=temperature, seed=[0, 1], max_new_tokens=NEW)
        done = short.using(LoadedRule(mj.verify.exact())).run(requests)
        assert logged["tokens"].tolist() == [token for text in done for token in text.tokens]
        _, counts = margins.steps_of(logged, margins.accepted(logged, np.inf), 2)
        assert counts.tolist() == [[text.metrics.steps, text.metrics.emitted] for text in done]
        first = short.using(LoadedRule(mj.verify.mars(theta=0.7))).stream(requests)
        begun = {}
        for event in first:  # the first step of each row begins where the log does
            begun.setdefault(event.row, len(event.tokens))
        edges = np.flatnonzero(np.diff(logged["text"], prepend=-1))
        taken = np.minimum(margins.accepted(logged, 0.7), 2)[edges] + 1
        assert [begun[row] for row in range(2)] == taken.tolist()
    margins.write(tmp_path / "log.npz", {"tiny, T=1": logged})
    back = margins.read(tmp_path / "log.npz")["tiny, T=1"]
    assert back["bits"].tolist() == logged["bits"].tolist() and np.allclose(
        back["z1"], logged["z1"], atol=0.02
    )


def test_a_rejection_is_counted_where_a_chain_stops(margins):
    """By hand: two places, a chain of two. The first stops at depth 1 with a ratio of 0.95, the second at depth 0."""
    exact, second = margins.EXACT, margins.SECOND
    logged = {
        "bits": np.asarray([[exact, second], [0, 0], [0, 0]], np.uint8),
        "z1": np.full((3, 2), 10.0, np.float32),
        "z2": np.asarray([[5.0, 9.5], [0.0, 0.0], [5.0, 5.0]], np.float32),
        "text": np.asarray([0, 0, 0], np.int32),
    }
    begins, counts = margins.steps_of(logged, margins.accepted(logged, np.inf), 2)
    assert begins.tolist() == [0, 2] and counts.tolist() == [[2, 3]]
    assert margins.accepted(logged, 0.9).tolist() == [2, 0, 0]
    found = margins.rejections(logged, 2)
    assert (
        found["rejections"] == 2 and found["share_above_0.9"][0] == 0.5 == found["share_that_mars_takes"][0]
    )
    barred = logged | {"bits": logged["bits"] | margins.BARRED}
    assert margins.accepted(barred, 0.9).tolist() == [1, 0, 0]
