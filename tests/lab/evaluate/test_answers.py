"""Tests of conversations: turns, the chat template, and a full context."""

import shutil

import pytest

from mars_jax import drafters, hub
from mars_jax.lab.evaluate.answers import Decoding, prompt_tokens
from mars_jax.lab.evaluate.benchmark.arms import MARS, make_arms
from mars_jax.lab.evaluate.tasks.problems import Problem
from mars_jax.serve.prepare import Prepared
from mars_jax.serve.session import Session

TEMPLATE = "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }};{% endfor %}a:"


@pytest.fixture(scope="module")
def chatty(target, tmp_path_factory):
    """Load the target with a chat template."""
    path = shutil.copytree(target, tmp_path_factory.mktemp("answers") / "chatty")
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return hub.load(str(path))


@pytest.fixture(scope="module")
def decoding(chatty):
    drafter = drafters.load("ngram", chatty, num_draft_tokens=3)
    session = Session(target=chatty, drafter=drafter, batch_size=3)
    return Decoding(session=session, chat=True, max_new_tokens=8)


def problem(*turns, **changes):
    return Problem(**{"task": "t", "id": "0", "turns": turns} | changes)


def arms(temperature=0.0):
    return {arm.name: arm for arm in make_arms(MARS, [0.9], temperature=temperature)}


@pytest.mark.slow
def test_a_follow_up_turn_sees_the_answer_before_it(chatty, decoding):
    dialogue, question = problem("sea", "sun"), problem("the")
    first, second = decoding.answer(arms()["exact"], [dialogue, question], [0, 1], temperature=0.0)
    assert len(first.texts) == 2 and len(second.texts) == 1
    expected = chatty.tokenizer(f"u:sea;a:{first.texts[0]};u:sun;a:")["input_ids"]
    assert prompt_tokens(chatty, dialogue, first.texts[:1], chat=True) == expected
    assert first.metrics.emitted == sum(map(len, first.tokens))
    undrafted, _ = decoding.answer(arms()["autoregressive"], [dialogue, question], [0, 1], temperature=0.0)
    assert undrafted.tokens == first.tokens and undrafted.metrics.tau == 1.0


def test_without_a_template_the_first_turn_alone_is_asked(chatty, decoding):
    without_chat = Decoding(session=decoding.session, max_new_tokens=8)
    [answer] = without_chat.answer(arms()["exact"], [problem("sea", "sun")], [0], temperature=0.0)
    assert len(answer.texts) == 1
    assert prompt_tokens(chatty, problem("sea"), chat=False) == chatty.tokenizer("sea")["input_ids"]
    continued = problem("sea", continues=True)
    assert prompt_tokens(chatty, continued, chat=True) == chatty.tokenizer("sea")["input_ids"]


def test_the_time_of_all_answers_is_printed_beforehand(decoding, monkeypatch, capsys):
    """100 answers of 8 tokens take 800 steps over two rows, which is as many as there are problems."""
    monkeypatch.setattr(Prepared, "step_seconds", lambda self, rows, **_: 0.25 * rows)
    decoding.announce([problem("sea"), problem("the")], 100)
    assert capsys.readouterr().err.startswith("100 answers of at most 8 tokens: about 0:05:00 of plain")
    decoding.announce([problem("sea")], 0)
    assert capsys.readouterr().err == ""


def test_a_turn_that_does_not_fit_is_left_out(decoding):
    too_long = problem("sea", "sun " * 60, "sea")
    [answer] = decoding.answer(arms()["exact"], [too_long], [0], temperature=0.0)
    assert len(answer.texts) == 1 and answer.finish_reason == "context"


def test_arms_draw_by_their_seed(decoding):
    arm = arms(1.0)["autoregressive"]
    drawn = [decoding.answer(arm, [problem("sea")], [n], temperature=1.0)[0].tokens for n in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
