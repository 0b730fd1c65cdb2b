"""Sessions, which combine a target with a drafter and a rule. All functions that generate text use them.

B batch, T token buffer, M stop tokens. Tested against `transformers` generate with the same checkpoint
(tests/serve/test_generate.py).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax import Array
from jax.sharding import Sharding

from mars_jax import drafters
from mars_jax.core.axes import state_shardings
from mars_jax.core.decoder import Decoder
from mars_jax.core.prefill import WIDE_CHUNK
from mars_jax.core.rule import LoadedRule
from mars_jax.core.types import DecodeState, Params
from mars_jax.hub.pretrained import Pretrained
from mars_jax.serve.prepare import AnyRule, Prepared, loaded_rule, of_mesh, prepared
from mars_jax.serve.queue import Finished, Queue, Said, longest_first
from mars_jax.serve.requests import Completion, Request, Result, total_metrics
from mars_jax.serve.sizes import with_costs
from mars_jax.utils import activity
from mars_jax.utils.errors import MarsError, check_count, check_switch, warn
from mars_jax.utils.limits import BATCH_ROWS, TOP_LOG_PROBS
from mars_jax.verify import exact

MOST, MOST_ON_CPU = 128, 16
"""Maximum number of rows in a batch. A few rows saturate a CPU: beyond them, the time of a step is proportional to the
number of rows."""
SHARE, SHARE_OF_HOST = 0.85, 0.25
"""Fractions of a device's and of a host's memory to use for weights, rows and the arrays of a step. The host's fraction
is smaller because other programs share its memory."""


def default_rows(prepared: Prepared) -> int:
    """Return the default number of rows to decode in parallel: as many as fit in memory, at most one per request.

    The number depends on the size of the memory, not on how much of it is free. If the size is unknown, use the
    maximum, `MOST` or `MOST_ON_CPU`.
    """
    target = prepared.target
    param_leaves = jax.tree.leaves((prepared.params.target, prepared.params.draft))
    weights = [x for x in param_leaves if isinstance(x, jax.Array)]
    weight_devices = (device for x in weights for device in x.sharding.addressable_devices)
    device = next(weight_devices, jax.local_devices()[0])
    max_rows = MOST_ON_CPU if device.platform == "cpu" else MOST
    usable_bytes = _bytes_of(device)
    if usable_bytes is not None:
        weight_bytes = sum(_device_bytes(x, x.sharding) for x in weights)
        max_rows = min(max_rows, int((usable_bytes - weight_bytes) // row_bytes(prepared)))
    return min(max(max_rows, 1) * of_mesh(target, 1), len(prepared.requests))


def row_bytes(prepared: Prepared) -> int:
    """Return the number of bytes that a row occupies on each device that stores it.

    This is the size of the row's state plus that of the larger of two buffers: four copies of a step's logits, or the
    activations of one layer for a prompt chunk.
    """
    target = prepared.target
    prompts = prepared.prompts([None] * of_mesh(target, 1))
    with target.on_mesh():
        state = jax.eval_shape(prepared.decoder.init, prepared.params, prompts)
    leaves = jax.tree.leaves(state)
    shardings = [None] * len(leaves)
    if target.mesh is not None:
        shardings = jax.tree.leaves(state_shardings(state, target.mesh))
    num_nodes, vocab_size = prepared.drafter.drafter.num_nodes, target.model.vocab_size
    config, model = target.config, target.model
    # The config of a user-defined model may lack these fields.
    activation_width = 2 * getattr(config, "intermediate_size", 0) + 4 * getattr(config, "hidden_size", 0)
    # Activations of one layer in float32: `activation_width` numbers for each token of a prompt chunk.
    prefill_bytes = min(model.prefill_chunk or WIDE_CHUNK, state.tokens.shape[1]) * activation_width * 4
    return max(4 * num_nodes * vocab_size * 4, prefill_bytes) + sum(map(_device_bytes, leaves, shardings))


def _device_bytes(x: Array | jax.ShapeDtypeStruct, sharding: Sharding | None) -> int:
    """Return the size in bytes of an array or, if it is sharded, of the shard on one device."""
    shape = x.shape if sharding is None else sharding.shard_shape(x.shape)
    return math.prod(shape) * x.dtype.itemsize


def _bytes_of(device: Any) -> float | None:
    """Return how many bytes of a device's memory may be used; None if the memory size is unknown."""
    if device.platform == "cpu":
        try:
            return SHARE_OF_HOST * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        except (ValueError, OSError, AttributeError):
            return None
    memory_bytes = (device.memory_stats() or {}).get("bytes_limit")
    return memory_bytes and SHARE * memory_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Session:
    """A target with its drafter and verification rule, for decoding requests."""

    target: Pretrained
    drafter: drafters.LoadedDrafter
    # Each numeric setting of the rule has one value for all requests, or one value per request.
    loaded_rule: LoadedRule = dataclasses.field(default_factory=lambda: LoadedRule(exact()))
    batch_size: int = 1  # number of rows to decode in parallel; 0: as many as fit in memory
    log_probs: bool = False  # whether to record the log-probabilities of each token
    top_log_probs: int = 0  # number of the target's most probable tokens to record as well
    # Names of drafters for which a warning was issued.
    _warned: set[str] = dataclasses.field(default_factory=set, repr=False)

    @classmethod
    def of(
        cls,
        target: Pretrained,
        drafter: drafters.AnyDrafter = "none",
        verify: AnyRule | None = None,
        *,
        batch_size: int | None = 1,
        log_probs: bool = False,
        top_log_probs: int = 0,
    ) -> Session:
        """Create a session from the arguments of `mars_jax.generate`.

        Args:
          target, drafter, verify, batch_size, log_probs, top_log_probs: as for `mars_jax.generate`.

        Raises:
          MarsError: batch_size or top_log_probs is out of range; see also `drafters.load`.
        """
        if batch_size is not None:
            check_count("batch_size", batch_size, most=BATCH_ROWS)
        check_switch("log_probs", log_probs)
        check_count("top_log_probs", top_log_probs, 0, TOP_LOG_PROBS)
        rule = loaded_rule(verify)  # check the rule before loading a drafter
        return cls(
            target=target,
            drafter=drafters.loaded(drafter, target),
            loaded_rule=rule,
            batch_size=batch_size or 0,
            log_probs=log_probs or top_log_probs > 0,
            top_log_probs=top_log_probs,
        )

    @property
    def rule_name(self) -> str:
        """Name of the rule, for reports."""
        return self.loaded_rule.rule.name

    def using(self, rule: LoadedRule) -> Session:
        """Return a session with the same target and drafter but a different rule."""
        return dataclasses.replace(self, loaded_rule=rule)

    @functools.cached_property
    def autoregressive(self) -> Session:
        """A session with the same target that decodes without drafting."""
        drafter = drafters.load("none", self.target)
        return dataclasses.replace(self, drafter=drafter, loaded_rule=LoadedRule(exact()))

    def _check_length(self, requests: Sequence[Request]) -> None:
        """Warn once if a sequence may become longer than the context for which the drafter was trained."""
        max_len = max(len(request.prompt_tokens) + request.max_new_tokens for request in requests)
        max_len, trained_max = min(max_len, self.target.config.max_positions), self.drafter.max_positions
        # Sessions that `using` returns share `_warned`, so each drafter causes at most one warning, however many rules
        # are used.
        drafter_name = self.drafter.drafter.name
        if trained_max is not None and max_len > trained_max and drafter_name not in self._warned:
            self._warned.add(drafter_name)
            warn(
                f"the drafter {drafter_name} was trained for texts of {trained_max} tokens "
                f"(max_position_embeddings), and a prompt with its completion may reach {max_len}: fewer drafts may be "
                f"accepted after {trained_max}."
            )

    def prepared(self, requests: Sequence[Request]) -> Prepared:
        """Check requests and return them with their decoder; see `serve.prepare.prepared`."""
        prepared_requests = prepared(self.target, self.drafter, requests, verify=self.loaded_rule)
        self._check_length(requests)
        # A small vocabulary may have fewer tokens than requested.
        num_top = min(self.top_log_probs, self.target.model.vocab_size)
        decoder = dataclasses.replace(prepared_requests.decoder, top_log_probs=num_top)
        return dataclasses.replace(prepared_requests, decoder=decoder)

    def queue(
        self, requests: Sequence[Request], *, order: Sequence[int] | None = None, telling: bool = False
    ) -> Queue:
        """Return an iterator that decodes requests in `batch_size` rows. A request starts as soon as a row is free.

        Args:
          requests: any number of requests to decode.
          order: indices of the requests to decode, in the order in which to start them; default: all, in the given
            order.
          telling: whether `Queue.events` also yields new tokens.

        Raises:
          MarsError: a request does not fit the target, the drafter or the rule.
        """
        prepared_requests = self.prepared(requests)
        num_rows = self.batch_size or default_rows(prepared_requests)
        return Queue(prepared_requests, num_rows, order=order, log_probs=self.log_probs, telling=telling)

    @activity.doing("compiling")
    def warm_up(self, requests: Sequence[Request]) -> None:
        """Compile the programs that `decode` uses, by decoding one token, so that later timings exclude compilation."""
        self.queue(requests, order=longest_first(requests)).warm_up()

    @activity.doing("timing a step")
    def plain_seconds(self, requests: Sequence[Request]) -> float:
        """Estimate how many seconds decoding takes without drafting, if all completions reach their length limits.

        The estimate is based on the time of a few steps, and excludes prefill.
        """
        prepared_requests = self.autoregressive.prepared(requests)
        num_rows = of_mesh(self.target, self.batch_size or default_rows(prepared_requests))
        # Measure twice, because the first measurement includes compilation.
        _, step_seconds = (
            prepared_requests.step_seconds(num_rows, log_probs=self.log_probs) for _ in range(2)
        )
        return (
            step_seconds * sum(request.max_new_tokens for request in requests) / min(num_rows, len(requests))
        )

    def decode(self, requests: Sequence[Request]) -> Result:
        """Decode all requests, in decreasing order of `max_new_tokens`.

        Raises:
          MarsError: see `queue`.
        """
        start_time = time.perf_counter()
        queue = self.queue(requests, order=longest_first(requests))
        completion_by_index = dict(queue.finished(early=False))
        completions = [completion_by_index[i] for i in range(len(requests))]
        return Result(
            completions=completions,
            metrics=total_metrics(completions),
            seconds=time.perf_counter() - start_time,
            forwards=queue.forwards,
        )

    def stream(self, requests: Sequence[Request]) -> Iterator[Said | Finished]:
        """Decode requests in `batch_size` rows, and yield new tokens and completions as they are decoded."""
        return self.queue(requests, telling=True).events()


def check_finite(target: Pretrained, completions: Sequence[Completion]) -> None:
    """Raise MarsError if any completion failed, for callers that treat this as an error."""
    num_failed = sum(completion.finish_reason == "failed" for completion in completions)
    if num_failed:
        raise MarsError(
            f"the logits of '{target.name}' are not finite for {num_failed} of {len(completions)} prompts: its weights "
            "hold NaN, or overflow in bfloat16; load an intact checkpoint, or one in float32."
        )


def prepare(
    target: Pretrained,
    drafter: drafters.AnyDrafter,
    requests: Sequence[Request],
    *,
    verify: AnyRule | None = None,
) -> tuple[Decoder, Params, DecodeState]:
    """Prefill one batch, and return the decoder, its params and the state, for use in a loop of your own.

    If the draft length is adaptive, the costs of all lengths are measured first. On a mesh, the rows are sharded over
    the axis `data`, and their number is rounded up to a multiple of its size.

    Args:
      target, drafter, requests, verify: as for `prepared`.
    """
    num_rows = of_mesh(target, len(requests))
    prepared_requests = with_costs(prepared(target, drafter, requests, verify=verify), num_rows)
    state = prepared_requests.start([*range(len(requests)), *[None] * (num_rows - len(requests))])
    return prepared_requests.decoder, prepared_requests.params, state
