"""A drafter on separate devices: the tokens, drafts and log-probabilities of the ordinary loop."""

import dataclasses

import jax
import numpy as np
import pytest

import mars_jax as mj
from mars_jax import drafters, verify
from mars_jax.contrib.drafters import elsewhere
from mars_jax.core.axes import parse_mesh
from mars_jax.hub.pretrained import Pretrained
from mars_jax.models import ModelConfig, init_params, language_model
from mars_jax.models.shardings import place
from mars_jax.serve.requests import make_requests
from mars_jax.serve.session import Session
from mars_jax.utils.errors import MarsError

CONFIG = ModelConfig(
    vocab_size=8, hidden_size=16, intermediate_size=24, num_heads=2, num_layers=2, max_positions=64
)
MODEL = language_model(CONFIG)
PROMPTS = [[3], [1, 2, 3, 4, 5], [7, 0], [2, 2, 6]]
OPTIONS = {"max_new_tokens": [20, 24, 9, 30], "temperature": [0.0, 0.0, 1.0, 0.0]}
OPTIONS |= {"stop_tokens": [[], [5], [], []]}


def pair(*, mesh=None, draft_mesh=None):
    """Return a target, and a draft with the target's weights plus noise."""
    params = init_params(CONFIG, jax.random.key(0), scale=0.4)
    noise_params = init_params(CONFIG, jax.random.key(1), scale=0.4)
    small = jax.tree.map(lambda x, y: x + 0.1 * y, params, noise_params)
    if mesh is not None:
        params, small = place(params, CONFIG, mesh), place(small, CONFIG, draft_mesh)
    return Pretrained.from_parts(MODEL, params, config=CONFIG, mesh=mesh), small


def drafter(length, small):
    return drafters.LoadedDrafter(drafters.language_model(MODEL, length), small)


def without_rounding(completion):
    """Return the fields of a completion that rounding cannot change."""
    kind, metrics = completion.log_probs.kind, dataclasses.replace(completion.metrics, regret=0.0)
    return completion.tokens, completion.finish_reason, kind, metrics


@pytest.mark.slow
def test_generate_and_a_sessions_queue_give_what_the_plain_loop_gives():
    """Run two batches, the second with a row to fill, under a lossy rule, whose tokens depend on the drafts."""
    target, small = pair()
    rule = verify.mars(theta=[0.5, 0.9, 0.7, 0.5])
    requests = make_requests(target, PROMPTS, **OPTIONS)
    options = {"batch_size": 3, "log_probs": True}
    expected = dict(Session.of(target, drafter(3, small), rule, **options).queue(requests))
    remote = elsewhere.draft_elsewhere(drafter(4, small), target, jax.devices()[1])
    session = Session.of(target, remote, rule, **options)
    for order in (range(4), range(2, 4)):
        completions = dict(session.queue(requests, order=order))
        assert sorted(completions) == list(order)
        for i in order:
            assert without_rounding(completions[i]) == without_rounding(expected[i]), i
            for name in ("log_prob", "temperature_log_prob", "regret"):
                actual, reference = (getattr(c.log_probs, name) for c in (completions[i], expected[i]))
                np.testing.assert_allclose(actual, reference, atol=1e-4)
    assert sum(c.metrics.accepted_relaxed for c in expected.values()) > 0
    result = mj.generate(target, remote, PROMPTS, verify=rule, batch_size=3, **OPTIONS)
    assert result.tokens == [expected[i].tokens for i in range(4)]
    assert result.forwards >= max(c.metrics.steps for c in expected.values())
    for index, completion in mj.generate_iter(target, remote, PROMPTS, verify=rule, batch_size=3, **OPTIONS):
        assert completion.tokens == expected[index].tokens
    small_device = {d for x in jax.tree.leaves(target.params) for d in x.devices()}
    assert jax.devices()[1] not in small_device


@pytest.mark.slow
def test_a_mesh_drafts_for_a_mesh():
    meshes = [parse_mesh("model=2"), elsewhere.open_device([2, 3], parse_mesh("model=2"))]
    target, small = pair(mesh=meshes[0], draft_mesh=meshes[1])
    unsharded, unsharded_draft = pair()
    expected = mj.generate(unsharded, drafter(3, unsharded_draft), PROMPTS, **OPTIONS)
    remote = elsewhere.draft_elsewhere(drafter(4, small), target, meshes[1])
    result = mj.generate(target, remote, PROMPTS, **OPTIONS)
    assert result.tokens == expected.tokens
    assert result.metrics.accepted_exact == expected.metrics.accepted_exact


def test_what_cannot_draft_elsewhere_is_refused():
    target, small = pair()
    remote = elsewhere.draft_elsewhere(drafter(4, small), target, jax.devices()[1])
    with pytest.raises(MarsError, match="needs the draft's true probabilities"):
        mj.generate(target, remote, PROMPTS, verify=verify.rejection(), temperature=1.0)
    with pytest.raises(MarsError, match="only model:PATH can"):
        elsewhere.draft_elsewhere("ngram", target, jax.devices()[1])
    for devices, sentence in (
        ([0], "target works on device 0"),
        ([99], r"no device 99 .* the last is 7; XLA_FLAGS"),
        ([1, 1], "named twice"),
    ):
        with pytest.raises(MarsError, match=sentence):
            elsewhere.open_device(devices)
