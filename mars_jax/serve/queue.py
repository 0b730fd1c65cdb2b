"""A queue of requests for a batch of rows. When a request ends, the next one starts in its row, and the other rows
continue.

B rows. Tested against each request decoded separately (tests/serve/test_queue.py).
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
"""A batch of B rows is refilled after B // WAIT rows have finished, so that large batches do not stop at every step."""
SAVED = 2048
"""Minimum number of prompt tokens that must be saved to justify compiling the program that continues from a shared
prefix."""
BETWEEN = 4
"""Number of steps between two transfers of new tokens from an accelerator, for streaming and stop strings. On a CPU,
tokens are transferred after every step, because that costs less than an unnecessary step."""


class Finished(NamedTuple):
    """An event for the end of a request, with its completion."""

    index: int  # index of the prompt
    completion: Completion


class Said(NamedTuple):
    """An event for new tokens of a request, with their text."""

    index: int  # index of the prompt
    text: str  # new text; it may lag behind `tokens` inside a multi-byte character
    pieces: tuple[tuple[str, str], ...]  # (entry of KINDS, text) per token; the texts concatenate to `text`
    tokens: tuple[int, ...]  # new token ids
    log_probs: TokenLogProbs  # one entry for each token


class Queue:
    """An iterator that decodes requests in a batch of rows and yields each completion as it ends.

    It can be used only once. `forwards` counts the target's forward passes, each of which covers all rows.
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
          rows: B, the number of rows, which is rounded up to a multiple of the mesh axis `data`.
          order: indices of the requests, in the order in which to start them; default: the order of
            `prepared.requests`.
          log_probs: whether to record the log-probabilities of each token.
          shared: prompt tokens shared by consecutive requests, to be prefilled only once; default: the result of
            `shares_of`, which is NOTHING on a mesh that shards rows.
          telling: whether `events` also yields new tokens. New tokens are then copied to the host after every step, or
            after every fourth step on accelerators.
          state: state of rows in which the first requests are already prefilled; default: new rows.
          began: if `state` is given, the time at which its prefill started, for `Completion.seconds`.
          compiling: whether to continue from the previous prompt even if the shared prefix is too short to save time;
            see `warm_up`.
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
        # Iterator over steps, if the drafter runs its own steps.
        self._steps: Iterator[tuple[DecodeState, StepInfo]] | None = None
        self._holds: list[int | None] = [None] * num_rows  # index of the request in each row
        self._began = [0.0] * num_rows
        # The text so far of each row whose text is needed before the row ends.
        self._texts: list[RowText | None] = [None] * num_rows

    def __iter__(self) -> Iterator[Finished]:
        return self.finished()

    def finished(self, *, early: bool = True) -> Iterator[Finished]:
        """Yield each completion as it ends.

        Unless `early` is set, the completions of the last rows are held back until all rows have ended.
        """
        return (event for event in self.events(early=early) if isinstance(event, Finished))

    def events(self, *, early: bool = True) -> Generator[Said | Finished, None, None]:
        """Yield each completion as it ends and, if `telling` is set, new tokens. `early` works as in `finished`."""
        state, stats = self._first()
        completions: Iterator[Finished] = iter(())
        while any(index is not None for index in self._holds):
            # The device decodes while the host detokenizes the rows that ended earlier. With stop strings, the device
            # runs only a few steps at a time.
            state, stats, steps = self._advanced(state, stats, early)
            yield from completions
            # Wait for the device. The next call donates the state's buffers, so copy these parts to the host.
            row_parts, steps = fetch(((state.tokens, state.length, state.failed, state.done, stats), steps))
            rows = Rows(*row_parts)
            row_finished = rows.done.copy()
            row_stopped, new_texts = self._read_texts(rows)
            # Only the host searches for stop strings, so set `done` in the state for rows that contain one. If a
            # drafter runs its own steps, the state cannot be changed, so these rows continue to decode and their later
            # tokens are ignored.
            if row_stopped.any() and self._steps is None:
                with self._prepared.target.on_mesh():
                    state = refill.end(state, row_stopped & ~row_finished)
            row_finished |= row_stopped
            # The caches of failed rows may contain NaN, so do not store their state.
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
        """Compile the programs of this queue by decoding one token of its first requests.

        The prompts are cut to a few tokens. This is cheap if the programs are already compiled. Afterwards, the queue
        can still be used once.
        """
        # Array shapes depend on all requests, so shorten all of them and drop none.
        short_requests = []
        for i, request in enumerate(self._prepared.requests):
            short_prompt = request.prompt_tokens[:2]
            if self._shares is Shares.BEGINNINGS:
                # Alternate between two lengths, so that each request can reuse the cache of the one before it.
                short_prompt = request.prompt_tokens[:1] * (2 + i % 2)
            short_requests.append(dataclasses.replace(request, prompt_tokens=short_prompt, max_new_tokens=1))
        num_rows = len(self._holds)
        # Decode one more request than there are rows, so that the program that refills a row is compiled as well.
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
        """Decode until some rows have ended, or for a few steps. Also return the number of steps that were run."""
        self.state = None  # its buffers are donated
        prepared = self._prepared
        with prepared.target.on_mesh():
            if prepared.drafter.steps is not None:
                self._steps = self._steps or prepared.drafter.steps(prepared.decoder, prepared.params, state)
                state, step_info = next(self._steps)
                return state, _counted(stats, step_info, state.length), jnp.ones(1, jnp.int32)
            # Stop as soon as enough rows have ended, and refill or yield them. If there is no need for either, stop
            # when all have ended.
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
        """Replace the drafter's weights with new ones of the same shapes and dtypes, without recompilation.

        Running rows keep the draft caches that were computed with the old weights. This lowers acceptance but does not
        affect correctness.
        """
        all_params = self._prepared.params
        if self._prepared.drafter.sizes is not None:
            params = all_params.draft._replace(weights=params)
        self._prepared = dataclasses.replace(self._prepared, params=all_params._replace(draft=params))
        self._read = None  # the caches of this row were computed with the old weights

    def _next(self, row: int) -> int:
        """Assign the next request to `row`, and return the index of the request."""
        self._began[row] = time.perf_counter()
        self._holds[row] = index = self._waiting.popleft()
        request = self._prepared.requests[index]
        self._texts[row] = None
        if self._telling or request.stop_strings:
            self._texts[row] = RowText(self._prepared.target, request)
        return index

    def _read_texts(self, rows: Rows) -> tuple[np.ndarray, list[Said]]:
        """Add the new tokens to the texts of the rows.

        Return bool[B], True for rows whose text contains a stop string, and the new tokens if the queue is `telling`.
        """
        row_stopped, new_texts = np.zeros(len(self._holds), bool), []
        for row, (index, row_text) in enumerate(zip(self._holds, self._texts, strict=True)):
            if index is None or row_text is None:
                continue
            # `row_text.count` new tokens have been added to the text so far.
            start = len(self._prepared.requests[index].prompt_tokens) + row_text.count
            tokens = rows.tokens[row, start : rows.length[row]].tolist()
            strings = row_text.feed_all(tokens, last=bool(rows.done[row]))
            row_stopped[row] = row_text.stopped
            # A row may end without emitting a token, for example if its constraint allows no further token.
            remaining_text = row_text.feed([], last=True) if rows.done[row] else ""
            if not self._telling:
                continue
            assert rows.stats.tokens is not None  # recorded if the queue is `telling`
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
        # With shared prompts, all rows start empty, and `_refilled` fills them from a row in which the prompt is
        # prefilled.
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

        This way, arrays have the same shapes in every prefill. One prompt is enough to keep a device busy, because
        prefill chunks have hundreds of tokens (`prefill.chunk_of`).
        """
        # If a drafter runs its own steps, all rows start together, once every row is free.
        if self._prepared.drafter.steps is not None:
            if not self._waiting or any(index is not None for index in self._holds):
                return state, stats
            self._steps = self.state = None
            return self._first()
        num_shards = size_of("data", self._prepared.target.mesh)
        stride = len(self._holds) // num_shards
        while self._waiting and None in self._holds:
            rows_to_fill = [NO_ROW] * num_shards
            entries: list[int | None] = [None] * num_shards
            # Shard i of the mesh has `stride` rows, starting at row i * stride. Each pass starts at most one row per
            # shard.
            for shard in range(num_shards):
                free = (
                    row for row in range(shard * stride, (shard + 1) * stride) if self._holds[row] is None
                )
                row = next(free, NO_ROW)
                if row != NO_ROW and self._waiting:
                    rows_to_fill[shard], entries[shard] = row, self._next(row)
            if self._shares and entries[0] is not None:
                # With shared prompts, there is only one shard. Prefill the prompt in a separate row, which is then
                # copied to the new row.
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
        """Prefill a request's prompt in a separate row, if possible continuing from a prefix of the previous prompt."""
        prompt, prepared, previous = self._prepared.requests[index].prompt_tokens, self._prepared, self._read
        if previous is not None and previous.prompt == prompt:
            return previous
        self._read = None  # free the memory of this row before allocating another
        # `extend` donates the state of the previous prompt. Rows that started from that state have copies of it.
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
        """Return whether to prefill only the tokens after the prefix that a prompt shares with the previous one."""
        if previous.sound is None or len(prompt) == 1:
            return False
        chunk_length = chunk_of_decoder(self._prepared)
        if not self._compiling and not forwards_saved(previous.prompt, prompt, chunk_length):
            return False
        # Non-finite weights may leave NaN in slots after the end of the row, which would corrupt the next prompt.
        return bool(fetch(previous.sound))

    def _completed(self, rows: Rows, ended: Sequence[tuple[int, int, float]]) -> Iterator[Finished]:
        """Yield completions for the ended rows, each of which is given as (row, index of its request, seconds)."""
        if not self._log_probs:
            rows = rows._replace(stats=dataclasses.replace(rows.stats, tokens=None))
        for row, index, seconds in ended:
            completion = complete(self._prepared.target, self._prepared.requests[index], row, rows, seconds)
            yield Finished(index, completion)


class Reading(NamedTuple):
    """A separate row in which a prompt has been prefilled."""

    prompt: tuple[int, ...]
    state: DecodeState
    sound: Array | None  # bool[]; True if the caches are finite; None if no prompt continues from this row


@jax.jit
def _sound(caches: PyTree) -> Array:
    float_leaves = [x for x in jax.tree.leaves(caches) if jnp.issubdtype(x.dtype, jnp.floating)]
    return jnp.all(jnp.asarray([jnp.all(jnp.isfinite(x)) for x in float_leaves], bool))


_counted = jax.jit(accumulate, donate_argnums=0)


class Shares(enum.IntEnum):
    """Kinds of prompt tokens that consecutive requests share, and that are prefilled only once."""

    NOTHING = 0
    PROMPTS = 1  # whole prompts, as for samples of one prompt
    BEGINNINGS = 2  # prefixes, such as a system prompt or examples before a question


def shares_of(prepared: Prepared, order: Sequence[int]) -> Shares:
    """Choose which shared prompt tokens to prefill only once, for requests in this order.

    Nothing is shared on a mesh that shards rows, or if the drafter runs its own steps. Prefixes are shared only if that
    saves at least half of the prefill forward passes and at least `SAVED` tokens. Sharing has costs: prompts are
    prefilled one after the other, and one more program is compiled.
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
    """Return the number of prompt tokens that prefill processes in each forward pass."""
    with prepared.target.on_mesh():
        # The tokens after a shared prefix are prefilled in chunks of at most this length (`Decoder.extend`).
        default_chunk = min(chunk_of(prepared.width), WIDE_CHUNK)
        return prepared.decoder.prefill_chunk or prepared.target.model.prefill_chunk or default_chunk


def forwards_saved(previous: Sequence[int], prompt: Sequence[int], chunk: int) -> int:
    """Return how many prefill forward passes are saved if the common prefix of both prompts is already cached.

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
    """Return request indices in the order of decreasing `max_new_tokens`.

    A long request that starts last would decode in a batch of its own. Requests with equal limits are sorted by their
    prompts if adjacent prompts then share at least `SAVED` tokens in total.

    >>> longest_first([Request(prompt_tokens=(1,), max_new_tokens=n) for n in (5, 9, 5)])
    [1, 0, 2]
    """
    order = sorted(range(len(requests)), key=lambda i: -requests[i].max_new_tokens)
    # In sorted order, each prompt is next to the one with which it shares its longest prefix.
    order_by_prompt = sorted(order, key=lambda i: (-requests[i].max_new_tokens, requests[i].prompt_tokens))
    prompt_pairs = itertools.pairwise(requests[i].prompt_tokens for i in order_by_prompt)
    return order_by_prompt if sum(common_length(a, b) for a, b in prompt_pairs if a != b) >= SAVED else order
