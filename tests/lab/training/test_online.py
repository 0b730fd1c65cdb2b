"""Tests of online refinement: rejected positions, gains, restored weights, and no compilation while decoding."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mars_jax as mj
from mars_jax.core import decode
from mars_jax.lab.training import online
from mars_jax.models import ModelConfig, eagle_head, init_params, language_model
from mars_jax.models.eagle_head import EagleConfig
from mars_jax.serve.session import prepare
from mars_jax.utils.errors import MarsError

CONFIG = ModelConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_layers=1, num_heads=2)
MODEL = language_model(CONFIG)
DEPTH = 3


@pytest.fixture(scope="module")
def pair():
    weights = init_params(CONFIG, jax.random.key(0), scale=0.5)
    target = mj.Pretrained.from_parts(MODEL, weights, max_positions=512, name="target")
    params = init_params(CONFIG, jax.random.key(1), scale=0.5)
    return target, mj.drafters.LoadedDrafter(mj.drafters.language_model(MODEL, DEPTH), params)


PROMPTS = [[1 + i, 2, 3 + i] for i in range(8)]
OPTIONS = {"verify": mj.verify.exact(), "max_new_tokens": 40, "temperature": 0.7, "batch_size": 8}


@pytest.fixture(scope="module")
def decoded(pair):
    return mj.generate(*pair, PROMPTS, log_probs=True, **OPTIONS)


def texts_of(result):
    return [[*prompt, *tokens] for prompt, tokens in zip(PROMPTS, result.tokens, strict=True)]


def make_refiner(target, draft_model, params, held_out, **options):
    options |= {"depth": DEPTH, "held_out": held_out, "width": 64, "rows": 16}
    return online.Refiner(target.model, draft_model, params, target_params=target.params, **options)


def refine(refiner, target, steps):
    with jax.numpy_dtype_promotion("standard"):  # optax mixes its integer step counter with floats
        return refiner.refine(target.params, steps=steps)


def check_that_it_learns(refiner, target, draft, decoded, steps, factor):
    """Refine a draft and check that it decodes the same tokens in fewer steps, without compiling a program."""
    refiner.see_completions(decoded.completions[:6])
    refined = refine(refiner, target, steps)
    assert refined.kept and refined.after > refined.before
    compiled = decode.run._cache_size(), decode.start_ready._cache_size()
    replay = mj.generate(target, draft._replace(params=refined.params), PROMPTS, log_probs=True, **OPTIONS)
    assert (decode.run._cache_size(), decode.start_ready._cache_size()) == compiled
    assert replay.tokens == decoded.tokens and replay.metrics.tau > factor * decoded.metrics.tau
    return refined


@pytest.mark.slow
def test_failures_are_the_corrections_of_the_steps(pair):
    """Oracle: the verdicts of the steps of a run."""
    target, draft = pair
    options = {"max_new_tokens": 20, "temperature": 0.7, "seed": 3}
    close = jax.tree.map(lambda a, b: a + 0.2 * b, target.params, draft.params)
    draft = draft._replace(params=close)
    requests = mj.make_requests(target, PROMPTS[:3], **options)
    decoder, params, begun = prepare(target, draft, requests)
    expected = [[False] * 20 for _ in range(3)]
    first = np.asarray(begun.prompt_length)
    for state, info in decode.stream(decoder, params, begun, ahead=0):
        for row in range(3):
            # Mark the last token of a step that rejected a draft, unless the limit cut the step.
            count, accepted = int(info.num_emitted[row]), int(info.verdict.num_accepted[row])
            if count == accepted + 1 and accepted < DEPTH:
                expected[row][int(state.length[row]) - 1 - first[row]] = True
    result = mj.generate(target, draft, PROMPTS[:3], log_probs=True, verify=mj.verify.exact(), **options)
    kinds = [completion.log_probs.kind for completion in result.completions]
    assert [online.rejected_places(row, DEPTH) for row in kinds] == expected
    assert any(map(any, expected)) and any(row.count("exact") for row in kinds)


@pytest.mark.slow
def test_a_draft_model_learns_and_nothing_that_decodes_compiles(pair, decoded):
    target, draft = pair
    held_out = texts_of(decoded)[6:]
    refiner = make_refiner(target, MODEL, draft.params, held_out, temperature=1.0, optimizer=optax.adam(1e-2))
    refined = check_that_it_learns(refiner, target, draft, decoded, steps=60, factor=1.2)
    continued = refine(refiner, target, 2)
    assert continued.before == pytest.approx(refined.after, abs=1e-4), "it continues with the refined weights"


@pytest.mark.slow
def test_an_eagle_head_learns_and_nothing_that_decodes_compiles():
    config = EagleConfig(
        version=3, layer=CONFIG, target_hidden_size=16, draft_vocab_size=30, feature_layers=(0, 1)
    )
    deep = dataclasses.replace(CONFIG, num_layers=2, windows=(None, None))
    model = language_model(deep)
    weights = init_params(deep, jax.random.key(0), scale=0.5)
    target = mj.Pretrained.from_parts(model, weights, max_positions=512)
    params = eagle_head.init_params(config, jax.random.key(1), scale=0.3)
    draft = mj.drafters.LoadedDrafter(mj.drafters.eagle(config, model, DEPTH), params)
    decoded = mj.generate(target, draft, PROMPTS, log_probs=True, **OPTIONS)
    held_out = texts_of(decoded)[6:]
    refiner = make_refiner(target, config, params, held_out, optimizer=optax.adam(1e-2))
    refined = check_that_it_learns(refiner, target, draft, decoded, steps=40, factor=1.1)
    np.testing.assert_array_equal(refined.params["ids"], params["ids"])


def test_small_losses_do_not_add_up(pair, monkeypatch):
    """Each of twenty refinements loses 2.9% of tau; a change of the target does not count against one."""

    def update_by(factor):
        return lambda draft, state, *_: (factor * draft, state, {"loss": 0.0})

    monkeypatch.setattr(online, "make_step", lambda *_, donates: update_by(0.971))
    monkeypatch.setattr(online.Refiner, "expected_tau", lambda self, moved: 3.0 * moved * float(self._params))
    options = {"depth": DEPTH, "held_out": [[1, 2]], "rows": 4, "width": 8}
    refiner = online.Refiner(MODEL, MODEL, jnp.float32(1.0), target_params=1.0, **options)
    refiner._texts.append(([1, 2, 3], [False, True, True]))
    results = [refiner.refine(1.0, steps=1) for _ in range(20)]
    assert [result.kept for result in results] == [True] + 19 * [False]
    assert results[-1].before == pytest.approx(3.0 * 0.971)
    assert float(results[-1].params) == pytest.approx(0.971)
    assert not refiner.refine(0.5, steps=1).kept
    refiner._update = update_by(1.01)
    assert refiner.refine(0.5, steps=1).kept


@pytest.mark.slow
def test_weights_are_restored_if_the_draft_would_forget(pair, decoded):
    target, draft = pair
    options = {"temperature": 1.0, "optimizer": optax.sgd(1e4), "fall": 0.0}
    refiner = make_refiner(target, MODEL, draft.params, texts_of(decoded), **options)
    refiner.see_completions(decoded.completions)
    refined = refine(refiner, target, 3)
    assert not refined.kept and not refined.after >= refined.before
    jax.tree.map(np.testing.assert_array_equal, refined.params, draft.params)
    assert refiner.expected_tau(target.params) == refined.before


@pytest.mark.slow
def test_what_cannot_be_refined_is_refused(pair):
    target, draft = pair
    sizes = {"target_hidden_size": 16, "draft_vocab_size": 32}
    eagle1 = EagleConfig(version=1, layer=CONFIG, own_unembed=False, **sizes)
    with pytest.raises(MarsError, match="an EAGLE-1 head learns features"):
        make_refiner(target, eagle1, {}, [[1, 2]])
    with pytest.raises(MarsError, match="there are no held-out texts"):
        make_refiner(target, MODEL, draft.params, [])
    refiner = make_refiner(target, MODEL, draft.params, [[1, 2, 3, 4, 5]])
    with pytest.raises(MarsError, match="decode with log_probs=True"):
        refiner.see_completions(mj.generate(target, draft, PROMPTS, **OPTIONS).completions)
