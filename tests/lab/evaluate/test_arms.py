"""Tests of the arms, and of the control that samples from the truncated set."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from mars_jax import contrib, verify
from mars_jax.contrib.models import indicator
from mars_jax.core.tree import chain
from mars_jax.lab.evaluate.benchmark.arms import (
    AUTOREGRESSIVE,
    MARS,
    low_margin_sampling,
    make_arms,
    margin_of,
)
from mars_jax.verify import RuleChoice
from tests.helpers import make_rows, verdict_of

ROWS = 4000
LOW = [1.0, 9.6, 10.0, 8.0]  # z2 / z1 = 0.96
HIGH = [1.0, 5.0, 10.0, 8.0]  # 0.8


def two_best(scale):
    """Return the distribution over the two best tokens of `LOW`."""
    second = 1 / (1 + math.exp(0.4 * scale))
    return [0, second, 1 - second, 0]


BEST = [0, 0, 1, 0]


@pytest.mark.parametrize(
    ("logits", "options", "expected"),
    [
        (LOW, {}, two_best(1)),
        (LOW, {"temperature": 1.0}, two_best(1)),
        (LOW, {"temperature": 0.5}, two_best(2)),
        (LOW, {"margin": "gap", "theta": 0.5}, two_best(1)),
        (LOW, {"margin": "gap", "theta": 0.3}, BEST),
        (HIGH, {}, BEST),
        (HIGH, {"temperature": 1.0}, np.exp(HIGH) / np.exp(HIGH).sum()),
        (LOW, {"theta": math.inf}, BEST),
        (LOW, {"strict": True}, BEST),
        (LOW, {"stop_tokens": [1]}, BEST),
        (LOW, {"stop_tokens": [2]}, BEST),
    ],
)
def test_a_low_margin_draws_one_of_the_two_best_and_a_high_one_as_the_target(logits, options, expected):
    """Compare `ROWS` tokens that are sampled without a draft with their distribution."""
    options = {"theta": 0.9, "temperature": 0.0} | options
    margin = options.pop("margin", "ratio")
    z = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (ROWS, 1, 4))
    tree, keys = chain(jnp.zeros((ROWS, 1), jnp.int32)), jax.random.split(jax.random.key(0), ROWS)
    rule = low_margin_sampling(margin, theta=0.5 if margin != "gap" else 1.0)
    verdict = verdict_of(rule, keys, tree, z, make_rows(ROWS, limit=9, **options))
    assert not verdict.num_accepted.any() and verdict.relaxed.shape == (ROWS, 0)
    counts, expected = np.bincount(np.asarray(verdict.next_token), minlength=4), np.asarray(expected)
    assert not counts[expected == 0].any()
    drawn = expected > 0
    assert drawn.sum() == 1 or stats.chisquare(counts[drawn], ROWS * expected[drawn]).pvalue > 1e-3


def test_the_arms_of_a_run():
    arms = make_arms(MARS, [0.8, 0.95], temperature=1.0)
    assert [(arm.name, arm.drafts, arm.theta, arm.top_k) for arm in arms] == [
        (AUTOREGRESSIVE, False, None, 0),
        ("exact", True, None, 0),
        ("mars theta=0.8", True, 0.8, 0),
        ("mars theta=0.95", True, 0.95, 0),
        ("autoregressive top_k=2", False, None, 2),
        ("low-margin sampling", False, 0.8, 0),
    ]
    assert len(make_arms(MARS, [0.8], temperature=0.0)) == 4


def test_a_users_rule_is_one_arm(tmp_path):
    (tmp_path / "gates.py").write_text(
        "from mars_jax.verify import mars, rejection\n\n"
        "def gate(entropy: float = 1.5):\n    return mars(base=rejection(), theta=0.5)\n"
    )
    choice = RuleChoice(f"{tmp_path}/gates.py:gate", {"entropy": 2.0})
    arms = make_arms(choice, [], temperature=1.0)
    assert [(arm.name, arm.role, arm.theta) for arm in arms] == [
        (AUTOREGRESSIVE, "alone", None),
        ("rejection", "strict", None),
        ("gate entropy=2", "rule", None),
        ("autoregressive top_k=2", "control", None),
    ]
    assert margin_of(choice) is None


def test_a_rule_with_weights_is_swept_as_mars_is(tmp_path):
    params = indicator.init_params(8, jax.random.key(0))
    choice = RuleChoice(f"learned:{contrib.save(tmp_path / 'head', params)}", {})
    arms = make_arms(choice, [0.1, 0.3], temperature=0.0)
    assert [arm.name for arm in arms[1:]] == ["exact", "learned theta=0.1", "learned theta=0.3"]
    assert all(np.array_equal(arm.loaded_rule.params["inner"], params["inner"]) for arm in arms[2:])


def test_a_lossless_rule_has_no_quality_to_control_for():
    arms = make_arms(RuleChoice("rejection", {"block": True}), [], temperature=1.0)
    assert [arm.name for arm in arms] == [AUTOREGRESSIVE, "exact", "block"]
    assert len(make_arms(RuleChoice("exact", {}), [], temperature=1.0)) == 2


def test_fewer_controls():
    def names(choice, controls, *thetas):
        arms = make_arms(choice, thetas, temperature=1.0, refined=True, controls=controls)
        return [arm.name for arm in arms]

    swept = ["mars theta=0.9", "mars theta=0.8"]
    assert names(MARS, "none", 0.9, 0.8) == [AUTOREGRESSIVE, *swept, "exact refined"]
    assert names(MARS, "paper", 0.9) == [AUTOREGRESSIVE, "exact", "mars theta=0.9", "exact refined"]
    for controls in ("none", "paper", "all"):
        assert names(RuleChoice("exact", {}), controls) == [AUTOREGRESSIVE, "exact", "exact refined"]


@pytest.mark.slow
def test_the_exact_prefix_of_the_rule_is_its_controls_too():
    """A node decides about the token after it, so the root decides about the first of the remaining strict tokens."""
    z = jnp.broadcast_to(jnp.asarray(LOW, jnp.float32), (4, 2, 4))
    tree, start = chain(jnp.full((4, 2), 2, jnp.int32)), jnp.asarray([5, 6, 7, 8], jnp.int32)
    evidence = verify.evidence(tree, z, start=start, prompt_length=jnp.full((4,), 6, jnp.int32))
    rule = low_margin_sampling(theta=0.5, exact_prefix=2)
    drawn = []
    for seed in range(30):
        keys = verify.evidence(evidence.tree, z, seeds=[seed * 4 + i for i in range(4)]).keys
        verdict, _ = verify.for_rows(rule, 4)(evidence.replace(keys=keys))
        drawn.append(list(zip(verdict.num_accepted.tolist(), verdict.next_token.tolist(), strict=True)))
    first, second, third, fourth = (set(column) for column in zip(*drawn, strict=True))
    assert first == {(1, 2)}  # both tokens of the step are strict, so they are the target's best
    assert second == {(1, 1), (1, 2)}  # only the first token of this step is strict
    assert third == fourth == {(0, 1), (1, 1), (1, 2)}
    arms = make_arms(RuleChoice("mars", {"exact_prefix": 2}), [0.9], temperature=0.0)
    assert [int(arm.loaded_rule.rule.exact_prefix) for arm in arms[2:]] == [2, 2]
