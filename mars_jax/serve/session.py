"""A pair of models with its rule, and what has been compiled for them: batches whose time holds no compilation."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from mars_jax import drafters
from mars_jax.core.rules import name_of, structure
from mars_jax.core.types import Decoder, DecodeState, Drafter, LoadedRule, Params
from mars_jax.pretrained import Pretrained
from mars_jax.serve.generate import compile_batch, generate_stream, groups, run_batch
from mars_jax.serve.prepare import buffer_width, prepare
from mars_jax.serve.requests import Completion, Request, StreamEvent
from mars_jax.verify import exact


class Shape(NamedTuple):
    """What two batches of sessions over one pair can differ in and need two compilations for."""

    drafter: Drafter
    rule: object  # its structure: rules that differ in numbers share what is compiled
    width: int  # of the token buffer
    stream: bool


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
        return dataclasses.replace(self, drafter=drafter, rule=LoadedRule(exact()))

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
        shape = Shape(self.drafter.drafter, structure(self.rule.rule), width, stream)
        if shape not in self._compiled:
            compile_batch(
                self.target,
                self.drafter,
                requests,
                verify=self.rule,
                rows=self.batch_size,
                stream=stream,
                log_probs=self.log_probs,
            )
            self._compiled.add(shape)

    def run(self, requests: Sequence[Request]) -> list[Completion]:
        """Decode one batch in one device loop, at most `batch_size` requests; its time holds no compilation."""
        self.compile(requests)
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
        self.compile(requests, stream=True)
        return generate_stream(self.target, self.drafter, requests, verify=self.rule, rows=self.batch_size)
