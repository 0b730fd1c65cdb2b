"""Text to text: `generate` for whole completions, `generate_iter` for each as it ends, `generate_stream` for tokens as
they are decided.

B batch, T token buffer, M stop tokens. Oracle: `transformers` generate with the same checkpoint
(tests/serve/test_generate.py).
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax

from mars_jax import drafters
from mars_jax.contrib.drafters.elsewhere import Pair
from mars_jax.core import activity, decode, rule_values
from mars_jax.core.errors import MarsError
from mars_jax.core.types import LoadedRule
from mars_jax.hub.pretrained import Pretrained
from mars_jax.placement.hosts import fetch
from mars_jax.serve.complete import complete
from mars_jax.serve.events import events, look
from mars_jax.serve.memory import default_rows
from mars_jax.serve.prepare import AnyRule, Prepared, check_relaxes, of_mesh, prepare, prepared
from mars_jax.serve.queue import Finished, Queue, Said, longest_first, shares_prompts
from mars_jax.serve.requests import (
    Completion,
    Prompts,
    Request,
    Result,
    StreamEvent,
    batches,
    make_requests,
    total,
)

Rule = TypeVar("Rule", bound=AnyRule | None)


def generate(
    target: Pretrained,
    drafter: drafters.AnyDrafter = "none",
    prompts: Prompts = (),
    *,
    verify: AnyRule | None = None,
    batch_size: int | None = None,
    chat: bool = False,
    system: str | None = None,
    template_args: Mapping[str, Any] | None = None,
    ignore_eos: bool = False,
    log_probs: bool = False,
    samples: int = 1,
    draft_device: Any = None,
    **options: Any,
) -> Result:
    """Continue prompts by speculative decoding, side by side in one device loop.

    Where there are more prompts than rows, a row that ends is begun anew with the next prompt, those that may become
    longest first; the tokens of a prompt do not depend on that.

    Args:
      target: from `mars_jax.load`.
      drafter: from `mars_jax.drafters.by_name`, or its spec where it needs no more than that, such as "ngram"; or a
        `Drafter` without weights of its own.
      prompts: a text, texts, or token ids; or conversations, each a list of turns with their `role` and `content`.
      verify: the rule, such as `verify.mars(theta=0.9)`, or a `LoadedRule`; default `verify.exact()`, which changes
        nothing but the speed. Its numbers are one for all prompts, or one per prompt.
      batch_size: rows that decode side by side; default: what memory has room for, at most 128 for each device of the
        mesh's axis `data`, 16 on a CPU.
      chat: put each text through the chat template as a user turn.
      system: content of a system turn that comes first, where a conversation has none of its own.
      template_args: variables of the chat template, such as `{"enable_thinking": False}`.
      ignore_eos: decode to `max_new_tokens` past any stop token.
      samples: completions of each prompt, which follow each other in the result. A prompt is read once for all of
        them, but on a mesh that divides rows. They need a temperature.
      log_probs: also give what the target thinks of each new token, `Completion.log_probs`.
      draft_device: a device or a mesh where the drafter works while the target verifies; see `serve.elsewhere`.
        `drafter` is then a small model that drafts a chain, of which the last token is the guess by which it goes on:
        the target is given the others. Rows do not refill: prompts are decoded `batch_size` at a time.
      **options: fields of `Request`, each one value for all prompts or a sequence of one per prompt: temperature,
        top_k, top_p, min_p, strict (not for lossless rules), draft_stop (see `make_controls`; not for n-grams), seed,
        max_new_tokens (default 256), stop_tokens (default: the model's), stop_strings (texts that end a completion; see
        `serve.text.RowText`), logit_bias (by token id what is added to its logit), banned_tokens, repetition_penalty
        (as in transformers), presence_penalty and frequency_penalty (as OpenAI's); these change the target, so a
        lossless rule stays lossless. A single seed s gives prompt i the seed s + i.
        At temperature 0 a row takes the best token, and the filters and the seed have nothing to choose.
        What a text is to be: regex, json_schema (an object, its JSON or a file), choice (texts, one of which), or
        allowed_tokens; or as `constraint` what `mars_jax.constraints` made. It masks the target, so every rule
        honours it. A lossy rule relaxes nothing there, unless relax_constrained=True. relax_in and strict_in: spans
        inside of which alone, and inside of which never, a lossy rule relaxes; see `constraints.spans`.

    Raises:
      MarsError: a prompt that is empty or does not fit the context, a value out of range.

    A prompt at which the target's logits are not finite ends with the finish reason "failed", and harms no other.

    >>> import mars_jax as mj  # doctest: +SKIP
    >>> target = mj.load("path/to/checkpoint")  # doctest: +SKIP
    >>> mj.generate(target, "ngram", ["Once upon a time"], verify=mj.verify.mars(theta=0.9)).text  # doctest: +SKIP
    """
    requests, verify = _asked(
        target,
        prompts,
        verify,
        chat=chat,
        system=system,
        template_args=template_args,
        ignore_eos=ignore_eos,
        samples=samples,
        **options,
    )
    return generate_requests(
        target,
        drafter,
        requests,
        verify=verify,
        batch_size=batch_size,
        log_probs=log_probs,
        draft_device=draft_device,
    )


def generate_requests(
    target: Pretrained,
    drafter: drafters.AnyDrafter,
    requests: Sequence[Request],
    *,
    verify: AnyRule | None = None,
    batch_size: int | None = None,
    log_probs: bool = False,
    draft_device: Any = None,
) -> Result:
    """`generate` for prepared requests."""
    began = time.perf_counter()
    if draft_device is not None:
        completions: list[Completion] = []
        forwards = 0
        for group, rule in groups(requests, verify, batch_size or len(requests)):
            rows = {"rows": batch_size, "log_probs": log_probs, "draft_device": draft_device}
            events = generate_stream(target, drafter, group, verify=rule, **rows)
            done = {event.row: event.completion for event in events if event.completion is not None}
            completions += [done[row] for row in range(len(group))]
            forwards += max(completion.metrics.steps for completion in done.values())
        seconds = time.perf_counter() - began
        return Result(completions=completions, metrics=total(completions), seconds=seconds, forwards=forwards)
    made = prepared(target, drafter, requests, verify=verify)
    rows = of_mesh(target, _rows(made, batch_size))
    plain = not shares_prompts(requests) and not any(request.stop_strings for request in requests)
    if len(requests) <= rows and plain:
        # The drafter that is loaded already, where it was named.
        completions = run_batch(target, made.drafter, requests, verify=verify, rows=rows, log_probs=log_probs)
        forwards = max(completion.metrics.steps for completion in completions)
    else:
        queue = Queue(made, rows, order=longest_first(requests), log_probs=log_probs)
        found = dict(queue)
        completions, forwards = [found[i] for i in range(len(requests))], queue.forwards
    return Result(
        completions=completions,
        metrics=total(completions),
        seconds=time.perf_counter() - began,
        forwards=forwards,
    )


def _rows(made: Prepared, batch_size: int | None) -> int:
    if batch_size is None:
        return default_rows(made)
    if batch_size < 1:
        raise MarsError(f"batch_size is {batch_size}: give at least 1.")
    return batch_size


def generate_iter(
    target: Pretrained,
    drafter: drafters.AnyDrafter = "none",
    prompts: Prompts = (),
    *,
    verify: AnyRule | None = None,
    batch_size: int | None = None,
    chat: bool = False,
    system: str | None = None,
    template_args: Mapping[str, Any] | None = None,
    ignore_eos: bool = False,
    log_probs: bool = False,
    samples: int = 1,
    **options: Any,
) -> Iterator[Finished]:
    """`generate`, each completion as soon as it has ended, as `Finished(index, completion)`.

    Args: as for `generate`.

    Raises:
      MarsError: as `generate`, when it is called and not first when a completion is asked for.

    >>> import mars_jax as mj  # doctest: +SKIP
    >>> for index, completion in mj.generate_iter(mj.load(), "ngram", texts, batch_size=16):  # doctest: +SKIP
    ...     print(index, completion.text)
    """
    requests, verify = _asked(
        target,
        prompts,
        verify,
        chat=chat,
        system=system,
        template_args=template_args,
        ignore_eos=ignore_eos,
        samples=samples,
        **options,
    )
    made = prepared(target, drafter, requests, verify=verify)
    return iter(Queue(made, _rows(made, batch_size), order=longest_first(requests), log_probs=log_probs))


async def generate_async(*arguments: Any, **options: Any) -> AsyncIterator[Finished]:
    """`generate_iter` for a program with an event loop, which goes on while the device decodes.

    Args: as for `generate_iter`.

    Raises:
      MarsError: as `generate`, when the first completion is asked for.

    >>> async def first(target):
    ...     async for index, completion in generate_async(target, "ngram", ["Once upon a time"]):
    ...         return completion.text
    """
    found = generate_iter(*arguments, **options)
    while (one := await asyncio.to_thread(next, found, None)) is not None:
        yield one


def generate_text(
    target: Pretrained,
    drafter: drafters.AnyDrafter = "none",
    prompts: Prompts = (),
    *,
    verify: AnyRule | None = None,
    batch_size: int | None = None,
    **options: Any,
) -> Iterator[Said | Finished]:
    """Text as it is said while rows refill: `Said(index, text, tokens, pieces)`, and `Finished` at the end of each.

    The host looks after every step, on accelerators after every fourth.

    Args: as for `generate_iter`.

    Raises:
      MarsError: as `generate`, when it is called.
    """
    log_probs = options.pop("log_probs", False)
    requests, verify = _asked(target, prompts, verify, **options)
    made = prepared(target, drafter, requests, verify=verify)
    order = longest_first(requests)
    return Queue(made, _rows(made, batch_size), order=order, log_probs=log_probs, telling=True).events()


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
    decoder, params, state = prepare(target, drafter, requests, verify=verify, rows=rows, log_probs=log_probs)
    with target.on_mesh():
        state, stats = jax.block_until_ready(decode.run(decoder, params, state, record=log_probs))
    seconds = time.perf_counter() - began
    stats, final = fetch((stats, (state.tokens, state.length, state.failed)))
    return [complete(target, request, row, final, stats, seconds) for row, request in enumerate(requests)]


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
    draft_device: Any = None,
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

    def loop(*given: Any) -> object:
        if stream:
            return decode.jitted_step.lower(*given).compile()
        return decode.run.lower(*given, record=log_probs).compile()

    pair = Pair.of(
        target,
        drafter,
        stand_ins,
        verify=verify,
        rows=rows,
        draft_device=draft_device,
        log_probs=log_probs,
        loop=None if draft_device is not None else loop,
    )
    one_step = dataclasses.replace(pair.state.controls, limit=pair.state.length + 1)
    pair = pair._replace(state=dataclasses.replace(pair.state, controls=one_step))
    with target.on_mesh():
        if stream or draft_device is not None:
            stats = pair.stats(log_probs)
            for state, info in pair.steps(ahead=0):
                final = (state.done, state.tokens, state.length, state.failed)
                jax.block_until_ready(look(stats, info, final))
        else:
            jax.block_until_ready(decode.run(pair.decoder, pair.params, pair.state, record=log_probs))


def generate_stream(
    target: Pretrained,
    drafter: drafters.AnyDrafter,
    requests: Sequence[Request],
    *,
    verify: AnyRule | None = None,
    rows: int | None = None,
    log_probs: bool = False,
    draft_device: Any = None,
) -> Iterator[StreamEvent]:
    """Decode one batch step by step, and yield the tokens of each row as they are decided.

    Args:
      target, drafter, verify, draft_device: as for `generate`.
      requests: from `make_requests`.
      rows: as for `run_batch`.
      log_probs: of completions too; those of events are always there.
    """
    began = time.perf_counter()
    pair = Pair.of(target, drafter, requests, verify=verify, rows=rows, draft_device=draft_device)
    # Who drafts elsewhere reads the verdict of every step anyway.
    ahead = 0 if draft_device is not None else decode.look_ahead(pair.state)
    done, stats = fetch(pair.state.done), pair.stats(log_probs)
    yield from events(target, requests, pair.steps(ahead=ahead), stats, done, ahead=ahead, began=began)


def groups(
    requests: Sequence[Request], verify: Rule, batch_size: int | None
) -> Iterator[tuple[list[Request], Rule]]:
    """Requests in groups of `batch_size`, each with its rule: what that has one of per request is theirs."""
    first = 0
    for group in batches(requests, batch_size):
        yield group, rule_of(verify, range(first, first + len(group)), len(requests))
        first += len(group)


def rule_of(verify: Any, rows: Sequence[int], count: int) -> Any:
    """The rule of some of `count` requests: what it has one of per request is theirs."""
    if isinstance(verify, LoadedRule):
        return verify._replace(rule=rule_values.take_rows(verify.rule, rows, count))
    return None if verify is None else rule_values.take_rows(verify, rows, count)


def _asked(
    target: Pretrained, prompts: Prompts, verify: Any, *, samples: int = 1, **options: Any
) -> tuple[list[Request], Any]:
    """The requests that a user asks for, and the rule for them: what it has one of per prompt is its samples'."""
    requests = make_requests(target, prompts, samples=samples, **options)
    if samples != 1:
        of_prompt = [i // samples for i in range(len(requests))]
        verify = rule_of(verify, of_prompt, len(requests) // samples)
    check_relaxes(verify, requests)
    return requests, verify


def check_finite(target: Pretrained, completions: Sequence[Completion]) -> None:
    """Raise MarsError where prompts failed, for callers to whom that is an error."""
    failed = sum(completion.finish_reason == "failed" for completion in completions)
    if failed:
        raise MarsError(
            f"the logits of '{target.name}' are not finite for {failed} of {len(completions)} prompts: its weights "
            "hold NaN, or overflow in bfloat16; load an intact checkpoint, or one in float32."
        )
