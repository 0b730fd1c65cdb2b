"""Sessions, and warnings beyond the length that a drafter was trained for."""

import dataclasses
import shutil

import pytest

import mars_jax as mj
from mars_jax import drafters
from mars_jax.cli.progress import announce
from mars_jax.serve.chat import Running
from mars_jax.serve.prepare import Prepared
from mars_jax.serve.requests import make_requests
from mars_jax.serve.session import Session
from mars_jax.utils import assets
from mars_jax.utils.errors import MarsWarning
from tests.helpers import slow_but
from tests.helpers.checkpoint_files import edit_config
from tests.matrix.world import target as target_of

WORDS = ("the sea", "a story", "of the sun")


@pytest.fixture
def pair():
    target = target_of("float32", None, None)  # its single layer compiles quickly
    return Session(target=target, drafter=drafters.load("ngram", target, num_draft_tokens=3), batch_size=2)


def short_requests(target, **options):
    return make_requests(target, WORDS, **{"max_new_tokens": 8} | options)


def test_the_target_alone_is_one_session(pair):
    autoregressive = pair.autoregressive
    assert autoregressive is pair.autoregressive and autoregressive.rule_name == "exact"
    requests = short_requests(pair.target)[:1]
    reference, drafted = autoregressive.decode(requests), pair.decode(requests)
    assert reference.tokens == drafted.tokens and reference.metrics.tau == 1.0


def test_the_time_of_a_run_is_estimated_from_its_steps(pair, monkeypatch, capsys):
    """Three requests of 8 tokens in two rows, at half a second per step."""
    monkeypatch.setattr(Prepared, "step_seconds", lambda self, rows, **_: 0.25 * rows)
    assert pair.plain_seconds(short_requests(pair.target)) == 6.0
    announce("15 runs of 3 prompts", 15 * 6.0)
    expected = "15 runs of 3 prompts: about 0:01:30 of plain decoding, without reading the prompts, "
    assert capsys.readouterr().err == expected + "if no text ends early.\n"


def test_steps_are_timed(pair):
    assert 0 < pair.plain_seconds(short_requests(pair.target)) < 60


ENTRIES = {
    "prepared": lambda session, requests: session.prepared(requests),
    "decode": lambda session, requests: session.decode(requests),
    "stream": lambda session, requests: list(session.stream(requests)),
    "queue": lambda session, requests: list(session.queue(requests)),
    "running": lambda session, requests: list(Running(session).stream(requests[0])),
}


@pytest.mark.parametrize("entry", slow_but(ENTRIES, "prepared"))
def test_a_text_longer_than_the_drafter_was_trained_for_warns_once(pair, entry):
    short = dataclasses.replace(pair, drafter=pair.drafter._replace(max_positions=9), _warned=set())
    requests = short_requests(pair.target)[:2]
    longest = max(len(request.prompt_tokens) for request in requests) + 8
    with pytest.warns(MarsWarning) as caught:
        for _ in range(2):
            ENTRIES[entry](short, requests)
    [warning] = caught
    text = str(warning.message)
    assert "trained for texts of 9 tokens (max_position_embeddings)" in text
    assert f"may reach {longest}:" in text
    exact = dataclasses.replace(short, drafter=pair.drafter._replace(max_positions=longest), _warned=set())
    ENTRIES[entry](exact, requests)


DRAFTS = {"model": "draft", "eagle": "eagle3", "dflash": "dflash"}
SYSTEMS = ("sprinter", "trispec", "via_sd")
"""Drafters that name a small model, and prefer one in their own directory."""


@pytest.mark.parametrize("kind", slow_but([*DRAFTS, *SYSTEMS], "eagle", "sprinter"))
def test_a_loaded_drafter_knows_its_trained_length(tmp_path, kind):
    tiny = assets.FOLDER / "tiny"
    directory = small = shutil.copytree(tiny / DRAFTS.get(kind, kind), tmp_path / kind)
    if kind in SYSTEMS:
        small = shutil.copytree(tiny / "draft", directory / "tiny" / "draft")
    edit_config(small, max_position_embeddings=100)
    assert drafters.load(f"{kind}:{directory}", mj.load("tiny/target")).max_positions == 100
