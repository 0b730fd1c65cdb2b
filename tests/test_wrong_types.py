"""Arguments of a wrong type: every public function that decodes refuses them in a sentence that names them.

Typical first mistakes are a string for a model, a `Pretrained` for its weights, and a state that was donated.
"""

import functools
import inspect
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mars_jax as mj
from mars_jax import fake, refill
from mars_jax.core.metrics import zero_stats
from mars_jax.models import language_model
from mars_jax.serve.requests import Options
from mars_jax.serve.session import Session
from mars_jax.utils.errors import MarsError
from tests.helpers import small_models
from tests.helpers.checkpoint_files import message

MODEL, RULE, DRAFTER = fake.hash_model(vocab_size=11), mj.verify.mars(0.9), mj.drafters.ngram(4)
DECODER = mj.speculative_decoder(MODEL, DRAFTER, RULE)
PARAMS = mj.Params(())
ROW, ARRAY = jax.device_put((np.int32([0]), np.ones(3, np.float32)))


@functools.cache
def valid():
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
    "stream": (lambda *arguments: next(mj.stream(*arguments)), ["decoder", "params", "state"]),
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
WRONG = {
    "a number": 3,
    "a text": "x",
    "an object": object(),
    "an array": jax.device_put(np.ones(3, np.float32)),
    "a list": [1],
}


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_type_is_told_in_one_sentence(name):
    function, arguments = CALLS[name]
    for place, argument in enumerate(arguments):
        for value in (*WRONG.values(), valid()["target" if argument != "target" else "params"]):
            values = [valid()[name] for name in arguments]
            values[place] = value
            with pytest.raises(MarsError, match=r"^[^\n]+: [^\n]+\.$"):
                function(*values)


@pytest.mark.parametrize("value", ["x", object(), 0.5])
def test_a_number_of_steps_that_is_no_number_is_named(value):
    state = valid()["state"]
    assert message(mj.run, DECODER, PARAMS, state, max_steps=value).startswith("max_steps ")
    assert message(next, mj.stream(DECODER, PARAMS, state, ahead=value)).startswith("ahead ")


def test_a_state_that_was_given_away_is_told():
    prompts = valid()["prompts"]
    state = mj.decode.start(DECODER, PARAMS, prompts)
    mj.run(DECODER, PARAMS, state)
    stats = zero_stats(1, DECODER.max_depth)
    calls = [
        lambda: mj.run(DECODER, PARAMS, state),
        lambda: next(mj.stream(DECODER, PARAMS, state)),
        lambda: mj.decode.extend(DECODER, PARAMS, state, prompts),
        lambda: refill.advance(DECODER, PARAMS, state, stats),
        lambda: refill.refill(DECODER, PARAMS, state, stats, ROW, prompts),
        lambda: DECODER.step(PARAMS, state),
    ]
    for call in calls:
        assert re.search("was donated before.*: continue with the state that it returned", message(call))


def test_weights_that_were_given_away_are_told_by_their_name():
    decoder = mj.speculative_decoder(language_model(small_models.CONFIG), DRAFTER, RULE)
    params = mj.Params(small_models.random_weights(small_models.CONFIG, scale=0.3))
    state = mj.decode.start(decoder, params, valid()["prompts"])
    params.target["embed"].delete()  # as a trainer's update does
    with pytest.raises(MarsError, match="the params given to run was donated before"):
        mj.run(decoder, params, state)


def test_values_of_every_library_are_taken():
    state = mj.decode.start(DECODER, PARAMS, valid()["prompts"])
    state, _ = mj.run(DECODER, PARAMS, state=state, max_steps=np.asarray(1))
    state, _ = mj.run(DECODER, PARAMS, state, max_steps=jnp.int32(1))
    for limits in (jnp.asarray([3, 4]), np.asarray([3, 4]), [3, 4]):
        requests = mj.make_requests(valid()["target"], [[1], [2]], max_new_tokens=limits, seed=jnp.arange(2))
        assert [(r.max_new_tokens, r.seed) for r in requests] == [(3, 0), (4, 1)]


SENTENCE = r"^[^\n]+: [^\n]+\.$"
VALUES = {
    "None": None, "a number": 5, "below 0": -1, "above 32 bits": 2**40, "a large number": 10**5000, "half": 0.5,
    "NaN": float("nan"), "infinity": float("inf"), "imaginary": 1j, "a bool": True, "text": "x", "no text": "",
    "half a character": "a\ud800", "bytes": b"x", "a list": ["x"], "an empty list": [], "a nested list": [[["x"]]],
    "a list of None": [None], "a list of objects": [object()], "a ragged list": [[1], 2], "a list of -1": [-1],
    "a list of large numbers": [2**40], "a list of halves of characters": ["\ud800"], "a dict": {"x": 1},
    "a dict of text": {1: "x"}, "an empty dict": {}, "an object": object(), "a type": int, "a function": len,
    "a matrix": np.ones((2, 2)), "a vector": ARRAY, "an array of no dimensions": np.asarray(3.5),
}  # fmt: skip
"""Values that a user may pass for any argument."""

TEXT = {"text", "no text"}


@functools.cache
def chatty():
    return mj.hub.outline("tiny/target")


def option(name, **options):
    return lambda value: mj.make_requests(chatty(), ["a", "b"], **options, **{name: value})


def argument(function, name, *args, **options):
    return lambda value: function(*args, **options, **{name: value})


def turn(**fields):
    return [{"role": "user", "content": "x"} | fields]


def session(**arguments):
    return Session.of(**({"target": valid()["target"]} | arguments))


def say(text, **changed):
    """Add a turn to a chat without decoding it."""
    chat = mj.Chat(chatty())
    vars(chat).update(changed)
    chat._running.stream = lambda request: iter(())
    return chat.stream(text)


ARGUMENTS = {
    # Prompts and options: `generate`, `generate_iter`, `generate_stream` and `Chat` call `make_requests`.
    **{f"make_requests.{name}": option(name) for name in sorted(Options.__optional_keys__)},
    "make_requests.relax_constrained": option("relax_constrained", regex="a"),
    "make_requests.prompts": lambda x: mj.make_requests(chatty(), x),
    "make_requests.prompts of one": lambda x: mj.make_requests(chatty(), [x]),
    "make_requests.prompts, another": lambda x: mj.make_requests(chatty(), ["a", x]),
    "make_requests.role": lambda x: mj.make_requests(chatty(), [turn(role=x)]),
    "make_requests.content": lambda x: mj.make_requests(chatty(), [turn(content=x)]),
    "make_requests.chat": option("chat"),
    "make_requests.ignore_eos": option("ignore_eos"),
    "make_requests.system": option("system", chat=True),
    "make_requests.template_args": option("template_args", chat=True),
    "Session.batch_size": lambda x: session(batch_size=x),
    "Session.drafter": lambda x: session(drafter=x),
    "Session.verify": lambda x: session(verify=x),
    "Session.log_probs": lambda x: session(log_probs=x),
    "Chat.messages": lambda x: say("x", messages=x),
    "Chat.stream": say,
    "score.texts": lambda x: mj.score(valid()["target"], x),
    "score.texts of one": lambda x: mj.score(valid()["target"], [x]),
    **{
        f"Pretrained.{name}": lambda x, name=name: getattr(chatty(), name)(x)
        for name in ("encode", "encode_chat", "encode_many", "decode", "check_tokens")
    },
    "Pretrained.decode of one": lambda x: chatty().decode([x]),
    "Pretrained.encode_many of one": lambda x: chatty().encode_many([x]),
    "from_parts.model": lambda x: mj.Pretrained.from_parts(x, (), max_positions=8),
    "from_parts.max_positions": lambda x: mj.Pretrained.from_parts(MODEL, (), max_positions=x),
    "from_parts.stop_tokens": argument(mj.Pretrained.from_parts, "stop_tokens", MODEL, (), max_positions=8),
    # Settings of a step.
    "make_controls.limit": argument(mj.make_controls, "limit", 2),
    **{
        f"make_controls.{name}": argument(mj.make_controls, name, 2, limit=8)
        for name in ("temperature", "top_k", "top_p", "min_p", "strict", "draft_stop", "stop_tokens")
    },
    **{
        f"make_edits.{name}": argument(mj.make_edits, name, 2)
        for name in ("logit_bias", "repetition_penalty", "presence_penalty", "frequency_penalty")
    },
    "keys_from_seeds": mj.keys_from_seeds,
    "summarize.rows": lambda x: mj.summarize(zero_stats(1, 4), x),
    "speculative_decoder.prefill_chunk": lambda x: mj.speculative_decoder(
        MODEL, DRAFTER, RULE, prefill_chunk=x
    ),
    # Drafters, rules and constraints.
    **{f"ngram.{name}": argument(mj.drafters.ngram, name) for name in ("max_ngram", "min_ngram")},
    **{
        f"language_model.{name}": argument(mj.drafters.language_model, name, MODEL)
        for name in ("tree", "sample", "vocab_size", "own_tokens")
    },
    "language_model.model": lambda x: mj.drafters.language_model(x),
    **{f"Dynamic.{name}": argument(mj.drafters.Dynamic, name) for name in ("top_k", "depth", "nodes")},
    "drafters.load.spec": lambda x: mj.drafters.load(x, valid()["target"]),
    **{
        f"drafters.load.{name}": argument(mj.drafters.load, name, "ngram", valid()["target"])
        for name in ("num_draft_tokens", "tree", "sample", "dtype", "draft_size", "any_rule", "head_embed")
    },
    "verify.load.spec": lambda x: mj.verify.load(x),
    **{
        f"verify.{rule}.{name}": argument(getattr(mj.verify, rule), name)
        for rule in ("adaptive", "mars", "mixture", "nucleus", "topk", "typical")
        for name in inspect.signature(getattr(mj.verify, rule)).parameters
        if name != "block"
    },
    **{
        f"constraints.{name}": getattr(mj.constraints, name)
        for name in ("regex", "json_schema", "choice", "tokens", "from_fields")
    },
    # Models.
    "load.name_or_path": lambda x: mj.load(x),
    **{
        f"load.{name}": argument(mj.load, name, "tiny/draft")
        for name in ("dtype", "mesh", "check", "cache_dtype", "prefill_chunk", "attention")
    },
}
ACCEPTED = {
    "make_requests.seed": {"a number"},
    "make_requests.max_new_tokens": {"a number"},
    "make_requests.top_p": {"half"},
    "make_requests.strict": {"a bool"},
    "make_requests.stop_tokens": {"a number", "an empty list", "a ragged list"},
    "make_requests.banned_tokens": {"None", "a number", "an empty list", "a ragged list"},
    "make_requests.stop_strings": {"text", "a list", "an empty list"},
    "make_requests.logit_bias": {"None", "an empty dict"},
    "make_requests.prompts": {"text", "a list"},
    "make_requests.content": {*TEXT, "an empty list"},
    "make_requests.system": {"None", *TEXT},
    "make_requests.template_args": {"None", "a dict", "an empty dict"},
    "make_requests.chat": {"a bool"},
    "Pretrained.encode": {"text"},
    "Pretrained.decode": {"an empty list"},
    "Session.batch_size": {"None", "a number"},
    "Session.verify": {"None"},
    "Session.drafter": set(),
    "Chat.stream": {*TEXT, "an empty list"},
    "make_controls.stop_tokens": {"an empty list", "a list of -1"},
    "keys_from_seeds": set(),
    "speculative_decoder.prefill_chunk": {"None", "a number", "above 32 bits", "a large number"},
    "load.dtype": {"None"},
}
"""Valid values of an argument, if they are few enough to list."""


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_argument_takes_a_value_or_refuses_it_in_one_sentence(name):
    accepted = set()
    for label, value in VALUES.items():
        try:
            ARGUMENTS[name](value)
            accepted.add(label)
        except MarsError as error:
            assert re.match(SENTENCE, str(error)), (label, str(error))
    assert accepted == ACCEPTED.get(name, accepted)


MISTAKES = [
    ({"stop_strings": 5}, "stop_strings is 5: expected texts of at least one character"),
    ({"logit_bias": {"x": 1}}, "logit_bias has 'x': 1: expected one of the 4096 tokens of 'tiny/target' and"),
    ({"seed": -1}, "seed is -1: expected a whole number from 0 to 4294967295"),
    ({"stop_tokens": 4096}, "stop_tokens is .4096,.: expected a list of token ids from 0 to 4095"),
    ({"temperature": "hot"}, "temperature is 'hot': expected a finite number of at least 0"),
    ({"max_new_tokens": True}, "max_new_tokens is True: expected a whole number of at least 1"),
    ({"prompts": {"a": 1}}, "the prompts are of type dict: give strings, token ids or conversations"),
    ({"prompts": "a\ud800"}, "the prompt is 'a.*ud800', not valid Unicode: give it as UTF-8"),
    ({"prompts": [[1, 4096]]}, "prompt token 4096 is outside of the 4096 tokens of 'tiny/target'"),
]


@pytest.mark.parametrize(("options", "sentence"), MISTAKES)
def test_a_mistake_in_a_request_is_named_with_its_value(options, sentence):
    with pytest.raises(MarsError, match=rf"^{sentence}.*\.$"):
        mj.make_requests(chatty(), **({"prompts": ["a", "b"]} | options))


def test_numbers_of_numpy_and_jax_are_taken_where_numbers_of_python_are():
    for number in (np.int32, np.int64, np.uint8, jnp.int32):
        [request] = mj.make_requests(
            valid()["target"], [[number(1)]], seed=number(3), top_k=number(2), stop_tokens=number(4),
            temperature=np.float32(0.5), logit_bias={np.int64(5): np.float32(1)}, banned_tokens=[number(6)],
        )  # fmt: skip
        assert (request.seed, request.top_k, request.stop_tokens) == (3, 2, (4,))
        assert request.prompt_tokens == (1,) and request.temperature == 0.5
        assert request.logit_bias == ((5, 1.0), (6, -np.inf))
        assert {type(x) for x in (request.seed, request.top_k, *request.stop_tokens)} == {int}


@pytest.mark.parametrize("tree", [np.asarray(2), np.ones((1, 1), int), np.asarray([1.5]), np.empty(0, int)])
def test_an_array_that_is_no_tree_is_refused(tree):
    text = message(mj.drafters.language_model, MODEL, tree=tree)
    assert text.startswith("tree is ") and ": expected the children per node" in text


def test_every_public_function_is_tried():
    """A function that is added to `tests/public.json` needs a row above."""
    tried = {part for name in (*ARGUMENTS, *CALLS) for part in name.split(".")}
    names = json.loads(Path(__file__).with_name("public.json").read_text())["names"]
    functions = [name for name, arguments in names.items() if name.startswith("mars_jax.") and arguments]
    public = {name.rpartition(".")[2] for name in functions}
    untried = {"generate_iter", "generate_stream", "eagle", "enable_compilation_cache", "rejection"}
    assert {name for name in public if name.islower()} - tried == untried
