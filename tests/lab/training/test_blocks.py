"""Tests of the objective of block drafters: it scores the drafted distributions, and training raises acceptance."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mars_jax import verify
from mars_jax.contrib.drafters.dflash import dflash
from mars_jax.contrib.models import dflash_head as head
from mars_jax.contrib.models.dflash_head import DFlashConfig
from mars_jax.contrib.teaching import forward_packed
from mars_jax.core.types import Params
from mars_jax.lab.training import dflash_training
from mars_jax.models import ModelConfig
from tests.helpers.training_heads import IDS, SIZES, TARGET, WEIGHTS, drafted_text, scored_drafts, train

LAYER = ModelConfig(family="qwen3", qk_norm=True, num_layers=2, windows=(None, 6), **SIZES)
DRAFTED = {"block_size": 4, "mask_token": 3, "draft_vocab_size": 12, "own_unembed": True}
READ = {"target_hidden_size": 16, "feature_layers": (0, 2)}
DFLASH = DFlashConfig(layer=LAYER, causal=(False, True), **DRAFTED, **READ)
CONFIDENCE = {"confidence": True, "confidence_bias": True, "confidence_markov": True}
DSPARK = dataclasses.replace(
    DFLASH, draft_vocab_size=16, own_unembed=False, from_anchor=True, markov_rank=4, **CONFIDENCE
)
FEATURES = TARGET.with_features((0, 2))


@pytest.mark.slow
@pytest.mark.parametrize("config", [DFLASH, DSPARK], ids=["dflash", "dspark"])
def test_what_is_scored_is_what_is_drafted(config):
    """If the drafts of a chain equal the text, training scores the distributions of those draws."""
    params = head.init_params(config, jax.random.key(1), scale=0.4)
    ids = IDS if "ids" in params else None
    both = Params(target=WEIGHTS, draft=params if ids is None else params | {"ids": ids})
    text, tree = drafted_text(dflash(config, TARGET, sample=True), both, verify.rejection(), 1.0)
    n = text.shape[1]

    # One block per position, so that one begins at the last token of the prompt.
    def loss(divergence):
        return dflash_training.dflash(
            config, FEATURES, ids=ids, blocks=n, divergence=divergence, dtype="float32"
        )

    scored = scored_drafts(loss, params, text)
    places = dflash_training.anchors(text, n)
    np.testing.assert_array_equal(places[0], np.arange(n))
    wide = jax.nn.log_softmax(config.widen(both, scored[0][:, 11]))
    drafted = jax.nn.log_softmax(tree.draft_logits[:, : config.drafts])
    np.testing.assert_allclose(wide, drafted, atol=2e-5)


@pytest.mark.slow
def test_documents_do_not_see_each_other():
    params = head.init_params(DFLASH, jax.random.key(1), scale=0.4)
    both = Params(target=WEIGHTS, draft=params)
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(0, 16, (1, 24)), jnp.int32)
    changed_tokens = tokens.at[:, :12].set(jnp.asarray(rng.integers(0, 16, (1, 12)), jnp.int32))
    segments = jnp.asarray(np.repeat([0, 1], 12)[None], jnp.int32)
    places = jnp.asarray([[3, 15, 20]], jnp.int32)

    @jax.jit
    def hidden(tokens):
        output = forward_packed(FEATURES, WEIGHTS, tokens, segments)
        return dflash_training.block_hidden(DFLASH, TARGET, both, output, tokens, segments, places)

    original, changed = hidden(tokens), hidden(changed_tokens)
    np.testing.assert_allclose(original[:, 1:], changed[:, 1:], atol=1e-5)
    assert np.abs(original[:, 0] - changed[:, 0]).max() > 0.01


@pytest.mark.slow
def test_training_raises_the_acceptance_and_the_confidence_head_learns_it():
    loss = dflash_training.dflash(DSPARK, FEATURES, blocks=12, dtype="float32")
    figures = train(loss, head.init_params(DSPARK, jax.random.key(1)), steps=80)
    assert figures[-1]["loss"] < 0.8 * figures[0]["loss"]
    assert figures[-1]["accept_1"] > figures[0]["accept_1"] + 0.1
    assert figures[-1]["confidence"] < figures[0]["confidence"]
