"""A batch of requests as the arrays that the decoder takes. B batch, T token buffer, M stop tokens."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mars_jax import drafters, specs
from mars_jax.core import decode, rules
from mars_jax.core.controls import make_controls
from mars_jax.core.errors import MarsError
from mars_jax.core.types import (
    NO_TOKEN,
    Decoder,
    DecodeState,
    Drafter,
    LoadedRule,
    Params,
    Verifier,
    keys_from_seeds,
)
from mars_jax.placement.hosts import put
from mars_jax.placement.shardings import state_shardings
from mars_jax.pretrained import Pretrained
from mars_jax.serve.requests import Request, check_request
from mars_jax.verify import exact

AnyRule = Verifier | LoadedRule
"""What `mars_jax.generate` takes: a rule, or one with weights of its own."""


def prepare(
    target: Pretrained,
    drafter: drafters.AnyDrafter,
    requests: Sequence[Request],
    *,
    verify: AnyRule | None = None,
    rows: int | None = None,
) -> tuple[Decoder, Params, DecodeState]:
    """The decoder, its params, and the state after prefill for one batch of requests.

    On the target's mesh the rows are divided over `data`, and filled up to a multiple of it. The token buffer is a
    bucket, so prompts and limits of like lengths share one compilation; everything else that differs between requests
    is a value, the numbers of the rule among them: one for all, or one per request.
    """
    if isinstance(drafter, str):
        drafter = drafters.load(drafter, target)
    elif isinstance(drafter, Drafter):
        drafter = drafters.LoadedDrafter(drafter, ())
    rule = verify if isinstance(verify, LoadedRule) else LoadedRule(exact() if verify is None else verify)
    _check_rule(rule, drafter.drafter, requests)
    context = target.config.max_positions
    for request in requests:
        check_request(target, request)
        if request.draft_stop < math.inf and not drafter.drafter.stoppable:
            raise MarsError(
                f"draft_stop does not apply to the drafter '{drafter.drafter.name}', which has no entropy to stop by: "
                f"leave it out, or draft with {specs.drafters_that('stops')}."
            )
    batch = max(rows or 0, len(requests))
    if target.mesh is not None:
        batch += -batch % target.mesh.shape.get("data", 1)
    lengths = np.array([len(r.prompt_tokens) for r in requests])
    limits = np.minimum(lengths + np.array([r.max_new_tokens for r in requests]), context)
    width = buffer_width(target, requests)
    prompts = np.zeros((batch, width), np.int32)
    for row, request in enumerate(requests):
        prompts[row, : lengths[row]] = request.prompt_tokens
    # Rows that only fill the batch are born at their limit, so they are done before the first step.
    pad = batch - len(requests)
    fill = [dataclasses.replace(requests[0], prompt_tokens=(0,))] * pad
    everyone = [*requests, *fill]
    # A multiple of four, so that one more stop token seldom changes a shape.
    most = max(4, -(-max(len(r.stop_tokens) for r in everyone) // 4) * 4)
    made = make_controls(
        batch,
        limit=[*limits.tolist(), *[1] * pad],
        temperature=[r.temperature for r in everyone],
        top_k=[r.top_k for r in everyone],
        top_p=[r.top_p for r in everyone],
        min_p=[r.min_p for r in everyone],
        strict=[r.strict for r in everyone],
        draft_stop=[r.draft_stop for r in everyone],
        stop_tokens=[[*r.stop_tokens, *[NO_TOKEN] * (most - len(r.stop_tokens))] for r in everyone],
    )
    decoder = decode.speculative_decoder(target.model, drafter.drafter, rule.rule)
    params = Params(target=target.params, draft=drafter.params, verify=rule.params)
    keys = keys_from_seeds(jnp.asarray([r.seed & 0xFFFFFFFF for r in everyone], jnp.uint32))
    all_lengths = jnp.asarray([*lengths, *[1] * pad], jnp.int32)
    of_rows = rules.take_rows(rule.rule, [*range(len(requests)), *[0] * pad], len(requests))
    arrays: Any = (jnp.asarray(prompts), all_lengths, made, rules.for_rows(of_rows, batch), keys)
    if target.mesh is not None:
        arrays = put(arrays, state_shardings(arrays, target.mesh))
    with target.on_mesh():
        return decoder, params, decode.start(decoder, params, *arrays)


def _check_rule(rule: LoadedRule, drafter: Drafter, requests: Sequence[Request]) -> None:
    """Raise MarsError for a rule that cannot run, or for a switch that it does not have."""
    rules.structure(rule.rule)
    name = rules.name_of(rule.rule)
    if "weights" in getattr(rule.rule, "needs", ()) and not jax.tree.leaves(rule.params):
        raise MarsError(
            f"the rule {name} needs weights: pass mars_jax.verify.LoadedRule(rule, weights), or what verify.load gives."
        )
    if rules.lossless(rule.rule) and any(request.strict for request in requests):
        raise MarsError(f"strict does not apply to the rule {name}, which is lossless: leave it out.")
    check = getattr(rule.rule, "check_drafter", None)
    if check is not None:
        check(drafter)


def buffer_width(target: Pretrained, requests: Sequence[Request]) -> int:
    """T of a batch: the bucket of its longest prompt and continuation."""
    longest = max(len(r.prompt_tokens) + r.max_new_tokens for r in requests)
    return bucket(min(longest, target.config.max_positions))


def bucket(length: int) -> int:
    """The least of 64, 96, 128, 192, 256, 384, ... that is at least `length`.

    >>> [bucket(n) for n in (1, 65, 128, 200)]
    [64, 96, 128, 256]
    """
    size = 64
    while size < length:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return size
