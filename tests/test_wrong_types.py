"""Arguments of a wrong type are refused by a sentence that names them, in every public function that decodes.

A user's first mistakes are a string for a model, a `Pretrained` for its weights, a state that was given away.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import pytest

import mars_jax as mj
from mars_jax import fake, refill
from mars_jax.core.errors import MarsError
from mars_jax.core.metrics import zero_stats

MODEL, RULE, DRAFTER = fake.hash_model(vocab_size=11), mj.verify.mars(0.9), mj.drafters.ngram(4)
DECODER = mj.speculative_decoder(MODEL, DRAFTER, RULE)
PARAMS = mj.Params(())
ROW = jnp.asarray([0])


@functools.cache
def usual():
    tokens = jnp.asarray([[3, 1, 4] + [0] * 29], jnp.int32)
    controls, keys = mj.make_controls(1, limit=8), mj.keys_from_seeds(jnp.arange(1))
    prompts = mj.Prompts(tokens, jnp.asarray([3]), controls, RULE, keys)
    target = mj.Pretrained.from_parts(MODEL, (), None, max_positions=32)
    state = mj.decode.start(DECODER, PARAMS, prompts)
    return {
        "decoder": DECODER, "params": PARAMS, "state": state, "prompts": prompts, "stats": zero_stats(1, 4),
        "rows": ROW, "target": target, "model": MODEL, "drafter": DRAFTER, "rule": RULE,
    }  # fmt: skip


CALLS = {
    "speculative_decoder": (mj.speculative_decoder, ["model", "drafter", "rule"]),
    "start": (mj.decode.start, ["decoder", "params", "prompts"]),
    "run": (mj.run, ["decoder", "params", "state"]),
    "jitted_step": (mj.decode.jitted_step, ["decoder", "params", "state"]),
    "stream": (lambda *given: next(mj.stream(*given)), ["decoder", "params", "state"]),
    "extend": (mj.decode.extend, ["decoder", "params", "state", "prompts"]),
    "advance": (refill.advance, ["decoder", "params", "state", "stats"]),
    "refill": (refill.refill, ["decoder", "params", "state", "stats", "rows", "prompts"]),
    "Decoder.init": (DECODER.init, ["params", "prompts"]),
    "Decoder.step": (DECODER.step, ["params", "state"]),
    "Decoder.insert": (DECODER.insert, ["params", "state", "rows", "prompts"]),
    "Decoder.extend": (DECODER.extend, ["params", "state", "prompts"]),
    "summarize": (mj.summarize, ["stats"]),
    "generate": (mj.generate, ["target"]),
    "score": (lambda target: mj.score(target, [[1, 2]]), ["target"]),
    "drafters.load": (lambda target: mj.drafters.load("ngram", target), ["target"]),
}
WRONG = {"a number": 3, "a text": "x", "an object": object(), "an array": jnp.ones(3), "a list": [1]}


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_type_is_told_in_one_sentence(name):
    function, arguments = CALLS[name]
    for place, argument in enumerate(arguments):
        for value in (*WRONG.values(), usual()["target" if argument != "target" else "params"]):
            given = [usual()[one] for one in arguments]
            given[place] = value
            with pytest.raises(MarsError, match=r"^[^\n]+: [^\n]+\.$"):
                function(*given)


NUMBERS = {
    "batch_size": lambda x: mj.generate(usual()["target"], "ngram", [[1]], batch_size=x),
    "max_new_tokens": lambda x: mj.generate(usual()["target"], "ngram", [[1]], max_new_tokens=x),
    "samples": lambda x: mj.generate(usual()["target"], "ngram", [[1]], samples=x),
    "seed": lambda x: mj.generate(usual()["target"], "ngram", [[1]], seed=x),
    "max_steps": lambda x: mj.run(DECODER, PARAMS, usual()["state"], max_steps=x),
    "ahead": lambda x: next(mj.stream(DECODER, PARAMS, usual()["state"], ahead=x)),
    "batch": lambda x: mj.make_controls(x, limit=8),
    "batch of edits": lambda x: mj.make_edits(x),
    "stop_tokens": lambda x: mj.make_controls(1, limit=8, stop_tokens=x),
    "logit_bias": lambda x: mj.make_edits(2, logit_bias=x),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_setting_that_is_no_number_is_told_by_its_name(name):
    for value in ("x", object(), 0.5, usual()["target"]):
        with pytest.raises(MarsError, match=rf"^{name.split()[0]}\b[^\n]*: [^\n]+\.$"):
            NUMBERS[name](value)


def test_a_state_that_was_given_away_is_told():
    prompts = usual()["prompts"]
    state = mj.decode.start(DECODER, PARAMS, prompts)
    mj.run(DECODER, PARAMS, state)
    stats = zero_stats(1, DECODER.max_depth)
    again = [
        lambda: mj.run(DECODER, PARAMS, state),
        lambda: next(mj.stream(DECODER, PARAMS, state)),
        lambda: mj.decode.extend(DECODER, PARAMS, state, prompts),
        lambda: refill.advance(DECODER, PARAMS, state, stats),
        lambda: refill.refill(DECODER, PARAMS, state, stats, ROW, prompts),
        lambda: DECODER.step(PARAMS, state),
    ]
    for use in again:
        with pytest.raises(
            MarsError, match=r"was given away before.*: go on with the state that it returned"
        ):
            use()


def test_weights_that_were_given_away_are_told_by_their_name():
    target = mj.load("tiny/draft", dtype="float32")
    decoder = mj.speculative_decoder(target.model, DRAFTER, RULE)
    params = mj.Params({**target.params, "embed": jnp.array(target.params["embed"])})
    state = mj.decode.start(decoder, params, usual()["prompts"])
    params.target["embed"].delete()  # as a trainer's update does
    with pytest.raises(MarsError, match="the params given to run was given away before"):
        mj.run(decoder, params, state)


def test_values_of_every_library_are_taken():
    state = mj.decode.start(DECODER, PARAMS, usual()["prompts"])
    state, _ = mj.run(DECODER, PARAMS, state=state, max_steps=np.asarray(1))
    state, _ = mj.run(DECODER, PARAMS, state, max_steps=jnp.int32(1))
    target, asked = usual()["target"], [[1], [2]]
    for limits in (jnp.asarray([3, 4]), np.asarray([3, 4]), [3, 4]):
        requests = mj.make_requests(target, asked, max_new_tokens=limits, seed=jnp.arange(2))
        assert [(r.max_new_tokens, r.seed) for r in requests] == [(3, 0), (4, 1)]
    assert mj.make_requests(target, asked, max_new_tokens=jnp.int32(4))[1].max_new_tokens == 4
