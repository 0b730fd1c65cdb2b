"""Scores on hand-made cases, and beside the packages that define them."""

from __future__ import annotations

import numpy as np
import pytest

from mars_jax.core.errors import MarsError
from mars_jax.lab.evaluate.scoring import scores
from mars_jax.lab.evaluate.scoring.scores import (
    bleu_counts,
    check_metrics,
    last_number,
    program,
    rouge_l,
    score,
    total,
)
from mars_jax.lab.evaluate.tasks.problems import Code, Problem


def problem(metric, *references, code=None):
    return Problem(task="t", id="0", turns=("?",), metric=metric, references=references, code=code)


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("3 * 4 = 12.\n#### 12", True),
        ("#### 12 User: 13", True),
        ("12", False),
        ("#### 12.5", False),
        ("#### 13", False),
    ],
)
def test_final_answer(text, right):
    assert score(problem("final_answer", "12"), text) == [float(right)]


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


def test_open_ended_answers_have_no_score():
    assert score(problem("none"), "anything") is None


def test_rouge_l_by_hand():
    pytest.importorskip("rouge_score")
    # "cats sat" is common to both: precision 2/3, recall 2/4. Stemming makes "cat" of "cats".
    assert rouge_l("cats sat down", ["the cat sat here"]) == pytest.approx(
        2 * (2 / 3) * (2 / 4) / (2 / 3 + 2 / 4)
    )
    assert rouge_l("cats sat", ["nothing alike", "cats sat"]) == 1.0
    assert rouge_l("", ["cats"]) == 0.0


HYPOTHESES = [
    "the cat sat on a mat",
    "there is a dog in the garden",
    "yes",
    "he reads the big red book today",
]
REFERENCES = [
    "the cat sat on the mat",
    "a dog is in the garden",
    "no",
    "he is reading the big red book today",
]


@pytest.mark.parametrize("rows", [[0, 1, 2, 3], [0], [3, 3, 1], [2], [2, 2, 1]])
def test_bleu_is_that_of_sacrebleu(rows):
    sacrebleu = pytest.importorskip("sacrebleu")
    hypotheses, references = [HYPOTHESES[i] for i in rows], [REFERENCES[i] for i in rows]
    counts = np.sum([bleu_counts(h, [r]) for h, r in zip(hypotheses, references, strict=True)], axis=0)
    ours = total("bleu", np.append(counts, len(rows))[None])[0]
    assert 100 * ours == pytest.approx(sacrebleu.corpus_bleu(hypotheses, [references]).score, abs=1e-9)


def test_bleu_of_nothing_is_zero():
    pytest.importorskip("sacrebleu")
    assert total("bleu", np.append(bleu_counts("", ["no"]), 1.0)[None])[0] == 0.0


CODE = Code(
    'import math\n\ndef helper():\n    return 1\n\ndef one(x):\n    """Return 1."""\n',
    "one",
    "assert one(0) == 1\n",
)
RIGHT = [
    "    return 1\n",
    "    return helper()\n\ndef two():\n    return math",
    "    return 1\n\nprint(1 / 0)\n",
    "    return 1\n\n\ndef one(x):\n    return 2\n",
    "Here it is:\n```python\nimport math\ndef one(x):\n    return helper()\n```\nIt returns 1.",
    "```\n    return 1\n```",
    "def one(x):\n    return 1\n",
]
WRONG = ["    return 2\n", "", "I do not know.", "    import sys; sys.exit(0)", "    return 1 +\n"]


@pytest.mark.parametrize("text", RIGHT)
def test_answers_that_make_a_program(text):
    exec(program(CODE, text), {})


@pytest.mark.parametrize("text", WRONG)
def test_answers_that_make_none(text):
    with pytest.raises((AssertionError, SyntaxError, SystemExit)):
        exec(program(CODE, text), {})


def test_a_program_without_a_beginning():
    code = Code("", "", "assert one() == 1\n")
    for text in (
        "def one():\n    return 1\n[DONE]\nmore",
        "Sure:\n```python\ndef one():\n    return 1\n```\nDone.",
    ):
        exec(program(code, text), {})


def test_programs_run_only_where_that_is_allowed(monkeypatch):
    ran = []
    monkeypatch.setattr(
        scores.sandbox, "passes", lambda source, unconfined: ran.append((source, unconfined)) or True
    )
    asked = problem("pass@1", code=CODE)
    assert score(asked, RIGHT[0]) is None and not ran
    assert score(asked, RIGHT[0], run_code=True) == [1.0] and [how for _, how in ran] == [False]
    assert score(asked, RIGHT[0], run_code=True, unconfined=True) == [1.0] and ran[1] == (ran[0][0], True)


def test_programs_that_really_run():
    asked = problem("pass@1", code=CODE)
    found = [score(asked, text, run_code=True, unconfined=True) for text in (RIGHT[0], WRONG[0])]
    assert found == [[1.0], [0.0]]


def test_running_code_without_tests_is_refused():
    with pytest.raises(MarsError, match="does not apply to tasks without tests to run"):
        check_metrics([problem("none")], run_code=True)
    check_metrics([problem("pass@1", code=CODE)], run_code=True, unconfined=True)
    with pytest.raises(
        MarsError, match="--allow-unconfined-code does not apply without --allow-code-execution"
    ):
        check_metrics([problem("pass@1", code=CODE)], run_code=False, unconfined=True)


@pytest.mark.parametrize(
    ("metric", "package"), [("rouge_l", "rouge_score.rouge_scorer"), ("bleu", "sacrebleu.metrics.bleu")]
)
def test_a_missing_package_is_named_before_anything_runs(monkeypatch, metric, package):
    import sys

    monkeypatch.setitem(sys.modules, package, None)
    scores._rouge.cache_clear()
    scores._bleu_metric.cache_clear()
    with pytest.raises(MarsError, match="pip install "):
        check_metrics([problem(metric, "a")], run_code=False)
