"""Tests of scores, on hand-made cases and against the packages that define them."""

import sys

import numpy as np
import pytest

from mars_jax.lab.evaluate import scoring
from mars_jax.lab.evaluate.scoring import (
    bleu_counts,
    final_answer,
    last_number,
    rouge_l,
    score_answer,
    total_score,
)
from mars_jax.lab.evaluate.tasks.problems import Problem
from mars_jax.utils.errors import MarsError


def problem(metric, *references):
    return Problem(task="t", id="0", turns=("?",), metric=metric, references=references)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12 + 5 = 17.\n#### 17", 17),
        ("####17", 17),
        ("####   $1,234 \nUser: next", 1234),
        ("#### -3", -3),
        ("#### 17\nUser: more\n#### 18", 17),
        ("#### 17.5", None),
        ("#### seventeen", None),
        ("### 17", None),
        ("", None),
    ],
)
def test_final_answer(text, value):
    assert final_answer(text) == value
    assert score_answer(problem("final_answer", "17"), text) == [float(value == 17)]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("10-5 makes 5", 5),
        ("It is -5.", -5),
        ("a total of $1,234.", 1234),
        ("either 3, or 4, ", 4),
        ("12.0 in all", 12),
        ("12.5 in all", None),
        ("#### 7 and then 8", 7),
        ("nothing", None),
    ],
)
def test_last_number(text, number):
    assert last_number(text) == number


def test_rouge_l_by_hand():
    pytest.importorskip("rouge_score")
    # "cats sat" is common to both: precision 2/3, recall 2/4. Stemming reduces "cats" to "cat".
    f1 = 2 * (2 / 3) * (2 / 4) / (2 / 3 + 2 / 4)
    assert rouge_l("cats sat down", ["the cat sat here"]) == pytest.approx(f1)
    assert rouge_l("cats sat", ["nothing alike", "cats sat"]) == 1.0
    assert rouge_l("", ["cats"]) == 0.0


HYPOTHESES = ["the cat sat on a mat", "there is a dog in the garden", "yes", "he reads the red book"]
REFERENCES = ["the cat sat on the mat", "a dog is in the garden", "no", "he is reading the red book"]


@pytest.mark.parametrize("rows", [[0, 1, 2, 3], [0], [3, 3, 1], [2]])
def test_bleu_is_that_of_sacrebleu(rows):
    sacrebleu = pytest.importorskip("sacrebleu")
    hypotheses, references = [HYPOTHESES[i] for i in rows], [REFERENCES[i] for i in rows]
    counts = np.sum([bleu_counts(h, [r]) for h, r in zip(hypotheses, references, strict=True)], axis=0)
    score = total_score("bleu", np.append(counts, len(rows))[None])[0]
    assert 100 * score == pytest.approx(sacrebleu.corpus_bleu(hypotheses, [references]).score, abs=1e-9)


@pytest.mark.parametrize(
    ("metric", "package"), [("rouge_l", "rouge_score.rouge_scorer"), ("bleu", "sacrebleu.metrics.bleu")]
)
def test_a_missing_package_is_named_before_anything_runs(monkeypatch, metric, package):
    monkeypatch.setitem(sys.modules, package, None)
    scoring._rouge.cache_clear()
    scoring._bleu_metric.cache_clear()
    with pytest.raises(MarsError, match="pip install "):
        scoring.check_metric_packages([problem(metric, "a")])
