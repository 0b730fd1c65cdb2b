"""Every entry point gives the completions of a loop over the target in PyTorch that decodes one token at a time.

The rule is lossy, and rows are strict or constrained, so that nothing is relaxed.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pytest

import mars_jax as mj
from mars_jax import drafters, verify
from mars_jax.serve.queue import Finished, Said
from mars_jax.serve.session import Session
from tests.helpers import slow_but
from tests.matrix.world import target as target_of
from tests.matrix.world import world

regex = pytest.importorskip("regex")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

ROWS: tuple[dict[str, Any], ...] = (
    {"prompt": "the sea", "max_new_tokens": 20},
    {"prompt": "of a man, of a man", "max_new_tokens": 1},
    {"prompt": "a story of the sun, of the sun", "max_new_tokens": 17, "stop": 5},
    {"prompt": "the sea", "max_new_tokens": 18, "stop_text": (4, 7)},
    {"prompt": "a story of the sun, of the sun", "max_new_tokens": 16, "stop": 5, "min_new_tokens": 9},
    {"prompt": "a man", "max_new_tokens": 15, "stop_strings": ["qqq"], "ban": 3},
    {"prompt": "t", "max_new_tokens": 16, "repetition_penalty": 1.3, "temperature": 0.8, "top_k": 1},
    {"prompt": "the sun", "max_new_tokens": 12, "presence_penalty": 1.5, "frequency_penalty": 0.5},
    {"prompt": "of the sea and of", "max_new_tokens": 14, "regex": "(a|the) [a-e ,]{3,30}"},
    {"prompt": "the", "max_new_tokens": 13, "choice": ["the sea", "a man", "a story"]},
    {"prompt": "a story", "max_new_tokens": 11, "temperature": 1.5, "top_p": 1e-6, "bias": (0, 50.0, 6)},
    {"prompt": "and the sea", "max_new_tokens": 10, "temperature": 0.7, "min_p": 1.0, "ban": 1},
    {"prompt": "the sea", "max_new_tokens": 500},
)


class Wanted(NamedTuple):
    """Expected result of a request."""

    tokens: list[int]
    text: str
    finish: str
    log_probs: list[float]
    regrets: list[float]


@functools.cache
def asked() -> tuple[list[str], dict[str, list[Any]]]:
    """Return the prompts, and options with one value per prompt."""
    free = [by_hand({**row, "max_new_tokens": 20}) for row in ROWS]
    rows = [dict(row) for row in ROWS]
    for row, found in zip(rows, free, strict=True):
        row["stop_tokens"] = [found.tokens[row.pop("stop")]] if "stop" in row else [0]
        row["logit_bias"] = {}
        if "stop_text" in row:
            row["stop_strings"] = [found.text[slice(*row.pop("stop_text"))], "qqq"]
        if "ban" in row:
            row["banned_tokens"] = [found.tokens[row.pop("ban")]]
        if "bias" in row:
            place, value, token = row.pop("bias")
            row["logit_bias"] = {found.tokens[place]: -value, 64 + token: value}
    prompts = [row.pop("prompt") for row in rows]
    usual: dict[str, Any] = {"banned_tokens": [], "stop_strings": [], "top_p": 1.0, "repetition_penalty": 1.0}
    usual |= {"regex": None, "choice": None}
    names = dict.fromkeys(name for row in rows for name in row)
    options = {name: [row.get(name, usual.get(name, 0)) for row in rows] for name in names}
    # Constrained rows are strict by default.
    options["strict"] = [not (row.get("regex") or row.get("choice")) for row in rows]
    return prompts, options


@functools.cache
def wanted() -> list[Wanted]:
    prompts, options = asked()
    rows = [{name: values[i] for name, values in options.items()} for i in range(len(prompts))]
    return [by_hand({"prompt": prompt, **row}) for prompt, row in zip(prompts, rows, strict=True)]


@functools.cache
def model() -> tuple[Any, Any, list[str]]:
    """Return PyTorch's target, its tokenizer, and the text of each token."""
    made = transformers.AutoModelForCausalLM.from_pretrained(world().target, dtype="float32")
    words = transformers.AutoTokenizer.from_pretrained(world().target)
    return made, words, [words.decode([i]) for i in range(made.config.vocab_size)]


def by_hand(row: Mapping[str, Any]) -> Wanted:
    """Decode one request: append the target's best allowed token until the request ends."""
    target, words, texts = model()
    prompt = words(row["prompt"])["input_ids"]
    said: list[int] = []
    log_probs, regrets, finish = [], [], "length"
    pattern = "|".join(map(regex.escape, row["choice"])) if row.get("choice") else row.get("regex")
    for _ in range(min(row["max_new_tokens"], target.config.max_position_embeddings - len(prompt))):
        with torch.inference_mode():
            raw = target(torch.tensor([[*prompt, *said]])).logits[0, -1].double().numpy()
        z = edited(raw, row, prompt, said)
        if pattern is not None:
            text = words.decode(said)
            may = [bool(t) and regex.fullmatch(pattern, text + t, partial=True) is not None for t in texts]
            may[0] = regex.fullmatch(pattern, text) is not None
            z = np.where(may, z, -np.inf)
        said.append(int(np.argmax(z)))
        log_probs.append(float(raw[said[-1]] - np.logaddexp.reduce(raw)))
        regrets.append(float(raw.max() - raw[said[-1]]))
        text = words.decode([i for i in said if i])
        cuts = [text.index(stop) for stop in row.get("stop_strings") or () if stop in text]
        if cuts:
            return Wanted(said, text[: min(cuts)], "stop", log_probs, regrets)
        if said[-1] in row.get("stop_tokens", ()):
            finish = "stop"
            break
    return Wanted(said, words.decode([i for i in said if i]), finish, log_probs, regrets)


def edited(raw: np.ndarray, row: Mapping[str, Any], prompt: list[int], said: list[int]) -> np.ndarray:
    """Apply biases, bans, transformers' repetition penalty, and OpenAI's penalties of generated tokens."""
    z = raw.copy()
    for token, value in (row.get("logit_bias") or {}).items():
        z[token] += value
    z[list(row.get("banned_tokens") or ())] = -np.inf
    seen, by = list({*prompt, *said}), row.get("repetition_penalty", 1.0)
    z[seen] = np.where(z[seen] > 0, z[seen] / by, z[seen] * by)
    for token in set(said):
        z[token] -= row.get("presence_penalty", 0.0) + row.get("frequency_penalty", 0.0) * said.count(token)
    if len(said) < row.get("min_new_tokens", 0):
        z[list(row.get("stop_tokens", ()))] = -np.inf
    return z


# The surfaces: each gives the completions in the order of the prompts.

ROOM = {"batch_size": 4, "log_probs": True}


def pair() -> tuple[Any, Any, dict[str, Any]]:
    target = target_of("float32", None, None)
    return target, drafters.load("ngram", target, num_draft_tokens=3), {"verify": verify.mars(theta=0.2)}


def side_by_side() -> list[Any]:
    target, drafter, given = pair()
    prompts, options = asked()
    requests = mj.make_requests(target, prompts, **options)
    plain = [i for i, request in enumerate(requests) if not request.stop_strings]
    session = Session.of(target, drafter, batch_size=None, log_probs=True, **given)
    found = session.decode([requests[i] for i in plain])
    assert found.forwards == max(one.metrics.steps for one in found.completions)
    return [found.completions[plain.index(i)] if i in plain else None for i in range(len(requests))]


def through_few_rows() -> list[Any]:
    target, drafter, given = pair()
    prompts, options = asked()
    found = mj.generate(target, drafter, prompts, **given, **ROOM, **options)
    assert found.metrics.steps == sum(one.metrics.steps for one in found.completions)
    assert found.metrics.emitted == sum(one.metrics.emitted for one in found.completions)
    assert max(one.metrics.steps for one in found.completions) <= found.forwards < found.metrics.steps
    assert found.tokens == [one.tokens for one in found.completions]
    return found.completions


def as_they_end() -> list[Any]:
    target, drafter, given = pair()
    prompts, options = asked()
    found = dict(mj.generate_iter(target, drafter, prompts, **given, **ROOM, **options))
    assert [*found] != sorted(found), "the short ones end before those that began with them"
    return [found[i] for i in range(len(prompts))]


def told_as_it_is_said() -> list[Any]:
    target, drafter, given = pair()
    prompts, options = asked()
    texts, tokens, found = [""] * len(prompts), [[] for _ in prompts], {}
    for event in mj.generate_stream(target, drafter, prompts, **given, **ROOM, **options):
        assert event.index not in found, "nothing comes after a completion"
        if isinstance(event, Said):
            assert "".join(text for _, text in event.pieces) == event.text
            assert len(event.pieces) == len(event.tokens) <= 4
            texts[event.index] += event.text
            tokens[event.index] += event.tokens
        else:
            found[event.index] = event.completion
            assert (event.completion.text, event.completion.tokens) == (
                texts[event.index],
                tokens[event.index],
            )
    return [found[i] for i in range(len(prompts))]


def step_by_step() -> list[Any]:
    target, drafter, given = pair()
    prompts, options = asked()
    said = [["", [], [], []] for _ in prompts]
    found = {}
    requests = mj.make_requests(target, prompts, **options)
    for event in Session.of(target, drafter, log_probs=True, **given).stream(requests):
        if isinstance(event, Finished):
            found[event.index] = event.completion
            continue
        more = event.text, event.tokens, event.log_probs.log_prob, [kind for kind, _ in event.pieces]
        said[event.index] = [a + type(a)(b) for a, b in zip(said[event.index], more, strict=True)]
    for row, one in found.items():
        assert said[row][:2] == [one.text, one.tokens] and tuple(said[row][3]) == one.log_probs.kind
        np.testing.assert_allclose(said[row][2], one.log_probs.log_prob, atol=1e-5)
    return [found[i] for i in range(len(prompts))]


def by_a_session() -> list[Any]:
    target, drafter, given = pair()
    prompts, options = asked()
    rule = verify.LoadedRule(given["verify"])
    session = Session(target=target, drafter=drafter, loaded_rule=rule, batch_size=4, log_probs=True)
    requests = mj.make_requests(target, prompts, **options)
    order = [*range(1, len(prompts), 2), *range(0, len(prompts), 2)]
    found = dict(session.queue(requests, order=order))
    few = dict(session.queue(requests, order=[5, 1]))
    assert sorted(few) == [1, 5] and all(few[i].tokens == found[i].tokens for i in few)
    return [found[i] for i in range(len(prompts))]


FAST = (through_few_rows, as_they_end, told_as_it_is_said, by_a_session, step_by_step)


@pytest.mark.parametrize("surface", slow_but([*FAST, side_by_side], *FAST), ids=lambda one: one.__name__)
def test_texts_are_those_of_a_loop_over_the_target(surface):
    found = surface()
    assert len(found) == len(ROWS)
    for row, (one, want) in enumerate(zip(found, wanted(), strict=True)):
        if one is None:
            continue
        assert (one.tokens, one.text, one.finish_reason) == (want.tokens, want.text, want.finish), row
        scores, metrics = one.log_probs, one.metrics
        np.testing.assert_allclose(scores.log_prob, want.log_probs, atol=1e-3)
        np.testing.assert_allclose(scores.regret, want.regrets, atol=1e-3)
        assert set(scores.kind) <= {"exact", "corrected"} and len(scores.kind) == len(one.tokens)
        assert metrics.accepted_relaxed == 0 and metrics.steps <= metrics.emitted
        assert metrics.emitted == len(one.tokens) or one.request.stop_strings
        assert metrics.emitted >= len(one.tokens)
        assert metrics.steps + metrics.accepted_exact >= metrics.emitted
        assert sum(metrics.depth_histogram) == metrics.steps and one.seconds > 0
        if one.request.constraint is not None and one.request.constraint.kind == "choice":
            assert metrics.steps < len(one.tokens), "what is forced is drafted"


def test_the_requests_meet_what_they_are_for():
    """Some completions end by each reason, some settings change a completion, and some stop strings cut words."""
    prompts, options = asked()
    free = [by_hand({"prompt": prompt, "max_new_tokens": 20}) for prompt in prompts]
    for row, (one, plain) in enumerate(zip(wanted(), free, strict=True)):
        count = min(len(one.tokens), 20)
        names = ("regex", "choice", "banned_tokens", "logit_bias", "presence_penalty", "min_new_tokens")
        changed = any(options[name][row] for name in names) or options["repetition_penalty"][row] != 1
        assert (one.tokens[:count] == plain.tokens[:count]) != changed, row
    assert {one.finish for one in wanted()} == {"stop", "length"}
