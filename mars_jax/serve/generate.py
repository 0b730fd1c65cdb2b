"""Text to text: `generate` for whole completions, `generate_stream` for tokens as they are decided.

B batch, T token buffer, M stop tokens. Oracle: `transformers` generate with the same checkpoint
(tests/serve/test_generate.py).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from mars_jax import drafters
from mars_jax.core import decode
from mars_jax.core.errors import MarsError
from mars_jax.core.metrics import Metrics, accumulate, summarize, zero_stats
from mars_jax.core.types import Verifier
from mars_jax.placement.hosts import fetch
from mars_jax.pretrained import Detokenizer, Pretrained
from mars_jax.serve.prepare import prepare
from mars_jax.serve.requests import Completion, Request, Result, StreamEvent, batches, make_requests, total


def generate(
    target: Pretrained,
    drafter: drafters.AnyDrafter = "none",
    prompts: str | Sequence[str] | Sequence[Sequence[int]] = (),
    *,
    verify: Verifier | None = None,
    batch_size: int | None = None,
    chat: bool = False,
    ignore_eos: bool = False,
    **options: Any,
) -> Result:
    """Continue prompts by speculative decoding, a batch at a time, each batch in one device loop.

    Args:
      target: from `mars_jax.load`.
      drafter: from `mars_jax.drafters.load`, or its spec where it needs no more than that, such as "ngram"; or a
        `Drafter` without weights of its own.
      prompts: a text, texts, or token ids.
      verify: the rule; default `verify.exact()`, which changes nothing but the speed.
      batch_size: rows that decode side by side; default: all prompts.
      chat: put each text through the chat template as a user turn.
      ignore_eos: decode to `max_new_tokens` past any stop token.
      **options: fields of `Request`, each one value for all prompts or a sequence of one per prompt: temperature,
        top_k, top_p, min_p, theta (default: the rule's own), max_relaxed_run, strict, draft_stop (see `make_controls`;
        not for n-grams), seed, max_new_tokens (default 256), stop_tokens (default: the model's). A single seed s
        gives prompt i the seed s + i. At temperature 0 a row takes the best token, and the filters and the seed have
        nothing to choose.

    Raises:
      MarsError: a prompt that is empty or does not fit the context, a value out of range, logits that are not
        finite.

    >>> import mars_jax as mj  # doctest: +SKIP
    >>> target = mj.load("path/to/checkpoint")  # doctest: +SKIP
    >>> mj.generate(target, "ngram", ["Once upon a time"], verify=mj.verify.mars(theta=0.9)).text  # doctest: +SKIP
    """
    if options.get("theta") is not None and not hasattr(verify, "theta"):
        raise MarsError(
            "theta does not apply to a rule that relaxes nothing: leave it out, or verify with mars()."
        )
    requests = make_requests(target, prompts, chat=chat, ignore_eos=ignore_eos, **options)
    return generate_requests(target, drafter, requests, verify=verify, batch_size=batch_size)


def generate_requests(
    target: Pretrained,
    drafter: drafters.AnyDrafter,
    requests: Sequence[Request],
    *,
    verify: Verifier | None = None,
    batch_size: int | None = None,
) -> Result:
    """`generate` for prepared requests."""
    began = time.perf_counter()
    completions: list[Completion] = []
    for group in batches(requests, batch_size):
        completions += run_batch(target, drafter, group, verify=verify, rows=batch_size)
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
    verify: Verifier | None = None,
    rows: int | None = None,
) -> list[Completion]:
    """Decode one batch in one device loop. `rows` pads the batch, so that a shorter last one recompiles nothing."""
    began = time.perf_counter()
    decoder, params, state = prepare(target, drafter, requests, verify=verify, rows=rows)
    with target.on_mesh():
        state, stats = jax.block_until_ready(decode.run(decoder, params, state))
    seconds = time.perf_counter() - began
    stats, final = fetch((stats, (state.tokens, state.length, state.failed)))
    return [
        _complete(target, request, row, final, summarize(stats, row), seconds)
        for row, request in enumerate(requests)
    ]


def compile_batch(
    target: Pretrained,
    drafter: drafters.AnyDrafter,
    requests: Sequence[Request],
    *,
    verify: Verifier | None = None,
    rows: int | None = None,
    stream: bool = False,
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
            jax.block_until_ready(decode.run(decoder, params, state))


def generate_stream(
    target: Pretrained,
    drafter: drafters.AnyDrafter,
    requests: Sequence[Request],
    *,
    verify: Verifier | None = None,
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
        host, done, failed = fetch((info, state.done, state.failed))
        _check_finite(target, failed[: len(requests)])
        ended = None  # read where a row ends in this step
        for row, request in enumerate(requests):
            if was_done[row]:
                continue
            count = int(host.num_emitted[row])
            tokens = host.emitted[row, :count].tolist()
            kinds = ["relaxed" if r else "exact" for r in host.verdict.relaxed[row]]
            kinds[int(host.verdict.num_accepted[row]) :] = ["corrected"]
            pieces = tuple(
                (kind, texts[row].feed([token], last=bool(done[row]) and place == count - 1))
                for place, (kind, token) in enumerate(zip(kinds, tokens, strict=False))
            )
            completion = None
            if done[row]:
                ended = ended or fetch((stats, (state.tokens, state.length, state.failed)))
                seconds = time.perf_counter() - began
                completion = _complete(target, request, row, ended[1], summarize(ended[0], row), seconds)
            yield StreamEvent(row, "".join(text for _, text in pieces), pieces, tuple(tokens), completion)
        was_done = done


_accumulate = jax.jit(accumulate)


def _complete(
    target: Pretrained, request: Request, row: int, final: tuple, metrics: Metrics, seconds: float
) -> Completion:
    """Cut one row's new tokens out of the batch's final state and name why it ended."""
    tokens, length, failed = final
    _check_finite(target, failed[row : row + 1])
    new = tokens[row, len(request.prompt_tokens) : length[row]].tolist()
    detokenizer = Detokenizer(target, request.prompt_tokens)
    return Completion(
        request=request,
        # As the stream does it, so that a character cut in two reads the same both ways.
        text="".join(detokenizer.feed([token], last=i == len(new) - 1) for i, token in enumerate(new)),
        tokens=new,
        finish_reason="stop" if new and new[-1] in request.stop_tokens else "length",
        metrics=metrics,
        seconds=seconds,
    )


def _check_finite(target: Pretrained, failed: np.ndarray) -> None:
    if failed.any():
        raise MarsError(
            f"the logits of '{target.name}' are not finite: its weights hold NaN, or overflow in bfloat16; load an "
            "intact checkpoint, or one in float32."
        )
