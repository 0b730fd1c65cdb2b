"""The learned rule: it relaxes where its head allows, under the guards of `mars`, in the loop and outside it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mars_jax import contrib, drafters, verify
from mars_jax.contrib.models.indicator import init_params as init_head
from mars_jax.contrib.models.indicator import logit
from mars_jax.core import tree as trees
from mars_jax.core.types import Params
from mars_jax.models import ModelConfig, init_params, language_model
from tests import helpers
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
    head = init_head(E, jax.random.key(0)) | {"outer": jnp.asarray(rng.normal(size=64), jnp.float32)}
    z = np.sort(logits, axis=-1)
    harm = jax.nn.sigmoid(logit(head, *map(jnp.asarray, (hidden, z[..., -1], z[..., -2]))))
    theta = float(np.median(harm))
    made = rule_oracles.controls_of([GREEDY] * ROWS, theta=theta, stop_tokens=[3])
    found = jax.jit(judge(contrib.learned()))(
        rule_oracles.keys_of(0, ROWS),
        tree,
        jnp.asarray(logits),
        made,
        hidden=jnp.asarray(hidden),
        params=head,
    )
    seen = 0
    for b in range(ROWS):
        accepted = 0
        for i, x in enumerate(tokens[b]):
            first, second = best[b, i, :2]
            relaxable = x == second and harm[b, i] < theta and 3 not in (first, second)
            if x != first and not relaxable:
                break
            seen += x != first
            accepted += 1
        assert int(found.num_accepted[b]) == accepted
    assert seen > 3


@pytest.mark.slow
def test_the_loop_hands_it_the_targets_hidden_state_and_its_weights():
    """Check that a head that depends only on the margin equals `mars` by the gap."""
    config = ModelConfig(vocab_size=32, hidden_size=16, intermediate_size=24, num_layers=1, num_heads=2)
    model, params = language_model(config), init_params(config, jax.random.key(0), scale=0.3)
    drafter = drafters.ngram(4)
    head = jax.tree.map(jnp.zeros_like, init_head(16, jax.random.key(0))) | {
        "margin": jnp.asarray([1.0, 0.0]), "bias": jnp.asarray(-0.5)
    }  # fmt: skip
    prompts, lengths = helpers.ragged([9, 5], 64, 4)
    theta = float(jax.nn.sigmoid(1.0 - 0.5))  # for a gap of one nat
    ours, counts = helpers.decode_all(
        model, drafter, contrib.learned(), prompts, lengths, params=Params(params, (), head), theta=theta
    )
    theirs, _ = helpers.decode_all(
        model, drafter, verify.mars(margin="gap"), prompts, lengths, params=Params(params), theta=1.0
    )
    assert helpers.committed(ours) == helpers.committed(theirs)
    assert int(counts.accepted_relaxed.sum()) > 0
