"""A pair of models with its rule, and what has been compiled for them: batches whose time holds no compilation."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from mars_jax import drafters
from mars_jax.core.rule_values import name_of, structure
from mars_jax.core.types import Decoder, DecodeState, Drafter, LoadedRule, Params
from mars_jax.hub.pretrained import Pretrained
from mars_jax.serve.generation import compile_batch, generate_stream, groups, rule_of, run_batch
from mars_jax.serve.guides import guides_of
from mars_jax.serve.prepare import buffer_width, draws, prepare, prepared
from mars_jax.serve.queue import Finished, Queue, compile_queue, shares_prompts
from mars_jax.serve.requests import Completion, Request, StreamEvent
from mars_jax.verify import exact


class Shape(NamedTuple):
    """What two batches of sessions over one pair can differ in and need two compilations for."""

    drafter: Drafter
    rule: object  # its structure: rules that differ in numbers share what is compiled
    width: int  # of the token buffer
    rows: int
    draws: bool  # whether any request is not greedy
    edits: bool  # whether any request changes the target's logits
    guides: object  # shapes of the tables of constraints and spans
    log_probs: bool
    loop: str


class Batch(NamedTuple):
    """Requests that decode side by side, and the session whose rule has their numbers."""

    session: Session
    requests: list[Request]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Session:
    """A target, the drafter that drafts for it, and the rule that both decode by."""

    target: Pretrained
    drafter: drafters.LoadedDrafter
    # Its numbers are one for all requests, or one for each; then `batches` deals them out.
    rule: LoadedRule = dataclasses.field(default_factory=lambda: LoadedRule(exact()))
    batch_size: int = 1
    log_probs: bool = False  # keep what the target thinks of each token
    # A device or a mesh on which the drafter works while the target verifies; see `serve.elsewhere`.
    draft_device: Any = None
    _compiled: set[Shape] = dataclasses.field(default_factory=set, repr=False)

    @property
    def rule_name(self) -> str:
        """For reports."""
        return name_of(self.rule.rule)

    def using(self, rule: LoadedRule) -> Session:
        """The same pair with another rule; what is compiled for one of the two is for both."""
        return dataclasses.replace(self, rule=rule)

    @functools.cached_property
    def autoregressive(self) -> Session:
        """The target without a draft."""
        drafter = drafters.load("none", self.target)
        return dataclasses.replace(self, drafter=drafter, rule=LoadedRule(exact()), draft_device=None)

    def batches(self, requests: Sequence[Request]) -> Iterator[Batch]:
        """All the requests, `batch_size` at a time."""
        for group, rule in groups(requests, self.rule, self.batch_size):
            yield Batch(self.using(rule), group)

    def prepare(self, requests: Sequence[Request]) -> tuple[Decoder, Params, DecodeState]:
        """One batch as the arrays that the decoder takes, for a loop of one's own over `decode.stream`."""
        return prepare(self.target, self.drafter, requests, verify=self.rule, rows=self.batch_size)

    def compile(self, requests: Sequence[Request], *, stream: bool = False) -> None:
        """Compile what `run`, or `stream`, of one batch will run, unless it is compiled already.

        Raises:
          MarsError: as `prepare`.
        """
        width = buffer_width(self.target, requests)
        shape = self._shape(requests, width, "stream" if stream else "run")
        if shape not in self._compiled:
            compile_batch(
                self.target,
                self.drafter,
                requests,
                verify=self.rule,
                rows=self.batch_size,
                stream=stream,
                log_probs=self.log_probs,
                draft_device=self.draft_device,
            )
            self._compiled.add(shape)

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

    def queue(self, requests: Sequence[Request], *, order: Sequence[int] | None = None) -> Iterable[Finished]:
        """The requests through `batch_size` rows, each as soon as it has ended; see `Queue`. It compiles when called.

        Args:
          requests: any number of them.
          order: in which they begin, by their numbers; those that are not among them are left out. Default: as they
            are.
        """
        if self.draft_device is not None:
            return self._in_batches(requests, range(len(requests)) if order is None else order)
        made = prepared(self.target, self.drafter, requests, verify=self.rule)
        waits = len(requests if order is None else order) > self.batch_size
        kind = "shared" if shares_prompts(requests) else "refilled" if waits else "filled"
        shape = self._shape(requests, made.width, f"queue, {kind}")
        if shape not in self._compiled:
            compile_queue(made, self.batch_size, log_probs=self.log_probs)
            self._compiled.add(shape)
        return Queue(made, self.batch_size, order=order, log_probs=self.log_probs)

    def _in_batches(self, requests: Sequence[Request], order: Sequence[int]) -> Iterable[Finished]:
        rule = rule_of(self.rule, order, len(requests))
        batches = list(self.using(rule).batches([requests[i] for i in order]))
        for batch in batches:
            batch.session.compile(batch.requests)

        def completions() -> Iterator[Finished]:
            numbers = iter(order)
            for batch in batches:
                for completion in batch.session.run(batch.requests):
                    yield Finished(next(numbers), completion)

        return completions()

    def run(self, requests: Sequence[Request]) -> list[Completion]:
        """Decode one batch in one device loop, at most `batch_size` requests; its time holds no compilation.

        With a `draft_device` in a loop of the host's.
        """
        self.compile(requests)
        if self.draft_device is not None:
            done = {e.row: e.completion for e in self.stream(requests) if e.completion is not None}
            return [done[row] for row in range(len(requests))]
        return run_batch(
            self.target,
            self.drafter,
            requests,
            verify=self.rule,
            rows=self.batch_size,
            log_probs=self.log_probs,
        )

    def stream(self, requests: Sequence[Request]) -> Iterator[StreamEvent]:
        """Decode one batch step by step. It compiles when called, and decodes as the events are asked for."""
        # Elsewhere there is no other loop.
        self.compile(requests, stream=self.draft_device is None)
        return generate_stream(
            self.target,
            self.drafter,
            requests,
            verify=self.rule,
            rows=self.batch_size,
            log_probs=self.log_probs and self.draft_device is not None,
            draft_device=self.draft_device,
        )
