"""A queue of requests for a few rows: when a request ends, the next one takes its row while other rows continue.

B rows. Tested against each request decoded by itself (tests/serve/test_queue.py).
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import itertools
import math
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mars_jax.core import decode, refill
from mars_jax.core.axes import size_of
from mars_jax.core.given import NO_ROW
from mars_jax.core.metrics import DecodeStats, accumulate
from mars_jax.core.prefill import WIDE_CHUNK, chunk_of
from mars_jax.core.types import DecodeState, PyTree, StepInfo
from mars_jax.serve.prepare import Prepared, of_mesh
from mars_jax.serve.programs import program
from mars_jax.serve.requests import Completion, Request, TokenLogProbs
from mars_jax.serve.sizes import with_costs
from mars_jax.serve.text import Rows, RowText, complete, token_log_probs
from mars_jax.utils.hosts import fetch

WAIT = 32
"""A batch of B rows refills after B // WAIT rows have finished, so that large batches do not stop at every step."""
SAVED = 2048
"""Minimum number of saved prompt tokens that justifies compiling the program that continues from a shared prefix."""
BETWEEN = 4
"""Steps between two reads of new text on an accelerator, for streaming and stop strings. On a CPU, the text is read
after every step, because a read costs less than a superfluous step."""


class Finished(NamedTuple):
    """A completion, and the index of its prompt."""

    index: int
    completion: Completion


class Said(NamedTuple):
    """New tokens of a request, and their text."""

    index: int  # index of the prompt
    text: str  # may lag behind `tokens` inside a multi-byte character
    pieces: tuple[tuple[str, str], ...]  # (entry of KINDS, text) per token; the texts concatenate to `text`
    tokens: tuple[int, ...]
    log_probs: TokenLogProbs  # one entry per token


class Queue:
    """Iterator that decodes requests in a few rows and yields each completion as it ends. It can be used once.

    `forwards` counts the target's forward passes, each over all rows.
    """

    def __init__(
        self,
        prepared: Prepared,
        rows: int,
        *,
        order: Sequence[int] | None = None,
        log_probs: bool = False,
        shared: Shares | None = None,
        telling: bool = False,
        state: DecodeState | None = None,
        began: float | None = None,
        compiling: bool = False,
    ):
        """
        Args:
          prepared: the requests and their decoder.
          rows: B, rounded up to a multiple of the mesh's axis `data`.
          order: indices of requests in the order in which they begin; default: the order of `prepared.requests`.
          log_probs: record log-probabilities of each token.
          shared: the tokens that consecutive requests share and that are read only once; default: `shares_of`, which is
            NOTHING on a mesh that shards rows.
          telling: `events` also yields new tokens, which the host reads after every step, or after every fourth step on
            accelerators.
          state: rows that have read the first requests; default: new rows.
          began: if `state` is given, the time at which its prompts began to be read, for `Completion.seconds`.
          compiling: continue from the last prompt even if it shares too little to save time; see `warm_up`.
        """
        self.state = state
        """State of the rows between two events; None while the device is working on it."""
        self._telling, self._log_probs = telling, log_probs
        self._began_reading, self._compiling = began, compiling
        self.forwards = 0
        order = range(len(prepared.requests)) if order is None else order
        self._waiting = collections.deque(order)
        num_rows = of_mesh(prepared.target, rows)
        self._prepared = with_costs(prepared, num_rows, log_probs=log_probs or telling)
        self._shares = shares_of(prepared, order) if shared is None else shared
        self._read: Reading | None = None
        self._advance: Callable[..., Any] | None = None  # the compiled `refill.advance`
        # The iterator of a drafter that runs its own steps.
        self._steps: Iterator[tuple[DecodeState, StepInfo]] | None = None
        self._holds: list[int | None] = [None] * num_rows  # request by row
        self._began = [0.0] * num_rows
        self._texts: list[RowText | None] = [None] * num_rows  # for rows whose text is read before they end

    def __iter__(self) -> Iterator[Finished]:
        return self.finished()

    def finished(self, *, early: bool = True) -> Iterator[Finished]:
        """Yield each completion. If not `early`, yield those of the last rows together, after all have ended."""
        return (event for event in self.events(early=early) if isinstance(event, Finished))

    def events(self, *, early: bool = True) -> Generator[Said | Finished, None, None]:
        """Yield new tokens, if the queue is `telling`, and each completion as it ends; `early` as for `finished`."""
        state, stats = self._first()
        completions: Iterator[Finished] = iter(())
        while any(index is not None for index in self._holds):
            # The device decodes while the host detokenizes the rows that ended before. With stop strings, it runs only
            # a few steps at a time.
            state, stats, steps = self._advanced(state, stats, early)
            yield from completions
            # Wait for the device. These copies outlive the state, whose buffers the next call donates.
            row_parts, steps = fetch(((state.tokens, state.length, state.failed, state.done, stats), steps))
            rows = Rows(*row_parts)
            row_finished = rows.done.copy()
            row_stopped, new_texts = self._read_texts(rows)
            # Only the host searches for stop strings, so mark these rows as done on the device. A drafter that runs
            # its own steps holds the state, so these rows continue to decode, and their further tokens are ignored.
            if row_stopped.any() and self._steps is None:
                with self._prepared.target.on_mesh():
                    state = refill.end(state, row_stopped & ~row_finished)
            row_finished |= row_stopped
            # The caches of failed rows may hold NaN.
            if not rows.failed.any():
                self.state = state
            yield from new_texts
            self.forwards += int(np.max(steps))
            ended_rows = []
            for row, index in enumerate(self._holds):
                if index is not None and row_finished[row]:
                    ended_rows.append((row, index, time.perf_counter() - self._began[row]))
                    self._holds[row] = self._texts[row] = None
            completions = self._completed(rows, ended_rows)
            if self._waiting:
                self.state = None
                state, stats = self._refilled(state, stats)
        yield from completions

    def warm_up(self) -> None:
        """Compile the programs of this queue by decoding one token of its first requests, cut to a few tokens.

        This is cheap if they are already compiled. The queue can still be used once afterwards.
        """
        # Array shapes depend on all requests, so keep all of them.
        short_requests = []
        for i, request in enumerate(self._prepared.requests):
            short_prompt = request.prompt_tokens[:2]
            if self._shares is Shares.BEGINNINGS:
                # Give adjacent requests prompts of different lengths: one then continues from another.
                short_prompt = request.prompt_tokens[:1] * (2 + i % 2)
            short_requests.append(dataclasses.replace(request, prompt_tokens=short_prompt, max_new_tokens=1))
        num_rows = len(self._holds)
        # Decode one more request than there are rows, to compile the refill of a row as well.
        queue = Queue(
            dataclasses.replace(self._prepared, requests=short_requests),
            num_rows,
            order=range(min(num_rows + 1, len(self._waiting))),
            log_probs=self._log_probs,
            shared=self._shares,
            telling=self._telling,
            compiling=True,
        )
        for _ in queue.events():
            pass

    def _advanced(
        self, state: DecodeState, stats: DecodeStats, early: bool
    ) -> tuple[DecodeState, DecodeStats, Array]:
        """Decode until some rows have ended, or for a few steps. Also return the number of steps."""
        self.state = None  # its buffers are donated
        prepared = self._prepared
        with prepared.target.on_mesh():
            if prepared.drafter.steps is not None:
                self._steps = self._steps or prepared.drafter.steps(prepared.decoder, prepared.params, state)
                state, step_info = next(self._steps)
                return state, _counted(stats, step_info, state.length), jnp.ones(1, jnp.int32)
            # Return when enough rows have ended to refill or yield them; otherwise decode until all have ended.
            min_ended = max(1, len(self._holds) // WAIT)
            if not (early or self._waiting):
                min_ended = len(self._holds)
            max_steps = 2**30
            if any(text is not None for text in self._texts):
                max_steps = 1 if decode.look_ahead(state) == 0 else BETWEEN
            args = (prepared.params, state, stats, min_ended, max_steps)
            self._advance = self._advance or program(refill.advance, prepared.decoder, *args)
            return self._advance(*args)

    def draft_with(self, params: PyTree) -> None:
        """Continue with new drafter weights of the same shapes and dtypes, without recompiling.

        Running rows keep the draft caches of the old weights, which lowers acceptance but does not affect exactness.
        """
        all_params = self._prepared.params
        if self._prepared.drafter.sizes is not None:
            params = all_params.draft._replace(weights=params)
        self._prepared = dataclasses.replace(self._prepared, params=all_params._replace(draft=params))
        self._read = None  # this row read its prompt with the old weights

    def _next(self, row: int) -> int:
        """Assign the next request to this row, and return its index."""
        self._began[row] = time.perf_counter()
        self._holds[row] = index = self._waiting.popleft()
        request = self._prepared.requests[index]
        self._texts[row] = None
        if self._telling or request.stop_strings:
            self._texts[row] = RowText(self._prepared.target, request)
        return index

    def _read_texts(self, rows: Rows) -> tuple[np.ndarray, list[Said]]:
        """Return bool[B], the rows whose text contains a stop string; and the new tokens, if the queue is `telling`."""
        row_stopped, new_texts = np.zeros(len(self._holds), bool), []
        for row, (index, row_text) in enumerate(zip(self._holds, self._texts, strict=True)):
            if index is None or row_text is None:
                continue
            # The row's text has read `row_text.count` new tokens so far.
            start = len(self._prepared.requests[index].prompt_tokens) + row_text.count
            tokens = rows.tokens[row, start : rows.length[row]].tolist()
            strings = row_text.feed_all(tokens, last=bool(rows.done[row]))
            row_stopped[row] = row_text.stopped
            # A row may end without a token, for example if its constraint allows no further token.
            remaining_text = row_text.feed([], last=True) if rows.done[row] else ""
            if not self._telling:
                continue
            assert rows.stats.tokens is not None  # recorded for a queue that is `telling`
            log_probs = token_log_probs(rows.stats.tokens, row, start, len(strings))
            pieces = [*zip(log_probs.kind, strings, strict=True)]
            if remaining_text:
                pieces.append(("exact", remaining_text))
            if pieces:
                text = "".join(string for _, string in pieces)
                new_texts.append(Said(index, text, tuple(pieces), tuple(tokens[: len(strings)]), log_probs))
        return row_stopped, new_texts

    def _first(self) -> tuple[DecodeState, DecodeStats]:
        entries: list[int | None] = [None] * len(self._holds)
        # With shared prompts, all rows start empty, and `_refilled` fills them from a row that has read the prompt.
        if not self._shares:
            for row in range(min(len(self._holds), len(self._waiting))):
                entries[row] = self._next(row)
        stats = self._prepared.zero_stats(len(entries), log_probs=self._log_probs or self._telling)
        if self.state is None:
            state = self._prepared.start(entries)
        else:
            state, self._began = self.state, [self._began_reading or time.perf_counter()] * len(entries)
        return self._refilled(state, stats) if self._shares else (state, stats)

    def _refilled(self, state: DecodeState, stats: DecodeStats) -> tuple[DecodeState, DecodeStats]:
        """Start free rows with the next requests, one row per `data` shard at a time.

        This way, a prompt is read in arrays of the same shape whenever its request begins. One prompt keeps a device
        busy, because prefill chunks have hundreds of tokens (`prefill.chunk_of`).
        """
        if self._prepared.drafter.steps is not None:  # rows of such a drafter do not refill
            if not self._waiting or any(index is not None for index in self._holds):
                return state, stats
            self._steps = self.state = None
            return self._first()
        num_shards = size_of("data", self._prepared.target.mesh)
        stride = len(self._holds) // num_shards
        while self._waiting and None in self._holds:
            rows_to_fill = [NO_ROW] * num_shards
            entries: list[int | None] = [None] * num_shards
            # Shard i of the mesh holds the `stride` rows from row i * stride. Each pass starts at most one of them.
            for shard in range(num_shards):
                free = (
                    row for row in range(shard * stride, (shard + 1) * stride) if self._holds[row] is None
                )
                row = next(free, NO_ROW)
                if row != NO_ROW and self._waiting:
                    rows_to_fill[shard], entries[shard] = row, self._next(row)
            if self._shares and entries[0] is not None:
                # There is one shard. Its row begins as a copy of a separate row that has read the prompt.
                self._read = self._reading(entries[0])
            prepared, read_state = self._prepared, self._read and self._read.state
            prompts = prepared.prompts(entries)
            row_indices = prepared.placed(jnp.array(np.asarray(rows_to_fill, np.int32)))
            with prepared.target.on_mesh():
                state, stats = refill.refill(
                    prepared.decoder, prepared.params, state, stats, row_indices, prompts, read_state
                )
        return state, stats

    def _reading(self, index: int) -> Reading:
        """Return a row that has read a request's prompt, continuing from a prefix of the last prompt if possible."""
        prompt, prepared, previous = self._prepared.requests[index].prompt_tokens, self._prepared, self._read
        if previous is not None and previous.prompt == prompt:
            return previous
        self._read = None  # free its memory before allocating another row
        # `extend` donates the state of the last prompt. Rows that began from that state hold copies of it.
        if previous is not None and self._continues(previous, prompt):
            with prepared.target.on_mesh():
                state, _ = decode.extend(
                    prepared.decoder, prepared.params, previous.state, prepared.prompts([index])
                )
        else:
            previous = None
            state = prepared.start([index])
        if self._shares is not Shares.BEGINNINGS:
            return Reading(prompt, state, None)
        with prepared.target.on_mesh():
            return Reading(prompt, state, _sound((state.cache, state.draft)))

    def _continues(self, previous: Reading, prompt: Sequence[int]) -> bool:
        """Return whether a prompt is read only from the end of the prefix that it shares with the last prompt."""
        if previous.sound is None or len(prompt) == 1:
            return False
        chunk_length = chunk_of_decoder(self._prepared)
        if not self._compiling and not forwards_saved(previous.prompt, prompt, chunk_length):
            return False
        # Broken weights may leave NaN in slots past the end of the row, which would corrupt the next prompt.
        return bool(fetch(previous.sound))

    def _completed(self, rows: Rows, ended: Sequence[tuple[int, int, float]]) -> Iterator[Finished]:
        """Yield the completions of the rows that have ended, given as (row, index of its request, seconds)."""
        if not self._log_probs:
            rows = rows._replace(stats=dataclasses.replace(rows.stats, tokens=None))
        for row, index, seconds in ended:
            completion = complete(self._prepared.target, self._prepared.requests[index], row, rows, seconds)
            yield Finished(index, completion)


class Reading(NamedTuple):
    """A row that has read a prompt."""

    prompt: tuple[int, ...]
    state: DecodeState
    sound: Array | None  # bool[]; True if its caches are finite; None if no prompt continues from this row


@jax.jit
def _sound(caches: PyTree) -> Array:
    float_leaves = [x for x in jax.tree.leaves(caches) if jnp.issubdtype(x.dtype, jnp.floating)]
    return jnp.all(jnp.asarray([jnp.all(jnp.isfinite(x)) for x in float_leaves], bool))


_counted = jax.jit(accumulate, donate_argnums=0)


class Shares(enum.IntEnum):
    """Kinds of shared prompt tokens, which are read once for consecutive requests."""

    NOTHING = 0
    PROMPTS = 1  # whole prompts, as for samples of one prompt
    BEGINNINGS = 2  # prefixes, such as a system prompt or examples before a question


def shares_of(prepared: Prepared, order: Sequence[int]) -> Shares:
    """Return which shared prompt tokens to read only once for requests in this order.

    Nothing is shared on a mesh that shards rows, or if the drafter runs its own steps. Beginnings are shared only if
    this saves half of the prefill forward passes and `SAVED` tokens, because sharing has costs: rows read their prompts
    one after the other, and there is one more program to compile.
    """
    if of_mesh(prepared.target, 1) > 1 or prepared.drafter.steps is not None:
        return Shares.NOTHING
    prompts = [prepared.requests[i].prompt_tokens for i in order]
    chunk = chunk_of_decoder(prepared)
    num_saved = sum(forwards_saved(a, b, chunk) for a, b in itertools.pairwise(prompts) if a != b)
    if num_saved * chunk >= SAVED and 2 * num_saved >= sum(math.ceil(len(p) / chunk) for p in prompts):
        return Shares.BEGINNINGS
    return Shares.PROMPTS if any(a == b for a, b in itertools.pairwise(prompts)) else Shares.NOTHING


def chunk_of_decoder(prepared: Prepared) -> int:
    """Return the number of prompt tokens per forward pass of prefill."""
    with prepared.target.on_mesh():
        # The tokens after a shared beginning are read in chunks of at most this length (`Decoder.extend`).
        default_chunk = min(chunk_of(prepared.width), WIDE_CHUNK)
        return prepared.decoder.prefill_chunk or prepared.target.model.prefill_chunk or default_chunk


def forwards_saved(previous: Sequence[int], prompt: Sequence[int], chunk: int) -> int:
    """Return the number of forward passes that a prompt saves if its common prefix with `previous` is already read.

    >>> forwards_saved([1] * 130 + [2], [1] * 200, 64)
    2
    """
    num_remaining = len(prompt) - common_length(previous, prompt)
    return math.ceil(len(prompt) / chunk) - math.ceil(num_remaining / chunk)


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the common prefix of two prompts.

    >>> common_length((1, 2, 3), (1, 2, 4, 5)), common_length((1,), (1, 2))
    (2, 1)
    """
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))


def longest_first(requests: Sequence[Request]) -> list[int]:
    """Return request indices by decreasing `max_new_tokens`, since a long request that begins last would run by itself.

    Requests with equal limits are sorted by their prompts if this order shares at least `SAVED` tokens.

    >>> longest_first([Request(prompt_tokens=(1,), max_new_tokens=n) for n in (5, 9, 5)])
    [1, 0, 2]
    """
    order = sorted(range(len(requests)), key=lambda i: -requests[i].max_new_tokens)
    # In sorted order, each prompt shares its longest prefix with a neighbour.
    order_by_prompt = sorted(order, key=lambda i: (-requests[i].max_new_tokens, requests[i].prompt_tokens))
    prompt_pairs = itertools.pairwise(requests[i].prompt_tokens for i in order_by_prompt)
    return order_by_prompt if sum(common_length(a, b) for a, b in prompt_pairs if a != b) >= SAVED else order
