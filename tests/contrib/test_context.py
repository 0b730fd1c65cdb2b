"""Thresholds by context: factors of 1 change nothing, 0 is strict, and each bin has its own threshold."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from kernels_pallas import margin_stats
from mars_jax import contrib, verify
from mars_jax.contrib import context
from mars_jax.contrib.rules.context import thresholds, token_classes
from mars_jax.core import tree as trees
from mars_jax.core.errors import MarsError
from mars_jax.verify import MARGINS, evidence
from tests.helpers import judge, rule_oracles

V, NODES, ROWS = 8, 4, 32
CLASSES = token_classes(["a", "7", ".", "b", "8", ",", "c", "d"])
GREEDY = (0.0, 0, 1.0, 0.0)


@pytest.fixture(scope="module")
def case():
    """Return chains that draft the target's best or second-best token, so that thresholds decide."""
    rng = np.random.default_rng(0)
    logits = rng.normal(4, 2, (ROWS, NODES, V)).astype(np.float32)
    best = np.argsort(-logits, axis=-1)
    tokens = np.where(rng.random((ROWS, NODES - 1)) < 0.4, best[:, :-1, 0], best[:, :-1, 1])
    tree = trees.chain(jnp.asarray(np.pad(tokens, ((0, 0), (1, 0))), jnp.int32))
    return tree, jnp.asarray(logits), rule_oracles.keys_of(0, ROWS)


def decided(rule, case, theta, table=()):
    tree, logits, keys = case
    rows = rule_oracles.controls_of([GREEDY] * ROWS, theta=theta)
    return jax.jit(judge(rule))(keys, tree, logits, rows, params=table)


@pytest.mark.parametrize("margin", MARGINS)
def test_factors_scale_the_gap_that_is_let_through(case, margin):
    """Compare in units of the margin: nats for the gap, the second logit for the ratio."""
    tree, logits, _ = case
    found = margin_stats(logits)
    theta = jnp.full((ROWS, NODES), {"ratio": 0.7, "gap": 1.5}[margin], jnp.float32)
    seen = evidence(tree, logits)
    factors = np.asarray([1.0, 0.0, 2.0, 2.0])
    by = context("position", factors[:3], edges=(1, 2))
    low = MARGINS[margin](found.top1, found.top2, thresholds("position", by, seen, theta, margin))
    gap, unit = np.asarray(found.top1 - found.top2), 1.0
    limit = {"ratio": 1 / 0.7 - 1, "gap": 1.5}[margin]
    if margin == "ratio":
        unit = np.where(found.top2 > 0, found.top2, np.nan)  # only where both are positive, as most are
    expected = gap / unit < limit * factors
    sure = (np.asarray(found.top2) > 0) & (np.abs(gap / unit - limit * factors) > 1e-5)
    assert np.array_equal(np.asarray(low)[sure], expected[sure]) and sure.mean() > 0.8
    assert 0 < expected[sure].mean() < 1
    infinite = thresholds("position", by, seen, jnp.full((ROWS, NODES), jnp.inf), margin)
    assert not MARGINS[margin](found.top1, found.top2, infinite).any()


@pytest.mark.parametrize(
    ("chosen", "factor"),
    [
        (context("position", (2.0, 0.5, 0.0), edges=(1, 2)), lambda z, i: (2.0, 0.5, 0.0, 0.0)[i]),
        (
            context("entropy", (0.0, 1.5), edges=(1.2,)),
            lambda z, i: 1.5 if stats.entropy(np.exp(z.astype(np.float64))) >= 1.2 else 0.0,
        ),
        (
            context("class", (1.0, 0.0, 3.0), classes=CLASSES),
            lambda z, i: min((1.0, 0.0, 3.0)[CLASSES[t]] for t in np.argsort(-z)[:2]),
        ),
    ],
    ids=["position", "entropy", "class"],
)
def test_every_node_has_the_threshold_of_its_bin(case, chosen, factor):
    """Compare with a chain walked in Python, with a gap of one nat scaled by the factor."""
    tree, logits, _ = case
    found = decided(contrib.by_context(chosen.by, margin="gap"), case, 1.0, chosen)
    some = set()
    for b in range(ROWS):
        accepted, relaxed = 0, []
        for i, x in enumerate(np.asarray(tree.tokens)[b, 1:]):
            z = np.asarray(logits)[b, i]
            first, second = np.argsort(-z)[:2]
            low = z[first] - z[second] < factor(z, i)
            if x != first and not (x == second and low):
                break
            accepted += 1
            relaxed.append(bool(x != first))
            some.add((bool(x != first), bool(low)))
        assert int(found.num_accepted[b]) == accepted
        assert found.relaxed[b, :accepted].tolist() == relaxed
    assert (True, True) in some


def test_names_say_the_context():
    assert contrib.by_context("position", margin="gap", theta=1.5).name == "mars(gap, by position)"
    assert contrib.by_context("position", base=verify.rejection()).name == "mars(by position) over rejection"


def test_a_table_is_asked_for_by_its_kind(case):
    for table in ((), context("position", (1.0, 0.5), edges=(2,))):
        with pytest.raises(MarsError, match=r"has a context by class and Params\.verify holds"):
            decided(contrib.by_context("class"), case, 0.7, table)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"by": "weather", "factors": (1,)}, "by 'weather': expected one of entropy, position, class"),
        ({"by": "entropy", "factors": (1,), "edges": (1,)}, "has 1 factors: expected 2"),
        ({"by": "position", "factors": (1, -1), "edges": (1,)}, "at least 0"),
        ({"by": "position", "factors": (1, 1, 1), "edges": (2, 1)}, "ascending"),
        ({"by": "class", "factors": (1, 1, 1)}, "classes belong to a context by class"),
    ],
)
def test_bad_contexts_are_named(arguments, message):
    with pytest.raises(MarsError, match=message):
        context(**arguments)
