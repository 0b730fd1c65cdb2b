"""Simulated acceptance gives the requested tau on chains, trees and dynamic trees."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mars_jax import drafters
from mars_jax.contrib import simulated
from mars_jax.contrib.rules.simulated import acceptance_rate
from mars_jax.core import fake
from mars_jax.core import tree as trees
from mars_jax.core.metrics import summarize
from mars_jax.core.types import NO_TOKEN
from mars_jax.utils.errors import MarsError
from tests import helpers
from tests.helpers import judge, rule_oracles

GREEDY = (0.0, 0, 1.0, 0.0)


def test_rates_solve_the_geometric_sum():
    tau = np.asarray([1.0, 1.5, 3.0, 3.9, 6.0], np.float32)
    height = np.asarray([5, 1, 4, 3, 5])
    solve = jax.jit(acceptance_rate, static_argnums=2)
    rate = np.asarray(solve(jnp.asarray(tau), jnp.asarray(height, jnp.int32), 5), np.float64)
    sums = [sum(a**d for d in range(h + 1)) for a, h in zip(rate, height, strict=True)]
    np.testing.assert_allclose(sums, tau, rtol=1e-5)
    assert float(solve(jnp.float32([4.0] * 5), jnp.int32([2] * 5), 5)[0]) == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("tau", [1.0, 2.2])
def test_trees_of_any_shape_give_the_tau_in_the_mean(tau):
    """Padding shortens half of the trees, which therefore have another acceptance rate."""
    rows = 4096
    rng = np.random.default_rng(0)
    parents, depths = trees.static_topology((2, 1, 2, 1))
    tokens = np.tile(np.arange(len(parents)), (rows, 1))
    tokens[: rows // 2, depths > 3] = NO_TOKEN
    batch = {
        name: jnp.asarray(np.broadcast_to(x, tokens.shape), jnp.int32)
        for name, x in (("tokens", tokens), ("parents", parents), ("depths", depths))
    }
    tree = trees.DraftTree(**batch, max_depth=4, is_chain=False)
    logits = jnp.asarray(rng.normal(size=(1, len(parents), 32)).astype(np.float32)).repeat(rows, axis=0)
    greedy = rule_oracles.controls_of([GREEDY] * rows)
    verdict = jax.jit(judge(simulated(tau)))(rule_oracles.keys_of(1, rows), tree, logits, greedy)
    for half in (slice(0, rows // 2), slice(rows // 2, rows)):
        count = np.asarray(verdict.num_accepted[half]) + 1.0
        assert abs(count.mean() - tau) < 4 * count.std() / np.sqrt(len(count)) + 1e-6
    assert not verdict.relaxed.any()


@pytest.mark.slow
def test_a_decode_has_the_tau_and_rows_do_not_see_each_other():
    model = fake.hash_model(vocab_size=31)
    drafter = drafters.language_model(model, 5)  # drafts the target's tokens; acceptance is purely random
    prompts, lengths = helpers.ragged([5] * 8, 512, 31)
    rule = simulated(3.5)
    state, counters = helpers.decode_all(model, drafter, rule, prompts, lengths)
    steps = np.asarray(counters.steps)
    tau = summarize(counters).tau
    # The limit cuts the last step of a row by at most 2.5 tokens on average.
    spread = 2.0 / np.sqrt(steps.sum())
    assert abs(tau - 3.5) < 4 * spread + 2.5 * len(steps) / steps.sum()
    # A row's draws do not depend on its place in the batch.
    seeds = list(range(8))[::-1]
    turned, _ = helpers.decode_all(model, drafter, rule, prompts[::-1], lengths[::-1], seeds=seeds)
    assert jnp.array_equal(turned.tokens[::-1], state.tokens)


def test_a_tau_out_of_reach_is_refused():
    with pytest.raises(MarsError, match=r"tau is 3\.1, and this draft gives 3 tokens a step at most"):
        simulated([1, 3.1]).check_drafter(drafters.language_model(fake.hash_model(vocab_size=31), 2))
