"""Thresholds by context: a factor of 1 changes nothing, 0 is strict, and each bin has a separate threshold."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from mars_jax import contrib, verify
from mars_jax.contrib import context
from mars_jax.contrib.rules.context import token_classes
from mars_jax.core import tree as trees
from mars_jax.utils.errors import MarsError
from mars_jax.verify import MARGINS
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


CONTEXTS = {
    "position": context("position", (2.0, 0.5, 0.0), edges=(1, 2)),
    "entropy": context("entropy", (0.0, 1.5), edges=(1.2,)),
    "class": context("class", (1.0, 0.0, 3.0), classes=CLASSES),
}


def factor(by, z, i):
    """Return the factor of the bin of a node, for its logits f32[V] and its position."""
    if by == "position":
        return (2.0, 0.5, 0.0, 0.0)[i]
    if by == "entropy":
        return 1.5 if stats.entropy(np.exp(z.astype(np.float64))) >= 1.2 else 0.0
    return min((1.0, 0.0, 3.0)[CLASSES[t]] for t in np.argsort(-z)[:2])


@pytest.mark.parametrize(
    ("by", "margin"), [("position", "gap"), ("position", "ratio"), ("entropy", "gap"), ("class", "gap")]
)
def test_every_node_has_the_threshold_of_its_bin(case, by, margin):
    """Compare with a chain walked in Python. A factor scales one nat, or the relative gap of ratio 0.7."""
    tree, logits, _ = case
    theta = {"gap": 1.0, "ratio": 0.7}[margin]
    verdict = decided(contrib.by_context(by, margin=margin, theta=theta), case, theta, CONTEXTS[by])
    outcomes = set()
    for b in range(ROWS):
        accepted, relaxed = 0, []
        for i, x in enumerate(np.asarray(tree.tokens)[b, 1:]):
            z = np.asarray(logits)[b, i]
            first, second = np.argsort(-z)[:2]
            limit = {"gap": 1.0, "ratio": (1 / 0.7 - 1) * z[second]}[margin]
            low = z[first] - z[second] < limit * factor(by, z, i)
            if x != first and not (x == second and low):
                break
            accepted += 1
            relaxed.append(bool(x != first))
            outcomes.add((bool(x != first), bool(low)))
        assert int(verdict.num_accepted[b]) == accepted
        assert verdict.relaxed[b, :accepted].tolist() == relaxed
    assert (True, True) in outcomes


@pytest.mark.parametrize("margin", MARGINS)
def test_an_infinite_threshold_is_strict_in_every_bin(case, margin):
    rule = contrib.by_context("position", margin=margin, theta=1.0)
    assert not decided(rule, case, np.inf, CONTEXTS["position"]).relaxed.any()


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
