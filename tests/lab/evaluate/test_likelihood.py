"""Tests of likelihoods of token sequences and of the scores computed from them."""

import math
import types

import jax
import numpy as np
import pytest

import mars_jax as mj
from mars_jax.lab.evaluate.answers import prompt_tokens
from mars_jax.lab.evaluate.benchmark import rows
from mars_jax.lab.evaluate.scoring import total_score
from mars_jax.lab.evaluate.tasks.problems import Problem
from mars_jax.models.shardings import parse_mesh
from mars_jax.serve import likelihood

TEXTS = [[1, 5, 3], list(range(2, 60)), [7] * 17]


@pytest.fixture(scope="module")
def loaded(target):
    return mj.load(str(target), dtype="float32")


def assert_equal_scores(actual, expected):
    for actual_score, expected_score in zip(actual, expected, strict=True):
        for a, b in zip(actual_score, expected_score, strict=True):
            np.testing.assert_allclose(a, b, atol=2e-5)


def test_in_parts_it_is_the_same(loaded, monkeypatch):
    expected = likelihood.score(loaded, TEXTS)
    assert [len(s.log_p) for s in expected] == [len(t) - 1 for t in TEXTS]
    monkeypatch.setattr(likelihood, "POSITIONS", 24)  # divides none of the lengths
    likelihood._score.clear_cache()
    assert_equal_scores(likelihood.score(loaded, TEXTS), expected)
    likelihood._score.clear_cache()


@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")
def test_on_a_mesh_it_is_the_same(loaded, target):
    on_mesh = mj.load(str(target), dtype="float32", mesh=parse_mesh("data=2,model=4"))
    assert_equal_scores(likelihood.score(on_mesh, TEXTS, rows=1), likelihood.score(loaded, TEXTS))


def test_an_answer_is_scored_without_its_prompt(loaded):
    prompts, answers = [[1, 5], [2, 3, 4, 5]], [[3], [6, 7, 8]]
    scores = rows.score_answers(loaded, prompts, answers)
    texts = [p + a for p, a in zip(prompts, answers, strict=True)]
    logits = [s.log_p for s in likelihood.score(loaded, texts)]
    sums = [pytest.approx(logits[0][1], abs=1e-4), pytest.approx(logits[1][3:].sum(), abs=1e-4)]
    assert scores == [[sums[0], 1], [sums[1], 3]]
    sums = np.asarray([[scores[0][0] + scores[1][0], 4.0, 2.0]])
    assert total_score("likelihood", sums)[0] == pytest.approx(math.exp(sums[0, 0] / 4))


@pytest.mark.slow
def test_all_turns_of_a_conversation_count():
    target = mj.load("tiny/target")
    dialogue = Problem(task="t", id="0", turns=("One?", "Two?"), metric="likelihood")
    question = Problem(task="t", id="1", turns=("One?",), metric="likelihood")
    long_answer = types.SimpleNamespace(texts=(" Yes.", " No."), tokens=((20, 30), (40,)))
    short_answer = types.SimpleNamespace(texts=(" Yes.",), tokens=((20, 30),))
    decoding = types.SimpleNamespace(session=types.SimpleNamespace(target=target), chat=True)
    first, second = rows.scored(decoding, [dialogue, question], [long_answer, short_answer])
    prompts = [prompt_tokens(target, dialogue, long_answer.texts[:n], chat=True) for n in (0, 1)]
    parts = rows.score_answers(target, prompts, long_answer.tokens)
    np.testing.assert_allclose(first, np.sum(parts, axis=0), atol=1e-3)
    np.testing.assert_allclose(second, parts[0], atol=1e-3)
    assert first[1] == 3


def test_a_text_has_the_bits_beside_others_that_it_has_alone():
    """Therefore parts of an evaluation have the same scores as the whole."""
    embedded = mj.load("tiny/draft", dtype="float32")
    texts = [[7 + i * i % 390 for i in range(length)] for length in (45, 70, 120)]
    for text, batched in zip(texts, mj.score(embedded, texts, rows=3), strict=True):
        [single] = mj.score(embedded, [text], rows=3)
        np.testing.assert_array_equal(batched.log_p, single.log_p)


def test_the_public_score_is_teacher_forcing_by_transformers():
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    embedded = mj.load("tiny/draft", dtype="float32")
    model = transformers.AutoModelForCausalLM.from_pretrained(embedded.path, dtype="float32")
    texts = ["Once upon a time, there was a little girl.", "The cat", "Tim had 3 apples and 12 pears." * 4]
    for text, score in zip(texts, mj.score(embedded, texts), strict=True):
        ids = torch.tensor([embedded.encode(text)])
        with torch.inference_mode():
            log_p = torch.log_softmax(model(ids).logits[0, :-1], dim=-1)
        expected = log_p.gather(1, ids[0, 1:, None])[:, 0]
        np.testing.assert_allclose(score.log_p, expected.numpy(), atol=1e-4)
        assert list(score.tokens) == ids[0].tolist()


@pytest.mark.parametrize(
    ("texts", "message"),
    [("The", "texts is one text"), ([[]], "no tokens"), ([[1] * 5000], "text 0 has 5000 tokens")],
)
def test_texts_that_cannot_be_scored_are_refused(texts, message):
    with pytest.raises(mj.MarsError, match=message):
        mj.score(mj.load("tiny/draft"), texts)
