"""Requests that share a few rows through a queue decode as in separate batches, and no row idles."""

import dataclasses

import jax
import numpy as np
import pytest

import mars_jax as mj
from mars_jax import drafters, verify
from mars_jax.core import decode, fake
from mars_jax.models import language_model
from mars_jax.serve import session as memory
from mars_jax.serve.prepare import prepared
from mars_jax.serve.queue import Queue, Shares
from mars_jax.serve.requests import make_requests
from tests.helpers import slow_but

WORDS = ("Once upon a time", "The cat", "A big dog ran", "One day, Tim", "Lily had a", "They", "In the sun")


@pytest.fixture(scope="module")
def target():
    return mj.load("tiny/target", dtype="float32")


@pytest.fixture(scope="module")
def draft(target):
    return drafters.load("model:tiny/draft", target, num_draft_tokens=3, dtype="float32")


@pytest.mark.slow
def test_samples_of_a_prompt_read_it_once(target, draft, monkeypatch):
    """Some samples start at once and others wait for a free row. Each equals its request in a batch of one."""
    options = {"samples": 4, "temperature": 1.0, "max_new_tokens": [12, 20, 9], "seed": 5, "batch_size": 3}
    read, start = [], decode.start_ready

    def counted(decoder, params, prompts):
        read.append(prompts.tokens.shape[0])
        return start(decoder, params, prompts)

    monkeypatch.setattr(decode, "start_ready", counted)
    result = mj.generate(target, draft, WORDS[:3], **options)
    assert read == [3, 1, 1, 1]  # the filler rows, which read nothing, then each prompt
    assert len({tuple(tokens) for tokens in result.tokens[4:8]}) == 4
    requests = [completion.request for completion in result.completions]
    assert [request.seed for request in requests] == list(range(5, 17))
    prepared_batch = prepared(target, draft, requests)
    for index, single in Queue(prepared_batch, 1, shared=Shares.NOTHING):
        assert single.tokens == result.tokens[index]
    thetas = verify.mars(theta=[0.1, 0.5, np.inf])
    rowwise = mj.generate(target, draft, WORDS[:3], verify=thetas, **options)
    assert rowwise.tokens[8:] == result.tokens[8:] and rowwise.tokens != result.tokens


def test_samples_are_refused_at_temperature_0(target):
    with pytest.raises(mj.MarsError, match="samples do not apply at temperature 0"):
        mj.generate(target, "none", WORDS, samples=2)


@pytest.mark.parametrize(
    "draft", slow_but(["hash model", "model:tiny/draft", "eagle:tiny/eagle3"], "hash model")
)
def test_what_prompts_begin_with_is_read_once(draft, target, monkeypatch):
    """Prompts alternate between two beginnings, as with two system prompts.

    Every request gives the result of a separate batch, up to rounding in the log-probabilities.
    """
    if draft == "hash model":
        draft = "ngram"
        target = mj.Pretrained.from_parts(fake.hash_model(vocab_size=64), (), max_positions=512)
    rng = np.random.default_rng(0)
    beginnings = [rng.integers(3, 60, n).tolist() for n in (300, 280)]
    prompts = [[*beginnings[i % 2], *rng.integers(3, 60, 5 + 2 * i).tolist()] for i in range(12)]
    read, start, extend = [], decode.start_ready, decode.extend

    def counted_start(decoder, params, batch):
        if len(batch.length) == 1:  # larger batches only hold filler rows
            read.append(int(batch.length[0]))
        return start(decoder, params, batch)

    def counted_extend(*arguments):
        state, new = extend(*arguments)
        read.append(int(new[0]))
        return state, new

    monkeypatch.setattr(decode, "start_ready", counted_start)
    monkeypatch.setattr(decode, "extend", counted_extend)
    options = {"max_new_tokens": 12, "log_probs": True, "batch_size": 3}
    result = mj.generate(target, draft, prompts, **options)
    assert len(read) == 12
    once = 300 + 280 + sum(5 + 2 * i for i in range(12))
    assert sum(read) <= 1.15 * once < 0.3 * sum(map(len, prompts))
    requests = mj.make_requests(target, prompts, max_new_tokens=12)
    prepared_batch = prepared(target, draft, requests)
    for index, single in Queue(prepared_batch, 3, shared=Shares.NOTHING, log_probs=True):
        completion = result.completions[index]
        assert (single.tokens, single.metrics.steps) == (completion.tokens, completion.metrics.steps)
        np.testing.assert_allclose(single.log_probs.log_prob, completion.log_probs.log_prob, atol=2e-5)


def without_token(target, token):
    """Return the target with a NaN embedding for one token."""
    params = {**target.params, "embed": target.params["embed"].at[token].set(np.nan)}
    params["unembed"] = target.params["embed"]
    config = dataclasses.replace(target.config, tie_embeddings=False)
    return dataclasses.replace(target, config=config, params=params, model=language_model(config))


@pytest.mark.slow
def test_a_prompt_that_spoils_its_row_spoils_no_other(target):
    """The next prompt does not reuse the caches of a row if they are not finite."""
    broken_target = without_token(target, 50)
    start = [7] * 40
    prompts = [[*start, 50, 50, 9, 9], [*start, 9], [*start, 11]]
    requests = mj.make_requests(broken_target, prompts, max_new_tokens=3)
    completions = dict(Queue(prepared(broken_target, "none", requests), 1, shared=Shares.BEGINNINGS))
    assert [completions[i].finish_reason for i in range(3)] == ["failed", "length", "length"]
    expected = mj.generate(target, "none", prompts[1:], max_new_tokens=3, batch_size=1)
    assert [completions[i].tokens for i in (1, 2)] == expected.tokens


def test_a_batch_size_of_its_own_is_what_memory_has_room_for(target, monkeypatch):
    prepared_batch = prepared(target, "ngram", make_requests(target, ["The"] * 40, max_new_tokens=20))
    state = prepared_batch.start([0])
    cache = sum(x.nbytes for x in jax.tree.leaves(state.cache))
    assert cache < memory.row_bytes(prepared_batch) < 4 * cache
    assert memory.default_rows(prepared_batch) == memory.MOST_ON_CPU
    weights = sum(x.nbytes for x in jax.tree.leaves(target.params))
    for rows in (5.5, 0.5):
        room = weights + rows * memory.row_bytes(prepared_batch)
        monkeypatch.setattr(memory, "_bytes_of", lambda device, room=room: room)
        assert memory.default_rows(prepared_batch) == max(int(rows), 1)
    # One forward of the prompt needs the gate and the product of a wide layer.
    width, length = 2**20, state.tokens.shape[1]
    wide = dataclasses.replace(target, config=dataclasses.replace(target.config, intermediate_size=width))
    assert memory.row_bytes(dataclasses.replace(prepared_batch, target=wide)) > 2 * 4 * length * width


def test_eight_samples_of_a_long_prompt_read_it_about_once():
    """Count the tokens of the target's forwards: at most 1.3 times one reading of a prompt of 512."""
    model, read = fake.hash_model(vocab_size=11, agree=0.9), []

    def forward(params, tokens, visible, cache):
        # Count only chunks of prefill; a step has two nodes.
        if tokens.shape[1] > 8:
            jax.debug.callback(lambda: read.append(tokens.shape[0] * tokens.shape[1]))
        return model.forward(params, tokens, visible, cache)

    counted = mj.Pretrained.from_parts(model._replace(forward=forward), (), max_positions=2048)
    prompt = np.random.default_rng(0).integers(0, 11, 512).tolist()
    mj.generate(counted, "none", [prompt], samples=8, temperature=1.0, max_new_tokens=4, batch_size=8)
    jax.effects_barrier()
    assert 512 <= sum(read) <= 1.3 * 512 + 64, "the prompt is read once, in chunks of 64"
