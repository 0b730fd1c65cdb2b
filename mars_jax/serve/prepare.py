"""Preparation of requests for decoding: checks, construction of the decoder and its params, and arrays of prompts.

B batch, T token buffer.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mars_jax import drafters
from mars_jax.constraints import vocabulary
from mars_jax.constraints.automaton import FIRST
from mars_jax.constraints.batch_tables import Compiled, compiled, join_tables
from mars_jax.constraints.vocabulary import Vocabulary
from mars_jax.core import decode, refill, types
from mars_jax.core.axes import size_of, state_shardings
from mars_jax.core.controls import make_controls
from mars_jax.core.decoder import Decoder
from mars_jax.core.drafter import Drafter
from mars_jax.core.edits import Edits, make_edits
from mars_jax.core.guide import narrowed
from mars_jax.core.metrics import DecodeStats, zero_stats
from mars_jax.core.rule import LoadedRule, Rule, for_rows, structure, take_rows, user_errors
from mars_jax.drafters.registry import drafters_that
from mars_jax.hub.pretrained import Pretrained
from mars_jax.serve.programs import program
from mars_jax.serve.requests import Request, check_request
from mars_jax.utils import hosts
from mars_jax.utils.errors import MarsError
from mars_jax.verify import exact

STEPS = 8
"""Number of steps that `step_seconds` measures, enough to make the overhead of starting the loop negligible."""


class RequestGuides(NamedTuple):
    """Tables that a step uses to track constraints and spans in completions."""

    vocabulary: Vocabulary
    constraint: Compiled | None
    span: Compiled | None

    @property
    def tables(self) -> types.GuideTables:
        """The tables, in the form of `Params.guides`."""
        return types.GuideTables(
            constraint=self.constraint and self.constraint.tables, span=self.span and self.span.tables
        )

    def rows(self, requests: Sequence[Request]) -> types.GuideRows:
        """Return the value of `Controls.guides` for the requests of a batch."""
        spans, start_states = [request.spans for request in requests], [FIRST] * len(requests)
        for row, span in enumerate(spans):
            # A prompt may end inside a span, so start in the automaton state after the prompt.
            if span is not None:
                start_states[row] = span.table(self.vocabulary).run(requests[row].prompt_tokens)
        return types.GuideRows(
            constraint=self.constraint and self.constraint.rows([r.constraint for r in requests]),
            span=self.span and self.span.rows(spans, start_states),
        )


def guides_of(target: Pretrained, requests: Sequence[Request]) -> RequestGuides | None:
    """Build the tables of the requests' constraints and spans, if there are any. Identical constraints share one table.

    Raises:
      MarsError: the target has no tokenizer, so the text of its tokens is unknown; see also `Constraint.table`.
    """
    constraints = [r.constraint for r in requests if r.constraint is not None]
    spans = dict.fromkeys(r.spans for r in requests if r.spans is not None)
    if not constraints and not spans:
        return None
    vocab_size = target.config.vocab_size
    # A constraint on token ids does not need their text, so it also works without a tokenizer.
    vocab = Vocabulary(tokens=(None,) * vocab_size)
    if spans or any(constraint.kind != "tokens" for constraint in constraints):
        if not target.has_tokenizer:
            raise MarsError(
                f"'{target.name}' has no tokenizer, so the text of its tokens is unknown: constrain it by tokens only."
            )
        vocab = vocabulary(target.tokenizer, vocab_size)
    constraint_tables = span_tables = None
    if constraints:
        constraint_tables = compiled(constraints, vocab)
    if spans:
        span_tables = join_tables({span: span.table(vocab) for span in spans}, vocab_size)
    return RequestGuides(vocab, constraint_tables, span_tables)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepared:
    """Requests that the same compiled program can decode. Every subset of the requests has the same array shapes."""

    target: Pretrained
    requests: Sequence[Request]
    decoder: Decoder
    params: types.Params
    drafter: drafters.LoadedDrafter
    loaded_rule: LoadedRule  # each numeric setting is one value for all requests, or one per request
    width: int  # T, size of the token buffer
    guides: RequestGuides | None  # None if no request has a constraint or spans

    @property
    def draws(self) -> bool:
        """True if any request samples. If none does, the compiled program does not contain sampling."""
        return any(request.temperature != 0 for request in self.requests)

    def prompts(self, entries: Sequence[int | None]) -> types.Prompts:
        """Return the prompts of some requests for `Decoder.init`, sharded over the axis `data` if there is a mesh.

        Args:
          entries: the request index of each row, or None for a row that only pads the batch. A padding row starts at
            its length limit, so it is done before the first step.
        """
        requests = [self.requests[i] if i is not None else _FILL for i in entries]
        lengths = np.array([len(r.prompt_tokens) for r in requests], np.int32)
        context_length = self.target.config.max_positions
        # A length limit includes the tokens of the prompt.
        length_limits = np.minimum(lengths + np.array([r.max_new_tokens for r in requests]), context_length)
        tokens = np.zeros((len(requests), self.width), np.int32)
        for row, request in enumerate(requests):
            tokens[row, : lengths[row]] = request.prompt_tokens
        # Round up to a multiple of four, so that an additional stop token rarely changes a shape.
        max_stop_tokens = max(4, *(len(r.stop_tokens) for r in self.requests))
        num_stop_tokens = max_stop_tokens + -max_stop_tokens % 4
        # If no row samples, a temperature of None removes sampling from the program. A row with a constraint is strict
        # unless the constraint may be relaxed.
        controls = make_controls(
            len(requests),
            limit=length_limits,
            temperature=[r.temperature for r in requests] if self.draws else None,
            top_k=[r.top_k for r in requests],
            top_p=[r.top_p for r in requests],
            min_p=[r.min_p for r in requests],
            strict=[r.strict or (r.constraint is not None and not r.constraint.relax) for r in requests],
            draft_stop=[r.draft_stop for r in requests],
            stop_tokens=[
                [*r.stop_tokens, *[types.NO_TOKEN] * (num_stop_tokens - len(r.stop_tokens))] for r in requests
            ],
        )
        if any(r.edits for r in self.requests):
            controls = dataclasses.replace(controls, edits=self._edits(requests))
        if self.guides is not None:
            controls = dataclasses.replace(controls, guides=self.guides.rows(requests))
        keys = types.keys_from_seeds(jnp.array(np.asarray([r.seed for r in requests], np.uint32)))
        # Rows that only pad the batch use the rule settings of request 0.
        row_rule = take_rows(self.loaded_rule.rule, [i or 0 for i in entries], len(self.requests))
        return self.placed(
            types.Prompts(
                jnp.array(tokens), jnp.array(lengths), controls, for_rows(row_rule, len(requests)), keys
            )
        )

    def zero_stats(self, rows: int, *, log_probs: bool) -> DecodeStats:
        """Return the counters of new rows. With `log_probs`, they also record the log-probabilities of each token."""
        record_width = self.width if log_probs else None
        max_depth, num_top = self.decoder.max_depth, self.decoder.top_log_probs
        return self.placed(zero_stats(rows, max_depth, record=record_width, num_top=num_top))

    def placed(self, arrays: types.PyTree) -> types.PyTree:
        """Shard the rows of arrays over the mesh axis `data`, if there is a mesh."""
        if self.target.mesh is None:
            return arrays
        return hosts.put(arrays, state_shardings(arrays, self.target.mesh))

    def _edits(self, requests: Sequence[Request]) -> Edits:
        # Compute the width from all requests, so that it is the same for every subset. Round it up, so that one more
        # bias rarely changes it.
        max_biases = max(8, *(len(r.logit_bias) for r in self.requests))
        return make_edits(
            len(requests),
            logit_bias=[r.logit_bias for r in requests],
            repetition_penalty=[r.repetition_penalty for r in requests],
            presence_penalty=[r.presence_penalty for r in requests],
            frequency_penalty=[r.frequency_penalty for r in requests],
            min_new_tokens=[r.min_new_tokens for r in requests],
            width=max_biases + -max_biases % 8,
        )

    def drafting(self, drafter: drafters.LoadedDrafter) -> Prepared:
        """Return the same requests with another drafter, which may differ from the current one only in its params."""
        return dataclasses.replace(self, drafter=drafter, params=self.params._replace(draft=drafter.params))

    def step_seconds(self, rows: int, *, log_probs: bool = False) -> float:
        """Measure the mean seconds per step of B rows with half-full caches. The first call also compiles."""
        # No row may end, so replace the stop tokens with one that never occurs. Keep the same number of stop tokens,
        # because it determines a shape. The length limit is the size of the buffer, which no row reaches.
        requests = [
            dataclasses.replace(
                request,
                prompt_tokens=request.prompt_tokens[:2],
                max_new_tokens=self.width - 2,
                stop_tokens=(types.NO_TOKEN,) * len(request.stop_tokens),
            )
            for request in self.requests
        ]
        state = dataclasses.replace(self, requests=requests).start([i % len(requests) for i in range(rows)])
        # A step takes longer with a longer cache. Prefilling real prompts of this length would be slow, so treat empty
        # slots as tokens. Leave room for the steps.
        room = self.width - (STEPS + 1) * (self.decoder.max_depth + 1)
        with self.target.on_mesh():
            state = dataclasses.replace(state, length=state.length + max(min(self.width // 2, room) - 2, 0))
            stats = self.zero_stats(rows, log_probs=log_probs)
            args = (self.params, state, stats, 1, 1)
            advance = program(refill.advance, self.decoder, *args)
            # Exclude the first step, in which a draft model also processes the tokens that are missing from its cache.
            state, stats, _ = jax.block_until_ready(advance(*args))
            start_time = time.perf_counter()
            num_steps = jax.block_until_ready(advance(self.params, state, stats, 1, STEPS))[2]
            seconds = time.perf_counter() - start_time
        return seconds / max(int(np.max(hosts.fetch(num_steps))), 1)

    def start(self, entries: Sequence[int | None]) -> types.DecodeState:
        """Prefill some requests, and return the decoding state. `entries` is as for `prompts`."""
        prompts = decode.ready(self.decoder, self.prompts(entries))
        with self.target.on_mesh():
            return program(decode.start_ready, self.decoder, self.params, prompts)(self.params, prompts)


_FILL = Request(prompt_tokens=(0,), max_new_tokens=0)


AnyRule = Rule | LoadedRule
"""The types of rule that `mars_jax.generate` accepts: without weights, or loaded with them."""


def loaded_rule(verify: AnyRule | None) -> LoadedRule:
    """Convert a rule to a `LoadedRule`. None stands for `exact`.

    Raises:
      MarsError: `verify` is not a rule.
    """
    if verify is None:
        verify = exact()
    if not isinstance(verify, LoadedRule):
        verify = LoadedRule(verify)
    structure(verify.rule)
    return verify


def prepared(
    target: Pretrained,
    drafter: drafters.AnyDrafter,
    requests: Sequence[Request],
    *,
    verify: AnyRule | None = None,
) -> Prepared:
    """Check requests, and return them with a decoder for the target and drafter, and its params.

    The size of the token buffer is rounded up to a bucket, so that requests of similar lengths share one compilation.
    Most other settings of requests are array values, which do not affect compilation. Each numeric setting of the rule
    is one value for all requests, or one per request.

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
    max_length = max(len(request.prompt_tokens) + request.max_new_tokens for request in requests)
    guides = guides_of(target, requests)
    tables = guides and guides.tables
    if tables is not None and target.mesh is not None:
        # Replicate the tables on every device of the mesh.
        replicated_sharding = jax.sharding.NamedSharding(target.mesh, jax.sharding.PartitionSpec())
        tables = hosts.put(tables, jax.tree.map(lambda _: replicated_sharding, tables))
    # A drafter with a smaller vocabulary needs bit masks over its own token ids.
    if drafter.draft_ids is not None and tables is not None and tables.constraint is not None:
        tables = dataclasses.replace(tables, constraint=narrowed(tables.constraint, drafter.draft_ids))
    params = types.Params(target=target.params, draft=drafter.params, verify=rule.params, guides=tables)
    return Prepared(
        target=target,
        requests=requests,
        decoder=drafter.decoder(target.model, rule.rule),
        params=params,
        drafter=drafter,
        loaded_rule=rule,
        width=bucket(min(max_length, target.config.max_positions)),
        guides=guides,
    )


def of_mesh(target: Pretrained, rows: int) -> int:
    """Round a number of rows up to a multiple of the size of the target's mesh axis `data`."""
    return rows + -rows % size_of("data", target.mesh)


def _check_rule(loaded: LoadedRule, drafter: Drafter, requests: Sequence[Request]) -> None:
    """Raise MarsError if the rule cannot run with the drafter, or if an option of a request does not apply to it."""
    rule = loaded.rule
    with user_errors(rule):
        if "weights" in rule.needs and not jax.tree.leaves(loaded.params):
            raise MarsError(
                f"the rule {rule.name} needs weights: pass mars_jax.verify.LoadedRule(rule, weights), or the "
                "result of verify.load."
            )
        if rule.lossless and not drafter.trusts and any(request.strict for request in requests):
            raise MarsError(f"strict does not apply to the lossless rule {rule.name}: leave it out.")
        if "long" in rule.needs and any(request.draft_stop < math.inf for request in requests):
            raise MarsError(
                f"draft_stop does not apply to the rule {rule.name}, whose drafts must be long enough: leave it out."
            )
        rule.check_drafter(drafter)


def check_relaxes(verify: AnyRule | None, requests: Sequence[Request]) -> None:
    """Raise MarsError if requests restrict where the rule may relax verification, but the rule is lossless.

    Call this only for users' requests, because a benchmark may decode the same requests with a lossless and a lossy
    rule.
    """
    rule = loaded_rule(verify).rule
    if not rule.lossless:
        return
    for request in requests:
        relax_options = {
            "relax_in": request.relax_in,
            "strict_in": request.strict_in,
            "relax_constrained": request.constraint and request.constraint.relax,
        }
        for option in filter(relax_options.get, relax_options):
            raise MarsError(
                f"{option} does not apply to the rule {rule.name}, which relaxes nothing: leave it out."
            )


def bucket(length: int) -> int:
    """Round a length up to one of the sizes 64, 96, 128, 192, 256, 384, ...

    >>> [bucket(n) for n in (1, 65, 128, 200)]
    [64, 96, 128, 256]
    """
    # Each size is a power of two or 1.5 times a power of two, so for lengths above 64, padding makes up less than a
    # third of the size.
    sizes = (size for power in itertools.count(6) for size in (2**power, 3 * 2 ** (power - 1)))
    return next(size for size in sizes if size >= length)
