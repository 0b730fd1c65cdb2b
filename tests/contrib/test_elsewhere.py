"""A drafter on separate devices: the tokens, drafts and log-probabilities of the plain loop."""

import dataclasses

import jax
import numpy as np
import pytest

import mars_jax as mj
from mars_jax import drafters, verify
from mars_jax.contrib.drafters import elsewhere
from mars_jax.hub.pretrained import Pretrained
from mars_jax.mesh.axes import parse_mesh
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
    other = init_params(CONFIG, jax.random.key(1), scale=0.4)
    small = jax.tree.map(lambda x, y: x + 0.1 * y, params, other)
    if mesh is not None:
        params, small = place(params, CONFIG, mesh), place(small, CONFIG, draft_mesh)
    return Pretrained.from_parts(MODEL, params, config=CONFIG, mesh=mesh), small


def drafter(length, small):
    return drafters.LoadedDrafter(drafters.language_model(MODEL, length), small)


def same(completion):
    """Return the parts of a completion that rounding cannot change."""
    kind, metrics = completion.log_probs.kind, dataclasses.replace(completion.metrics, regret=0.0)
    return completion.tokens, completion.finish_reason, kind, metrics


@pytest.mark.slow
def test_generate_and_a_sessions_queue_give_what_the_plain_loop_gives():
    """Run two batches, the second with a row to fill, under a lossy rule, whose text depends on the drafts."""
    target, small = pair()
    rule = verify.mars(theta=[0.5, 0.9, 0.7, 0.5])
    requests = make_requests(target, PROMPTS, **OPTIONS)
    options = {"batch_size": 3, "log_probs": True}
    wanted = dict(Session.of(target, drafter(3, small), rule, **options).queue(requests))
    far = elsewhere.draft_elsewhere(drafter(4, small), target, jax.devices()[1])
    there = Session.of(target, far, rule, **options)
    for order in (range(4), range(2, 4)):
        found = dict(there.queue(requests, order=order))
        assert sorted(found) == list(order)
        for i in order:
            assert same(found[i]) == same(wanted[i]), i
            for name in ("log_prob", "temperature_log_prob", "regret"):
                mine, theirs = (getattr(c.log_probs, name) for c in (found[i], wanted[i]))
                np.testing.assert_allclose(mine, theirs, atol=1e-4)
    assert sum(c.metrics.accepted_relaxed for c in wanted.values()) > 0
    result = mj.generate(target, far, PROMPTS, verify=rule, batch_size=3, **OPTIONS)
    assert result.tokens == [wanted[i].tokens for i in range(4)]
    assert result.forwards >= max(c.metrics.steps for c in wanted.values())
    for index, completion in mj.generate_iter(target, far, PROMPTS, verify=rule, batch_size=3, **OPTIONS):
        assert completion.tokens == wanted[index].tokens
    small_device = {d for x in jax.tree.leaves(target.params) for d in x.devices()}
    assert jax.devices()[1] not in small_device


@pytest.mark.slow
def test_a_mesh_drafts_for_a_mesh():
    meshes = [parse_mesh("model=2"), elsewhere.open_device([2, 3], parse_mesh("model=2"))]
    target, small = pair(mesh=meshes[0], draft_mesh=meshes[1])
    alone, of_alone = pair()
    wanted = mj.generate(alone, drafter(3, of_alone), PROMPTS, **OPTIONS)
    there = elsewhere.draft_elsewhere(drafter(4, small), target, meshes[1])
    found = mj.generate(target, there, PROMPTS, **OPTIONS)
    assert found.tokens == wanted.tokens
    assert found.metrics.accepted_exact == wanted.metrics.accepted_exact


def test_what_cannot_draft_elsewhere_is_refused():
    target, small = pair()
    there = elsewhere.draft_elsewhere(drafter(4, small), target, jax.devices()[1])
    with pytest.raises(MarsError, match="needs the draft's true probabilities"):
        mj.generate(target, there, PROMPTS, verify=verify.rejection(), temperature=1.0)
    with pytest.raises(MarsError, match="only model:PATH can"):
        elsewhere.draft_elsewhere("ngram", target, jax.devices()[1])
    for devices, sentence in (
        ([0], "target works on device 0"),
        ([99], r"no device 99 .* devices 0 to 7; XLA_FLAGS"),
        ([1, 1], "named twice"),
    ):
        with pytest.raises(MarsError, match=sentence):
            elsewhere.open_device(devices)
