"""Validation and normalisation of chat turns. Tests: tests/serve/test_chat.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mars_jax.utils.errors import MarsError, check_text, short_repr

Turn = Mapping[str, Any]
"""A turn of a conversation: its `role`, such as "user", its `content`, and any other keys that the template reads.

The content is a string or, in OpenAI's format, a list of parts `{"type": "text", "text": ...}`, which are joined
without a separator. It may be None next to `tool_calls`."""


def as_turns(text: str) -> list[Turn]:
    """Wrap a string in a conversation with one user turn."""
    return [{"role": "user", "content": text}]


def as_conversation(turns: Any, system: str | None = None) -> list[Turn]:
    """Normalise a conversation for chat templates: join each content into one string, and prepend `system` if given.

    Args:
      turns: see `Turn`. Keys other than `role` and `content` are passed to the template.
      system: content of a system turn to prepend, unless the turns begin with one.

    Raises:
      MarsError: there are no turns, or a turn has no role or has content other than text.

    >>> parts = [{"type": "text", "text": "Hello"}, {"type": "text", "text": ", you"}]
    >>> [turn["content"] for turn in as_conversation([{"role": "user", "content": parts}], "Be brief.")]
    ['Be brief.', 'Hello, you']
    """
    if not isinstance(turns, Sequence) or isinstance(turns, str | bytes):
        raise MarsError(f"the conversation is {short_repr(turns)}: expected a list of turns.")
    conversation = [_as_turn(turn) for turn in turns]
    if not conversation:
        raise MarsError("the conversation is empty: give at least one turn.")
    if system is None or conversation[0]["role"] == "system":
        return conversation
    check_text("system", system)
    return [{"role": "system", "content": system}, *conversation]


def _as_turn(turn: Any) -> Turn:
    """Return a turn whose content is one string."""
    is_turn = isinstance(turn, Mapping) and isinstance(turn.get("role"), str)
    if not is_turn or not {"content", "tool_calls"} & turn.keys():
        raise MarsError(f"a turn is {short_repr(turn)}: expected an object with a role and its content.")
    check_text("the role of a turn", turn["role"])
    content = turn.get("content")
    if content is None and turn.get("tool_calls"):
        content = ""  # a template that does not handle None would render "None"
    elif isinstance(content, list | tuple):
        content = "".join(map(_text_of_part, content))
    check_text(f"the content of a turn of the {turn['role']}", content)
    return {**turn, "content": content}


def _text_of_part(part: Any) -> str:
    """Return the text of one content part in OpenAI's format."""
    if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
        raise MarsError(f'a content part is {short_repr(part)}: expected {{"type": "text", "text": "..."}}.')
    if part["type"] != "text":
        raise MarsError(f"a content part is of type {short_repr(part['type'])}: only text is supported.")
    check_text("the text of a content part", part.get("text"))
    return part["text"]
