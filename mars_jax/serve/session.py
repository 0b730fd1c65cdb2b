"""A pair of models with its rule and a record of its compilations: the engine behind every way to generate.

B batch, T token buffer, M stop tokens. Oracle: `transformers` generate with the same checkpoint
(tests/serve/test_generate.py).
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import jax

from mars_jax import drafters
from mars_jax.core import activity, decode
from mars_jax.core.decoder import Decoder
from mars_jax.core.drafter import Drafter
from mars_jax.core.errors import MarsError, check_count, check_switch, warn
from mars_jax.core.limits import BATCH_ROWS
from mars_jax.core.metrics import DecodeStats, zero_stats
from mars_jax.core.rule import LoadedRule, structure, take_rows
from mars_jax.core.types import DecodeState, Params, StepInfo
from mars_jax.hub.pretrained import Pretrained
from mars_jax.placement.hosts import fetch
from mars_jax.serve.events import events, look
from mars_jax.serve.guides import guides_of
from mars_jax.serve.memory import default_rows
from mars_jax.serve.prepare import AnyRule, buffer_width, loaded_rule, of_mesh, prepare, prepared
from mars_jax.serve.prepared import Compile, Prepared, draws
from mars_jax.serve.queue import Finished, Queue, compile_queue, longest_first, shares_of
from mars_jax.serve.requests import Completion, Request, Result, StreamEvent, total
from mars_jax.serve.text import complete
from mars_jax.verify import exact

Rule = TypeVar("Rule", bound=AnyRule | None)


class Shape(NamedTuple):
    """Key of a compilation. Batches with equal keys, of sessions over one pair, share it."""

    drafter: Drafter
    rule: object  # its structure; rules that differ only in numbers share a compilation
    width: int  # of the token buffer
    rows: int
    draws: bool  # whether any request is not greedy
    edits: bool  # whether any request changes the target's logits
    guides: object  # shapes of the tables of constraints and spans
    log_probs: bool
    loop: str


class Batch(NamedTuple):
    """Requests that decode side by side, and a session whose rule has their values."""

    session: Session
    requests: list[Request]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Session:
    """A target, its drafter and the rule."""

    target: Pretrained
    drafter: drafters.LoadedDrafter
    # Each number is one value for all requests, or one per request, which `batches` distributes.
    rule: LoadedRule = dataclasses.field(default_factory=lambda: LoadedRule(exact()))
    batch_size: int = 1  # rows side by side; 0: as many as fit in memory
    log_probs: bool = False  # record log-probabilities of each token
    _compiled: set[Shape] = dataclasses.field(default_factory=set, repr=False)
    _warned: set[str] = dataclasses.field(default_factory=set, repr=False)  # names of drafters

    @classmethod
    def of(
        cls,
        target: Pretrained,
        drafter: drafters.AnyDrafter = "none",
        verify: AnyRule | None = None,
        *,
        batch_size: int | None = 1,
        log_probs: bool = False,
    ) -> Session:
        """Make a session from the arguments of `mars_jax.generate`.

        Args:
          target, drafter, verify, batch_size, log_probs: as for `mars_jax.generate`.

        Raises:
          MarsError: as `drafters.load`, or batch_size is out of range.
        """
        if batch_size is not None:
            check_count("batch_size", batch_size, most=BATCH_ROWS)
        check_switch("log_probs", log_probs)
        rule = loaded_rule(verify)
        structure(rule.rule)  # raises an error for anything but a rule
        return cls(
            target=target,
            drafter=drafters.loaded(drafter, target),
            rule=rule,
            batch_size=batch_size or 0,
            log_probs=log_probs,
        )

    @property
    def rule_name(self) -> str:
        """Name of the rule, for reports."""
        return self.rule.rule.name

    def using(self, rule: LoadedRule) -> Session:
        """Return a session of the same pair with another rule. The two share their compilations."""
        return dataclasses.replace(self, rule=rule)

    @functools.cached_property
    def autoregressive(self) -> Session:
        """A session of the target without a draft."""
        drafter = drafters.load("none", self.target)
        return dataclasses.replace(self, drafter=drafter, rule=LoadedRule(exact()))

    def batches(self, requests: Sequence[Request]) -> Iterator[Batch]:
        """Yield all the requests, `batch_size` at a time, with the rule's values for them."""
        if self.batch_size < 1:
            raise MarsError(f"batch_size is {self.batch_size}: give at least 1.")
        for first in range(0, len(requests), self.batch_size):
            group = list(requests[first : first + self.batch_size])
            rule = rule_of(self.rule, range(first, first + len(group)), len(requests))
            yield Batch(self.using(rule), group)

    def prepare(
        self, requests: Sequence[Request], *, loop: Compile | None = None, streamed: bool = False
    ) -> tuple[Decoder, Params, DecodeState]:
        """Return one batch as the decoder's arrays, for a custom loop; `loop` and `streamed` as for `prepare`."""
        prepared_batch = prepare(
            self.target,
            self.drafter,
            requests,
            verify=self.rule,
            rows=self.batch_size,
            log_probs=self.log_probs,
            loop=loop,
            streamed=streamed,
        )
        self._check_length(requests)
        return prepared_batch

    def _check_length(self, requests: Sequence[Request]) -> None:
        """Warn, once per session, if a text may become longer than the drafter was trained for."""
        longest = max(len(request.prompt_tokens) + request.max_new_tokens for request in requests)
        longest, trained = min(longest, self.target.config.max_positions), self.drafter.max_positions
        name = self.drafter.drafter.name
        if trained is not None and longest > trained and name not in self._warned:
            self._warned.add(name)
            warn(
                f"the drafter {name} was trained for texts of {trained} tokens (max_position_embeddings), and a prompt "
                f"with its completion may reach {longest}: fewer drafts may be accepted after {trained}."
            )

    def prepared(self, requests: Sequence[Request]) -> Prepared:
        """Return requests that fit the pair, with their decoder; see `serve.prepare.prepared`."""
        prepared_requests = prepared(self.target, self.drafter, requests, verify=self.rule)
        self._check_length(requests)
        return prepared_requests

    def _steps(
        self, decoder: Decoder, params: Params, state: DecodeState, *, ahead: int
    ) -> Iterator[tuple[DecodeState, StepInfo]]:
        """Return the steps of a batch; the state is donated. The caller must enter the target's mesh."""
        if self.drafter.steps is not None:
            return self.drafter.steps(decoder, params, state)
        return decode.stream(decoder, params, state, ahead=ahead)

    def _stats(self, decoder: Decoder, state: DecodeState) -> DecodeStats:
        batch, buffer = state.tokens.shape
        return zero_stats(batch, decoder.max_depth, record=buffer if self.log_probs else None)

    def compile(self, requests: Sequence[Request], *, stream: bool = False) -> None:
        """Compile the programs of `run`, or of `stream`, for one batch, unless they are compiled already.

        Raises:
          MarsError: as `prepare`.
        """
        width = buffer_width(self.target, requests)
        shape = self._shape(requests, width, "stream" if stream else "run")
        if shape not in self._compiled:
            self._compile(requests, stream)
            self._compiled.add(shape)

    @activity.doing("compiling")
    def _compile(self, requests: Sequence[Request], stream: bool) -> None:
        """Compile a chunk of prefill and one step, in the shapes of the requests.

        Run both, because some backends finish compiling only at the first run.
        """
        stand_ins = [request.stand_in() for request in requests]

        def loop(*args: Any) -> object:
            if stream:
                return decode.jitted_step.lower(*args).compile()
            return decode.run.lower(*args, record=self.log_probs).compile()

        own_steps = self.drafter.steps is not None
        decoder, params, state = self.prepare(stand_ins, loop=None if own_steps else loop, streamed=stream)
        one_step = dataclasses.replace(state.controls, limit=state.length + 1)
        state = dataclasses.replace(state, controls=one_step)
        with self.target.on_mesh():
            if stream or own_steps:
                stats = self._stats(decoder, state)
                for next_state, info in self._steps(decoder, params, state, ahead=0):
                    final = (next_state.done, next_state.tokens, next_state.length, next_state.failed)
                    jax.block_until_ready(look(stats, info, final))
            else:
                jax.block_until_ready(decode.run(decoder, params, state, record=self.log_probs))

    def _shape(self, requests: Sequence[Request], width: int, loop: str) -> Shape:
        edits = any(request.edits for request in requests)
        guides = guides_of(self.target, requests)
        tables = (guides.constraint is not None, guides.span is not None, guides.shapes)
        return Shape(
            drafter=self.drafter.drafter,
            rule=structure(self.rule.rule),
            width=width,
            rows=self.batch_size,
            draws=draws(requests),
            edits=edits,
            guides=tables,
            log_probs=self.log_probs,
            loop=loop,
        )

    def decode(self, requests: Sequence[Request]) -> Result:
        """Decode all the requests: in one device loop if they fit the rows, else through rows that refill.

        Rows that refill begin with the requests of the most new tokens.

        Raises:
          MarsError: as `prepare`.
        """
        began = time.perf_counter()
        if self.drafter.steps is not None:
            completed_batches = [
                batch.session._run(batch.requests) for batch in self._sized(requests).batches(requests)
            ]
            completions = [completion for batch in completed_batches for completion in batch]
            forwards = sum(
                max(completion.metrics.steps for completion in batch) for batch in completed_batches
            )
        else:
            prepared_requests = self.prepared(requests)
            rows = of_mesh(self.target, self.batch_size or default_rows(prepared_requests))
            order = longest_first(requests)
            shares = shares_of(prepared_requests, order)
            needs_no_queue = not shares and not any(request.stop_strings for request in requests)
            if len(requests) <= rows and needs_no_queue:
                completions = dataclasses.replace(self, batch_size=rows)._run(requests)
                forwards = max(completion.metrics.steps for completion in completions)
            else:
                queue = Queue(prepared_requests, rows, order=order, log_probs=self.log_probs, shared=shares)
                by_number = dict(queue)
                completions, forwards = [by_number[i] for i in range(len(requests))], queue.forwards
        return Result(
            completions=completions,
            metrics=total(completions),
            seconds=time.perf_counter() - began,
            forwards=forwards,
        )

    def refilled(self, requests: Sequence[Request], *, telling: bool = False) -> Queue:
        """Decode the requests through rows that refill, the most new tokens first, without compiling at the call.

        Args:
          requests: any number of them.
          telling: whether `Queue.events` also yields new tokens.

        Raises:
          MarsError: as `prepare`, or the drafter makes its own steps, which do not refill rows.
        """
        if self.drafter.steps is not None:
            raise MarsError(
                f"rows do not refill with the drafter '{self.drafter.drafter.name}', which works on a device of its "
                "own: use generate, or Session.stream."
            )
        prepared_requests = self.prepared(requests)
        rows = self.batch_size or default_rows(prepared_requests)
        return Queue(
            prepared_requests, rows, order=longest_first(requests), log_probs=self.log_probs, telling=telling
        )

    def queue(self, requests: Sequence[Request], *, order: Sequence[int] | None = None) -> Iterable[Finished]:
        """Decode the requests through `batch_size` rows, and yield each completion as it ends; see `Queue`.

        Compilation happens at the call.

        Args:
          requests: any number of them.
          order: indices of the requests to decode, first to begin first; default: all, in their order.
        """
        if self.drafter.steps is not None:
            return self._in_batches(requests, range(len(requests)) if order is None else order)
        prepared_requests = self.prepared(requests)
        rows = self.batch_size or default_rows(prepared_requests)
        order = range(len(requests)) if order is None else order
        shares = shares_of(prepared_requests, order)
        kind = shares.name if shares else "refilled" if len(order) > rows else "filled"
        shape = self._shape(requests, prepared_requests.width, f"queue, {kind}")
        if shape not in self._compiled:
            compile_queue(prepared_requests, rows, shares, log_probs=self.log_probs)
            self._compiled.add(shape)
        return Queue(prepared_requests, rows, order=order, log_probs=self.log_probs, shared=shares)

    def _sized(self, requests: Sequence[Request]) -> Session:
        return self if self.batch_size else dataclasses.replace(self, batch_size=len(requests))

    def _in_batches(self, requests: Sequence[Request], order: Sequence[int]) -> Iterable[Finished]:
        rule = rule_of(self.rule, order, len(requests))
        ordered = [requests[i] for i in order]
        batches = list(self.using(rule)._sized(ordered).batches(ordered))
        for batch in batches:
            batch.session.compile(batch.requests)

        def completions() -> Iterator[Finished]:
            numbers = iter(order)
            for batch in batches:
                for completion in batch.session.run(batch.requests):
                    yield Finished(next(numbers), completion)

        return completions()

    def run(self, requests: Sequence[Request]) -> list[Completion]:
        """Decode one batch of at most `batch_size` requests in one device loop; its time excludes compilation.

        A drafter that makes its own steps runs in a loop of the host.

        Raises:
          MarsError: there are more requests than rows, or as `prepare`.
        """
        if self.batch_size and len(requests) > self.batch_size:
            raise MarsError(
                f"there are {len(requests)} requests for {self.batch_size} rows: give them to `decode`, or raise "
                "batch_size."
            )
        self.compile(requests)
        return self._run(requests)

    def _run(self, requests: Sequence[Request]) -> list[Completion]:
        if self.drafter.steps is not None:
            by_row = {e.row: e.completion for e in self._events(requests) if e.completion is not None}
            return [by_row[row] for row in range(len(requests))]
        began = time.perf_counter()
        decoder, params, state = self.prepare(requests)
        with self.target.on_mesh():
            state, stats = jax.block_until_ready(decode.run(decoder, params, state, record=self.log_probs))
        seconds = time.perf_counter() - began
        stats, final = fetch((stats, (state.tokens, state.length, state.failed)))
        return [
            complete(self.target, request, row, final, stats, seconds) for row, request in enumerate(requests)
        ]

    def stream(self, requests: Sequence[Request]) -> Iterator[StreamEvent]:
        """Decode one batch step by step, and yield the tokens of each row as they are decided.

        Compilation happens at the call, and decoding as the events are consumed.
        """
        self.compile(requests, stream=True)
        return self._events(requests)

    def _events(self, requests: Sequence[Request]) -> Iterator[StreamEvent]:
        began = time.perf_counter()
        decoder, params, state = self.prepare(requests, streamed=True)
        # A drafter's own steps wait for every verdict, so running ahead gains nothing.
        ahead = 0 if self.drafter.steps is not None else decode.look_ahead(state)
        finished, stats = fetch(state.done), self._stats(decoder, state)
        steps = self._steps(decoder, params, state, ahead=ahead)
        yield from events(self.target, requests, steps, stats, finished, ahead=ahead, began=began)


def rule_of(verify: Any, rows: Sequence[int], count: int) -> Any:
    """Return the rule with the values of the requests `rows` out of `count` requests."""
    if isinstance(verify, LoadedRule):
        return verify._replace(rule=take_rows(verify.rule, rows, count))
    return None if verify is None else take_rows(verify, rows, count)


def check_finite(target: Pretrained, completions: Sequence[Completion]) -> None:
    """Raise MarsError if prompts failed, for callers that treat this as an error."""
    failed = sum(completion.finish_reason == "failed" for completion in completions)
    if failed:
        raise MarsError(
            f"the logits of '{target.name}' are not finite for {failed} of {len(completions)} prompts: its weights "
            "hold NaN, or overflow in bfloat16; load an intact checkpoint, or one in float32."
        )
