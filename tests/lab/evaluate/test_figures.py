"""Tests of acceptance by depth and the coverage of confidence intervals."""

import numpy as np
import pytest

from mars_jax.lab.evaluate.figures import arm_figures, intervals


def row(tokens, score, seconds=1.0, **changes):
    ending = {"finish_reason": "stop", "loops": False, "theta": None}
    counts = {"proposed": 4, "accepted_exact": 1, "accepted_relaxed": 1, "depth_histogram": [1, 0, 1]}
    size = {"steps": 2, "emitted": len(tokens), "tokens": [tokens], "seconds": seconds}
    return ending | counts | size | {"regret": 0.5, "score": score} | changes


def test_a_summary_by_hand():
    autoregressive = [row([1, 2, 3, 4], [1.0], 4.0), row([1, 2], [1.0], 2.0), row([1, 2], [0.0], 2.0)]
    cut = row([1, 2], [0.5], finish_reason="length")
    rows = [row([1, 2, 3, 4], [1.0]), row([5, 6], [0.0], loops=True), cut]
    strict = [row([5, 6], [0.0])] * 3
    figures = arm_figures(rows, autoregressive, strict, metric="rouge_l")
    spans = figures.pop("intervals")
    counts = {"problems": 3, "theta": None, "tau": 8 / 6, "tokens_per_task": 8 / 3}
    drafts = {"depth_histogram": [3, 0, 3], "acceptance_by_depth": [0.5, 1.0], "relaxed_share": 0.5}
    times = {"tokens_per_second": 8 / 3, "speedup": 8 / 3, "seconds_per_task": 1.0, "task_speedup": 8 / 3}
    shares = {"loop_rate": 1 / 3, "length_rate": 1 / 3}
    shares |= {"same_as_autoregressive": 2 / 3, "same_as_strict": 1 / 3}
    quality = {"score": 0.5, "score_change": 0.5 - 2 / 3, "recovered": 0.75, "regret_per_token": 1.5 / 8}
    expected = counts | drafts | times | shares | quality
    assert figures.keys() == expected.keys()
    for name, value in expected.items():
        assert figures[name] == pytest.approx(value), name
    for name in ("tau", "tokens_per_second", "speedup", "regret_per_token", "score", "score_change"):
        assert spans[name][0] <= figures[name] <= spans[name][1], name
    assert spans["acceptance_by_depth"] == [[0.5, 0.5], [1.0, 1.0]]  # all rows have the same acceptance


def test_the_intervals_of_figures_hold_the_truth_as_often_as_they_say():
    """The true tau is 3: steps emit 1 to 5 tokens, and completions vary in length and number of steps."""
    rng, hits, repeats, problems = np.random.default_rng(0), 0, 300, 60
    for repeat in range(repeats):
        counts = rng.integers(4, 20, problems)
        rows = [row([0] * int(rng.integers(1, 6, n).sum()), [1.0], steps=int(n)) for n in counts]
        low, high = intervals(rows, rows, metric="final_answer", seed=repeat, resamples=400)["tau"]
        hits += low <= 3 <= high
    assert 0.91 <= hits / repeats <= 0.985


def test_the_interval_is_paired():
    """A run compared with itself has no uncertainty; the same scores in another order have some."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, 9, 100).tolist()
    rows = [row([0] * n, [float(i % 2)], seconds=float(n**2)) for i, n in enumerate(lengths)]
    same = intervals(rows, rows, metric="final_answer")
    assert [same[name] for name in ("speedup", "score_change", "recovered")] == [[1, 1], [0, 0], [1, 1]]
    assert same["tokens_per_second"][0] < same["tokens_per_second"][1]
    low, high = intervals(rows[::-1], rows, metric="final_answer")["recovered"]
    assert low < 0.8 < 1.25 < high


def test_a_single_problem_has_no_intervals():
    spans = intervals([row([1, 2], [1.0])], [row([1, 2], [1.0])], metric="final_answer")
    assert spans.pop("acceptance_by_depth") == [None, None] and {*spans.values()} == {None}


def test_without_scores_there_is_no_quality():
    rows = [row([1], None), row([2], None)]
    figures = arm_figures(rows, rows, rows, metric="none")
    assert figures["score"] is None and figures["recovered"] is None
    assert figures["intervals"]["score"] is None and figures["intervals"]["tau"] is not None


def test_nothing_is_recovered_of_a_score_of_zero():
    zero = [row([1], [0.0]), row([2], [0.0])]
    figures = arm_figures([row([1], [1.0]), row([2], [0.0])], zero, zero, metric="final_answer")
    assert figures["score"] == 0.5 and figures["recovered"] is figures["intervals"]["recovered"] is None
