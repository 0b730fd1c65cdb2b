"""The learned rule relaxes nodes that its head allows, under the guards of `mars`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mars_jax import contrib
from mars_jax.contrib.models.indicator import harm_log_odds, init_params
from mars_jax.core import tree as trees
from tests.helpers import judge, rule_oracles

GREEDY, V, NODES, ROWS, E = (0.0, 0, 1.0, 0.0), 8, 4, 32, 6


@pytest.mark.slow
def test_nodes_are_relaxed_where_the_head_gives_little_chance_of_harm():
    rng = np.random.default_rng(0)
    logits = rng.normal(4, 2, (ROWS, NODES, V)).astype(np.float32)
    hidden = rng.normal(size=(ROWS, NODES, E)).astype(np.float32)
    best = np.argsort(-logits, axis=-1)
    tokens = np.where(rng.random((ROWS, NODES - 1)) < 0.4, best[:, :-1, 0], best[:, :-1, 1])
    tree = trees.chain(jnp.asarray(np.pad(tokens, ((0, 0), (1, 0))), jnp.int32))
    head = init_params(E, jax.random.key(0)) | {"outer": jnp.asarray(rng.normal(size=64), jnp.float32)}
    z = np.sort(logits, axis=-1)
    harm = jax.nn.sigmoid(harm_log_odds(head, *map(jnp.asarray, (hidden, z[..., -1], z[..., -2]))))
    theta = float(np.median(harm))
    controls = rule_oracles.controls_of([GREEDY] * ROWS, theta=theta, stop_tokens=[3])
    keys, relax = rule_oracles.keys_of(0, ROWS), jax.jit(judge(contrib.learned()))
    verdict = relax(keys, tree, jnp.asarray(logits), controls, hidden=jnp.asarray(hidden), params=head)
    num_relaxed = 0
    for b in range(ROWS):
        accepted = 0
        for i, x in enumerate(tokens[b]):
            first, second = best[b, i, :2]
            relaxable = x == second and harm[b, i] < theta and 3 not in (first, second)
            if x != first and not relaxable:
                break
            num_relaxed += x != first
            accepted += 1
        assert int(verdict.num_accepted[b]) == accepted
    assert num_relaxed > 3
