"""Every entry point gives the completions of a PyTorch loop that decodes one token at a time with the target.

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


class Expected(NamedTuple):
    """Expected result of a request."""

    tokens: list[int]
    text: str
    finish: str
    log_probs: list[float]
    regrets: list[float]


@functools.cache
def prompts_and_options() -> tuple[list[str], dict[str, list[Any]]]:
    """Return the prompts, and options with one value per prompt."""
    free = [decode_reference({**row, "max_new_tokens": 20}) for row in ROWS]
    rows = [dict(row) for row in ROWS]
    for row, reference in zip(rows, free, strict=True):
        row["stop_tokens"] = [reference.tokens[row.pop("stop")]] if "stop" in row else [0]
        row["logit_bias"] = {}
        if "stop_text" in row:
            row["stop_strings"] = [reference.text[slice(*row.pop("stop_text"))], "qqq"]
        if "ban" in row:
            row["banned_tokens"] = [reference.tokens[row.pop("ban")]]
        if "bias" in row:
            place, value, token = row.pop("bias")
            row["logit_bias"] = {reference.tokens[place]: -value, 64 + token: value}
    prompts = [row.pop("prompt") for row in rows]
    usual: dict[str, Any] = {"banned_tokens": [], "stop_strings": [], "top_p": 1.0, "repetition_penalty": 1.0}
    usual |= {"regex": None, "choice": None}
    names = dict.fromkeys(name for row in rows for name in row)
    options = {name: [row.get(name, usual.get(name, 0)) for row in rows] for name in names}
    # Constrained rows are strict by default.
    options["strict"] = [not (row.get("regex") or row.get("choice")) for row in rows]
    return prompts, options


@functools.cache
def expected_completions() -> list[Expected]:
    prompts, options = prompts_and_options()
    rows = [{name: values[i] for name, values in options.items()} for i in range(len(prompts))]
    return [decode_reference({"prompt": prompt, **row}) for prompt, row in zip(prompts, rows, strict=True)]


@functools.cache
def model() -> tuple[Any, Any, list[str]]:
    """Return PyTorch's target, its tokenizer, and the text of each token."""
    target = transformers.AutoModelForCausalLM.from_pretrained(world().target, dtype="float32")
    words = transformers.AutoTokenizer.from_pretrained(world().target)
    return target, words, [words.decode([i]) for i in range(target.config.vocab_size)]


def decode_reference(row: Mapping[str, Any]) -> Expected:
    """Decode one request: append the target's best allowed token until the request ends."""
    target, words, texts = model()
    prompt = words(row["prompt"])["input_ids"]
    tokens: list[int] = []
    log_probs, regrets, finish = [], [], "length"
    pattern = "|".join(map(regex.escape, row["choice"])) if row.get("choice") else row.get("regex")
    for _ in range(min(row["max_new_tokens"], target.config.max_position_embeddings - len(prompt))):
        with torch.inference_mode():
            raw = target(torch.tensor([[*prompt, *tokens]])).logits[0, -1].double().numpy()
        z = edited(raw, row, prompt, tokens)
        if pattern is not None:
            text = words.decode(tokens)
            allowed = [bool(t and regex.fullmatch(pattern, text + t, partial=True)) for t in texts]
            allowed[0] = bool(regex.fullmatch(pattern, text))
            z = np.where(allowed, z, -np.inf)
        tokens.append(int(np.argmax(z)))
        log_probs.append(float(raw[tokens[-1]] - np.logaddexp.reduce(raw)))
        regrets.append(float(raw.max() - raw[tokens[-1]]))
        text = words.decode([i for i in tokens if i])
        cuts = [text.index(stop) for stop in row.get("stop_strings") or () if stop in text]
        if cuts:
            return Expected(tokens, text[: min(cuts)], "stop", log_probs, regrets)
        if tokens[-1] in row.get("stop_tokens", ()):
            finish = "stop"
            break
    return Expected(tokens, words.decode([i for i in tokens if i]), finish, log_probs, regrets)


def edited(raw: np.ndarray, row: Mapping[str, Any], prompt: list[int], tokens: list[int]) -> np.ndarray:
    """Apply biases, bans, transformers' repetition penalty, and OpenAI's penalties of generated tokens."""
    z = raw.copy()
    for token, value in (row.get("logit_bias") or {}).items():
        z[token] += value
    z[list(row.get("banned_tokens") or ())] = -np.inf
    distinct, penalty = list({*prompt, *tokens}), row.get("repetition_penalty", 1.0)
    z[distinct] = np.where(z[distinct] > 0, z[distinct] / penalty, z[distinct] * penalty)
    for token in set(tokens):
        z[token] -= row.get("presence_penalty", 0.0) + row.get("frequency_penalty", 0.0) * tokens.count(token)
    if len(tokens) < row.get("min_new_tokens", 0):
        z[list(row.get("stop_tokens", ()))] = -np.inf
    return z


# The entry points. Each returns the completions in the order of the prompts.
ROOM = {"batch_size": 4, "log_probs": True}
RULE = verify.mars(theta=0.2)


def arguments() -> tuple[Any, Any, list[str], dict[str, list[Any]]]:
    target = target_of("float32", None, None)
    return target, drafters.load("ngram", target, num_draft_tokens=3), *prompts_and_options()


def from_session_decode() -> list[Any]:
    target, drafter, prompts, options = arguments()
    requests = mj.make_requests(target, prompts, **options)
    indices = [i for i, request in enumerate(requests) if not request.stop_strings]
    session = Session.of(target, drafter, batch_size=None, verify=RULE, log_probs=True)
    result = session.decode([requests[i] for i in indices])
    assert result.forwards == max(completion.metrics.steps for completion in result.completions)
    return [result.completions[indices.index(i)] if i in indices else None for i in range(len(requests))]


def from_generate() -> list[Any]:
    target, drafter, prompts, options = arguments()
    result = mj.generate(target, drafter, prompts, verify=RULE, **ROOM, **options)
    steps = [completion.metrics.steps for completion in result.completions]
    assert result.metrics.steps == sum(steps) and max(steps) <= result.forwards < sum(steps)
    assert result.metrics.emitted == sum(completion.metrics.emitted for completion in result.completions)
    assert result.tokens == [completion.tokens for completion in result.completions]
    return result.completions


def from_generate_iter() -> list[Any]:
    target, drafter, prompts, options = arguments()
    completions = dict(mj.generate_iter(target, drafter, prompts, verify=RULE, **ROOM, **options))
    assert [*completions] != sorted(completions), "short completions end first"
    return [completions[i] for i in range(len(prompts))]


def from_generate_stream() -> list[Any]:
    target, drafter, prompts, options = arguments()
    texts, tokens, completions = [""] * len(prompts), [[] for _ in prompts], {}
    for event in mj.generate_stream(target, drafter, prompts, verify=RULE, **ROOM, **options):
        assert event.index not in completions, "an event follows the completion"
        if isinstance(event, Said):
            assert "".join(text for _, text in event.pieces) == event.text
            assert len(event.pieces) == len(event.tokens) <= 4
            texts[event.index] += event.text
            tokens[event.index] += event.tokens
        else:
            completion = completions[event.index] = event.completion
            assert (completion.text, completion.tokens) == (texts[event.index], tokens[event.index])
    return [completions[i] for i in range(len(prompts))]


def from_session_stream() -> list[Any]:
    target, drafter, prompts, options = arguments()
    streamed, completions = [["", [], [], []] for _ in prompts], {}
    requests = mj.make_requests(target, prompts, **options)
    for event in Session.of(target, drafter, verify=RULE, log_probs=True).stream(requests):
        if isinstance(event, Finished):
            completions[event.index] = event.completion
            continue
        parts = event.text, event.tokens, event.log_probs.log_prob, [kind for kind, _ in event.pieces]
        streamed[event.index] = [a + type(a)(b) for a, b in zip(streamed[event.index], parts, strict=True)]
    for row, completion in completions.items():
        text, tokens, log_probs, kinds = streamed[row]
        scores = completion.log_probs
        assert (text, tokens, tuple(kinds)) == (completion.text, completion.tokens, scores.kind)
        np.testing.assert_allclose(log_probs, scores.log_prob, atol=1e-5)
    return [completions[i] for i in range(len(prompts))]


def from_session_queue() -> list[Any]:
    target, drafter, prompts, options = arguments()
    rule = verify.LoadedRule(RULE)
    session = Session(target=target, drafter=drafter, loaded_rule=rule, batch_size=4, log_probs=True)
    requests = mj.make_requests(target, prompts, **options)
    order = [*range(1, len(prompts), 2), *range(0, len(prompts), 2)]
    completions = dict(session.queue(requests, order=order))
    subset = dict(session.queue(requests, order=[5, 1]))
    assert sorted(subset) == [1, 5] and all(subset[i].tokens == completions[i].tokens for i in subset)
    return [completions[i] for i in range(len(prompts))]


SURFACES = {
    "through_few_rows": from_generate,
    "as_they_end": from_generate_iter,
    "told_as_it_is_said": from_generate_stream,
    "by_a_session": from_session_queue,
    "step_by_step": from_session_stream,
    "side_by_side": from_session_decode,
}


@pytest.mark.parametrize("surface", slow_but(SURFACES, *(SURFACES.keys() - {"side_by_side", "step_by_step"})))
def test_texts_are_those_of_a_loop_over_the_target(surface):
    actual_completions = SURFACES[surface]()
    assert len(actual_completions) == len(ROWS)
    for row, (actual, expected) in enumerate(zip(actual_completions, expected_completions(), strict=True)):
        if actual is None:
            continue
        assert (actual.tokens, actual.text) == (expected.tokens, expected.text), row
        assert actual.finish_reason == expected.finish, row
        scores, metrics = actual.log_probs, actual.metrics
        np.testing.assert_allclose(scores.log_prob, expected.log_probs, atol=1e-3)
        np.testing.assert_allclose(scores.regret, expected.regrets, atol=1e-3)
        assert set(scores.kind) <= {"exact", "corrected"} and len(scores.kind) == len(actual.tokens)
        assert metrics.accepted_relaxed == 0 and metrics.steps <= metrics.emitted
        assert metrics.emitted == len(actual.tokens) or actual.request.stop_strings
        assert metrics.emitted >= len(actual.tokens)
        assert metrics.steps + metrics.accepted_exact >= metrics.emitted
        assert sum(metrics.depth_histogram) == metrics.steps and actual.seconds > 0
        if actual.request.constraint is not None and actual.request.constraint.kind == "choice":
            assert metrics.steps < len(actual.tokens), "forced tokens are not drafted"


def test_the_requests_meet_what_they_are_for():
    """Completions end for each reason, settings change some completions, and some stop strings cut words."""
    prompts, options = prompts_and_options()
    free = [decode_reference({"prompt": prompt, "max_new_tokens": 20}) for prompt in prompts]
    for row, (expected, free_completion) in enumerate(zip(expected_completions(), free, strict=True)):
        count = min(len(expected.tokens), 20)
        names = ("regex", "choice", "banned_tokens", "logit_bias", "presence_penalty", "min_new_tokens")
        changed = any(options[name][row] for name in names) or options["repetition_penalty"][row] != 1
        assert (expected.tokens[:count] == free_completion.tokens[:count]) != changed, row
    assert {expected.finish for expected in expected_completions()} == {"stop", "length"}
