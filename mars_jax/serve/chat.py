"""A conversation whose turns share one cache.

Oracle: `generate` of the whole conversation (tests/serve/test_running.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Self, Unpack

from mars_jax import drafters
from mars_jax.hub.pretrained import Pretrained, Turn
from mars_jax.serve.options import Options
from mars_jax.serve.prepare import AnyRule, check_relaxes
from mars_jax.serve.queue import Finished, Said
from mars_jax.serve.requests import Completion, Request, make_requests
from mars_jax.serve.running import Running
from mars_jax.serve.session import Session
from mars_jax.utils.errors import MarsError, check_type

Ask = Callable[[Sequence[Turn]], Request]
"""Function from a conversation to the request for its next turn."""


class Chat:
    """A conversation whose turns share a cache: only new tokens are read, and answers equal those of a fresh run.

    The chat template is applied to the whole conversation at each turn. Some templates change earlier turns, for
    example by removing an answer's thoughts; the models then read again from the first change.

    `messages` holds the turns, each with its `role` and `content`. Answers are stripped of surrounding white space. You
    may change it between two turns; a turn during which it changes is not added.

    Turn i of the user, counted from 0, draws with seed + i, so a repeated conversation gives the same answers.

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
        template_args: Mapping[str, Any] | None = None,
        ignore_eos: bool = False,
        **options: Unpack[Options],
    ):
        """
        Args:
          target, drafter, verify, system, template_args, ignore_eos, options: as for `generate`; one value per option.

        Raises:
          MarsError: as `generate`.
        """
        session = Session.of(target, drafter, verify)
        prompt_options = {"system": system, "template_args": template_args, "ignore_eos": ignore_eos}

        def ask(turns: Sequence[Turn]) -> Request:
            [request] = make_requests(target, [turns], **prompt_options, **options)
            check_relaxes(session.rule, [request])
            turn = sum(turn["role"] == "user" for turn in turns) - 1
            return dataclasses.replace(request, seed=(request.seed + turn) % 2**32)

        self._begin(Running(session), ask)

    @classmethod
    def over(cls, running: Running, ask: Ask) -> Self:
        """Make a conversation over an existing `Running`, whose requests `ask` makes."""
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
        """Number of tokens read for the last turn; the others were in the cache."""
        return self._running.read

    def say(self, text: str) -> Completion:
        """Answer a turn of the user, and add both to the conversation.

        Raises:
          MarsError: the conversation is full, or as `generate`; the conversation is then unchanged.
        """
        [finished] = (event for event in self.stream(text) if isinstance(event, Finished))
        return finished.completion

    def stream(self, text: str) -> Generator[Said | Finished, None, None]:
        """Answer as `say` does, and yield the answer as it is decoded.

        If the iterator is closed early, the answer is the text so far; without any text the turn is dropped. The next
        turn, `undo` and `clear` close the iterator.
        """
        self._close()
        check_type("messages", self.messages, list, "a list of turns")
        turns: list[Turn] = [*self.messages, {"role": "user", "content": text}]
        request = self.ask(turns)
        target, tokens = self._running.session.target, len(request.prompt_tokens)
        if tokens >= target.config.max_positions:
            raise MarsError(
                f"the conversation is full: with this turn it has {tokens} tokens, and '{target.name}' a context of "
                f"{target.config.max_positions}: take turns back, or begin a new one."
            )
        events = self._answered(turns, self._running.stream(request))
        # The reference is weak, so that Python closes a stream as soon as its caller drops it.
        self._last = weakref.ref(events)
        return events

    def _close(self) -> None:
        """Close the stream of the last turn if it has not been read to its end."""
        events = None if self._last is None else self._last()
        if events is not None:
            events.close()

    def _answered(
        self, turns: list[Turn], events: Generator[Said | Finished, None, None]
    ) -> Generator[Said | Finished]:
        """Yield the events of a turn, and add it with its answer to the conversation at its end."""
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
            if answer:
                self._add(turns, answer)
            raise

    def _add(self, turns: list[Turn], answer: str) -> None:
        if self.messages == turns[:-1]:
            # Templates write the space between a role and its text themselves. A second space would change the tokens.
            self.messages = [*turns, {"role": "assistant", "content": answer.strip()}]

    def undo(self) -> str:
        """Remove the user's last turn and its answer, and return the text of the turn.

        Raises:
          MarsError: the conversation is empty.
        """
        self._close()
        last = max((i for i, turn in enumerate(self.messages) if turn["role"] == "user"), default=None)
        if last is None:
            raise MarsError("there is no turn to take back: the conversation is empty.")
        text = self.messages[last]["content"]
        self.messages = self.messages[:last]
        return text

    def clear(self) -> None:
        """Begin a new conversation. Tokens that it shares with the beginning of the old one are not read again."""
        self._close()
        self.messages = []
