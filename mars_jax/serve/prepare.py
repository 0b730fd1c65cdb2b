"""The decoder of a pair of models, and checks that requests fit it; `prepared` makes the arrays.

B batch, T token buffer.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax

from mars_jax import drafters
from mars_jax.core.decoder import Decoder
from mars_jax.core.drafter import Drafter
from mars_jax.core.guide import narrowed
from mars_jax.core.rule import LoadedRule, Rule, structure, user_errors
from mars_jax.core.types import DecodeState, Params
from mars_jax.drafters.registry import drafters_that
from mars_jax.hub.pretrained import Pretrained
from mars_jax.mesh.axes import size_of
from mars_jax.serve.guides import guides_of, placed
from mars_jax.serve.prepared import Prepared
from mars_jax.serve.requests import Request, check_request
from mars_jax.serve.sizes import with_costs
from mars_jax.utils.errors import MarsError
from mars_jax.verify import exact

AnyRule = Rule | LoadedRule
"""A rule as `mars_jax.generate` takes it: without weights, or loaded with them."""


def loaded_rule(verify: AnyRule | None) -> LoadedRule:
    """Return a rule with its weights; None means `exact`."""
    if isinstance(verify, LoadedRule):
        return verify
    rule = exact() if verify is None else verify
    structure(rule)
    return LoadedRule(rule)


def prepared(
    target: Pretrained,
    drafter: drafters.AnyDrafter,
    requests: Sequence[Request],
    *,
    verify: AnyRule | None = None,
) -> Prepared:
    """Return the decoder of a pair, its params, and the checked requests.

    The width of the token buffer is a bucket, so prompts and limits of similar lengths share one compilation.
    Everything else that differs between requests is a value. Each number of the rule is one value for all requests, or
    one per request.

    Raises:
      MarsError: a request does not fit the target, the drafter or the rule.
    """
    drafter = drafters.loaded(drafter, target)
    rule = loaded_rule(verify)
    _check_rule(rule, drafter.drafter, requests)
    for request in requests:
        check_request(target, request)
        if request.draft_stop < math.inf and not drafter.drafter.stops:
            raise MarsError(
                f"draft_stop does not apply to the drafter '{drafter.drafter.name}', which has no entropy to stop by: "
                f"leave it out, or draft with {drafters_that('stops')}."
            )
    guides = guides_of(target, requests)
    tables = placed(guides.tables, target)
    if drafter.draft_ids is not None and tables is not None and tables.constraint is not None:
        tables = dataclasses.replace(tables, constraint=narrowed(tables.constraint, drafter.draft_ids))
    params = Params(target=target.params, draft=drafter.params, verify=rule.params, guides=tables)
    return Prepared(
        target=target,
        requests=requests,
        decoder=drafter.decoder(target.model, rule.rule),
        params=params,
        drafter=drafter,
        rule=rule,
        width=buffer_width(target, requests),
        guides=guides,
    )


def prepare(
    target: Pretrained,
    drafter: drafters.AnyDrafter,
    requests: Sequence[Request],
    *,
    verify: AnyRule | None = None,
) -> tuple[Decoder, Params, DecodeState]:
    """Return the decoder, its params, and the state after prefill of one batch, for a loop of the caller's own.

    If the draft length adapts to its cost, measure that cost first. On the target's mesh the rows are divided over
    `data`, and their number is rounded up to a multiple of it.

    Args:
      target, drafter, requests, verify: as for `prepared`.
    """
    batch = of_mesh(target, len(requests))
    prepared_requests = with_costs(prepared(target, drafter, requests, verify=verify), batch)
    state = prepared_requests.start([*range(len(requests)), *[None] * (batch - len(requests))])
    return prepared_requests.decoder, prepared_requests.params, state


def of_mesh(target: Pretrained, rows: int) -> int:
    """Round a number of rows up to a multiple of the target's mesh axis `data`."""
    return rows + -rows % size_of("data", target.mesh)


def _check_rule(rule: LoadedRule, drafter: Drafter, requests: Sequence[Request]) -> None:
    """Raise MarsError if the rule cannot run, or if a request has an option that does not apply to it."""
    structure(rule.rule)
    with user_errors(rule.rule):
        _check_needs(rule, drafter, requests)


def _check_needs(rule: LoadedRule, drafter: Drafter, requests: Sequence[Request]) -> None:
    checked = rule.rule
    if "weights" in checked.needs and not jax.tree.leaves(rule.params):
        raise MarsError(
            f"the rule {checked.name} needs weights: pass mars_jax.verify.LoadedRule(rule, weights), or the "
            "result of verify.load."
        )
    if checked.lossless and not drafter.trusts and any(request.strict for request in requests):
        raise MarsError(f"strict does not apply to the rule {checked.name}, which is lossless: leave it out.")
    if "long" in checked.needs and any(r.draft_stop < math.inf for r in requests):
        raise MarsError(
            f"draft_stop does not apply to the rule {checked.name}, whose drafts must be long enough: leave it out."
        )
    checked.check_drafter(drafter)


def check_relaxes(verify: AnyRule | None, requests: Sequence[Request]) -> None:
    """Raise MarsError if requests control where rules relax, but the rule is lossless.

    Check only requests of users: a measurement may decode the same requests by a lossless and by a lossy rule.
    """
    checked = loaded_rule(verify).rule
    if not checked.lossless:
        return
    for request in requests:
        relaxes = request.constraint is not None and request.constraint.relax
        if request.spans is not None or relaxes:
            option = (
                "relax_in" if request.relax_in else "strict_in" if request.strict_in else "relax_constrained"
            )
            raise MarsError(
                f"{option} does not apply to the rule {checked.name}, which relaxes nothing: leave it out."
            )


def buffer_width(target: Pretrained, requests: Sequence[Request]) -> int:
    """Return T of a batch: the bucket of its longest prompt with completion."""
    longest = max(len(r.prompt_tokens) + r.max_new_tokens for r in requests)
    return bucket(min(longest, target.config.max_positions))


def bucket(length: int) -> int:
    """Round a length up to one of 64, 96, 128, 192, 256, 384, ...

    >>> [bucket(n) for n in (1, 65, 128, 200)]
    [64, 96, 128, 256]
    """
    size = 64
    while size < length:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return size
