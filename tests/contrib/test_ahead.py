"""Drafting on another device while the target verifies gives the tokens of the ordinary loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mars_jax import drafters, verify
from mars_jax.contrib.drafters.ahead import ahead, run_ahead
from mars_jax.core import fake
from mars_jax.core.controls import make_controls
from mars_jax.core.types import Params, Prompts, keys_from_seeds
from mars_jax.models import ModelConfig, init_params, language_model
from mars_jax.utils.errors import MarsError
from tests.helpers import committed, decode_all, ragged

SIZES = {"vocab_size": 8, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "num_layers": 1}
CONFIG = ModelConfig(**SIZES)
MODEL = language_model(CONFIG)


def weights(noise):
    """Return a target, and a draft with the target's weights plus noise."""
    target = init_params(CONFIG, jax.random.key(0), scale=0.4)
    noise_params = init_params(CONFIG, jax.random.key(1), scale=0.4)
    return Params(target, jax.tree.map(lambda x, y: x + noise * y, target, noise_params))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("noise", "temperature", "pre_verify"), [(0.1, [0.0, 1.0, 0.7], False), (0.03, [0.0, 1.0, 0.0], True)]
)
def test_tokens_are_those_of_the_plain_loop(noise, temperature, pre_verify):
    device, draft_device = jax.devices()[:2]
    params = weights(noise)
    prompts, lengths = ragged([1, 2, 17], 48, 8)
    settings = {"limit": 48 - jnp.arange(3), "temperature": temperature}
    controls, keys = make_controls(3, **settings), keys_from_seeds(jnp.arange(3, dtype=jnp.uint32))
    rule = verify.exact()
    loop = ahead(MODEL, drafters.language_model(MODEL, 4), rule)
    batch = Prompts(prompts, lengths, controls, verify.for_rows(rule, 3), keys)
    state, stats, guesses = run_ahead(
        loop, *jax.device_put((params, batch), device), draft_device=draft_device, pre_verify=pre_verify
    )
    assert state.tokens.devices() == {device}
    drafter = drafters.language_model(MODEL, 3)
    expected, expected_stats = decode_all(MODEL, drafter, rule, prompts, lengths, params=params, **settings)
    assert committed(state) == committed(expected)
    assert guesses.steps == int(jnp.max(stats.steps))
    if pre_verify:
        # Some steps have no draft, and only the remainder of some drafts is verified.
        assert 0 < guesses.held < guesses.steps and jnp.sum(stats.steps) > jnp.sum(expected_stats.steps)
        return
    # The drafts are the same too: the target never verifies the extra token, which is a guess.
    np.testing.assert_array_equal(stats.steps, expected_stats.steps)
    np.testing.assert_array_equal(stats.accepted_exact, expected_stats.accepted_exact)
    assert guesses.held < guesses.steps and int(jnp.sum(stats.accepted_exact)) > 0


def test_a_drafter_that_cannot_draft_ahead_is_refused():
    model = fake.hash_model(vocab_size=8)
    for drafter in (drafters.language_model(model, 1), drafters.language_model(model, tree=(2, 1))):
        with pytest.raises(MarsError, match="no chain of 2 or more"):
            ahead(MODEL, drafter, verify.exact())
    rule, keys = verify.exact(), keys_from_seeds(jnp.zeros((1,), jnp.uint32))
    drawn = ahead(MODEL, drafters.language_model(MODEL, 3, sample=True), rule)
    batch = Prompts(*ragged([3], 16, 8), make_controls(1, limit=16), verify.for_rows(rule, 1), keys)
    with pytest.raises(MarsError, match="draws its drafts"):
        run_ahead(drawn, weights(0.0), batch, draft_device=jax.devices()[1])
