"""Draft trees in Python: extract the branches of a row, and check the children of every node."""

import numpy as np

from mars_jax.core.types import NO_TOKEN


def branches(tree, row):
    """Return {node: tokens from the root's child to the node} for every node except padding; the root maps to ()."""
    tokens, parents, depths = (np.asarray(x[row]).tolist() for x in (tree.tokens, tree.parents, tree.depths))
    paths = {0: ()}
    for node in range(1, len(tokens)):
        assert parents[node] < node
        if tokens[node] != NO_TOKEN:
            paths[node] = (*paths[parents[node]], tokens[node])
            assert len(paths[node]) == depths[node]
    return paths


def check_best_children(tree, state, scores):
    """Check that the children of every node are the best tokens by `scores(text up to the node)`, best first."""
    for row, length in enumerate(state.length.tolist()):
        past = state.tokens[row, :length].tolist()
        assert tree.tokens[row, 0] == past[-1]
        paths = branches(tree, row)
        for path in paths.values():
            children = [child[-1] for child in paths.values() if child and child[:-1] == path]
            best = np.argsort(-scores([*past, *path]), kind="stable")[: len(children)]
            assert children == best.tolist()
