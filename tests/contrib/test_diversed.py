"""DIVERSED: `mixture` at its head's weights, and a gradient equal to that of the enumerated worth."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mars_jax import contrib, verify
from mars_jax.contrib.models import indicator, mixer
from mars_jax.contrib.rules import diversed_training
from mars_jax.contrib.rules.head_files import read_weights
from mars_jax.contrib.teaching import forward_packed
from mars_jax.core import tree as trees
from mars_jax.core.rule import LoadedRule
from mars_jax.models.config import ModelConfig
from mars_jax.models.transformer import init_params, language_model
from tests.helpers.checkpoint_files import message

V, NODES, ROWS, E, F = 7, 4, 64, 5, 3


def evidence(params):
    rng = np.random.default_rng(0)
    logits, drafted = (jnp.asarray(rng.normal(0, 2, (ROWS, NODES, V)), jnp.float32) for _ in range(2))
    tree = trees.chain(jnp.asarray(rng.integers(0, V, (ROWS, NODES)), jnp.int32), drafted)
    tree = tree.replace(hidden=jnp.asarray(rng.normal(size=(ROWS, NODES, F)), jnp.float32))
    hidden = jnp.asarray(rng.normal(size=(ROWS, NODES, E)), jnp.float32)
    return verify.evidence(tree, logits, hidden=hidden, params=params, temperature=1.0)


@pytest.mark.slow
def test_a_head_that_says_one_weight_is_the_mixture_of_that_weight():
    params = mixer.init_params(E, jax.random.key(0), draft_hidden_size=F) | {"bias": jnp.asarray(0.3)}
    same_evidence = evidence(params)
    for shift in (-1.0, 0.0, 2.0):
        weight = 1 / (1 + np.exp(-(0.3 + shift)))
        actual, _ = verify.for_rows(contrib.diversed(shift=shift), ROWS)(same_evidence)
        expected, _ = verify.for_rows(verify.mixture(weight=weight), ROWS)(same_evidence)
        np.testing.assert_array_equal(actual.num_accepted, expected.num_accepted)
        np.testing.assert_array_equal(actual.next_token, expected.next_token)


def test_the_weight_is_that_of_each_position():
    """Compare with the formula, written out for one node."""
    rng = np.random.default_rng(1)
    shapes = {"inner": (3, E), "drafted": (3, F), "outer": (3,)}
    params = {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()}
    params |= {"signals": jnp.asarray([0.5, -0.7, 2.0]), "bias": jnp.asarray(0.1)}
    h, d = rng.normal(size=E), rng.normal(size=F)
    p, q = (np.exp(z) / np.exp(z).sum() for z in rng.normal(size=(2, V)))
    unit_h, unit_d = (x / np.sqrt((x**2).mean() + 1e-6) for x in (h, d))
    inner = np.asarray(jax.nn.gelu(jnp.asarray(params["inner"] @ unit_h + params["drafted"] @ unit_d)))
    entropies = [-(x * np.log(x)).sum() for x in (p, q)]
    expected = inner @ params["outer"] + 0.5 * entropies[0] - 0.7 * entropies[1] + np.abs(p - q).sum() + 0.1
    log_p, log_q = (jnp.log(jnp.asarray(x)) for x in (p, q))
    actual = mixer.weight_log_odds(params, jnp.asarray(h), log_p, log_q, jnp.asarray(d))
    np.testing.assert_allclose(actual, expected, rtol=1e-4)


@pytest.mark.slow
def test_the_gradient_is_that_of_the_enumerated_worth():
    """Use texts of one token after a prompt, in which each token occurs as often as the mixture emits it."""
    config = ModelConfig(
        vocab_size=V, hidden_size=E * 2, intermediate_size=8, num_layers=1, num_heads=1, head_dim=4
    )
    model = language_model(config)
    teacher, params = (init_params(config, jax.random.key(i), scale=0.8) for i in range(2))
    rewards = np.asarray([0.0, 1.0, 0.2, 0.7, 0.0, 1.0, 0.4], np.float32)
    head = mixer.init_params(2 * E, jax.random.key(2), draft_hidden_size=2 * E)
    head |= {"signals": jnp.asarray([0.1, 0.2, -0.3])}
    sequences = np.asarray([[3, x] for x in range(V)], np.int32)

    def run_model(weights):
        out = forward_packed(model, weights, jnp.asarray(sequences[:1, :1]), jnp.zeros((1, 1), jnp.int32))
        return out.hidden[0, 0], jax.nn.log_softmax(model.unembed(weights, out.hidden)[0, 0])

    (hidden, log_p), (draft_hidden, log_q) = run_model(teacher), run_model(params)

    def law(head):
        w = jax.nn.sigmoid(mixer.weight_log_odds(head, hidden, log_p, log_q, draft_hidden))
        return w * jnp.exp(log_p) + (1 - w) * jnp.exp(log_q)

    def worth(head):
        return jnp.sum(law(head) * rewards) + 0.5 * jnp.sum(jnp.minimum(law(head), jnp.exp(log_q)))

    counts = np.round(np.asarray(jax.jit(law)(head)) * 20000).astype(int)
    completions, answered = np.repeat(sequences, counts, axis=0), np.tile([False, True], (counts.sum(), 1))
    rollouts = diversed_training.Rollouts(completions, answered, np.repeat(rewards, counts))
    expected = jax.jit(jax.grad(worth))(head)

    def surrogate(head):
        return -diversed_training.surrogate(head, rollouts, (teacher, params), models=(model, model))[0]

    actual = jax.jit(jax.grad(surrogate))(head)
    for name in ("bias", "signals", "outer"):
        np.testing.assert_allclose(actual[name], expected[name], rtol=0.02, atol=2e-4)
    assert float(jnp.abs(expected["bias"])) > 1e-3


def test_its_weights_are_written_and_read_and_are_no_other_rule_s(tmp_path):
    params = mixer.init_params(6, jax.random.key(0), width=3, draft_hidden_size=4)
    folder = contrib.save(tmp_path / "head", params, "diversed")
    loaded = verify.load(f"diversed:{folder}", shift=1.0)
    assert isinstance(loaded, LoadedRule) and loaded.rule.shift == 1.0
    jax.tree.map(np.testing.assert_array_equal, loaded.params, params)
    assert "its model_type is mars_jax_mixer" in message(read_weights, folder)
    indicator_folder = contrib.save(tmp_path / "other", indicator.init_params(6, jax.random.key(0)))
    assert "its model_type is mars_jax_indicator" in message(verify.load, f"diversed:{indicator_folder}")


def test_a_draft_or_weights_that_do_not_fit_are_refused():
    rule, inputs = verify.for_rows(contrib.diversed(), ROWS), evidence(())
    assert "needs the weights of its head" in message(rule, inputs)
    inputs = inputs.replace(params=mixer.init_params(6, jax.random.key(0), width=3, draft_hidden_size=4))
    assert "reads hidden states of size 4 from the draft, and the draft's have 3" in message(rule, inputs)
    bare = inputs.replace(tree=inputs.tree.replace(hidden=None))
    assert "and the drafter gives none: draft with the model" in message(rule, bare)
