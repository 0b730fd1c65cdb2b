"""Text generation: whole results, completions as they end, or text as it is decoded; all run in a `Session`.

Oracle: `transformers` generate with the same checkpoint (tests/serve/test_generate.py).
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
    """Continue prompts by speculative decoding, batched in one device loop.

    If there are more prompts than rows, a row that ends restarts with the next prompt. Prompts with the highest
    `max_new_tokens` begin first; the tokens of a prompt do not depend on this order.

    Args:
      target: model from `mars_jax.load`.
      drafter: drafter from `mars_jax.drafters.load`; or its spec, such as "ngram", if it needs no other setting; or a
        `Drafter` without weights.
      prompts: a string, a list of strings, or token ids; or conversations, each a list of turns with `role` and
        `content`, a string or a list of text parts in OpenAI's format.
      verify: the rule, such as `verify.mars(theta=0.9)`, or a `LoadedRule`; default `verify.exact()`, which only
        changes the speed. Each of its numeric settings is one value for all prompts, or one per prompt.
      batch_size: rows that decode in parallel; default: as many as fit in memory, at most 128 (16 on a CPU) for each
        device along the mesh axis `data`.
      chat: apply the chat template to each string, as a user turn. Chat answers also end at the tokenizer's end-of-text
        and end-of-turn tokens, see `Pretrained.chat_stop_tokens`; for prompts given as token ids, `chat` only
        adds these stop tokens.
      system: content of a system turn to prepend to conversations that do not begin with one.
      template_args: variables of the chat template, such as `{"enable_thinking": False}`.
      ignore_eos: decode to `max_new_tokens` past any stop token.
      samples: completions per prompt, which are adjacent in the result. A prompt is read once for all of its samples,
        except on a mesh that shards rows. More than one sample needs a temperature above 0.
      log_probs: also return log-probabilities, regret and the kind of each new token, as `Completion.log_probs`.
      top_log_probs: for each new token, also return this many of the target's most probable tokens at that position, at
        most 100, as `Completion.log_probs.top` and `processed_top`; implies log_probs.
      **options: fields of `Request`, each one value for all prompts or a sequence with one per prompt: temperature,
        top_k, top_p, min_p, strict (not for lossless rules), draft_stop (see `make_controls`; not for n-grams), seed,
        max_new_tokens (default 256), min_new_tokens (as in transformers: no stop token before that many tokens; not
        with constraints), stop_tokens (default: the model's), stop_strings (strings that end a completion; see
        `serve.text.RowText`), logit_bias (numbers to add to logits, by token id), banned_tokens, repetition_penalty
        (as in transformers), presence_penalty and frequency_penalty (as in OpenAI's API); these change the target, so a
        lossless rule stays lossless. A single seed s, by default 0, gives completion i the seed s + i modulo 2**32, so
        that completions of one prompt differ and every call reproduces them. With one seed per prompt,
        sample j of a prompt has the prompt's seed plus j.
        At temperature 0, a row takes the best token, and filters and seed have no effect.
        Constraints on the completion: regex, json_schema (an object, its JSON or a file), choice (a list of strings),
        or allowed_tokens; or `constraint`, a value from `mars_jax.constraints`. A constraint masks the target, so every
        rule obeys it. A lossy rule relaxes nothing in constrained text unless relax_constrained=True. With relax_in, a
        lossy rule relaxes only inside the given spans; with strict_in, only outside them; see `constraints.spans`.

    Raises:
      MarsError: a prompt is empty or does not fit the context, or a value is out of range.

    If the target's logits for a prompt are not finite, that prompt ends with the finish reason "failed"; the others
    continue.

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
    """Generate as `generate` does, and yield each completion as soon as it ends, as `Finished(index, completion)`.

    Args:
      target, drafter, prompts, verify, batch_size, log_probs, top_log_probs: as for `generate`.
      **options: other arguments of `generate`.

    Returns:
      `Finished(index, completion)` for each prompt: the prompt's index in `prompts`, and its `Completion`.

    Raises:
      MarsError: see `generate`; raised when the function is called, not at the first completion.

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
    """Yield text as it is decoded, and each completion as it ends; rows refill as in `generate`.

    The host reads the tokens after every step, or after every fourth step on accelerators.

    Args:
      target, drafter, prompts, verify, batch_size, log_probs, top_log_probs: as for `generate`.
      **options: other arguments of `generate`.

    Returns:
      `Said(index, text, pieces, tokens, log_probs)` for new text, where `pieces` are (kind, text) pairs whose texts
      concatenate to `text`; and `Finished(index, completion)` for each completion.

    Raises:
      MarsError: see `generate`; raised when the function is called.

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
    """Return the requests of a call, and the rule with its per-prompt values repeated for each sample."""
    requests, samples = make_requests(target, prompts, **options), options.get("samples", 1)
    rule = loaded_rule(verify)
    check_relaxes(rule, requests)
    if samples == 1:
        return requests, rule
    # Request i is a sample of prompt i // samples, and takes the rule's values for that prompt.
    prompt_indices = [i // samples for i in range(len(requests))]
    return requests, rule._replace(rule=take_rows(rule.rule, prompt_indices, len(requests) // samples))
