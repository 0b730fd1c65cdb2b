"""Tests of step times estimated from the table of overheads."""

import pytest

from mars_jax.lab.planning import estimate
from mars_jax.lab.planning.chips import CHIPS
from mars_jax.lab.planning.estimate import HOP_SECONDS, LAUNCH_SECONDS, StepBytes, Work

MODEL = {"dtype": "bfloat16", "num_layers": 32, "hidden_size": 4096, "num_experts": 0}
DRAFT = {"draft": "none", "passes": 0, "draft_layers": 0}
READ = StepBytes(layers=3 * 10**9, unembed=10**8, draft=0)
PLAIN = Work(bytes=READ, flops=1e9, tokens=1, context=4096, devices=1, **MODEL, **DRAFT)


def time_of(**changes):
    return estimate.step_time(PLAIN._replace(**changes), "v5e", CHIPS["v5e"])


def test_an_estimate_adds_the_measured_overheads_to_the_bytes():
    table = estimate.overheads()["v5e"]
    layer, step = table["layers"]["bfloat16"]["1"], table["drafts"]["none"]
    launches = 32 * layer["launches"] + step["step_launches"]
    seconds = (layer["stretch"] * 3e9 + 1e8) / 819e9 + step["step_seconds"]
    time = time_of()
    expected = [seconds + launches * launch for launch in LAUNCH_SECONDS]
    assert [time.low_seconds, time.high_seconds] == pytest.approx(expected)
    assert time.floor_seconds == pytest.approx(3.1e9 / 819e9) and not time.missing


def test_chips_wait_for_the_sums_of_each_layer():
    waited = time_of(devices=4).low_seconds - time_of().low_seconds
    assert waited > 2 * 32 * 4 * HOP_SECONDS


def test_a_deeper_draft_takes_longer_and_so_does_a_draft_model_with_more_layers():
    chain = {"draft": "chain", "tokens": 6, "draft_layers": 1}
    times = [time_of(**chain, passes=passes).low_seconds for passes in (3, 5)]
    deep = time_of(**chain | {"draft_layers": 16}, passes=5).low_seconds
    assert times[0] < times[1] < deep


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "float32"}, "float32 on v5e was not measured"),
        ({"num_experts": 8}, "mixtures of experts were not measured"),
        ({"draft": "medusa"}, "medusa drafts were not measured"),
        ({"tokens": 61}, "a device scores 61 tokens, and at most 60 were measured"),
        ({"context": 8193}, "contexts above 8192 tokens were not measured"),
    ],
)
def test_what_the_table_does_not_cover_has_a_lower_bound(changes, message):
    time = time_of(**changes)
    assert time.missing == message
    assert time.low_seconds == time.high_seconds == time.floor_seconds


def test_a_ring_that_passes_both_ways():
    seconds, large = estimate.collective_seconds, 90 * 10**6
    assert seconds("all-gather", 0, 0, 4, 90e9) == 2 * HOP_SECONDS
    assert seconds("all-reduce", 0, 0, 8, 90e9) == 8 * HOP_SECONDS
    assert seconds("all-reduce", large, large // 2, 4, 90e9) == pytest.approx(4e-6 + 1.5 * 0.75e-3)
    assert seconds("reduce-scatter", large, large // 4, 4, 90e9) == pytest.approx(2e-6 + 0.75e-3)
    assert seconds("all-reduce", 1 << 20, 1 << 20, 1, 90e9) == 0
