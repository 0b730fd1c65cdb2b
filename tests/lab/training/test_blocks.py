"""The objective of block drafters: what it scores is what the drafter drafts, and training raises acceptance."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mars_jax import verify
from mars_jax.contrib.drafters.dflash import dflash
from mars_jax.contrib.models import dflash_head as head
from mars_jax.contrib.models.dflash_head import DFlashConfig
from mars_jax.contrib.teaching import Batch, read
from mars_jax.core import decode
from mars_jax.core.controls import make_controls
from mars_jax.core.types import Params, Prompts, keys_from_seeds
from mars_jax.lab.training import dflash_training
from mars_jax.lab.training.loop import make_step
from mars_jax.models import ModelConfig
from tests.helpers import draft_input, ragged
from tests.helpers.training_heads import SIZES, TARGET, WEIGHTS, target_texts

LAYER = ModelConfig(family="qwen3", qk_norm=True, num_layers=2, windows=(None, 6), **SIZES)
DFLASH = DFlashConfig(
    layer=LAYER,
    target_hidden_size=16,
    feature_layers=(0, 2),
    block_size=4,
    mask_token=3,
    draft_vocab_size=12,
    own_unembed=True,
    causal=(False, True),
)
DSPARK = dataclasses.replace(
    DFLASH,
    draft_vocab_size=16,
    own_unembed=False,
    from_anchor=True,
    markov_rank=4,
    confidence=True,
    confidence_bias=True,
    confidence_markov=True,
)
IDS = jnp.asarray([0, 1, 3, 4, 5, 6, 8, 9, 10, 13, 14, 15], jnp.int32)
FEATURES = TARGET.with_features((0, 2))


@pytest.mark.slow
@pytest.mark.parametrize("config", [DFLASH, DSPARK], ids=["dflash", "dspark"])
def test_what_is_scored_is_what_is_drafted(config):
    """A chain whose drafts happen to be the text: training scores the distributions that they were taken from."""
    params = head.init_params(config, jax.random.key(1), scale=0.4)
    ids = IDS if "ids" in params else None
    both = Params(target=WEIGHTS, draft=params if ids is None else params | {"ids": ids})
    prompts, lengths = ragged([12], 24, 16, seed=4)
    drafter = dflash(config, TARGET, sample=True)
    decoder = decode.speculative_decoder(TARGET, drafter, verify.rejection(), prefill_chunk=8)
    keys = keys_from_seeds(jnp.zeros((1,), jnp.uint32))
    controls = make_controls(1, limit=24, temperature=1.0)
    state = decode.start(decoder, both, Prompts(prompts, lengths, controls, verify.rejection(), keys))
    tree, _ = drafter.propose(both, state.draft, draft_input(state))
    text = jnp.concatenate([prompts[:, :12], tree.tokens[:, 1:]], axis=1)
    n = text.shape[1]

    scored = []

    def watch(labels, drafted):
        scored.append(drafted)
        return jnp.zeros(drafted.shape[:-1])

    trained = {name: value for name, value in params.items() if name != "ids"}
    batch = Batch(tokens=jnp.pad(text, ((0, 0), (0, 1))), segments=jnp.zeros((1, n + 1), jnp.int32))
    # A block at each place, so that one begins at the last token of the prompt.
    loss = dflash_training.dflash(config, FEATURES, ids=ids, blocks=n, divergence=watch, dtype="float32")
    loss(trained, batch, WEIGHTS)
    places = dflash_training.anchors(text, n)
    np.testing.assert_array_equal(places[0], np.arange(n))
    wide = config.widen(both, scored[0][:, 11])
    np.testing.assert_allclose(
        jax.nn.log_softmax(wide), jax.nn.log_softmax(tree.draft_logits[:, : config.drafts]), atol=2e-5
    )


@pytest.mark.slow
def test_documents_do_not_see_each_other():
    params = head.init_params(DFLASH, jax.random.key(1), scale=0.4)
    both = Params(target=WEIGHTS, draft=params)
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(0, 16, (1, 24)), jnp.int32)
    other = tokens.at[:, :12].set(jnp.asarray(rng.integers(0, 16, (1, 12)), jnp.int32))
    segments = jnp.asarray(np.repeat([0, 1], 12)[None], jnp.int32)
    places = jnp.asarray([[3, 15, 20]], jnp.int32)

    @jax.jit
    def hidden(tokens):
        output = read(FEATURES, WEIGHTS, tokens, segments)
        return dflash_training.block_hidden(DFLASH, TARGET, both, output, tokens, segments, places)

    mine, changed = hidden(tokens), hidden(other)
    np.testing.assert_allclose(mine[:, 1:], changed[:, 1:], atol=1e-5)
    assert np.abs(mine[:, 0] - changed[:, 0]).max() > 0.01


@pytest.mark.slow
def test_training_raises_the_acceptance_and_the_confidence_head_learns_it():
    tokens = target_texts(16, 33)
    batch = Batch(tokens=tokens, segments=jnp.zeros(tokens.shape, jnp.int32))
    loss = dflash_training.dflash(DSPARK, FEATURES, blocks=12, dtype="float32")
    params = head.init_params(DSPARK, jax.random.key(1))
    optimizer = optax.adam(3e-3)
    step, state, figures = make_step(loss, optimizer), optimizer.init(params), []
    with jax.numpy_dtype_promotion("standard"):  # optax's counters
        for _ in range(80):
            params, state, found = step(params, state, batch, WEIGHTS)
            figures.append(found)
    assert figures[-1]["loss"] < 0.8 * figures[0]["loss"]
    assert figures[-1]["accept_1"] > figures[0]["accept_1"] + 0.1
    assert figures[-1]["confidence"] < figures[0]["confidence"]
