"""A batch of requests as the arrays that the decoder takes. B batch, T token buffer, M stop tokens."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mars_jax import drafters, specs
from mars_jax.core import decode
from mars_jax.core.controls import make_controls
from mars_jax.core.decoder import Decoder
from mars_jax.core.drafter import STOPS, TRUSTS, Drafter
from mars_jax.core.edits import Edits, make_edits
from mars_jax.core.errors import MarsError
from mars_jax.core.guide import narrowed
from mars_jax.core.mesh import size_of
from mars_jax.core.rule import LoadedRule, Rule, facts, for_rows, structure, take_rows
from mars_jax.core.types import NO_TOKEN, DecodeState, Params, Prompts, keys_from_seeds
from mars_jax.hub.pretrained import Pretrained
from mars_jax.placement.hosts import put
from mars_jax.placement.shardings import state_shardings
from mars_jax.serve.compiling import Compile, beside
from mars_jax.serve.guides import RequestGuides, guides_of, placed
from mars_jax.serve.requests import Request, check_request
from mars_jax.serve.sizes import with_costs
from mars_jax.verify import exact

AnyRule = Rule | LoadedRule
"""What `mars_jax.generate` takes: a rule, or one with weights of its own."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepared:
    """Requests that one program decodes, in however many rows: all of them in the same shapes."""

    target: Pretrained
    requests: Sequence[Request]
    decoder: Decoder
    params: Params
    drafter: drafters.LoadedDrafter
    rule: LoadedRule  # its numbers are one for all requests, or one for each
    width: int  # T
    guides: RequestGuides

    @property
    def draws(self) -> bool:
        """Whether any of the requests is to be drawn; where none is, nothing of drawing is compiled."""
        return draws(self.requests)

    def prompts(self, entries: Sequence[int | None]) -> Prompts:
        """What `Decoder.init` takes, for some of the requests by their numbers.

        None is a row that only fills the batch. It is born at its limit, so it is done before the first step. On a mesh
        all of them are divided over `data`.
        """
        own = [self.requests[i] if i is not None else _FILL for i in entries]
        lengths = np.array([len(r.prompt_tokens) for r in own], np.int32)
        context = self.target.config.max_positions
        limits = np.minimum(lengths + np.array([r.max_new_tokens for r in own]), context)
        tokens = np.zeros((len(own), self.width), np.int32)
        for row, request in enumerate(own):
            tokens[row, : lengths[row]] = request.prompt_tokens
        # A multiple of four, so that one more stop token seldom changes a shape.
        most = max(4, -(-max(len(r.stop_tokens) for r in self.requests) // 4) * 4)
        controls = make_controls(
            len(own),
            limit=limits,
            temperature=[r.temperature for r in own] if self.draws else None,
            top_k=[r.top_k for r in own],
            top_p=[r.top_p for r in own],
            min_p=[r.min_p for r in own],
            strict=[r.strict or (r.constraint is not None and not r.constraint.relax) for r in own],
            draft_stop=[r.draft_stop for r in own],
            stop_tokens=[[*r.stop_tokens, *[NO_TOKEN] * (most - len(r.stop_tokens))] for r in own],
        )
        if any(r.edits for r in self.requests):
            controls = dataclasses.replace(controls, edits=self._edits(own))
        controls = dataclasses.replace(controls, guides=self.guides.rows(own))
        keys = keys_from_seeds(jnp.array(np.asarray([r.seed & 0xFFFFFFFF for r in own], np.uint32)))
        numbers = take_rows(self.rule.rule, [i or 0 for i in entries], len(self.requests))
        made = Prompts(jnp.array(tokens), jnp.array(lengths), controls, for_rows(numbers, len(own)), keys)
        mesh = self.target.mesh
        return made if mesh is None else put(made, state_shardings(made, mesh))

    def _edits(self, own: Sequence[Request]) -> Edits:
        # As wide for some of the requests as for all, and seldom another width for one more token.
        most = max(len(r.logit_bias) for r in self.requests)
        return make_edits(
            len(own),
            logit_bias=[r.logit_bias for r in own],
            repetition_penalty=[r.repetition_penalty for r in own],
            presence_penalty=[r.presence_penalty for r in own],
            frequency_penalty=[r.frequency_penalty for r in own],
            width=max(8, -(-most // 8) * 8),
        )

    def start(self, entries: Sequence[int | None], *, loop: Compile | None = None) -> DecodeState:
        """The state after prefill of some of the requests. `loop`, if it is given, compiles what comes then meanwhile.

        Not on a mesh, over which the shapes alone do not say how the state will be divided.
        """
        prompts = self.prompts(entries)
        with self.target.on_mesh():
            if loop is None or self.target.mesh is not None:
                return decode.start(self.decoder, self.params, prompts)
            state = decode.shapes(self.decoder, self.params, prompts)
            with beside(functools.partial(loop, self.decoder, self.params, state)):
                return decode.start(self.decoder, self.params, prompts)


def draws(requests: Sequence[Request]) -> bool:
    """Whether any of the requests is not greedy."""
    return any(request.temperature != 0 for request in requests)


_FILL = Request(prompt_tokens=(0,), max_new_tokens=0)


def prepared(
    target: Pretrained,
    drafter: drafters.AnyDrafter,
    requests: Sequence[Request],
    *,
    verify: AnyRule | None = None,
) -> Prepared:
    """The decoder of a pair and its params, and requests that fit it.

    The token buffer is a bucket, so prompts and limits of like lengths share one compilation; everything else that
    differs between requests is a value, the numbers of the rule among them: one for all, or one per request.

    Raises:
      MarsError: a request that does not fit the target, the drafter or the rule.
    """
    drafter = drafters.loaded(drafter, target)
    rule = verify if isinstance(verify, LoadedRule) else LoadedRule(exact() if verify is None else verify)
    _check_rule(rule, drafter.drafter, requests)
    for request in requests:
        check_request(target, request)
        if request.draft_stop < math.inf and STOPS not in drafter.drafter.traits:
            raise MarsError(
                f"draft_stop does not apply to the drafter '{drafter.drafter.name}', which has no entropy to stop by: "
                f"leave it out, or draft with {specs.drafters_that('stops')}."
            )
    guides = guides_of(target, requests)
    params = Params(
        target=target.params,
        draft=drafter.params,
        verify=rule.params,
        guides=placed(guides.tables, target),
    )
    if drafter.draft_ids is not None and guides.constraint is not None:
        held = narrowed(params.guides.constraint, drafter.draft_ids)
        params = params._replace(guides=dataclasses.replace(params.guides, constraint=held))
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
    rows: int | None = None,
    log_probs: bool = False,
    loop: Compile | None = None,
) -> tuple[Decoder, Params, DecodeState]:
    """The decoder, its params, and the state after prefill for one batch of requests; see `prepared`.

    Where the size of drafts follows what they cost, that is measured first. `log_probs` says whether the loop that will
    decode keeps them; `loop` is as for `Prepared.start`.

    On the target's mesh the rows are divided over `data`, and filled up to a multiple of it.
    """
    batch = of_mesh(target, max(rows or 0, len(requests)))
    made = with_costs(prepared(target, drafter, requests, verify=verify), batch, log_probs=log_probs)
    state = made.start([*range(len(requests)), *[None] * (batch - len(requests))], loop=loop)
    return made.decoder, made.params, state


def of_mesh(target: Pretrained, rows: int) -> int:
    """The least number of rows from `rows` on that divides over the target's mesh."""
    return rows + -rows % size_of("data", target.mesh)


def _check_rule(rule: LoadedRule, drafter: Drafter, requests: Sequence[Request]) -> None:
    """Raise MarsError for a rule that cannot run, or for a switch that it does not have."""
    structure(rule.rule)
    said = facts(rule.rule)
    if "weights" in said.needs and not jax.tree.leaves(rule.params):
        raise MarsError(
            f"the rule {said.name} needs weights: pass mars_jax.verify.LoadedRule(rule, weights), or what verify.load "
            "gives."
        )
    if said.lossless and TRUSTS not in drafter.traits and any(request.strict for request in requests):
        raise MarsError(f"strict does not apply to the rule {said.name}, which is lossless: leave it out.")
    if "long" in said.needs and any(r.draft_stop < math.inf for r in requests):
        raise MarsError(
            f"draft_stop does not apply to the rule {said.name}, whose drafts must be long enough: leave it out."
        )
    said.check_drafter(drafter)


def check_relaxes(verify: AnyRule | None, requests: Sequence[Request]) -> None:
    """Raise MarsError where requests say in what rules relax, and the rule is lossless. It is for what a user asked:
    a measurement may decode the same requests by a lossless rule beside a lossy one."""
    rule: Any = verify.rule if isinstance(verify, LoadedRule) else verify
    if rule is not None and not facts(rule).lossless:
        return
    for request in requests:
        relaxes = request.constraint is not None and request.constraint.relax
        if request.spans is not None or relaxes:
            what = (
                "relax_in" if request.relax_in else "strict_in" if request.strict_in else "relax_constrained"
            )
            name = facts(exact() if rule is None else rule).name
            raise MarsError(f"{what} does not apply to the rule {name}, which relaxes nothing: leave it out.")


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
