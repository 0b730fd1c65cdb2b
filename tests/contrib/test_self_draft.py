"""The target as its own drafter, under an attention mask. The output does not change."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mars_jax as mj
from mars_jax import contrib, drafters, fake, verify
from mars_jax.contrib.drafters.self_draft import SINKS, load_self
from mars_jax.core import decode
from mars_jax.core.types import Params, Visible
from mars_jax.drafters.asked import Asked
from mars_jax.models import ModelConfig, language_model
from mars_jax.models.quantize import Int8
from tests.helpers import begin, draft_input, ragged
from tests.helpers.small_models import random_weights

CONFIG = ModelConfig(vocab_size=32, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=2)
MODEL = language_model(CONFIG)
WEIGHTS = random_weights(CONFIG, scale=0.4)
BUFFER, WINDOW = 40, 6


@jax.jit
def masked_logits(tokens, length):
    """Return the target's logits f32[V] over its own cache, if the last token attends only to `SINKS` and a window."""
    slot, zero = jnp.arange(BUFFER, dtype=jnp.int32), jnp.zeros((1,), jnp.int32)
    causal = Visible.causal(zero, BUFFER)
    cache = MODEL.forward(WEIGHTS, tokens[None], causal, MODEL.init_cache(1, BUFFER)).cache
    last = (length - 1)[None]
    mask = ((slot < length) & ((slot < SINKS) | (slot >= last - WINDOW)))[None, None]
    visible = Visible(first=zero, positions=last[None], slot=last, seen=mask, seen_positions=slot[None])
    return MODEL.unembed(WEIGHTS, MODEL.forward(WEIGHTS, tokens[last][None], visible, cache).hidden)[0, 0]


@pytest.mark.parametrize("tree", [None, pytest.param((2, 1), marks=pytest.mark.slow)])
def test_what_it_drafts_first_is_what_the_target_says_under_a_mask(tree):
    """Use rows shorter and longer than the visible part, while they grow by paths of a tree."""
    drafter = contrib.self_draft(MODEL, 2, tree=tree, window=WINDOW)
    prompts, lengths = ragged([1, 9, 22], BUFFER, CONFIG.vocab_size)
    params = Params(WEIGHTS, WEIGHTS)
    decoder, state = begin(MODEL, drafter, verify.exact(), prompts, lengths, params=params)
    propose, accepted = jax.jit(drafter.propose), 0
    for _ in range(6):
        tree_, _ = propose(params, state.draft, draft_input(state))
        for row in range(3):
            want = masked_logits(state.tokens[row], state.length[row])
            assert int(tree_.tokens[row, 1]) == int(jnp.argmax(want))
        state, info = decode.jitted_step(decoder, params, state)
        accepted += int(jnp.sum(info.num_emitted - 1))
    assert accepted > 4


def test_weights_are_in_8_bits_and_those_that_are_stay_the_same_arrays():
    target = mj.Pretrained.from_parts(MODEL, WEIGHTS, config=CONFIG)
    spec = Asked(target, "", 3, None, False, None)
    draft = load_self(spec).params
    assert isinstance(draft["layers"][0]["up"], Int8) and draft["norm"] is WEIGHTS["norm"]
    reloaded = load_self(spec._replace(target=mj.Pretrained.from_parts(MODEL, draft, config=CONFIG))).params
    assert all(a is b for a, b in zip(jax.tree.leaves(reloaded), jax.tree.leaves(draft), strict=True))


def test_a_target_that_it_cannot_draft_for_is_refused():
    target = mj.Pretrained.from_parts(fake.hash_model(vocab_size=9), (), max_positions=64)
    with pytest.raises(mj.MarsError, match="has no config, and the drafter 'self' is for"):
        drafters.load("self", target)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"tree": drafters.Dynamic(3, 3, 8)}], ids=["chain", "tree"])
def test_a_text_longer_than_its_window_is_unchanged(options):
    target = mj.load("tiny/target", dtype="float32")
    prompts = ["Once upon a time, there was a little dog. " * 32, "The sun was warm."]
    reference = mj.generate(target, "none", prompts, max_new_tokens=40)
    result = mj.generate(target, drafters.load("self", target, **options), prompts, max_new_tokens=40)
    assert len(target.encode(prompts[0])) > 300 and result.tokens == reference.tokens
    assert np.mean([c.metrics.tau for c in result.completions]) > 2
