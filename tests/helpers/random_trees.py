"""Random draft trees of one padded shape, and a Python reference of `tree.walk`."""

import jax
import numpy as np

from mars_jax.core.types import NO_NODE, NO_TOKEN, DraftTree

B, N, D, S, V = 8, 12, 5, 24, 4


def random_tree(rng: np.random.Generator, batch: int = B) -> DraftTree:
    """Return a random topology of depth <= D. Token ids are few, so that siblings repeat; about a sixth is padding."""
    parents = np.full((batch, N), NO_NODE)
    depths = np.zeros((batch, N), int)
    for b in range(batch):
        for i in range(1, N):
            parents[b, i] = rng.choice([j for j in range(i) if depths[b, j] < D])
            depths[b, i] = depths[b, parents[b, i]] + 1
    tokens = rng.integers(0, V, (batch, N))
    tokens[:, 1:][rng.random((batch, N - 1)) < 1 / 6] = NO_TOKEN
    tokens, parents, depths = jax.device_put([x.astype(np.int32) for x in (tokens, parents, depths)])
    return DraftTree(tokens=tokens, parents=parents, depths=depths, max_depth=D, is_chain=False)


def python_walk(tokens, parents, exact, relaxed, max_run, max_depth, most=N, cost=(0,) * N, budget=0):
    """Walk one row as documented in `tree.walk`, with at most `most` relaxed edges and within the budget."""
    node, path, edges, run = 0, [0], [], 0
    while len(edges) < max_depth:
        children = [i for i in range(len(tokens)) if parents[i] == node and tokens[i] >= 0]
        best = [i for i in children if exact[i]]
        spare = [
            i for i in children if relaxed[i] and run < max_run and sum(edges) < most and cost[i] <= budget
        ]
        if not best and not spare:
            break
        edges.append(not best)
        run = run + 1 if edges[-1] else 0
        node = (best or spare)[0]
        budget -= cost[node] if edges[-1] else 0
        path.append(node)
    missing = max_depth - len(edges)
    return path + [node] * missing, len(edges), edges + [False] * missing
