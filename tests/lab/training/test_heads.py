"""The objectives of heads: training-time test is what the drafter does, and a head that is trained drafts better."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mars_jax import verify
from mars_jax.contrib.teaching import Batch
from mars_jax.core import decode
from mars_jax.core.controls import make_controls
from mars_jax.core.types import Params, Prompts, keys_from_seeds
from mars_jax.drafters.eagle import eagle
from mars_jax.lab.training import eagle_training
from mars_jax.lab.training.loop import make_step
from mars_jax.models import eagle_head as head
from mars_jax.models.eagle_head import EagleConfig
from tests.helpers import draft_input, ragged
from tests.helpers.training_heads import EAGLE3, FEATURES, IDS, LAYER, TARGET, WEIGHTS, target_texts

EAGLE1 = EagleConfig(version=1, layer=LAYER, target_hidden_size=16, draft_vocab_size=16, own_unembed=False)


@pytest.mark.slow
def test_step_j_of_training_is_the_jth_drafted_token():
    """A chain whose drafts happen to be the text: each of its distributions is one that training scored."""
    params = head.init_params(EAGLE3, jax.random.key(1), scale=0.4) | {"ids": IDS}
    both = Params(target=WEIGHTS, draft=params)
    prompts, lengths = ragged([12], 24, 16, seed=4)
    drafter = eagle(EAGLE3, TARGET, 4)
    decoder = decode.speculative_decoder(TARGET, drafter, verify.exact(), prefill_chunk=8)
    controls = make_controls(1, limit=24)
    keys = keys_from_seeds(jnp.zeros((1,), jnp.uint32))
    state = decode.start(decoder, both, Prompts(prompts, lengths, controls, verify.exact(), keys))
    tree, _ = drafter.propose(both, state.draft, draft_input(state))
    text = jnp.concatenate([prompts[:, :12], tree.tokens[:, 1:]], axis=1)  # 16 tokens

    scored = []

    def watch(labels, drafted):
        scored.append(drafted)
        return jnp.zeros(drafted.shape[:2])

    trained = {name: value for name, value in params.items() if name != "ids"}
    batch = Batch(tokens=jnp.pad(text, ((0, 0), (0, 1))), segments=jnp.zeros((1, 17), jnp.int32))
    loss = eagle_training.eagle3(EAGLE3, FEATURES, ids=IDS, steps=4, divergence=watch, dtype="float32")
    loss(trained, batch, WEIGHTS)
    for j, drafted in enumerate(scored):
        # Token 12 + j is drafted j tokens after the text: by entry 10 + j, in step j.
        assert IDS[jnp.argmax(drafted[0, 10 + j])] == tree.tokens[0, 1 + j]


@pytest.mark.slow
def test_documents_do_not_see_each_other():
    params = head.init_params(EAGLE3, jax.random.key(1), scale=0.4)
    params.pop("ids")
    loss = eagle_training.eagle3(EAGLE3, FEATURES, ids=IDS, steps=3, dtype="float32")
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 16, (1, 25))
    segments = np.repeat([0, 1], [12, 13])[None]
    other = tokens.copy()
    other[0, :12] = rng.integers(0, 16, 12)

    def second(tokens):
        """The loss with the first document masked by giving each of its tokens a document of its own."""
        alone = np.concatenate([np.arange(100, 112), np.ones(13)])[None].astype(np.int32)
        return loss(params, Batch(jnp.asarray(tokens), jnp.asarray(alone)), WEIGHTS)

    np.testing.assert_allclose(second(tokens)[0], second(other)[0], rtol=1e-5)
    assert np.isfinite(loss(params, Batch(jnp.asarray(tokens), jnp.asarray(segments)), WEIGHTS)[0])


def trained(loss, params, batch, steps=60):
    optimizer = optax.adam(3e-3)
    step, state, figures = make_step(loss, optimizer), optimizer.init(params), []
    with jax.numpy_dtype_promotion("standard"):  # optax's counters
        for _ in range(steps):
            params, state, found = step(params, state, batch, WEIGHTS)
            figures.append(found)
    return params, figures


@pytest.mark.slow
def test_training_raises_the_acceptance_of_eagle_heads():
    tokens = target_texts(16, 33)
    batch = Batch(tokens=tokens, segments=jnp.zeros(tokens.shape, jnp.int32))
    for config, make in (
        (EAGLE3, lambda: eagle_training.eagle3(EAGLE3, FEATURES, ids=IDS, steps=3, dtype="float32")),
        (EAGLE1, lambda: eagle_training.eagle1(EAGLE1, TARGET, dtype="float32")),
    ):
        params = head.init_params(config, jax.random.key(1))
        params.pop("ids", None)
        params, figures = trained(make(), params, batch)
        assert figures[-1]["loss"] < 0.8 * figures[0]["loss"]
        assert figures[-1]["accept_1"] > figures[0]["accept_1"] + 0.1
