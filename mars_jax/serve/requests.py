"""Requests and what they get: one prompt with its own controls, one completion with its own metrics."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from mars_jax import specs
from mars_jax.core.errors import MarsError
from mars_jax.core.metrics import Metrics
from mars_jax.pretrained import Pretrained


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt and whatever it chooses for itself; None takes the default of the call."""

    prompt: str | None = None  # None where only tokens were given
    prompt_tokens: tuple[int, ...]
    id: Any = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    strict: bool = False
    draft_stop: float = math.inf
    seed: int = 0
    max_new_tokens: int = 256
    stop_tokens: tuple[int, ...] = ()


class TokenLogProbs(NamedTuple):
    """What the target thinks of each new token, in nats; see `core.types.StepInfo`."""

    log_prob: tuple[float, ...]
    temperature_log_prob: tuple[float, ...]
    processed_log_prob: tuple[float, ...]  # NaN where the rule is not lossless
    regret: tuple[float, ...]
    kind: tuple[str, ...]  # of KINDS


KINDS = ("exact", "relaxed", "corrected")
"""Kinds of tokens by their numbers in `core.types`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
    """What one prompt got. `seconds` is the wall time of its batch's decoding, prefill included."""

    request: Request
    text: str  # "" where the checkpoint has no tokenizer
    tokens: list[int]  # new tokens, the stop token included
    finish_reason: str  # "stop", "length", or "failed": the target's logits were not finite there
    metrics: Metrics
    seconds: float
    log_probs: TokenLogProbs | None = None  # of the new tokens, where they were asked for

    @property
    def tokens_per_second(self) -> float:
        return len(self.tokens) / max(self.seconds, 1e-9)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """The completions of one call, in the order of its prompts."""

    completions: list[Completion]
    metrics: Metrics  # totals over all prompts
    seconds: float

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
    pieces: tuple[
        tuple[str, str], ...
    ]  # (kind, text): "exact", "relaxed" or "corrected"; joined they are `text`
    tokens: tuple[int, ...]
    log_probs: TokenLogProbs  # of `tokens`
    completion: Completion | None  # with the last event of its row


def make_requests(
    target: Pretrained,
    prompts: str | Sequence[str] | Sequence[Sequence[int]],
    *,
    chat: bool = False,
    ignore_eos: bool = False,
    **options: Any,
) -> list[Request]:
    """Tokenize prompts and spread options over them; see `generate`."""
    given: list[Any] = [prompts] if isinstance(prompts, str) else list(prompts)
    if not given:
        raise MarsError("there are no prompts: give at least one.")
    known = {f.name for f in dataclasses.fields(Request)} - {"prompt", "prompt_tokens", "id"}
    for name in options.keys() - known:
        for row in specs.RULES.values():
            if name in row.settings:
                raise MarsError(
                    f"{name} is a setting of the rule: give it there, as in verify={row.name}({name}=...)."
                )
        raise TypeError(f"generate() got an unexpected keyword argument '{name}'")
    if ignore_eos and "stop_tokens" in options:
        raise MarsError("ignore_eos and stop_tokens contradict each other: leave one of them out.")
    if "stop_tokens" not in options:
        options["stop_tokens"] = () if ignore_eos else target.stop_tokens
    requests = []
    for index, prompt in enumerate(given):
        chosen = {name: _spread(name, value, index, len(given)) for name, value in options.items()}
        if isinstance(prompt, str):
            requests.append(
                Request(prompt=prompt, prompt_tokens=tuple(target.encode(prompt, chat=chat)), **chosen)
            )
        else:
            ids = _token_ids(prompt, f"prompt {index}")
            target.check_tokens(ids)
            requests.append(Request(prompt_tokens=ids, **chosen))
    return requests


def _token_ids(values: Any, name: str) -> tuple[int, ...]:
    """A sequence of whole numbers as a tuple of ints; 1.5 is refused, and so are bytes."""
    try:
        if isinstance(values, bytes):
            raise TypeError
        return tuple(operator.index(i) for i in np.asarray(values).tolist())
    except (TypeError, ValueError):
        raise MarsError(f"{name} is {values!r}: expected token ids, a sequence of whole numbers.") from None


def _spread(name: str, value: Any, index: int, count: int) -> Any:
    """What prompt number `index` of `count` takes of an option: the one value for all, or its own."""
    many = isinstance(value, list | tuple | np.ndarray | jax.Array) and getattr(value, "ndim", 1) > 0
    if name == "stop_tokens":
        value = value if many else (value,)
        many = (
            len(value) > 0 and not isinstance(value[0], int | np.integer) and getattr(value[0], "ndim", 1) > 0
        )
        if not many:  # a flat sequence is one row's worth
            return _token_ids(value, name)
    if many:
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
    if request.max_new_tokens < 1:
        raise MarsError(f"max_new_tokens is {request.max_new_tokens}: ask for at least 1.")


def batches(requests: Sequence[Request], batch_size: int | None) -> Iterator[list[Request]]:
    """Requests in groups of `batch_size`, in order."""
    size = len(requests) if batch_size is None else batch_size
    if size < 1:
        raise MarsError(f"batch_size is {batch_size}: give at least 1.")
    for first in range(0, len(requests), size):
        yield list(requests[first : first + size])


def total(completions: Sequence[Completion]) -> Metrics:
    """Metrics summed over completions."""
    parts = [dataclasses.asdict(c.metrics) for c in completions]
    summed = {name: sum(p[name] for p in parts) for name in parts[0] if name != "depth_histogram"}
    histogram = tuple(map(sum, zip(*(p["depth_histogram"] for p in parts), strict=True)))
    return Metrics(depth_histogram=histogram, **summed)
