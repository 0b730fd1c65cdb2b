"""Tests of the objectives of heads: training-time test matches the drafter, and training raises acceptance."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mars_jax import verify
from mars_jax.contrib.teaching import Batch
from mars_jax.core.types import Params
from mars_jax.drafters.eagle import eagle
from mars_jax.drafters.mtp import mtp
from mars_jax.lab.training import eagle_training
from mars_jax.models import eagle_head as head
from mars_jax.models import init_params, language_model
from mars_jax.models.config import Delta
from mars_jax.models.eagle_head import EagleConfig
from mars_jax.models.heads import init_params as init_head
from mars_jax.models.mtp_head import MtpConfig
from tests.helpers import training_heads
from tests.helpers.training_heads import EAGLE3, FEATURES, IDS, LAYER, TARGET, WEIGHTS


@pytest.mark.slow
def test_step_j_of_training_is_the_jth_drafted_token():
    """If the drafts of a chain equal the text, training scores each distribution of the chain."""
    params = head.init_params(EAGLE3, jax.random.key(1), scale=0.4) | {"ids": IDS}
    both = Params(target=WEIGHTS, draft=params)
    text, tree = training_heads.drafted_text(eagle(EAGLE3, TARGET, 4), both, verify.exact(), 0.0)
    options = {"ids": IDS, "steps": 4, "dtype": "float32"}
    scored = training_heads.scored_drafts(
        lambda divergence: eagle_training.eagle3(EAGLE3, FEATURES, divergence=divergence, **options),
        params,
        text,
    )
    for j, drafted in enumerate(scored):
        # Token 12 + j is drafted j tokens after the text: entry 10 + j of step j predicts it.
        assert IDS[jnp.argmax(drafted[0, 10 + j])] == tree.tokens[0, 1 + j]


@pytest.mark.slow
def test_step_j_of_a_module_of_a_recurrent_target_is_the_jth_drafted_token():
    """The target reads a row as a single document."""
    delta = Delta(layers=(0, 2), key_heads=1, value_heads=2, key_dim=8, value_dim=6)
    config = dataclasses.replace(
        training_heads.CONFIG, family="qwen3_5_text", delta=delta, attention_gate=True
    )
    module, target = MtpConfig.outline(config), language_model(config)
    params = init_head(module, jax.random.key(1), scale=0.4)
    both = Params(target=init_params(config, jax.random.key(0), scale=0.4), draft=params)
    text, tree = training_heads.drafted_text(mtp(module, target, 4), both, verify.exact(), 0.0, target)
    scored = training_heads.scored_drafts(
        lambda divergence: eagle_training.eagle3(
            module, target, divergence=divergence, steps=4, dtype="float32"
        ),
        params,
        text,
        both.target,
    )
    for j, drafted in enumerate(scored):
        assert jnp.argmax(drafted[0, 10 + j]) == tree.tokens[0, 1 + j]


@pytest.mark.slow
def test_documents_do_not_see_each_other():
    params = head.init_params(EAGLE3, jax.random.key(1), scale=0.4)
    params.pop("ids")
    loss = eagle_training.eagle3(EAGLE3, FEATURES, ids=IDS, steps=3, dtype="float32")
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 16, (1, 25)).astype(np.int32)
    changed = tokens.copy()
    changed[0, :12] = rng.integers(0, 16, 12)
    # Each token of the first document is a separate document, which has no loss.
    segments = jnp.asarray(np.concatenate([np.arange(100, 112), np.ones(13)])[None], jnp.int32)
    losses = [loss(params, Batch(jnp.asarray(x), segments), WEIGHTS)[0] for x in (tokens, changed)]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("version", [1, 3])
def test_training_raises_the_acceptance_of_eagle_heads(version):
    if version == 3:
        config = EAGLE3
        loss = eagle_training.eagle3(EAGLE3, FEATURES, ids=IDS, steps=3, dtype="float32")
    else:
        sizes = {"target_hidden_size": 16, "draft_vocab_size": 16}
        config = EagleConfig(version=1, layer=LAYER, own_unembed=False, **sizes)
        loss = eagle_training.eagle1(config, TARGET, dtype="float32")
    params = head.init_params(config, jax.random.key(1))
    params.pop("ids", None)
    figures = training_heads.train(loss, params, steps=60)
    assert figures[-1]["loss"] < 0.8 * figures[0]["loss"]
    assert figures[-1]["accept_1"] > figures[0]["accept_1"] + 0.1
