"""The stream events of a step-by-step decode: the host reads one step while the device computes later ones.

B batch, T token buffer. Oracle: the same requests in one device loop (tests/serve/test_generate.py).
"""

from __future__ import annotations

import collections
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mars_jax.core.metrics import DecodeStats, accumulate
from mars_jax.core.types import DecodeState, StepInfo
from mars_jax.hub.pretrained import Pretrained
from mars_jax.placement.hosts import fetch
from mars_jax.serve.requests import Request, StreamEvent
from mars_jax.serve.text import RowText, complete, token_log_probs


def events(
    target: Pretrained,
    requests: Sequence[Request],
    steps: Iterator[tuple[DecodeState, StepInfo]],
    stats: DecodeStats,
    was_done: np.ndarray,
    *,
    ahead: int,
    began: float,
) -> Iterator[StreamEvent]:
    """Yield the tokens of each row as they are decided, and its completion with the last of them.

    Args:
      target: the target model.
      requests: of the rows; request i is in row i.
      steps: as `decode.stream` yields them.
      stats: counters at zero.
      was_done: bool[B], on the host; the rows that are done before the first step.
      ahead: maximum number of steps that the device runs ahead of the host.
      began: start time, for `Completion.seconds`.
    """
    texts = [RowText(target, request) for request in requests]
    in_flight: collections.deque[Seen] = collections.deque()
    while not was_done.all():
        # Dispatch a step to the device before reading an earlier one.
        while len(in_flight) <= ahead:
            # Enter the mesh here and not around the loop: the caller's code between two events must not run in it.
            with target.on_mesh():
                state, info = next(steps)
                snapshot = look(stats, info, (state.done, state.tokens, state.length, state.failed))
            jax.tree.map(lambda x: x.copy_to_host_async(), (snapshot.info, snapshot.done))
            stats = snapshot.stats
            in_flight.append(snapshot)
        snapshot = in_flight.popleft()
        host, finished = fetch((snapshot.info, snapshot.done))
        # Include rows that ended at a stop string, which the device does not see.
        finished = np.asarray(finished) | was_done
        ended = None  # fetched once a row ends in this step
        for row, request in enumerate(requests):
            if was_done[row]:
                continue
            tokens = host.emitted[row, : host.num_emitted[row]].tolist()
            strings = texts[row].feed_all(tokens, last=bool(finished[row]))
            log_probs = token_log_probs(host, row, 0, len(strings))
            tokens, pieces = tokens[: len(strings)], tuple(zip(log_probs.kind, strings, strict=True))
            completion = None
            if texts[row].stopped:
                finished[row] = True
            if finished[row]:
                # A row may end without a token, for example if its constraint allows no further token.
                if remaining := texts[row].end():
                    pieces += (("exact", remaining),)
                ended = ended or fetch((snapshot.stats, snapshot.final))
                seconds = time.perf_counter() - began
                completion = complete(target, request, row, ended[1], ended[0], seconds)
            yield StreamEvent(
                row, "".join(text for _, text in pieces), pieces, tuple(tokens), log_probs, completion
            )
        was_done = finished


class Seen(NamedTuple):
    """Results of a step for the host, in arrays that are not donated to the next step."""

    stats: DecodeStats  # up to and including this step
    info: StepInfo
    done: Array  # bool[B]
    final: tuple[Array, Array, Array]  # tokens i32[B, T], length i32[B], failed bool[B]


@jax.jit
def look(stats: DecodeStats, info: StepInfo, state: tuple[Array, Array, Array, Array]) -> Seen:
    """Accumulate the counters of a step, and copy the arrays that later steps overwrite.

    Args:
      stats: counters before the step.
      info: of the step.
      state: (done, tokens, length, failed) after the step.
    """
    finished, *final = jax.tree.map(jnp.copy, state)
    return Seen(accumulate(stats, info, final[1]), info, finished, tuple(final))
