"""Text to text: `generate` for whole completions, `generate_stream` for tokens as they are decided.

B batch, T token buffer, M stop tokens. Oracle: `transformers` generate with the same checkpoint
(tests/serve/test_generate.py).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import jax

from mars_jax import drafters
from mars_jax.core import activity, decode, rules
from mars_jax.core.errors import MarsError
from mars_jax.core.metrics import DecodeStats, accumulate, summarize, zero_stats
from mars_jax.core.types import LoadedRule
from mars_jax.placement.hosts import fetch
from mars_jax.pretrained import Detokenizer, Pretrained
from mars_jax.serve.prepare import AnyRule, prepare
from mars_jax.serve.requests import (
    KINDS,
    Completion,
    Request,
    Result,
    StreamEvent,
    TokenLogProbs,
    batches,
    make_requests,
    total,
)

Rule = TypeVar("Rule", bound=AnyRule | None)


def generate(
    target: Pretrained,
    drafter: drafters.AnyDrafter = "none",
    prompts: str | Sequence[str] | Sequence[Sequence[int]] = (),
    *,
    verify: AnyRule | None = None,
    batch_size: int | None = None,
    chat: bool = False,
    ignore_eos: bool = False,
    log_probs: bool = False,
    **options: Any,
) -> Result:
    """Continue prompts by speculative decoding, a batch at a time, each batch in one device loop.

    Args:
      target: from `mars_jax.load`.
      drafter: from `mars_jax.drafters.load`, or its spec where it needs no more than that, such as "ngram"; or a
        `Drafter` without weights of its own.
      prompts: a text, texts, or token ids.
      verify: the rule, such as `verify.mars(theta=0.9)`, or a `LoadedRule`; default `verify.exact()`, which changes
        nothing but the speed. Its numbers are one for all prompts, or one per prompt.
      batch_size: rows that decode side by side; default: all prompts.
      chat: put each text through the chat template as a user turn.
      ignore_eos: decode to `max_new_tokens` past any stop token.
      log_probs: also give what the target thinks of each new token, `Completion.log_probs`.
      **options: fields of `Request`, each one value for all prompts or a sequence of one per prompt: temperature,
        top_k, top_p, min_p, strict (not for lossless rules), draft_stop (see `make_controls`; not for n-grams), seed,
        max_new_tokens (default 256), stop_tokens (default: the model's). A single seed s gives prompt i the seed s + i.
        At temperature 0 a row takes the best token, and the filters and the seed have nothing to choose.

    Raises:
      MarsError: a prompt that is empty or does not fit the context, a value out of range.

    A prompt at which the target's logits are not finite ends with the finish reason "failed", and harms no other.

    >>> import mars_jax as mj  # doctest: +SKIP
    >>> target = mj.load("path/to/checkpoint")  # doctest: +SKIP
    >>> mj.generate(target, "ngram", ["Once upon a time"], verify=mj.verify.mars(theta=0.9)).text  # doctest: +SKIP
    """
    requests = make_requests(target, prompts, chat=chat, ignore_eos=ignore_eos, **options)
    return generate_requests(
        target, drafter, requests, verify=verify, batch_size=batch_size, log_probs=log_probs
    )


def generate_requests(
    target: Pretrained,
    drafter: drafters.AnyDrafter,
    requests: Sequence[Request],
    *,
    verify: AnyRule | None = None,
    batch_size: int | None = None,
    log_probs: bool = False,
) -> Result:
    """`generate` for prepared requests."""
    began = time.perf_counter()
    completions: list[Completion] = []
    for group, rule in groups(requests, verify, batch_size):
        completions += run_batch(target, drafter, group, verify=rule, rows=batch_size, log_probs=log_probs)
    return Result(
        completions=completions,
        metrics=total(completions),
        seconds=time.perf_counter() - began,
    )


def run_batch(
    target: Pretrained,
    drafter: drafters.AnyDrafter,
    requests: Sequence[Request],
    *,
    verify: AnyRule | None = None,
    rows: int | None = None,
    log_probs: bool = False,
) -> list[Completion]:
    """Decode one batch in one device loop. `rows` pads the batch, so that a shorter last one recompiles nothing."""
    began = time.perf_counter()
    decoder, params, state = prepare(target, drafter, requests, verify=verify, rows=rows)
    with target.on_mesh():
        state, stats = jax.block_until_ready(decode.run(decoder, params, state, record=log_probs))
    seconds = time.perf_counter() - began
    stats, final = fetch((stats, (state.tokens, state.length, state.failed)))
    return [_complete(target, request, row, final, stats, seconds) for row, request in enumerate(requests)]


@activity.doing("compiling")
def compile_batch(
    target: Pretrained,
    drafter: drafters.AnyDrafter,
    requests: Sequence[Request],
    *,
    verify: AnyRule | None = None,
    rows: int | None = None,
    stream: bool = False,
    log_probs: bool = False,
) -> None:
    """Compile what `run_batch`, or `generate_stream` if `stream`, will run, so that they time no compilation.

    Next to free where it is compiled already: a chunk of prefill and one step, in the same shapes. They do run,
    since some backends finish compiling only then.
    """
    stand_ins = []
    for request in requests:
        length = len(request.prompt_tokens)
        short = request.prompt_tokens[:2]
        stand_ins.append(
            dataclasses.replace(
                request, prompt_tokens=short, max_new_tokens=length - len(short) + request.max_new_tokens
            )
        )
    decoder, params, state = prepare(target, drafter, stand_ins, verify=verify, rows=rows)
    one_step = dataclasses.replace(state.controls, limit=state.length + 1)
    state = dataclasses.replace(state, controls=one_step)
    with target.on_mesh():
        if stream:
            stats = zero_stats(state.tokens.shape[0], decoder.max_depth)
            jax.block_until_ready(_accumulate(stats, decode.jitted_step(decoder, params, state)[1]))
        else:
            jax.block_until_ready(decode.run(decoder, params, state, record=log_probs))


def generate_stream(
    target: Pretrained,
    drafter: drafters.AnyDrafter,
    requests: Sequence[Request],
    *,
    verify: AnyRule | None = None,
    rows: int | None = None,
) -> Iterator[StreamEvent]:
    """Decode one batch step by step, and yield the tokens of each row as they are decided.

    Args:
      target, drafter, verify: as for `generate`.
      requests: from `make_requests`.
      rows: as for `run_batch`.
    """
    began = time.perf_counter()
    decoder, params, first = prepare(target, drafter, requests, verify=verify, rows=rows)
    stats = zero_stats(first.tokens.shape[0], decoder.max_depth)
    texts = [Detokenizer(target, request.prompt_tokens) for request in requests]
    was_done = fetch(first.done)
    steps = decode.stream(decoder, params, first)
    while True:
        # Not around the loop: what the caller does between two events is none of the mesh's business.
        with target.on_mesh():
            state, info = next(steps, (None, None))
            if state is None or info is None:
                return
            stats = _accumulate(stats, info)
        host, done = fetch((info, state.done))
        ended = None  # read where a row ends in this step
        for row, request in enumerate(requests):
            if was_done[row]:
                continue
            count = int(host.num_emitted[row])
            tokens = host.emitted[row, :count].tolist()
            told = _token_log_probs(host, row, count)
            pieces = tuple(
                (kind, texts[row].feed([token], last=bool(done[row]) and place == count - 1))
                for place, (kind, token) in enumerate(zip(told.kind, tokens, strict=True))
            )
            completion = None
            if done[row]:
                ended = ended or fetch((stats, (state.tokens, state.length, state.failed)))
                seconds = time.perf_counter() - began
                completion = _complete(target, request, row, ended[1], ended[0], seconds)
            yield StreamEvent(
                row, "".join(text for _, text in pieces), pieces, tuple(tokens), told, completion
            )
        was_done = done


_accumulate = jax.jit(accumulate)


def _token_log_probs(source: Any, row: int, count: int) -> TokenLogProbs:
    """Of the first `count` tokens of a row, from a `StepInfo` or a `TokenRecord` on the host."""
    names = ("log_prob", "temperature_log_prob", "processed_log_prob", "regret")
    values = {name: tuple(getattr(source, name)[row, :count].tolist()) for name in names}
    return TokenLogProbs(**values, kind=tuple(KINDS[k] for k in source.kind[row, :count]))


def _complete(
    target: Pretrained, request: Request, row: int, final: tuple, stats: DecodeStats, seconds: float
) -> Completion:
    """Cut one row's new tokens out of the batch's final state and name why it ended."""
    tokens, length, failed = final
    new = tokens[row, len(request.prompt_tokens) : length[row]].tolist()
    detokenizer = Detokenizer(target, request.prompt_tokens)
    stopped = "stop" if new and new[-1] in request.stop_tokens else "length"
    return Completion(
        request=request,
        # As the stream does it, so that a character cut in two reads the same both ways.
        text="".join(detokenizer.feed([token], last=i == len(new) - 1) for i, token in enumerate(new)),
        tokens=new,
        finish_reason="failed" if failed[row] else stopped,
        metrics=summarize(stats, row),
        seconds=seconds,
        log_probs=None if stats.tokens is None else _token_log_probs(stats.tokens, row, len(new)),
    )


def groups(
    requests: Sequence[Request], verify: Rule, batch_size: int | None
) -> Iterator[tuple[list[Request], Rule]]:
    """Requests in groups of `batch_size`, each with its rule: what that has one of per request is theirs."""
    first = 0
    for group in batches(requests, batch_size):
        yield group, _rule_of(verify, range(first, first + len(group)), len(requests))
        first += len(group)


def _rule_of(verify: Any, rows: Sequence[int], count: int) -> Any:
    if isinstance(verify, LoadedRule):
        return verify._replace(rule=rules.take_rows(verify.rule, rows, count))
    return None if verify is None else rules.take_rows(verify, rows, count)


def check_finite(target: Pretrained, completions: Sequence[Completion]) -> None:
    """Raise MarsError where prompts failed, for callers to whom that is an error."""
    failed = sum(completion.finish_reason == "failed" for completion in completions)
    if failed:
        raise MarsError(
            f"the logits of '{target.name}' are not finite for {failed} of {len(completions)} prompts: its weights "
            "hold NaN, or overflow in bfloat16; load an intact checkpoint, or one in float32."
        )
