"""Tests of the arithmetic files: they equal the generator's output, the splits are disjoint, equations are true."""

import operator
import re
from itertools import pairwise

import pytest

from mars_jax.lab.evaluate.scoring import score_answer
from mars_jax.lab.evaluate.tasks.catalogue import read_arithmetic
from scripts.arithmetic import generator

SIGNS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
EQUATION = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)")


@pytest.fixture(scope="module", params=generator.COUNTS)
def split(request):
    return request.param


@pytest.fixture(scope="module")
def exercises(split):
    return list(generator.generate(generator.COUNTS[split], split=split))


def test_the_file_holds_the_problems_of_the_generator(split, exercises):
    problems = read_arithmetic(split)
    assert [p.turns for p in problems] == [(exercise.question,) for exercise in exercises]
    assert [p.references for p in problems] == [(str(exercise.result),) for exercise in exercises]


def test_a_problem_is_correct_by_its_own_answer(split, exercises):
    for problem, exercise in zip(read_arithmetic(split), exercises, strict=True):
        assert score_answer(problem, exercise.answer) == [1.0]


def test_every_equation_is_true_and_within_the_limits(exercises):
    for exercise in exercises:
        steps = [(int(a), sign, int(b), int(c)) for a, sign, b, c in EQUATION.findall(exercise.answer)]
        assert 1 <= len(steps) <= 3 and exercise.answer.count("=") == len(steps)
        assert steps[-1][3] == exercise.result
        assert all(previous[3] == step[0] for previous, step in pairwise(steps))
        assert all(SIGNS[sign](a, b) == result <= 100 for a, sign, b, result in steps)


def test_the_splits_share_no_question():
    train, evaluation = ({p.turns for p in read_arithmetic(split)} for split in ("train", "eval"))
    assert train.isdisjoint(evaluation)
