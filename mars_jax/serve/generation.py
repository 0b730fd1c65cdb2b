"""Functions that generate text. They return whole results, completions as they end, or text as it is decoded.

All of them run in a `Session`. Tested against `transformers` generate with the same checkpoint
(tests/serve/test_generate.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Unpack

from mars_jax import drafters
from mars_jax.core.rule import LoadedRule, take_rows
from mars_jax.hub.pretrained import Pretrained
from mars_jax.serve.prepare import AnyRule, check_relaxes, loaded_rule
from mars_jax.serve.queue import Finished, Said, longest_first
from mars_jax.serve.requests import AnyPrompts, CallOptions, Options, Request, Result, make_requests
from mars_jax.serve.session import Session


def generate(
    target: Pretrained,
    drafter: drafters.AnyDrafter = "none",
    prompts: AnyPrompts = (),
    *,
    verify: AnyRule | None = None,
    batch_size: int | None = None,
    chat: bool = False,
    system: str | None = None,
    template_args: Mapping[str, object] | None = None,
    ignore_eos: bool = False,
    log_probs: bool = False,
    top_log_probs: int = 0,
    samples: int = 1,
    **options: Unpack[Options],
) -> Result:
    """Generate completions of prompts by speculative decoding, in batches on the device.

    If there are more prompts than rows, each row that finishes takes the next prompt. Prompts with the highest
    `max_new_tokens` start first. The tokens of a completion do not depend on this order.

    Args:
      target: model from `mars_jax.load`.
      drafter: a drafter from `mars_jax.drafters.load`; a spec such as "ngram", which is loaded with default settings;
        or a `Drafter` without weights.
      prompts: a string, a list of strings, lists of token ids, or conversations. A conversation is a list of turns with
        `role` and `content`. The content is a string or a list of text parts in OpenAI's format.
      verify: verification rule, such as `verify.mars(theta=0.9)`, or a `LoadedRule`. The default, `verify.exact()`,
        does not change the target's output. Each numeric setting of the rule is one value for all prompts, or one
        per prompt.
      batch_size: number of rows to decode in parallel. Default: as many as fit in memory, but at most 128 (16 on a
        CPU) for each device along the mesh axis `data`.
      chat: treat each string as a user turn and apply the chat template to it. Chat answers also end at the tokenizer's
        end-of-text and end-of-turn tokens; see `Pretrained.chat_stop_tokens`. For prompts given as token ids, `chat`
        only adds these stop tokens.
      system: content of a system turn, which is prepended to conversations that do not begin with one.
      template_args: variables of the chat template, such as `{"enable_thinking": False}`.
      ignore_eos: ignore stop tokens and decode until `max_new_tokens`.
      samples: number of completions per prompt, which are adjacent in the result. A prompt is prefilled once for all of
        its samples, except on a mesh that shards rows. More than one sample requires a temperature above 0.
      log_probs: also return the log-probabilities, the regret and the kind of each new token, as
        `Completion.log_probs`.
      top_log_probs: for each new token, also return this many of the target's most probable tokens at that position (at
        most 100), as `Completion.log_probs.top` and `processed_top`. Implies `log_probs`.
      **options: fields of `Request`, each one value for all prompts or a sequence with one per prompt: temperature,
        top_k, top_p, min_p, strict (not for lossless rules), draft_stop (see `make_controls`; not for n-grams), seed,
        max_new_tokens (default 256), min_new_tokens (as in transformers: no stop token before that many tokens; not
        with constraints), stop_tokens (default: the model's), stop_strings (strings that end a completion; see
        `serve.text.RowText`), logit_bias (numbers to add to logits, by token id), banned_tokens, repetition_penalty
        (as in transformers), presence_penalty and frequency_penalty (as in OpenAI's API). The bias, the bans and the
        penalties change the target's logits, so a lossless rule stays lossless. If a single seed s is given (default
        0), completion i uses the seed s + i modulo 2**32. So the samples of a prompt differ, and repeating a call
        reproduces them. If there is one seed per prompt, sample j of a prompt uses the prompt's seed plus j. At
        temperature 0, the most probable token is chosen, and filters and seed have no effect.
        To constrain completions, pass regex, json_schema (an object, its JSON or a file), choice (a list of strings) or
        allowed_tokens; or pass a value from `mars_jax.constraints` as `constraint`. A constraint masks the target's
        logits, so every rule obeys it. A lossy rule relaxes no tokens in constrained completions unless
        relax_constrained=True. With relax_in, it relaxes tokens only inside the given spans, and with strict_in only
        outside them; see `constraints.spans`.

    Raises:
      MarsError: a prompt is empty or does not fit into the context, or a value is out of range.

    If the target's logits are not finite for a prompt, its completion ends with the finish reason "failed". Other
    prompts are not affected.

    >>> import mars_jax as mj  # doctest: +SKIP
    >>> target = mj.load("path/to/checkpoint")  # doctest: +SKIP
    >>> mj.generate(target, "ngram", ["Once upon a time"], verify=mj.verify.mars(theta=0.9)).text  # doctest: +SKIP
    """
    requests, verify = _requests_and_rule(
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
    return Session.of(
        target, drafter, verify, batch_size=batch_size, log_probs=log_probs, top_log_probs=top_log_probs
    ).decode(requests)


def generate_iter(
    target: Pretrained,
    drafter: drafters.AnyDrafter = "none",
    prompts: AnyPrompts = (),
    *,
    verify: AnyRule | None = None,
    batch_size: int | None = None,
    log_probs: bool = False,
    top_log_probs: int = 0,
    **options: Unpack[CallOptions],
) -> Iterator[Finished]:
    """Generate completions like `generate`, but yield each one as soon as it ends, as `Finished(index, completion)`.

    Args:
      target, drafter, prompts, verify, batch_size, log_probs, top_log_probs: as for `generate`.
      **options: other arguments of `generate`.

    Returns:
      An iterator of `Finished(index, completion)`, with the index of the prompt and its `Completion`.

    Raises:
      MarsError: see `generate`. It is raised when the function is called, not when the iterator is first advanced.

    >>> import mars_jax as mj  # doctest: +SKIP
    >>> for index, completion in mj.generate_iter(mj.load(), "ngram", texts, batch_size=16):  # doctest: +SKIP
    ...     print(index, completion.text)
    """
    requests, verify = _requests_and_rule(target, prompts, verify, **options)
    session = Session.of(
        target, drafter, verify, batch_size=batch_size, log_probs=log_probs, top_log_probs=top_log_probs
    )
    return iter(session.queue(requests, order=longest_first(requests)))


def generate_stream(
    target: Pretrained,
    drafter: drafters.AnyDrafter = "none",
    prompts: AnyPrompts = (),
    *,
    verify: AnyRule | None = None,
    batch_size: int | None = None,
    log_probs: bool = False,
    top_log_probs: int = 0,
    **options: Unpack[CallOptions],
) -> Iterator[Said | Finished]:
    """Generate completions like `generate`, but yield text as it is decoded, and each completion as it ends.

    New tokens are copied to the host after every step, or after every fourth step on accelerators.

    Args:
      target, drafter, prompts, verify, batch_size, log_probs, top_log_probs: as for `generate`.
      **options: other arguments of `generate`.

    Returns:
      An iterator of events: `Said(index, text, pieces, tokens, log_probs)` for new text, and `Finished(index,
      completion)` for each completion. `pieces` are (kind, text) pairs whose texts concatenate to `text`.

    Raises:
      MarsError: see `generate`. The error is raised when the function is called.

    >>> import mars_jax as mj  # doctest: +SKIP
    >>> for event in mj.generate_stream(mj.load(), "ngram", texts):  # doctest: +SKIP
    ...     print(event.index, getattr(event, "text", "is done"))
    """
    requests, verify = _requests_and_rule(target, prompts, verify, **options)
    session = Session.of(
        target, drafter, verify, batch_size=batch_size, log_probs=log_probs, top_log_probs=top_log_probs
    )
    return session.queue(requests, order=longest_first(requests), telling=True).events()


def _requests_and_rule(
    target: Pretrained, prompts: AnyPrompts, verify: AnyRule | None, **options: Unpack[CallOptions]
) -> tuple[list[Request], LoadedRule]:
    """Return the requests of a call, and its rule, whose per-prompt settings are repeated for each sample."""
    requests, samples = make_requests(target, prompts, **options), options.get("samples", 1)
    rule = loaded_rule(verify)
    check_relaxes(rule, requests)
    if samples == 1:
        return requests, rule
    # Request i is a sample of prompt i // samples, so it uses the rule's settings for that prompt.
    prompt_indices = [i // samples for i in range(len(requests))]
    return requests, rule._replace(rule=take_rows(rule.rule, prompt_indices, len(requests) // samples))
