"""Trees compared with short Python references, on random trees padded to one fixed shape."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mars_jax.core import tree as trees
from mars_jax.core.types import NO_NODE
from tests.helpers import slow_but
from tests.helpers.random_trees import B, D, N, S, python_walk, random_tree

seeds = st.integers(0, 2**32 - 1)
property_test = settings(max_examples=25, deadline=None)


BOUNDS = {
    "none": (),
    "number of relaxed edges": ("max_relaxed",),
    "budget": ("cost", "budget"),
    "number and budget": ("max_relaxed", "cost", "budget"),
    # A cost without a budget limits nothing.
    "cost": ("cost",),
    "no relaxed edge": None,
}


@pytest.mark.parametrize("bounds", slow_but(BOUNDS, "none", "number and budget", "no relaxed edge"))
@given(seeds)
@property_test
def test_walk_equals_the_python_walk(bounds, seed):
    rng = np.random.default_rng(seed)
    tree = random_tree(rng)
    exact, relaxed = rng.random((B, N)) < 0.25, rng.random((B, N)) < 0.5
    max_run = rng.integers(0, 4, B).astype(np.int32)
    drawn = {
        "max_relaxed": rng.integers(0, 4, B).astype(np.int32),
        "cost": rng.integers(0, 5, (B, N)).astype(np.float32) / 4,
        "budget": rng.integers(0, 9, B).astype(np.float32) / 4,
    }
    drawn = {name: drawn[name] for name in BOUNDS[bounds] or ()}
    allowance = trees.Allowance(relaxed, max_run, **drawn)
    if BOUNDS[bounds] is None:
        allowance, relaxed = None, np.zeros((B, N), bool)
    tree, (path, count, edges) = jax.device_get((tree, jax.jit(trees.walk)(tree, exact, allowance)))
    if "budget" not in drawn:
        drawn.pop("cost", None)
    for b in range(B):
        row = {("most" if name == "max_relaxed" else name): x[b] for name, x in drawn.items()}
        expected = python_walk(tree.tokens[b], tree.parents[b], exact[b], relaxed[b], max_run[b], D, **row)
        assert (path[b].tolist(), int(count[b]), edges[b].tolist()) == expected


def mask_of(tree, start):
    return trees.visible(tree, start).dense(S)


@given(seeds)
@property_test
def test_attention_mask_shows_the_prefix_and_the_ancestors(seed):
    rng = np.random.default_rng(seed)
    tree = random_tree(rng)
    start = rng.integers(0, S - N + 1, B)
    tree, mask = jax.device_get((tree, jax.jit(mask_of)(tree, start.astype(np.int32))))
    for b in range(B):
        visible_slots = {-1: set(range(start[b]))}
        for i, parent in enumerate(tree.parents[b].tolist()):
            visible_slots[i] = visible_slots[parent] | {start[b] + i}
            assert set(np.flatnonzero(mask[b, i])) == visible_slots[i]


def test_a_chain_has_the_mask_of_the_same_tree():
    chain = trees.chain(jnp.arange(2 * N, dtype=jnp.int32).reshape(2, N))
    start = jnp.asarray([0, 7], jnp.int32)
    as_tree = chain.replace(is_chain=False)
    np.testing.assert_array_equal(mask_of(chain, start), mask_of(as_tree, start))
    values = jnp.arange(2 * N, dtype=jnp.int32).reshape(2, N)
    np.testing.assert_array_equal(trees.at_parent(chain, values), trees.at_parent(as_tree, values))


@pytest.mark.parametrize("branching", [(), (3,), (4, 2, 2, 1), (1, 1, 1)])
def test_static_topology_has_the_branching_it_was_asked_for(branching):
    parents, depths = trees.static_topology(branching)
    assert parents[0] == NO_NODE and len(parents) == 1 + sum(np.cumprod(branching, dtype=int))
    for i in range(1, len(parents)):
        assert parents[i] < i and depths[i] == depths[parents[i]] + 1
    for i, depth in enumerate(depths):
        assert np.sum(parents == i) == (branching[depth] if depth < len(branching) else 0)
