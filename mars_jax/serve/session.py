"""A pair of models and its rule: the engine behind every way to generate.

B batch, T token buffer, M stop tokens. Oracle: `transformers` generate with the same checkpoint
(tests/serve/test_generate.py).
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Iterator, Sequence
from typing import Any

from mars_jax import drafters
from mars_jax.core.rule import LoadedRule, structure, take_rows
from mars_jax.hub.pretrained import Pretrained
from mars_jax.serve.memory import default_rows
from mars_jax.serve.prepare import AnyRule, loaded_rule, prepared
from mars_jax.serve.prepared import Prepared
from mars_jax.serve.queue import Finished, Queue, Said, longest_first
from mars_jax.serve.requests import Completion, Request, Result, total
from mars_jax.utils import activity
from mars_jax.utils.errors import MarsError, check_count, check_switch, warn
from mars_jax.utils.limits import BATCH_ROWS
from mars_jax.verify import exact


@dataclasses.dataclass(frozen=True, kw_only=True)
class Session:
    """A target, its drafter and the rule."""

    target: Pretrained
    drafter: drafters.LoadedDrafter
    # Each number is one value for all requests, or one per request.
    rule: LoadedRule = dataclasses.field(default_factory=lambda: LoadedRule(exact()))
    batch_size: int = 1  # rows side by side; 0: as many as fit in memory
    log_probs: bool = False  # record log-probabilities of each token
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
        """Return a session of the same pair with another rule."""
        return dataclasses.replace(self, rule=rule)

    @functools.cached_property
    def autoregressive(self) -> Session:
        """A session of the target without a draft."""
        drafter = drafters.load("none", self.target)
        return dataclasses.replace(self, drafter=drafter, rule=LoadedRule(exact()))

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

    def queue(
        self, requests: Sequence[Request], *, order: Sequence[int] | None = None, telling: bool = False
    ) -> Queue:
        """Return an iterator that decodes the requests through `batch_size` rows, each as soon as a row is free.

        Args:
          requests: any number of them.
          order: indices of the requests to decode, first to begin first; default: all, in their order.
          telling: whether `Queue.events` also yields new tokens.

        Raises:
          MarsError: a request does not fit the target, the drafter or the rule.
        """
        prepared_requests = self.prepared(requests)
        rows = self.batch_size or default_rows(prepared_requests)
        return Queue(prepared_requests, rows, order=order, log_probs=self.log_probs, telling=telling)

    @activity.doing("compiling")
    def warm_up(self, requests: Sequence[Request]) -> None:
        """Compile the programs of `decode` by decoding a token, so that its time excludes compilation."""
        self.queue(requests, order=longest_first(requests)).warm_up()

    def decode(self, requests: Sequence[Request]) -> Result:
        """Decode all the requests, those of the most new tokens first.

        Raises:
          MarsError: as `queue`.
        """
        began = time.perf_counter()
        queue = self.queue(requests, order=longest_first(requests))
        by_index = dict(queue.finished(early=False))
        completions = [by_index[i] for i in range(len(requests))]
        return Result(
            completions=completions,
            metrics=total(completions),
            seconds=time.perf_counter() - began,
            forwards=queue.forwards,
        )

    def stream(self, requests: Sequence[Request]) -> Iterator[Said | Finished]:
        """Decode the requests as `queue` does, and yield the tokens of each row as they are decided."""
        return self.queue(requests, telling=True).events()


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
