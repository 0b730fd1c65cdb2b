"""`Running` keeps a row between requests: it gives the tokens of a fresh state and reads only new tokens."""

import dataclasses
import gc
import shutil
import time
from types import SimpleNamespace

import jax
import pytest

import mars_jax as mj
from mars_jax import drafters, hub, verify
from mars_jax.core import decode
from mars_jax.core.decode import _extend
from mars_jax.core.rule import LoadedRule
from mars_jax.serve import chat as runnings
from mars_jax.serve.chat import Running
from mars_jax.serve.queue import Finished, Said
from mars_jax.serve.requests import make_requests
from mars_jax.serve.session import Session
from mars_jax.utils.errors import MarsError
from tests.helpers import slow_but
from tests.matrix.world import target as target_of
from tests.matrix.world import world

TURNS = ["Tom has a red ball.", "What did Tom do then?", "And his friend?"]
# The template keeps only the first word of earlier turns, as real templates drop thoughts.
FORGETFUL = """\
{%- for m in messages %}[{{ m.role }}]{{ m.content if loop.last else m.content.split()[0] }}
{% endfor %}[assistant]"""


@pytest.fixture(scope="module")
def target():
    return mj.load("tiny/target", dtype="float32")


@pytest.fixture(scope="module")
def forgetful(tmp_path_factory):
    """Load the embedded target with a template that writes earlier turns differently."""
    path = tmp_path_factory.mktemp("forgetful") / "target"
    shutil.copytree(hub.outline("tiny/target").path, path)
    (path / "chat_template.jinja").write_text(FORGETFUL)
    return mj.load(str(path), dtype="float32")


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    """Give the buffer the width of fresh runs, so that both share compiled programs."""
    monkeypatch.setattr(runnings, "WIDTH", 64)


def fresh_completion(target, drafter, prompts, rule=None, **options):
    """Return the completion of a state that has read the whole prompt."""
    requests = make_requests(target, prompts, **options)
    [completion] = Session.of(target, drafter, rule).decode(requests).completions
    return completion


def common_prefix(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def session(target, draft="ngram"):
    rule = LoadedRule(verify.exact())
    return Session(target=target, drafter=drafters.load(draft, target), loaded_rule=rule)


def small_chat(draft, **options):
    """Return a chat with a target whose single layer compiles quickly."""
    target = target_of("float32", None, None)
    drafter = drafters.load(world().drafters[draft], target, num_draft_tokens=4)
    return mj.Chat(target, drafter, verify=verify.mars(theta=0.5), **options)


@pytest.mark.parametrize("draft", slow_but(["ngram", "model", "eagle"], "ngram"))
def test_a_conversation_says_what_it_says_afresh(draft):
    chat = small_chat(draft, max_new_tokens=8)
    target, drafter, rule = (
        chat._running.session.target,
        chat._running.session.drafter,
        verify.mars(theta=0.5),
    )
    cached, compiled = [], set()
    for turn, text in enumerate(("the sea", "a man", "of a sun")):
        answer = chat.say(text)
        compiled.add(_extend._cache_size())
        fresh = fresh_completion(target, drafter, chat.messages[:-1], rule, max_new_tokens=8)
        assert answer.tokens == fresh.tokens and answer.text.strip() == chat.messages[-1]["content"]
        prompt = answer.request.prompt_tokens
        assert prompt == fresh.request.prompt_tokens and len(prompt) < 56
        # An EAGLE head reads one more token, and no cache holds the last token of an answer.
        new = len(prompt) - common_prefix(prompt, cached)
        assert new - 1 <= chat.read <= new + 1 and (turn == 0 or chat.read < len(prompt) - len(cached) // 2)
        cached = [*prompt, *answer.tokens]
    assert len(chat.messages) == 6 and len(compiled) == 1


@pytest.mark.slow
def test_a_template_that_writes_turns_anew_is_read_from_there(forgetful):
    chat = mj.Chat(forgetful, "ngram", max_new_tokens=10)
    cached, reads = [], []
    for text in TURNS:
        answer = chat.say(text)
        fresh = fresh_completion(forgetful, "ngram", chat.messages[:-1], max_new_tokens=10)
        assert answer.tokens == fresh.tokens
        prompt = answer.request.prompt_tokens
        same = common_prefix(prompt, cached)
        assert same < len(cached) or not cached
        assert chat.read == len(prompt) - 1 - same
        cached = [*prompt, *answer.tokens]
        reads.append((same, chat.read))
    assert reads[1][0] < reads[2][0], "a shortened turn does not change again"


@pytest.mark.slow
def test_a_conversation_that_is_full_says_so_and_stays(target):
    small = dataclasses.replace(target, config=dataclasses.replace(target.config, max_positions=48))
    chat = mj.Chat(small, "ngram", max_new_tokens=64, ignore_eos=True)
    answer = chat.say("Tom")
    assert answer.finish_reason == "length"
    assert len(answer.request.prompt_tokens) + len(answer.tokens) == 48
    messages = list(chat.messages)
    with pytest.raises(MarsError, match=r"the conversation is full: .* context of 48: take turns back"):
        chat.say(TURNS[1])
    assert chat.messages == messages


@pytest.mark.slow
def test_a_buffer_that_is_full_grows(target):
    chat = mj.Chat(target, "ngram", max_new_tokens=24)
    widths = []
    for text in TURNS:
        answer = chat.say(text)
        widths.append(chat._running._width)
        fresh = fresh_completion(target, "ngram", chat.messages[:-1], max_new_tokens=24)
        assert answer.tokens == fresh.tokens
    assert widths[0] == 64 and widths[-1] >= 128


@pytest.mark.slow
def test_requests_of_all_kinds_take_turns(target):
    """Mix sampled and greedy requests, with and without stop strings, short and long, under two rules."""
    running = Running(session(target, "eagle:tiny/eagle3"))
    cases = [
        {"prompts": "Once upon a time", "temperature": 0.8, "seed": 3},
        {"prompts": [[9]], "temperature": 0.8, "seed": 4},
        {"prompts": "Once upon a time, a dog", "stop_strings": ["."]},
        {"prompts": "Once upon a"},
    ]
    for number, options in enumerate(cases):
        rule = verify.mars(theta=0.9 if number % 2 else 0.2)
        running.session = running.session.using(LoadedRule(rule))
        [request] = make_requests(target, max_new_tokens=14, **options)
        running.compile(request)
        completion = list(running.stream(request))[-1].completion
        fresh = fresh_completion(target, running.session.drafter, rule=rule, max_new_tokens=14, **options)
        assert (completion.tokens, completion.text) == (fresh.tokens, fresh.text), options


def test_the_seconds_of_a_completion_include_its_prompt(monkeypatch):
    def extend(*arguments, extend=decode.extend):
        time.sleep(0.2)
        return extend(*arguments)

    monkeypatch.setattr(decode, "extend", extend)
    assert small_chat("ngram", max_new_tokens=2).say("the sea").seconds > 0.2


@pytest.mark.slow
def test_a_request_that_needs_another_program_goes_on_over_the_same_caches(target):
    """Penalties and constraints need fields that a state without them lacks."""
    running = Running(session(target))
    for options in ({}, {"repetition_penalty": 1.3}, {"regex": " there[a-z ]*"}, {}):
        options |= {"prompts": "Once upon a time", "max_new_tokens": 10}
        [request] = make_requests(target, **options)
        completion = list(running.stream(request))[-1].completion
        assert completion.tokens == fresh_completion(target, "ngram", **options).tokens
    assert running.read == 0


@pytest.mark.slow
def test_what_is_not_finite_is_not_held(target):
    running = Running(session(target, "none"))
    broken = dataclasses.replace(target, params=jax.tree.map(lambda x: x * float("nan"), target.params))
    intact_session = running.session
    [request] = make_requests(target, "Once upon a time", max_new_tokens=6)
    running.session = dataclasses.replace(intact_session, target=broken)
    assert list(running.stream(request))[-1].completion.finish_reason == "failed"
    running.session = intact_session
    expected = fresh_completion(target, "none", "Once upon a time", max_new_tokens=6).tokens
    assert list(running.stream(request))[-1].completion.tokens == expected


def test_a_conversation_refuses_unknown_options_and_an_undo_without_turns(target):
    with pytest.raises(TypeError, match="unexpected keyword argument 'top'"):
        mj.Chat(target, top=3).say("Tom")
    with pytest.raises(MarsError, match="there is no turn to take back"):
        mj.Chat(target).undo()


def scripted_chat():
    """Return a chat that answers every turn with "one two three", one event per word."""

    def stream(request):
        for word in ("one", " two", " three"):
            yield Said(0, word, (("exact", word),), (), None)
        yield Finished(0, request)

    target = SimpleNamespace(name="scripted", config=SimpleNamespace(max_positions=1000))
    running = SimpleNamespace(session=SimpleNamespace(target=target), stream=stream)
    return mj.Chat.over(running, lambda turns: SimpleNamespace(prompt_tokens=[1] * len(turns)))


def contents(chat):
    return [turn["content"] for turn in chat.messages]


ABANDON = {
    "closed": lambda events: events.close(),
    "collected": lambda events: None,  # drop the only reference
    "read on": lambda events: list(events),
}
LATER = {
    "say": (lambda chat: chat.say("b"), ["a", "one two", "b", "one two three"]),
    "stream": (lambda chat: list(chat.stream("b")), ["a", "one two", "b", "one two three"]),
    "undo": (lambda chat: chat.undo(), []),
    "clear": (lambda chat: chat.clear(), []),
    "change": (lambda chat: setattr(chat, "messages", [{"role": "user", "content": "x"}]), ["x"]),
}


@pytest.mark.parametrize("later", LATER)
@pytest.mark.parametrize("abandon", ABANDON)
def test_an_abandoned_stream_does_not_change_a_later_conversation(abandon, later):
    chat = scripted_chat()
    events = chat.stream("a")
    assert [next(events).text, next(events).text] == ["one", " two"]
    act, expected = LATER[later]
    act(chat)
    assert contents(chat) == expected
    ABANDON[abandon](events)
    del events
    gc.collect()
    assert contents(chat) == expected


def test_a_stream_that_nobody_read_adds_no_turn():
    chat = scripted_chat()
    events = chat.stream("a")
    chat.say("b")
    events.close()
    assert contents(chat) == ["b", "one two three"]


def test_turns_of_a_chat_draw_with_seeds_of_their_own(target):
    for options, seeds in (({}, [0, 1, 2]), ({"seed": 2**32 - 2}, [2**32 - 2, 2**32 - 1, 0])):
        chat = mj.Chat(target, temperature=1.0, **options)
        turns = [{"role": role, "content": "Tom"} for role in ("user", "assistant") * 2 + ("user",)]
        assert [chat.ask(turns[:n]).seed for n in (1, 3, 5)] == seeds
