"""Trees against 15-line Python references, on random trees padded to one fixed shape."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mars_jax.core import tree as trees
from mars_jax.core.types import NO_NODE
from tests.helpers.random_trees import B, D, N, S, python_walk, random_tree

seeds = st.integers(0, 2**32 - 1)
property_test = settings(max_examples=25, deadline=None)


def python_ancestors(parents, i):
    seen = set()
    while i >= 0:
        seen.add(i)
        i = parents[i]
    return seen


@given(seeds)
@property_test
def test_walk_equals_the_python_walk(seed):
    rng = np.random.default_rng(seed)
    tree = random_tree(rng)
    exact, relaxed = rng.random((B, N)) < 0.3, rng.random((B, N)) < 0.4
    max_run = rng.integers(0, 4, B)
    path, count, edges = jax.jit(trees.walk)(
        tree, jnp.asarray(exact), trees.Allowance(jnp.asarray(relaxed), jnp.asarray(max_run, jnp.int32))
    )
    for b in range(B):
        expected = python_walk(tree.tokens[b], tree.parents[b], exact[b], relaxed[b], max_run[b], D)
        assert (path[b].tolist(), int(count[b]), edges[b].tolist()) == expected


@given(seeds)
@property_test
@pytest.mark.slow
def test_a_walk_with_every_bound_equals_the_python_walk(seed):
    rng = np.random.default_rng(seed)
    tree = random_tree(rng)
    exact, relaxed = rng.random((B, N)) < 0.2, rng.random((B, N)) < 0.7
    max_run, most = rng.integers(1, 4, B), rng.integers(0, 4, B)
    cost, budget = rng.integers(0, 5, (B, N)) / 4, rng.integers(0, 9, B) / 4

    def walked(**bounds):
        bounds = {
            name: jnp.asarray(x, jnp.int32 if name == "max_relaxed" else jnp.float32)
            for name, x in bounds.items()
        }
        allowed = trees.Allowance(jnp.asarray(relaxed), jnp.asarray(max_run, jnp.int32), **bounds)
        path, count, edges = jax.jit(trees.walk)(tree, jnp.asarray(exact), allowed)
        return [(path[b].tolist(), int(count[b]), edges[b].tolist()) for b in range(B)]

    def expected(**bounds):
        rows = [{name: x[b] for name, x in bounds.items()} for b in range(B)]
        rest = (exact, relaxed, max_run)
        return [
            python_walk(tree.tokens[b], tree.parents[b], *(x[b] for x in rest), D, **rows[b])
            for b in range(B)
        ]

    assert walked(max_relaxed=most) == expected(most=most)
    assert walked(max_relaxed=most, cost=cost, budget=budget) == expected(most=most, cost=cost, budget=budget)
    assert walked(cost=cost) == walked() == expected()  # what costs is free where no budget bounds it


def test_without_an_allowance_only_exact_edges_are_walked():
    tree = random_tree(np.random.default_rng(3))
    exact = np.random.default_rng(4).random((B, N)) < 0.5
    path, count, edges = trees.walk(tree, jnp.asarray(exact), None)
    for b in range(B):
        expected = python_walk(tree.tokens[b], tree.parents[b], exact[b], np.zeros(N, bool), 0, D)
        assert (path[b].tolist(), int(count[b]), edges[b].tolist()) == expected


def mask_of(tree, start):
    return trees.visible(tree, start).dense(S)


@given(seeds)
@property_test
def test_what_a_walk_spends_stays_within_the_budget_and_the_next_affordable_edge_is_taken(seed):
    """With the first relaxed child free of choice: along a chain, against plain Python."""
    rng = np.random.default_rng(seed)
    tree = trees.chain(jnp.zeros((B, N), jnp.int32))
    exact, relaxed = rng.random((B, N)) < 0.3, rng.random((B, N)) < 0.8
    cost, budget = rng.integers(0, 5, (B, N)) / 4, rng.integers(0, 9, B) / 4
    allowed = trees.Allowance(
        jnp.asarray(relaxed),
        jnp.full((B,), N, jnp.int32),
        jnp.asarray(cost, jnp.float32),
        jnp.asarray(budget, jnp.float32),
    )
    _, count, edges = jax.jit(trees.walk)(tree, jnp.asarray(exact), allowed)
    for b in range(B):
        left, taken = budget[b], []
        for i in range(1, N):
            if not exact[b, i] and not (relaxed[b, i] and cost[b, i] <= left):
                break
            taken.append(not exact[b, i])
            left -= cost[b, i] if taken[-1] else 0
        assert int(count[b]) == len(taken) and edges[b, : len(taken)].tolist() == taken


@given(seeds)
@property_test
def test_attention_mask_shows_the_prefix_and_the_ancestors(seed):
    rng = np.random.default_rng(seed)
    tree = random_tree(rng)
    start = rng.integers(0, S - N + 1, B)
    mask = np.asarray(jax.jit(mask_of)(tree, jnp.asarray(start, jnp.int32)))
    for b in range(B):
        parents = np.asarray(tree.parents[b])
        for i in range(N):
            seen = set(range(start[b])) | {start[b] + j for j in python_ancestors(parents, i)}
            assert set(np.flatnonzero(mask[b, i])) == seen


def test_a_chain_has_the_mask_of_the_same_tree():
    chain = trees.chain(jnp.arange(2 * N, dtype=jnp.int32).reshape(2, N))
    start = jnp.asarray([0, 7], jnp.int32)
    as_tree = chain.replace(is_chain=False)
    np.testing.assert_array_equal(mask_of(chain, start), mask_of(as_tree, start))
    values = jnp.arange(2 * N, dtype=jnp.int32).reshape(2, N)
    np.testing.assert_array_equal(trees.at_parent(chain, values), trees.at_parent(as_tree, values))


def test_one_node_walks_nowhere():
    tree = trees.chain(jnp.asarray([[3]], jnp.int32))
    flags = jnp.ones((1, 1), bool)
    path, count, edges = trees.walk(tree, flags, trees.Allowance(flags, jnp.asarray([9], jnp.int32)))
    assert path.tolist() == [[0]] and count.tolist() == [0] and edges.shape == (1, 0)


@pytest.mark.parametrize("branching", [(), (3,), (4, 2, 2, 1), (1, 1, 1)])
def test_static_topology_has_the_branching_it_was_asked_for(branching):
    parents, depths = trees.static_topology(branching)
    assert parents[0] == NO_NODE and len(parents) == 1 + sum(np.cumprod(branching, dtype=int))
    for i in range(1, len(parents)):
        assert parents[i] < i and depths[i] == depths[parents[i]] + 1
    for i, depth in enumerate(depths):
        assert np.sum(parents == i) == (branching[depth] if depth < len(branching) else 0)


def test_gather_path_takes_rows_in_path_order():
    values = jnp.arange(2 * 4 * 3, dtype=jnp.int32).reshape(2, 4, 3)
    path = jnp.asarray([[0, 2, 2], [0, 1, 3]], jnp.int32)
    expected = np.stack([np.asarray(values)[b, np.asarray(path)[b]] for b in range(2)])
    np.testing.assert_array_equal(trees.gather_path(values, path), expected)
