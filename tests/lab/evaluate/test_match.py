"""Matching a threshold to a tau, on functions whose crossing is known."""

from __future__ import annotations

import math

import pytest

from mars_jax.core.errors import MarsError
from mars_jax.lab.evaluate.benchmark.match import CLOSE, STEPS, match, threshold


def seen(function):
    calls = []

    def tau_at(theta):
        calls.append(theta)
        return function(theta)

    return tau_at, calls


@pytest.mark.parametrize("wanted", [2.02, 2.4, 3.0, 4.9])
@pytest.mark.parametrize("margin", ["gap", "ratio"])
def test_it_finds_the_crossing(margin, wanted):
    def tau(theta):  # from 2, strict, to 5
        gap = theta if margin == "gap" else (1 / theta - 1) * 10
        return 2 + 3 * (1 - math.exp(-gap))

    tau_at, calls = seen(tau)
    found = match(tau_at, wanted, margin)
    assert found.tau == pytest.approx(wanted, rel=CLOSE) and found.tau == tau(found.theta)
    assert found.wanted == wanted and len(calls) <= STEPS


def test_the_nearest_one_counts_where_nothing_meets():
    tau_at, calls = seen(lambda theta: 3.0 if theta > 0.3 else 2.0)
    found = match(tau_at, 2.6, "gap")
    assert len(calls) == STEPS and found.tau == 3.0
    assert match(lambda theta: 2.0, 2.6, "gap").tau == 2.0
    assert match(lambda theta: 3.0, 2.6, "ratio").tau == 3.0


def test_thresholds_stay_in_the_range_of_their_margin():
    for wanted in (0.0, 9.0):
        for margin in ("gap", "ratio"):
            tau_at, calls = seen(lambda theta: 2.0)
            match(tau_at, wanted, margin)
            assert all(0 < theta < math.inf and (margin == "gap" or theta <= 1) for theta in calls)


def test_other_margins_have_no_scale():
    with pytest.raises(MarsError, match="no scale for the margin 'wide'"):
        threshold("wide", 1.0)
