"""Arithmetic problems: every equation is true, the splits are disjoint, the wording is free."""

import operator
import re
from itertools import islice, pairwise

import pytest

from mars_jax.core.errors import MarsError
from mars_jax.lab.evaluate.tasks import arithmetic
from mars_jax.lab.evaluate.tasks import arithmetic_words as words
from mars_jax.lab.evaluate.tasks.arithmetic import Exercise, final_answer, generate, is_correct, problem

SIGNS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
EQUATION = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)")


@pytest.fixture(scope="module")
def train():
    return list(generate(20_000, split="train"))


@pytest.fixture(scope="module")
def evaluation():
    return list(generate(5_000, split="eval"))


def equations(problem):
    return [(int(a), sign, int(b), int(c)) for a, sign, b, c in EQUATION.findall(problem.answer)]


@pytest.mark.slow
def test_every_equation_is_true_and_within_the_limits(train, evaluation):
    for found in train + evaluation:
        steps = equations(found)
        assert 1 <= len(steps) <= 3 and found.answer.count("=") == len(steps)
        assert found.answer.endswith(f"\n#### {found.result}") and steps[-1][3] == found.result
        assert all(before[3] == after[0] for before, after in pairwise(steps))
        for left, sign, right, result in steps:
            assert SIGNS[sign](left, right) == result and 1 <= result <= 100
            assert 2 <= right <= (30 if sign in "+-" else 9)
            assert sign != "*" or 2 <= left <= 9
            assert sign != "/" or result <= 10
        assert 2 <= steps[0][0] <= 30


def test_the_question_states_the_numbers_in_the_order_of_the_steps(train):
    for found in train:
        steps = equations(found)
        told = [int(word) for word in re.findall(r"\d+", found.question.replace("twice", "2"))]
        first = [steps[0][0], steps[0][2]]
        if steps[0][1] == "*":
            assert told[:2] == first
        assert told == first + [right for _, _, right, _ in steps[1:]]


def test_lengths_and_shares(train):
    sizes = [(len(found.question.split()), len(found.answer.split())) for found in train]
    assert max(question for question, _ in sizes) <= 55 and min(question for question, _ in sizes) >= 12
    assert max(answer for _, answer in sizes) <= 45
    assert sum(answer for _, answer in sizes) / len(sizes) < 25
    shares = [sum(len(equations(found)) == steps for found in train) / len(train) for steps in (1, 2, 3)]
    assert shares == pytest.approx([0.4, 0.4, 0.2], abs=0.03)


def test_nouns_agree_with_their_numbers(train):
    things = "|".join([*words.THINGS.split(), *words.TRAYS.split(), "coin"])
    counted = [hit for found in train for hit in re.findall(rf"\b(\d+) ({things})(e?s)?\b", found.answer)]
    assert {number for number, _, plural in counted if not plural} == {"1"}
    assert all(plural for number, _, plural in counted if number != "1")


def test_the_splits_share_no_question(train, evaluation):
    assert {found.question for found in train}.isdisjoint(found.question for found in evaluation)


def test_single_facts_are_not_held_out(train, evaluation):
    known = {fact for found in train for fact in equations(found)}
    asked = [fact for found in evaluation for fact in equations(found)]
    assert sum(fact[1] == "*" for fact in known) == 8 * 8
    assert sum(fact not in known for fact in asked) < 0.03 * len(asked)


def test_about_a_tenth_of_problems_is_for_evaluation():
    rng = arithmetic.Random(0)
    held = sum(arithmetic._split(arithmetic._steps(rng)) == "eval" for _ in range(5_000))
    assert 0.08 < held / 5_000 < 0.12


def test_generation_is_reproducible_and_prefixes_are_stable():
    for split in arithmetic.SPLITS:
        some = list(generate(30, split=split, seed=3))
        assert some == list(islice(generate(100, split=split, seed=3), 30))
        assert some[17] == problem(17, split=split, seed=3)
        assert some != list(generate(30, split=split, seed=4))


def test_one_problem_has_many_wordings():
    rng = arithmetic.Random(1)
    steps = next(s for s in iter(lambda: arithmetic._steps(rng), None) if len(s) == 2)
    worded = [arithmetic._worded(steps, rng) for _ in range(500)]
    assert len({found.result for found in worded}) == 1
    assert len({found.question for found in worded}) > 450
    assert len({found.answer for found in worded}) > 300


def test_every_kind_has_enough_phrasings():
    assert len(words.KINDS) >= 8
    for kind in words.KINDS:
        for phrases in (kind.tell, kind.ask, kind.work):
            assert len(set(arithmetic._lines(phrases))) >= 4
        assert all("{eq}" in line for line in arithmetic._lines(kind.work))


def test_no_wording_belongs_to_two_kinds():
    """Else two problems, of one split each, could share a question."""
    told = [line for kind in words.KINDS for line in arithmetic._lines(kind.tell)]
    assert len(told) == len(set(told))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12 + 5 = 17.\n#### 17", 17),
        ("####17", 17),
        ("####   $1,234 \nUser: next", 1234),
        ("#### 17.", 17),
        ("#### -3", -3),
        ("#### 17\nUser: more\n#### 18", 17),
        ("#### 12345", 12345),
        ("#### 17.5", None),
        ("#### seventeen", None),
        ("### 17", None),
        ("17", None),
        ("", None),
    ],
)
def test_final_answer(text, value):
    assert final_answer(text) == value
    assert is_correct(Exercise("", "", 17), text) == (value == 17)


def test_a_problem_is_correct_by_its_own_answer(evaluation):
    assert all(is_correct(found, found.answer) for found in evaluation)


def test_an_unknown_split_is_named():
    with pytest.raises(MarsError, match="split must be 'train' or 'eval', not 'test'; pass one of these two"):
        problem(0, split="test")
