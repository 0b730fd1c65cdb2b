"""Decoding of one request after another with the same caches, and conversations that use it.

Only prompt tokens that are not yet in the caches are prefilled. B rows: one decodes, and the others only pad the
batch for a mesh. T token buffer. Tested against each request decoded from a new state
(tests/serve/test_running.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Self, Unpack

import jax
import numpy as np

from mars_jax import drafters
from mars_jax.core import decode
from mars_jax.core.decoder import Decoder
from mars_jax.core.types import DecodeState, Params, Prompts
from mars_jax.hub.pretrained import Pretrained, Turn
from mars_jax.serve.prepare import AnyRule, Prepared, bucket, check_relaxes, of_mesh
from mars_jax.serve.queue import Finished, Queue, Said
from mars_jax.serve.requests import Completion, Options, Request, make_requests
from mars_jax.serve.session import Session
from mars_jax.serve.sizes import with_costs
from mars_jax.utils import activity
from mars_jax.utils.errors import MarsError, check_type
from mars_jax.utils.hosts import fetch

WIDTH = 4096
"""Initial size of the token buffer, unless the model's context is shorter. A request that needs a larger buffer
triggers another compilation. A larger initial size would take more memory."""


class Running:
    """A target and drafter that decode one request after another, reusing the same state.

    If a prompt shares a prefix with the previous prompt and completion, only the tokens after that prefix are
    prefilled. Compiled programs depend only on the size of the token buffer, so all requests that fit into it use the
    same programs. The buffer grows for longer requests.
    """

    def __init__(self, session: Session):
        """
        Args:
          session: the target, the drafter and the rule. The attribute may be replaced between two requests, for example
            by `session.using(rule)`.
        """
        self.session = session
        self.read = 0
        """Number of prefilled tokens of the last prompt. Its last token is not counted, because the first step
        processes it."""
        self._width = 0
        self._decoder: Decoder | None = None
        self._queue: Queue | None = None  # queue of the last request, which also holds the decoding state

    @activity.doing("compiling")
    def compile(self, request: Request) -> None:
        """Compile the programs that `stream` uses for requests of this size, by decoding one token."""
        self._widen(len(request.prompt_tokens) + request.max_new_tokens - 1)
        one_token = dataclasses.replace(request, prompt_tokens=request.prompt_tokens[:2], max_new_tokens=1)
        for _ in self.stream(one_token):
            pass
        self._queue = None  # discard the decoded token

    def stream(self, request: Request) -> Generator[Said | Finished, None, None]:
        """Prefill the new tokens of the prompt, and return an iterator that decodes the completion.

        The iterator yields events after every step, or after every fourth step on accelerators. If the caller stops
        iterating or closes the iterator, the completion ends there, and the state includes the tokens decoded so far.
        The next call continues from the state of an unfinished iterator.

        Raises:
          MarsError: see `mars_jax.generate`.
        """
        start_time = time.perf_counter()
        prepared = self.session.prepared([request])
        self._widen(len(request.prompt_tokens) + request.max_new_tokens)
        rows = of_mesh(self.session.target, 1)
        prepared = with_costs(dataclasses.replace(prepared, width=self._width), rows, log_probs=True)
        state = self._read_prompt(prepared, rows)
        self._queue = Queue(prepared, rows, telling=True, state=state, began=start_time)
        return self._queue.events()

    def _widen(self, length: int) -> None:
        """Grow the buffer to at least `length` tokens, or to the model's whole context if that is shorter."""
        context_length = self.session.target.config.max_positions
        if self._width < min(length, context_length):
            # At least double the size, so that a growing conversation rarely triggers a compilation.
            self._width = bucket(min(max(length, WIDTH, 2 * self._width), context_length))
            self._queue = None

    def _read_prompt(self, prepared: Prepared, rows: int) -> DecodeState:
        """Return the state after prefill of the request's prompt."""
        prompts = prepared.prompts([0, *[None] * (rows - 1)])
        state = self._queue and self._queue.state
        self._queue = None  # the state's buffers are donated, even if an error follows
        with prepared.target.on_mesh():
            # For a prompt of one token, start from a new state. In the old state, a draft head would read features of
            # the previous request.
            has_one_token = len(prepared.requests[0].prompt_tokens) == 1
            if state is None or prepared.decoder != self._decoder or has_one_token:
                state = _unread(prepared.decoder, prepared.params, prompts)
            state, num_read = decode.extend(prepared.decoder, prepared.params, state, prompts)
        self.read = int(fetch(num_read)[0])
        self._decoder = prepared.decoder
        return state


@functools.partial(jax.jit, static_argnums=0)
def _unread(decoder: Decoder, params: Params, prompts: Prompts) -> DecodeState:
    """Return the initial state for prompts that are truncated to one token.

    The length is a compile-time constant, so the compiled program does not run the models.
    """
    lengths = np.ones(prompts.tokens.shape[0], np.int32)
    return decoder.init(params, dataclasses.replace(prompts, length=lengths))


Ask = Callable[[Sequence[Turn]], Request]
"""A function that builds the request for the next turn of a conversation."""


class Chat:
    """A conversation whose turns share one KV cache, so that each turn prefills only its new tokens.

    Answers are the same as without this cache. The chat template is applied to the whole conversation at each turn.
    Some templates change earlier turns, for example by removing the reasoning from an answer. Tokens after the first
    change are then prefilled again.

    `messages` is the list of turns, each with its `role` and `content`. Answers are stripped of surrounding white
    space. You may change the list between two turns. A turn during which the list changes is not added.

    User turn i, counted from 0, uses the seed `seed + i`, so repeating a conversation reproduces its answers.

    >>> import mars_jax as mj
    >>> chat = mj.Chat(mj.load("tiny/target"), "ngram", max_new_tokens=8)
    >>> answer = chat.say("Once upon a time")
    >>> answer = chat.say("And then?")
    >>> len(chat.messages), chat.read < len(answer.request.prompt_tokens)
    (4, True)
    """

    def __init__(
        self,
        target: Pretrained,
        drafter: drafters.AnyDrafter = "none",
        *,
        verify: AnyRule | None = None,
        system: str | None = None,
        template_args: Mapping[str, object] | None = None,
        ignore_eos: bool = False,
        **options: Unpack[Options],
    ):
        """
        Args:
          target, drafter, verify, system, template_args, ignore_eos, options: as for `generate`, with a single value
            for each option.

        Raises:
          MarsError: see `generate`.
        """
        session = Session.of(target, drafter, verify)

        def ask(turns: Sequence[Turn]) -> Request:
            [request] = make_requests(
                target, [turns], system=system, template_args=template_args, ignore_eos=ignore_eos, **options
            )
            check_relaxes(session.loaded_rule, [request])
            user_turn = sum(user_turn["role"] == "user" for user_turn in turns) - 1
            return dataclasses.replace(request, seed=(request.seed + user_turn) % 2**32)

        self._begin(Running(session), ask)

    @classmethod
    def over(cls, running: Running, ask: Ask) -> Self:
        """Create a conversation that decodes with an existing `Running` and builds its requests with `ask`."""
        # `__init__` would open a second session.
        chat = cls.__new__(cls)
        chat._begin(running, ask)
        return chat

    def _begin(self, running: Running, ask: Ask) -> None:
        self.messages: list[Turn] = []
        self.ask = ask
        self._running = running
        self._last: weakref.ref[Generator[Said | Finished]] | None = None  # the stream of the last turn

    @property
    def read(self) -> int:
        """Number of prompt tokens that were prefilled for the last turn. The others were already in the cache."""
        return self._running.read

    def say(self, text: str) -> Completion:
        """Decode the answer to a user turn, and add both to the conversation.

        Raises:
          MarsError: the conversation fills the model's context; see also `generate`. After an error, the conversation
            is unchanged.
        """
        [finished_event] = (event for event in self.stream(text) if isinstance(event, Finished))
        return finished_event.completion

    def stream(self, text: str) -> Generator[Said | Finished, None, None]:
        """Answer a user turn as `say` does, but yield the answer while it is decoded.

        If the iterator is closed early, the text so far becomes the answer; if there is no text yet, the turn is not
        added. The next turn, `undo` and `clear` close the iterator.
        """
        self._close()
        check_type("messages", self.messages, list, "a list of turns")
        turns: list[Turn] = [*self.messages, {"role": "user", "content": text}]
        request = self.ask(turns)
        target, prompt_length = self._running.session.target, len(request.prompt_tokens)
        if prompt_length >= target.config.max_positions:
            raise MarsError(
                f"the conversation is full: with this turn it has {prompt_length} tokens, and '{target.name}' has a "
                f"context of {target.config.max_positions}: take turns back, or begin a new conversation."
            )
        events = self._answered(turns, self._running.stream(request))
        # The reference is weak, so that Python closes the stream as soon as the caller no longer uses it.
        self._last = weakref.ref(events)
        return events

    def _close(self) -> None:
        """Close the stream of the last turn if it has not been consumed completely."""
        if self._last is not None and (events := self._last()) is not None:
            events.close()

    def _answered(
        self, turns: list[Turn], events: Generator[Said | Finished, None, None]
    ) -> Generator[Said | Finished]:
        """Yield the events of a turn, and then add the turn and its answer to the conversation."""
        answer = ""
        try:
            with contextlib.closing(events):
                for event in events:
                    if isinstance(event, Said):
                        answer += event.text
                    else:
                        self._add(turns, answer)
                        answer = ""
                    yield event
        except GeneratorExit:
            # The caller closed the stream early, so the answer is the text so far.
            if answer:
                self._add(turns, answer)
            raise

    def _add(self, turns: list[Turn], answer: str) -> None:
        if self.messages == turns[:-1]:
            # Templates add the space between a role and its text themselves. A second space would change the tokens.
            self.messages = [*turns, {"role": "assistant", "content": answer.strip()}]

    def undo(self) -> str:
        """Remove the last user turn and its answer from the conversation, and return the turn's text.

        Raises:
          MarsError: the conversation is empty.
        """
        self._close()
        turn_index = max((i for i, turn in enumerate(self.messages) if turn["role"] == "user"), default=None)
        if turn_index is None:
            raise MarsError("there is no turn to take back: the conversation is empty.")
        text = self.messages[turn_index]["content"]
        self.messages = self.messages[:turn_index]
        return text

    def clear(self) -> None:
        """Start a new conversation. A prefix shared with the old conversation is not prefilled again."""
        self._close()
        self.messages = []
