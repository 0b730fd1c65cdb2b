"""Requests, which are prompts with their settings; the options from which they are made; and completions.

Tested against the docstring of `generate` and the fields of `Request` (tests/serve/test_options.py).
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypedDict, TypeGuard, TypeVar, Unpack

import jax
import numpy as np

from mars_jax import constraints
from mars_jax.constraints import Constraint
from mars_jax.constraints.spans import Spans, checked_spans
from mars_jax.core.edits import bias_of
from mars_jax.core.metrics import Metrics
from mars_jax.hub.pretrained import Pretrained, Turn, check_pretrained, token_ids
from mars_jax.utils import errors
from mars_jax.utils.errors import MarsError, check_switch, check_type
from mars_jax.utils.limits import SAMPLES
from mars_jax.utils.settings import REQUEST, RequestSettings
from mars_jax.verify import rules

T = TypeVar("T")
AnyArray = np.ndarray | np.generic | jax.Array
Each = T | Sequence[T] | AnyArray
"""One value for all prompts, or one per prompt."""
TokenIds = int | Sequence[int] | Sequence[Sequence[int]] | AnyArray
"""One or several token ids for all prompts, or a sequence of token ids per prompt."""
Schema = Mapping[str, object] | str | os.PathLike[str]


class Options(TypedDict, total=False):
    """Options of requests. Each option has one value for all prompts, or one value per prompt; see `generate`.

    >>> chosen: Options = {"temperature": 0.7, "seed": [3, 4]}
    >>> sorted(Options.__optional_keys__)[:2]
    ['allowed_tokens', 'banned_tokens']
    """

    temperature: Each[float]
    top_k: Each[int]
    top_p: Each[float]
    min_p: Each[float]
    strict: Each[bool]
    draft_stop: Each[float]
    seed: Each[int]
    max_new_tokens: Each[int]
    min_new_tokens: Each[int]
    stop_tokens: TokenIds
    stop_strings: str | Sequence[str] | Sequence[Sequence[str]]
    logit_bias: Mapping[int, float] | Sequence[Mapping[int, float] | None] | None
    banned_tokens: TokenIds | None
    repetition_penalty: Each[float]
    presence_penalty: Each[float]
    frequency_penalty: Each[float]
    regex: str | Sequence[str | None] | None
    json_schema: Schema | Sequence[Schema | None] | None
    choice: Sequence[str] | Sequence[Sequence[str] | None] | None
    allowed_tokens: Sequence[int] | Sequence[Sequence[int] | None] | None
    constraint: Constraint | Sequence[Constraint | None] | None
    relax_constrained: bool | Sequence[bool]
    relax_in: str | Sequence[str]
    strict_in: str | Sequence[str]


class CallOptions(Options, total=False):
    """`Options`, and those arguments of `generate` that have a single value for all prompts."""

    chat: bool
    system: str | None
    template_args: Mapping[str, object] | None
    ignore_eos: bool
    samples: int


AnyPrompts = str | Sequence[str] | Sequence[Sequence[int]] | Sequence[Turn] | Sequence[Sequence[Turn]]
"""The types of prompts: a string, several strings, lists of token ids, a conversation or several conversations."""
OptionValues = dict[str, Any]
"""Values of options, keyed by name."""


def _check_constraint(constraint: Constraint) -> Constraint:
    check_type("constraint", constraint, Constraint, "one of mars_jax.constraints, such as regex(...)")
    return constraint


_CONSTRAINTS = {
    "constraint": _check_constraint,
    "regex": constraints.regex,
    "json_schema": constraints.json_schema,
    "choice": constraints.choice,
    "allowed_tokens": constraints.tokens,
}
"""Options that constrain a completion, with the functions that convert their values to constraints."""
_SEQUENCES = ("stop_tokens", "banned_tokens", "stop_strings", "choice", "allowed_tokens")
"""Options whose value for one prompt is a sequence."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request(RequestSettings):
    """One prompt with its settings. `make_requests` increments the seed, so that requests are sampled independently."""

    prompt: str | None = None  # None if the prompt is a conversation or token ids
    messages: tuple[Turn, ...] | None = None  # the conversation; None if the prompt is not a conversation
    prompt_tokens: tuple[int, ...]  # token ids of the prompt, at least one
    id: Any = None  # id that the user chose for the request
    stop_tokens: tuple[int, ...] = ()  # token ids that end the completion
    stop_strings: tuple[str, ...] = ()  # strings that end the completion and are not part of it
    # (token id, number to add to its logit); -inf bans a token
    logit_bias: tuple[tuple[int, float], ...] = ()
    constraint: Constraint | None = None  # constraint on the completion
    # spans outside which a lossy rule verifies strictly; see `constraints.spans`
    relax_in: tuple[str, ...] = ()
    strict_in: tuple[str, ...] = ()  # spans inside which a lossy rule verifies strictly

    @property
    def spans(self) -> Spans | None:
        """Spans that limit where a lossy rule may relax verification; None means no limit."""
        return Spans(self.relax_in, self.strict_in) if self.relax_in or self.strict_in else None

    @property
    def edits(self) -> bool:
        """True if the request changes the target's logits with biases, penalties or a minimum length."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return bool(self.logit_bias or self.min_new_tokens) or penalties != (1.0, 0.0, 0.0)


TopTokens = tuple[tuple[int, float], ...]


class TokenLogProbs(NamedTuple):
    """Log-probabilities of each new token under the target, in nats; see `core.types.StepInfo`."""

    log_prob: tuple[float, ...]
    temperature_log_prob: tuple[float, ...]
    processed_log_prob: tuple[float, ...]  # NaN if the rule is not lossless
    regret: tuple[float, ...]
    kind: tuple[str, ...]  # entries of KINDS
    # With `top_log_probs=n`: for each new token, up to n pairs (token id, log-probability) in descending order.
    top: tuple[TopTokens, ...] = ()  # under the raw target, as in `log_prob`
    # Like `top`, but under the distribution that the token was drawn from, without tokens that filters exclude. Empty
    # for each token if the rule is not lossless.
    processed_top: tuple[TopTokens, ...] = ()


KINDS = ("exact", "relaxed", "corrected", "trusted")
"""Kinds of tokens, indexed by their numbers in `core.types`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
    """The completion of one prompt.

    `seconds` is the wall time from the start of the prefill until the host finds that the row has ended. `metrics`
    counts all decoded tokens, including tokens after a stop string.
    """

    request: Request  # the request that was completed
    text: str  # text of the new tokens, up to a stop string; "" if the checkpoint has no tokenizer
    tokens: list[int]  # new tokens, including the stop token or the token that completes a stop string
    finish_reason: str  # "stop", "length", or "failed" if the target's logits were not finite
    metrics: Metrics  # counters of the row's steps
    seconds: float  # wall time of the row
    log_probs: TokenLogProbs | None = None  # log-probabilities of new tokens; None without `log_probs=True`

    @property
    def tokens_per_second(self) -> float:
        return len(self.tokens) / max(self.seconds, 1e-9)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """The completions of one call, in the order of its prompts."""

    completions: list[Completion]  # in the order of the prompts
    metrics: Metrics  # totals over all prompts
    seconds: float  # wall time of the call
    forwards: int  # number of forward passes of the target, each over all rows of a batch

    @property
    def text(self) -> list[str]:
        return [c.text for c in self.completions]

    @property
    def tokens(self) -> list[list[int]]:
        return [c.tokens for c in self.completions]

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.tokens)) / max(self.seconds, 1e-9)


def make_requests(
    target: Pretrained,
    prompts: AnyPrompts,
    *,
    chat: bool = False,
    system: str | None = None,
    template_args: Mapping[str, object] | None = None,
    ignore_eos: bool = False,
    samples: int = 1,
    **options: Unpack[Options],
) -> list[Request]:
    """Tokenize prompts and build their requests; see `generate`. The samples of a prompt are adjacent.

    This function validates all values from users.
    """
    check_pretrained(target)
    check_switch("chat", chat)
    check_switch("ignore_eos", ignore_eos)
    errors.check_count("samples", samples, most=SAMPLES)
    check_type(
        "template_args", template_args, (Mapping, type(None)), "variables of the chat template by name"
    )
    prompt_list = _as_list(prompts)
    if (system is not None or template_args) and not (chat or any(map(_is_conversation, prompt_list))):
        raise MarsError("system and template_args do not apply to texts: give chat=True, or conversations.")
    _check_names(options.keys())
    if ignore_eos and "stop_tokens" in options:
        raise MarsError("ignore_eos and stop_tokens contradict each other: leave one of them out.")
    options = {"seed": 0, **options}
    by_option = {name: _spread(name, value, len(prompt_list)) for name, value in options.items()}
    requests, constraint_by_id = [], {}
    for index, prompt in enumerate(prompt_list):
        prompt_options = {name: values[index] for name, values in by_option.items()}
        constraint = take_constraint(prompt_options, constraint_by_id)
        banned_tokens = prompt_options.pop("banned_tokens", None)
        if banned_tokens is not None:
            banned_ids = _ids(target, "banned_tokens", banned_tokens)
            biases = _pairs(prompt_options.get("logit_bias")) | dict.fromkeys(banned_ids, -math.inf)
            prompt_options["logit_bias"] = biases
        prompt_options = {name: _checked(target, name, value) for name, value in prompt_options.items()}
        if not ignore_eos and "stop_tokens" not in prompt_options:
            prompt_options["stop_tokens"] = target.stop_tokens
            if chat or _is_conversation(prompt):
                prompt_options["stop_tokens"] = target.chat_stop_tokens
        if prompt_options.get("stop_strings"):
            prompt_options = _with_special(target, prompt_options)
        if isinstance(prompt, str):
            prompt_options["prompt"] = prompt
            prompt_tokens = target.encode(prompt, chat=chat, system=system, template_args=template_args)
        elif _is_conversation(prompt):
            prompt_options["messages"] = tuple(prompt)
            prompt_tokens = target.encode_chat(prompt, system=system, template_args=template_args)
        else:
            prompt_tokens = target.check_tokens(token_ids(f"prompt {index}", prompt))
        requests.append(Request(prompt_tokens=tuple(prompt_tokens), constraint=constraint, **prompt_options))
    if any(by_option.get("relax_constrained", ())) and not any(r.constraint for r in requests):
        raise MarsError("relax_constrained does not apply where no text is constrained: leave it out.")
    return _sampled(requests, samples, one_seed=not np.ndim(options["seed"]))


def _as_list(prompts: AnyPrompts) -> list[Any]:
    """Return the prompts as a list of strings, token ids or conversations."""
    if isinstance(prompts, np.ndarray | jax.Array):
        prompts = prompts.tolist()
    if isinstance(prompts, bytes | Mapping) or not isinstance(prompts, Iterable):
        raise MarsError(
            f"the prompts are of type {type(prompts).__name__}: give strings, token ids or conversations."
        )
    if isinstance(prompts, str):
        return [prompts]
    prompt_list = list(prompts)
    if not prompt_list:
        raise MarsError("there are no prompts: give at least one.")
    # A list of turns is one conversation, not one prompt per turn.
    if all(isinstance(turn, Mapping) for turn in prompt_list):
        return [prompt_list]
    return prompt_list


def _check_names(names: Iterable[str]) -> None:
    """Raise an error if one of these names is not an option."""
    option_names = Options.__optional_keys__
    for name in set(names) - option_names:
        for rule_row in rules().values():
            if name in rule_row.settings:
                raise MarsError(
                    f"{name} is a setting of the rule: give it there, as in verify={rule_row.name}({name}=...)."
                )
        raise TypeError(
            f"generate() got an unexpected keyword argument '{name}'{errors.did_you_mean(name, option_names)}"
        )


def _sampled(requests: list[Request], samples: int, *, one_seed: bool) -> list[Request]:
    """Repeat each request once per sample, and increment the seeds.

    A single seed for all prompts is incremented for each request. If there is one seed per prompt, it is incremented
    for each sample of that prompt.
    """
    if samples > 1 and any(request.temperature == 0 for request in requests):
        raise MarsError(
            "samples do not apply at temperature 0, as all are equal: give a temperature above 0."
        )
    # Sample j of prompt i uses the seed `seed + i * samples + j`, or `seed[i] + j`.
    stride = samples if one_seed else 0
    return [
        dataclasses.replace(request, seed=(request.seed + index * stride + sample) % 2**32)
        for index, request in enumerate(requests)
        for sample in range(samples)
    ]


def _is_conversation(prompt: object) -> TypeGuard[Sequence[Turn]]:
    return isinstance(prompt, list | tuple) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def _with_special(target: Pretrained, options: OptionValues) -> OptionValues:
    """Replace stop strings that are special tokens with stop tokens, because decoded text omits special tokens."""
    if not target.has_tokenizer:
        raise MarsError(
            f"stop_strings do not apply to '{target.name}', without a tokenizer: give stop_tokens."
        )
    specials = {str(token): i for i, token in target.tokenizer.added_tokens_decoder.items() if token.special}
    stop_strings = options["stop_strings"]
    stop_tokens = [*options.get("stop_tokens", ()), *(specials[s] for s in stop_strings if s in specials)]
    return options | {
        "stop_tokens": tuple(dict.fromkeys(stop_tokens)),
        "stop_strings": tuple(s for s in stop_strings if s not in specials),
    }


def take_constraint(options: OptionValues, by_id: dict[tuple[str, int], Constraint]) -> Constraint | None:
    """Remove the constraint options from the options of one prompt, and return the prompt's constraint.

    Args:
      options: the options of one prompt.
      by_id: constraints made so far, keyed by the name of the option and the `id` of its value. A value that is used
        for all prompts is thus compiled only once.

    Raises:
      MarsError: there is more than one constraint; see also the functions of `constraints`.
    """
    may_relax = options.pop("relax_constrained", False)
    check_switch("relax_constrained", may_relax)
    values = {name: options.pop(name, None) for name in _CONSTRAINTS}
    names = [name for name, value in values.items() if value is not None]
    if len(names) > 1:
        raise MarsError(f"{names[1]} does not apply with another constraint: leave one of them out.")
    for name in names:
        key = (name, id(values[name]))
        constraint = by_id[key] = by_id.get(key) or _CONSTRAINTS[name](values[name])
        return dataclasses.replace(constraint, relax=constraint.relax or may_relax)
    return None


def _ids(target: Pretrained, name: str, value: int | Sequence[int]) -> tuple[int, ...]:
    """Return the token ids of an option whose value is one id or several."""
    if isinstance(value, int):
        value = (value,)
    return token_ids(name, value, target.config.vocab_size)


def _pairs(bias: Mapping[int, float] | None) -> dict[int, float]:
    """Check a logit bias and convert it to a dict."""
    check_type(
        "logit_bias", bias, (Mapping, type(None)), "a mapping of token ids to numbers, or one per prompt"
    )
    return dict(bias or {})


def _spread(name: str, value: Any, count: int) -> list[Any]:
    """Return a list with the value of an option for each of `count` prompts."""
    if hasattr(value, "tolist"):  # an array
        value = value.tolist()
    # A list contains one value per prompt, except for spans, which apply to all prompts. For the options in
    # `_SEQUENCES`, a single value is already a list, so only a list of lists contains one value per prompt.
    per_prompt = isinstance(value, list | tuple) and name not in ("relax_in", "strict_in")
    if name in _SEQUENCES:
        per_prompt = per_prompt and any(
            item is None or isinstance(item, list | tuple) or np.ndim(item) for item in value
        )
    if not per_prompt:
        return [value] * count
    if len(value) != count:
        raise MarsError(f"{name} has {len(value)} values for {count} prompts: give one, or one per prompt.")
    return list(value)


def _checked(target: Pretrained, name: str, value: Any) -> Any:
    """Check the value of an option for one prompt, and convert it to the type of the `Request` field.

    Raises:
      MarsError: the value has the wrong type or is out of range.
    """
    if name in REQUEST:
        # `from_json` compares types exactly, so convert NumPy and JAX scalars to Python numbers.
        return REQUEST[name].from_json(value.item() if isinstance(value, np.generic | jax.Array) else value)
    if name == "stop_tokens":
        return _ids(target, name, value)
    if name == "stop_strings":
        stop_strings = [value] if isinstance(value, str) else value
        if not isinstance(stop_strings, list | tuple) or not all(
            isinstance(text, str) and text for text in stop_strings
        ):
            raise MarsError(
                f"stop_strings is {errors.short_repr(value)}: expected texts of at least one character."
            )
        # Decoded text never contains a lone surrogate, so a stop string with one would never match.
        for text in stop_strings:
            errors.check_text("stop_strings", text)
        return tuple(stop_strings)
    if name == "logit_bias":
        vocab_size = target.config.vocab_size
        expected_token = f"one of the {vocab_size} tokens of '{target.name}'"
        return tuple(bias_of(token, x, vocab_size, expected_token) for token, x in _pairs(value).items())
    return checked_spans(value)  # relax_in or strict_in


def check_request(target: Pretrained, request: Request) -> None:
    """Raise MarsError if a request has no room for a new token, or its settings contradict each other."""
    context_length = target.config.max_positions
    if len(request.prompt_tokens) >= context_length:
        raise MarsError(
            f"the prompt has {len(request.prompt_tokens)} tokens and '{target.name}' has a context of "
            f"{context_length}: shorten the prompt, so that at least one token can follow."
        )
    for name in ("max_new_tokens", "seed"):
        REQUEST[name].check(getattr(request, name))
    if request.min_new_tokens > request.max_new_tokens:
        raise MarsError(
            f"min_new_tokens is {request.min_new_tokens} and max_new_tokens {request.max_new_tokens}: "
            "give a minimum that does not exceed the maximum."
        )
    if request.min_new_tokens and request.constraint is not None:
        raise MarsError(
            "min_new_tokens does not apply with a constraint, which determines where the text ends: leave one out."
        )


def total_metrics(completions: Sequence[Completion]) -> Metrics:
    """Return the sums of the metrics of several completions."""
    counters = [dataclasses.asdict(c.metrics) for c in completions]
    totals = {name: sum(p[name] for p in counters) for name in counters[0] if name != "depth_histogram"}
    histogram = tuple(map(sum, zip(*(p["depth_histogram"] for p in counters), strict=True)))
    return Metrics(depth_histogram=histogram, **totals)
