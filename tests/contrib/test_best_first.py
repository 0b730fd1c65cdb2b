"""DDTree's trees, compared with a best-first search that uses a heap."""

import functools
import heapq

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mars_jax.contrib.drafters.best_first import best_first
from mars_jax.core.types import NO_TOKEN
from mars_jax.drafters.tree_shapes import Dynamic


def search(log_p, shape):
    """Return {path: score} of the likeliest nodes, popped one by one, for log_p f32[D, V]."""
    order = np.argsort(-log_p, axis=1, kind="stable")[:, : shape.top_k]
    best = {}
    heap = [(-log_p[0, t], (int(t),)) for t in order[0]]
    heapq.heapify(heap)
    while heap and len(best) < shape.num_nodes - 1:
        score, path = heapq.heappop(heap)
        best[path] = -score
        if len(path) < shape.depth:
            for t in order[len(path)]:
                heapq.heappush(heap, (np.float32(score - log_p[len(path), t]), (*path, int(t))))
    return best


def paths(tree, row):
    """Return the nodes of a row, except the root and padding, as tuples of tokens."""
    tokens, parents = np.asarray(tree.tokens[row]), np.asarray(tree.parents[row])
    node_paths = {0: ()}
    for i in range(1, len(tokens)):
        assert 0 <= parents[i] < i
        if tokens[i] != NO_TOKEN:
            node_paths[i] = (*node_paths[int(parents[i])], int(tokens[i]))
            assert len(node_paths[i]) == tree.depths[row, i]
    return list(node_paths.values())[1:]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "vocab", "rows"),
    [(Dynamic(10, 7, 60), 64, 700), (Dynamic(30, 4, 30), 40, 200), (Dynamic(10, 15, 256), 300, 100)],
)
def test_the_tree_is_that_of_a_best_first_search(shape, vocab, rows):
    """Check 1,000 random marginals in all, sharp and flat."""
    rng = np.random.default_rng(shape.nodes)
    logits = rng.normal(size=(rows, shape.depth, vocab)) * rng.choice([0.5, 2, 6], (rows, 1, 1))
    logits = jnp.asarray(logits, jnp.float32)
    root = jnp.asarray(rng.integers(0, vocab, (rows, 1)), jnp.int32)
    build = jax.jit(functools.partial(best_first, shape))
    tree = build(root, logits, jnp.ones(logits.shape[:2], bool))
    assert np.array_equal(tree.tokens[:, 0], root[:, 0])
    log_p = np.asarray(jax.nn.log_softmax(logits))
    for row in range(rows):
        actual, expected = paths(tree, row), search(log_p[row], shape)
        assert len(set(actual)) == len(actual) == shape.num_nodes - 1
        # Two paths may have equal scores up to rounding.
        if set(actual) != set(expected):
            scores = [sum(log_p[row, d, t] for d, t in enumerate(path)) for path in actual]
            np.testing.assert_allclose(sorted(scores), sorted(expected.values()), atol=1e-5)
            assert len(set(actual) ^ set(expected)) <= 4


@pytest.mark.slow
def test_nothing_is_drafted_after_a_depth_that_is_not_alive():
    logits = jax.random.normal(jax.random.key(0), (3, 4, 9))
    alive = jnp.asarray([[True] * 4, [True, True, False, False], [False] * 4])
    tree = best_first(Dynamic(3, 4, 20), jnp.ones((3, 1), jnp.int32), logits, alive)
    lengths = [[len(path) for path in paths(tree, row)] for row in range(3)]
    assert max(lengths[0]) > 2 and set(lengths[1]) == {1, 2} and len(lengths[1]) == 12 and not lengths[2]
