"""Requests and what they get: one prompt with its own controls, one completion with its own metrics."""

from __future__ import annotations

import dataclasses
import math
import numbers
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Unpack

import jax
import numpy as np

from mars_jax import specs
from mars_jax.constraints import Constraint
from mars_jax.constraints.spans import Spans, names_of
from mars_jax.core.errors import MarsError, check_count, did_you_mean
from mars_jax.core.limits import SAMPLES
from mars_jax.core.metrics import Metrics
from mars_jax.core.settings import LARGEST_FLOAT
from mars_jax.core.types import NO_TOKEN
from mars_jax.hub.pretrained import Pretrained, Turn, check_pretrained
from mars_jax.serve.constrained import with_constraints
from mars_jax.serve.options import Options

AnyPrompts = str | Sequence[str] | Sequence[Sequence[int]] | Sequence[Turn] | Sequence[Sequence[Turn]]
"""A text, texts, token ids, a conversation or conversations."""
MEANT = {
    "max_tokens": "max_new_tokens",
    "max_length": "max_new_tokens",
    "stop": "stop_strings",
    "do_sample": "temperature",
    "n": "samples",
    "num_return_sequences": "samples",
}
"""Options of other libraries, and what they are called here."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt and whatever it chooses for itself; None takes the default of the call."""

    prompt: str | None = None  # None where only tokens were given, or a conversation
    messages: tuple[Turn, ...] | None = None  # the conversation, where one was given
    prompt_tokens: tuple[int, ...]  # token ids, at least one
    id: Any = None  # the user's own, as it was given
    temperature: float = 0.0  # 0 is greedy
    top_k: int = 0  # 0 is off
    top_p: float = 1.0  # 1 is off
    min_p: float = 0.0  # 0 is off
    strict: bool = False  # nothing is relaxed
    draft_stop: float = math.inf  # as `Controls.draft_stop`
    seed: int = 0  # of its draws
    max_new_tokens: int = 256  # of the completion, at most
    stop_tokens: tuple[int, ...] = ()  # token ids that end it
    stop_strings: tuple[str, ...] = ()  # texts that end it, and are no part of it
    logit_bias: tuple[
        tuple[int, float], ...
    ] = ()  # (token id, what is added to its logit); -inf bans a token
    repetition_penalty: float = 1.0  # 1 is off; of tokens in prompt and text
    presence_penalty: float = 0.0  # 0 is off; of tokens in the text
    frequency_penalty: float = 0.0  # 0 is off; of tokens in the text, for each time that they are there
    constraint: Constraint | None = None  # what the text is to be
    relax_in: tuple[
        str, ...
    ] = ()  # spans inside of which alone a lossy rule relaxes; see `constraints.spans`
    strict_in: tuple[str, ...] = ()  # spans inside of which it does not

    @property
    def spans(self) -> Spans | None:
        """Spans in which a lossy rule may relax; None is anywhere."""
        return Spans(self.relax_in, self.strict_in) if self.relax_in or self.strict_in else None

    @property
    def edits(self) -> bool:
        """True if the request changes the target's logits."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return bool(self.logit_bias) or penalties != (1.0, 0.0, 0.0)

    def stand_in(self) -> Request:
        """Return a request of the same shapes with a prompt of two tokens at most, which no stop token ends."""
        short = self.prompt_tokens[:2]
        return dataclasses.replace(
            self,
            prompt_tokens=short,
            max_new_tokens=len(self.prompt_tokens) - len(short) + self.max_new_tokens,
            stop_tokens=(NO_TOKEN,) * len(self.stop_tokens),
        )


class TokenLogProbs(NamedTuple):
    """Log-probabilities of each new token under the target, in nats; see `core.types.StepInfo`."""

    log_prob: tuple[float, ...]
    temperature_log_prob: tuple[float, ...]
    processed_log_prob: tuple[float, ...]  # NaN where the rule is not lossless
    regret: tuple[float, ...]
    kind: tuple[str, ...]  # of KINDS


KINDS = ("exact", "relaxed", "corrected", "trusted")
"""Kinds of tokens by their numbers in `core.types`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
    """The completion of one prompt.

    `seconds` is the wall time of its row, from its prefill until the host has seen it end. `metrics` count all decoded
    tokens, also some after a stop string.
    """

    request: Request  # what was asked for
    text: str  # "" where the checkpoint has no tokenizer; it ends before a stop string
    tokens: list[int]  # new tokens, the stop token included, or the one that completes a stop string
    finish_reason: str  # "stop", "length", or "failed": the target's logits were not finite there
    metrics: Metrics  # counters of the row's steps
    seconds: float  # wall time of the row
    log_probs: TokenLogProbs | None = None  # of the new tokens, where they were asked for

    @property
    def tokens_per_second(self) -> float:
        return len(self.tokens) / max(self.seconds, 1e-9)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """The completions of one call, in the order of its prompts."""

    completions: list[Completion]  # of prompt after prompt
    metrics: Metrics  # totals over all prompts
    seconds: float  # wall time of the call
    forwards: int  # of the target, each over all rows that decode side by side

    @property
    def text(self) -> list[str]:
        return [c.text for c in self.completions]

    @property
    def tokens(self) -> list[list[int]]:
        return [c.tokens for c in self.completions]

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.tokens)) / max(self.seconds, 1e-9)


@dataclasses.dataclass(frozen=True)
class StreamEvent:
    """Tokens that one step decided for one prompt."""

    row: int  # index of the prompt
    text: str  # may lag behind `tokens` inside of a multi-byte character
    pieces: tuple[tuple[str, str], ...]  # (kind of KINDS, text); joined they are `text`
    tokens: tuple[int, ...]
    log_probs: TokenLogProbs  # of `tokens`
    completion: Completion | None  # with the last event of its row


def make_requests(
    target: Pretrained,
    prompts: AnyPrompts,
    *,
    chat: bool = False,
    system: str | None = None,
    template_args: Mapping[str, Any] | None = None,
    ignore_eos: bool = False,
    samples: int = 1,
    **options: Unpack[Options],
) -> list[Request]:
    """Tokenize prompts and spread options over them; see `generate`. The samples of a prompt follow each other."""
    check_pretrained(target)
    if not isinstance(prompts, Iterable):
        raise MarsError(
            f"the prompts are of type {type(prompts).__name__}: give a text, texts, token ids, or conversations."
        )
    check_count("samples", samples, most=SAMPLES)
    given: list[Any] = [prompts] if isinstance(prompts, str) else list(prompts)
    if not given:
        raise MarsError("there are no prompts: give at least one.")
    if all(isinstance(turn, Mapping) for turn in given):  # one conversation
        given = [given]
    if (system is not None or template_args) and not (chat or any(map(_is_conversation, given))):
        raise MarsError(
            "system and template_args do not apply to plain texts: give chat=True, or conversations."
        )
    known = Options.__optional_keys__
    for name in options.keys() - known:
        for row in specs.RULES.values():
            if name in row.settings:
                raise MarsError(
                    f"{name} is a setting of the rule: give it there, as in verify={row.name}({name}=...)."
                )
        near = f" (did you mean {MEANT[name]}?)" if name in MEANT else did_you_mean(name, known)
        raise TypeError(f"generate() got an unexpected keyword argument '{name}'{near}")
    if ignore_eos and "stop_tokens" in options:
        raise MarsError("ignore_eos and stop_tokens contradict each other: leave one of them out.")
    settings = with_constraints(_with_bans({**options}, len(given)), len(given))
    if "stop_tokens" not in settings:
        settings["stop_tokens"] = () if ignore_eos else target.stop_tokens
    if samples > 1:
        settings.setdefault("seed", 0)
    requests = []
    for index, prompt in enumerate(given):
        chosen = {name: _spread(name, value, index, len(given)) for name, value in settings.items()}
        for name in ("relax_in", "strict_in"):
            if name in chosen:
                chosen[name] = names_of(chosen[name])
        if chosen.get("logit_bias"):
            _check_bias(target, chosen["logit_bias"])
        if chosen.get("stop_strings"):
            chosen = _with_special(target, chosen)
        if isinstance(prompt, str):
            ids = target.encode(prompt, chat=chat, system=system, template_args=template_args)
            requests.append(Request(prompt=prompt, prompt_tokens=tuple(ids), **chosen))
        elif _is_conversation(prompt):
            ids = target.encode_chat(prompt, system=system, template_args=template_args)
            requests.append(Request(messages=tuple(prompt), prompt_tokens=tuple(ids), **chosen))
        else:
            ids = _token_ids(prompt, f"prompt {index}")
            target.check_tokens(ids)
            requests.append(Request(prompt_tokens=ids, **chosen))
    if samples == 1:
        return requests
    if any(request.temperature == 0 for request in requests):
        raise MarsError(
            "samples do not apply at temperature 0, where all are the same: give a temperature above 0."
        )
    # One seed for all counts up over the samples; of a prompt's own seed its samples count up from it.
    one = isinstance(settings["seed"], int | np.integer)
    return [
        dataclasses.replace(request, seed=request.seed + sample + index * (samples - 1) * one)
        for index, request in enumerate(requests)
        for sample in range(samples)
    ]


def _is_conversation(prompt: Any) -> bool:
    return isinstance(prompt, list | tuple) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def _token_ids(values: Any, name: str) -> tuple[int, ...]:
    """Return a sequence of whole numbers as a tuple of ints; 1.5 is refused, and so are bytes."""
    try:
        if isinstance(values, bytes):
            raise TypeError
        return tuple(operator.index(i) for i in np.asarray(values).tolist())
    except (TypeError, ValueError):
        raise MarsError(f"{name} is {values!r}: expected token ids, a sequence of whole numbers.") from None


def _with_special(target: Pretrained, chosen: dict[str, Any]) -> dict[str, Any]:
    """Return options in which stop strings that are special tokens, which no text shows, are stop tokens."""
    if not target.has_tokenizer:
        raise MarsError(
            f"stop_strings do not apply to '{target.name}', which has no tokenizer: give stop_tokens."
        )
    special = {str(token): i for i, token in target.tokenizer.added_tokens_decoder.items() if token.special}
    strings = chosen["stop_strings"]
    tokens = dict.fromkeys([*chosen["stop_tokens"], *(special[s] for s in strings if s in special)])
    return chosen | {
        "stop_tokens": tuple(tokens),
        "stop_strings": tuple(s for s in strings if s not in special),
    }


def _with_bans(options: dict[str, Any], count: int) -> dict[str, Any]:
    """Return options whose banned tokens are biases of -inf, and whose biases are pairs of each prompt."""
    made = {name: value for name, value in options.items() if name not in ("logit_bias", "banned_tokens")}
    bias, banned = options.get("logit_bias"), options.get("banned_tokens")
    if not bias and banned is None:
        return made
    biases = [bias] * count if bias is None or isinstance(bias, Mapping) else list(bias)
    if len(biases) != count:
        raise MarsError(
            f"logit_bias has {len(biases)} values for {count} prompts: give one, or one per prompt."
        )
    bans = [() if banned is None else _spread("stop_tokens", banned, i, count) for i in range(count)]
    pairs = [dict(b or {}) | dict.fromkeys(ids, -math.inf) for b, ids in zip(biases, bans, strict=True)]
    return made | {"logit_bias": [tuple((int(i), float(x)) for i, x in one.items()) for one in pairs]}


def _check_bias(target: Pretrained, pairs: Sequence[tuple[int, float]]) -> None:
    for token, value in pairs:
        if not 0 <= token < target.config.vocab_size or not value <= LARGEST_FLOAT:
            raise MarsError(
                f"logit_bias has {token}: {value}: expected one of the {target.config.vocab_size} tokens of "
                f"'{target.name}' and a number, or -inf to ban it."
            )


def _strings(value: Any) -> tuple[str, ...]:
    """Return one stop string or several, none of them empty."""
    given = (value,) if isinstance(value, str) else tuple(value)
    if not all(isinstance(text, str) and text for text in given):
        raise MarsError(f"stop_strings is {value!r}: expected texts of at least one character.")
    try:
        "".join(given).encode()
    except UnicodeEncodeError:  # no text has it, so it would never end one
        raise MarsError(f"stop_strings is {value!r}, which is not valid Unicode: give it as UTF-8.") from None
    return given


def _spread(name: str, value: Any, index: int, count: int) -> Any:
    """Return the value of an option for prompt number `index` of `count`: the one for all, or its own."""
    if isinstance(value, jax.Array | np.ndarray):
        value = np.asarray(value) if value.ndim else value.item()
    many = isinstance(value, list | tuple | np.ndarray | jax.Array) and getattr(value, "ndim", 1) > 0
    if name in ("relax_in", "strict_in"):  # those of every prompt
        return value
    if name == "stop_strings":
        if not many or not any(isinstance(one, list | tuple) for one in value):
            return _strings(value)  # those of every prompt
        if len(value) != count:
            raise MarsError(
                f"stop_strings has {len(value)} values for {count} prompts: give texts, or a list for each."
            )
        return _strings(value[index])
    if name == "stop_tokens":
        value = value if many else (value,)
        many = (
            len(value) > 0 and not isinstance(value[0], int | np.integer) and getattr(value[0], "ndim", 1) > 0
        )
        if not many:  # a flat sequence is one row's worth
            return _token_ids(value, name)
    if many or name == "logit_bias":
        if len(value) != count:
            raise MarsError(
                f"{name} has {len(value)} values for {count} prompts: give one, or one per prompt."
            )
        return _token_ids(value[index], name) if name == "stop_tokens" else value[index]
    return value + index if name == "seed" and isinstance(value, int | np.integer) else value


def check_request(target: Pretrained, request: Request) -> None:
    """Raise MarsError where a request leaves no room for a token."""
    context = target.config.max_positions
    if len(request.prompt_tokens) >= context:
        raise MarsError(
            f"the prompt has {len(request.prompt_tokens)} tokens and '{target.name}' a context of {context}: "
            "shorten the prompt, so that at least one token can follow."
        )
    check_count("max_new_tokens", request.max_new_tokens)
    if not isinstance(request.seed, numbers.Integral):
        raise MarsError(f"seed is {request.seed!r}: expected a whole number.")


def total(completions: Sequence[Completion]) -> Metrics:
    """Return metrics summed over completions."""
    parts = [dataclasses.asdict(c.metrics) for c in completions]
    summed = {name: sum(p[name] for p in parts) for name in parts[0] if name != "depth_histogram"}
    histogram = tuple(map(sum, zip(*(p["depth_histogram"] for p in parts), strict=True)))
    return Metrics(depth_histogram=histogram, **summed)
