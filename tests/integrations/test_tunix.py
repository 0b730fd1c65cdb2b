"""Tests of `MarsRollout` against a stand-in for Tunix. test_tunix_cluster.py uses the real package."""

import dataclasses
import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mars_jax import drafters, verify
from mars_jax.core import decode
from mars_jax.integrations import tunix
from mars_jax.utils.errors import MarsError
from tests.integrations.tunix_like import stand_in

WIDTH = 32
PROMPTS = ["abcabc", "xyz", "the cat sat", "the cat sat"]


@pytest.fixture(params=["qwen", pytest.param("llama", marks=pytest.mark.slow)])
def base_and_actor(request, monkeypatch):
    """Return the stand-in module and an actor."""
    # User modules rely on JAX's default promotion.
    monkeypatch.setattr(tunix, "_rollout_class", functools.cache(tunix._rollout_class.__wrapped__))
    base = stand_in.install(monkeypatch)
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        if request.param == "llama":
            yield base, stand_in.Llama3(stand_in.Config(use_tied_embedding=False))
        else:
            yield base, stand_in.Qwen3(stand_in.Config())


def rollout_of(actor, **options):
    return tunix.MarsRollout(rollout_actor=actor, tokenizer=stand_in.Tokenizer(), mesh=None, **options)


@nnx.jit
def logits_of(actor, ids, mask):
    return actor(ids, jnp.arange(ids.shape[1])[None], None, mask)[0][0]


def teacher_forced(actor, prompt, tokens, temperature):
    """Return log softmax(z / T) of each token, computed by the actor."""
    count = len(prompt) + len(tokens)
    # One width for all sequences, so that they share a compiled program. The mask is causal, so padding has no effect.
    ids = jnp.asarray([[*prompt, *tokens] + [0] * (WIDTH - count)])
    mask = jnp.asarray(np.tril(np.ones((1, WIDTH, WIDTH), bool)))
    logits = logits_of(actor, ids, mask) / temperature
    return np.asarray(jax.nn.log_softmax(logits))[np.arange(len(prompt) - 1, count - 1), tokens]


@pytest.mark.slow
def test_samples_and_log_probabilities_are_the_actors(base_and_actor):
    base, actor = base_and_actor
    rollout = rollout_of(actor)
    assert isinstance(rollout, base.BaseRollout)
    lengths = {"max_tokens_to_generate": 12, "max_prompt_length": 16}
    config = base.RolloutConfig(**lengths, temperature=0.8, return_logprobs=True)
    out = rollout.generate(PROMPTS, config)
    assert out.left_padded_prompt_tokens.shape == (4, 16) and len(out.text) == 4
    for row, tokens in enumerate(out.tokens):
        prompt = [x for x in out.left_padded_prompt_tokens[row].tolist() if x != 0]
        assert prompt[0] == 1 and 0 not in tokens.tolist()  # one BOS token and no padding
        assert len(tokens) == 12 or tokens[-1] == 2
        expected = teacher_forced(actor, prompt, tokens.tolist(), 0.8)
        np.testing.assert_allclose(out.logprobs[row], expected, atol=2e-4)
        completion = jnp.asarray([tokens.tolist() + [0] * (12 - len(tokens))])
        padded_prompt = out.left_padded_prompt_tokens[row : row + 1]
        log_probs = rollout.get_per_token_logps(padded_prompt, completion)
        expected = teacher_forced(actor, prompt, tokens.tolist(), 1.0)
        np.testing.assert_allclose(log_probs[0, : len(tokens)], expected, atol=2e-4)
    later = rollout.generate(PROMPTS, config)
    assert any(a.tolist() != b.tolist() for a, b in zip(out.tokens, later.tokens, strict=True)), "other draws"
    same_seed = rollout_of(actor).generate(PROMPTS, dataclasses.replace(config, return_logprobs=False))
    assert same_seed.tokens[2].tolist() == out.tokens[2].tolist() and same_seed.logprobs is None
    assert rollout.metrics.tau >= 1


@pytest.mark.slow
def test_an_update_is_device_work_and_compiles_nothing(base_and_actor):
    base, actor = base_and_actor
    rollout = rollout_of(actor)
    lengths = {"max_tokens_to_generate": 8, "max_prompt_length": 16}
    config = base.RolloutConfig(**lengths, temperature=0.0, return_logprobs=True)
    first = rollout.generate(PROMPTS, config)
    state = jax.tree.map(lambda x: x * 1.5, nnx.state(actor, nnx.Param))
    with jax.transfer_guard("disallow_explicit"):
        rollout.update_params(state, (nnx.Param,))
    jax.tree.map(lambda x: x.delete(), state)  # like a trainer that donates its weights
    # Tunix syncs weights only if these arrays are not the actor's.
    rollout_ids = {id(x) for x in jax.tree.leaves(nnx.state(rollout.model()))}
    assert rollout_ids and not rollout_ids & {id(x) for x in jax.tree.leaves(nnx.state(actor))}
    rollout.update_params(nnx.state(rollout.model()))
    compiled = decode.start_ready._cache_size()
    second = rollout.generate([*PROMPTS, "a longer prompt"][1:], config)
    assert decode.start_ready._cache_size() == compiled
    nnx.update(actor, jax.tree.map(lambda x: x * 1.5, nnx.state(actor, nnx.Param)))
    prompt = [x for x in second.left_padded_prompt_tokens[0].tolist() if x != 0]
    expected = teacher_forced(actor, prompt, second.tokens[0].tolist(), 1.0)
    np.testing.assert_allclose(second.logprobs[0], expected, atol=2e-4)
    assert first.tokens[1].tolist() != second.tokens[0].tolist()


@pytest.mark.slow
def test_a_completion_mask_hides_tokens_from_the_others(base_and_actor):
    """Hidden tokens take no position, so the other tokens have the log-probabilities of the text without them."""
    _, actor = base_and_actor
    rollout = rollout_of(actor)
    prompt, tokens = [1, 5, 9], [7, 2, 8, 11]  # an end-of-text token between two turns
    prompts = jnp.asarray([[0, *prompt]])
    padded = jnp.asarray([[*tokens, 0, 0]])
    expected = teacher_forced(actor, prompt, tokens, 1.0)
    unmasked = rollout.get_per_token_logps(prompts, padded)
    np.testing.assert_allclose(unmasked[0, :4], expected, atol=2e-4)
    with_junk = jnp.asarray([[7, 33, 2, 8, 11, 44]])
    mask = jnp.asarray([[1, 0, 1, 1, 1, 0]])
    masked = rollout.get_per_token_logps(prompts, with_junk, completion_mask=mask)
    np.testing.assert_allclose(masked[0, jnp.asarray([0, 3, 4])], expected[jnp.asarray([0, 2, 3])], atol=2e-4)
    with pytest.raises(MarsError, match=r"completion_mask has shape \(1, 2\): expected \(1, 6\)"):
        rollout.get_per_token_logps(prompts, with_junk, completion_mask=mask[:, :2])


def test_what_it_refuses(base_and_actor):
    _, actor = base_and_actor
    with pytest.raises(MarsError, match="is lossy: its samples are not the policy's"):
        rollout_of(actor, verify=verify.mars(theta=0.5))
    assert rollout_of(actor, verify=verify.mars(theta=0.5), lossy=True)
    assert rollout_of(actor, drafter=lambda target: drafters.load("ngram", target, num_draft_tokens=2))
    with pytest.raises(MarsError, match=r"takes Tunix's Qwen3, Qwen2 and Llama3"):
        rollout_of(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
    with pytest.raises(MarsError, match="and no adapters"):
        rollout_of(actor).update_params(nnx.state(actor.final_norm, nnx.Param))

    class Qwen3(stand_in.Qwen3):
        def __call__(self, *arguments):
            logits, cache = super().__call__(*arguments)
            return jnp.roll(logits, 1, axis=-1), cache

    with pytest.raises(MarsError, match="this version of Tunix is not known"):
        rollout_of(Qwen3(stand_in.Config()))


@pytest.mark.skipif(importlib.util.find_spec("tunix") is not None, reason="Tunix is here")
def test_without_tunix_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(tunix, "_rollout_class", functools.cache(tunix._rollout_class.__wrapped__))
    with pytest.raises(MarsError, match="pip install google-tunix"):
        _ = tunix.MarsRollout
