"""Read a prompts file: plain text, one prompt a line, or JSON lines with settings of their own."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from mars_jax import specs
from mars_jax.core.errors import MarsError
from mars_jax.specs import RuleChoice

_PER_REQUEST = {name: row for name, row in specs.REQUEST.items() if row.per_row}
_KEYS = ("prompt", "prompt_tokens", "id", *_PER_REQUEST)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptRow:
    """One prompt, as text or as token ids, and what it chooses for itself."""

    where: str  # for messages: "prompts.jsonl, line 3", or "" for a prompt of the command line
    prompt: str | None = None
    tokens: tuple[int, ...] | None = None
    id: str | int | None = None
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)  # of the request
    numbers: dict[str, Any] = dataclasses.field(default_factory=dict)  # of the rule

    def error(self, message: object) -> MarsError:
        """`message` with the place it is about."""
        return MarsError(f"{self.where}: {message}" if self.where else str(message))


def from_texts(texts: list[str]) -> list[PromptRow]:
    """Prompts of the command line.

    Raises:
      MarsError: one is empty, or not Unicode.
    """
    return [_checked(PromptRow(where="", prompt=text)) for text in texts]


def read_prompts(path: str, rule: RuleChoice) -> list[PromptRow]:
    """The rows of a file; `-` is stdin. Blank lines are ignored.

    Files named *.jsonl, *.ndjson or *.json hold JSON lines, and so does stdin if it begins with "{".

    Args:
      path: of the file.
      rule: whose numbers a row may choose for itself.

    Raises:
      MarsError: no such file, no prompts in it, or a line that is not a prompt.
    """
    name = "stdin" if path == "-" else path
    try:
        data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except FileNotFoundError:
        raise MarsError(f"there is no prompts file '{path}': check the path.") from None
    except OSError as error:
        raise MarsError(
            f"the prompts file '{path}' cannot be read ({error.strerror}): check the path."
        ) from None
    rows = []
    jsonl = (
        data.lstrip().startswith(b"{")
        if path == "-"
        else path.lower().endswith((".jsonl", ".ndjson", ".json"))
    )
    # Split the bytes: str.splitlines would also split at characters that a prompt may hold.
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        where = f"{name}, line {number}"
        try:
            text = line.decode("utf-8").removesuffix("\r")
        except UnicodeDecodeError:
            raise MarsError(f"{where}: it is not UTF-8: convert the file.") from None
        if text.strip():
            rows.append(
                _checked(_from_json_line(text, where, rule) if jsonl else PromptRow(where=where, prompt=text))
            )
    if not rows:
        raise MarsError(f"the prompts file '{name}' holds no prompts: give one a line.")
    return rows


def _from_json_line(line: str, where: str, rule: RuleChoice) -> PromptRow:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise MarsError(
            f"{where}: it is not JSON ({error}): a .jsonl file holds one object a line."
        ) from None
    row = PromptRow(where=where)
    if not isinstance(fields, dict):
        raise row.error('it is not an object: write {"prompt": "..."}.')
    numbers = {name: setting for name, setting in rule.options.items() if setting.per_row}
    for name in sorted(fields.keys() - {*_KEYS, *numbers}):
        raise row.error(_unknown(name, rule, (*_KEYS, *numbers)))
    if ("prompt" in fields) == ("prompt_tokens" in fields):
        raise row.error("it needs either prompt or prompt_tokens, and not both.")
    prompt, tokens, name = fields.get("prompt"), fields.get("prompt_tokens"), fields.get("id")
    if "prompt" in fields and not isinstance(prompt, str):
        raise row.error(f"prompt is {prompt!r}: expected a text.")
    if "prompt_tokens" in fields and not (isinstance(tokens, list) and all(type(i) is int for i in tokens)):
        raise row.error("prompt_tokens is not a list of whole numbers: give token ids.")
    if type(name) not in (str, int, type(None)):
        raise row.error(f"id is {name!r}: expected a text or a whole number.")
    try:
        settings = {key: row.from_json(fields[key]) for key, row in _PER_REQUEST.items() if key in fields}
        chosen = {}
        for key in numbers.keys() & fields.keys():
            setting, structure = rule.setting(key)
            chosen[key] = setting.from_json(fields[key], **structure)
    except MarsError as error:
        raise row.error(error) from None
    return PromptRow(
        where=where,
        prompt=prompt,
        tokens=None if tokens is None else tuple(tokens),
        id=name,
        settings=settings,
        numbers=chosen,
    )


def _unknown(name: str, rule: RuleChoice, keys: tuple[str, ...]) -> str:
    """Why a key is none of a row."""
    if name in rule.options:
        return f"{name} is one for all prompts: leave it out, and give --rule-option {name}=VALUE."
    if any(name in row.settings for row in specs.RULES.values()):
        return f"{name} does not apply to {specs.not_in(rule, name)}."
    return f"unknown key '{name}': the keys are {', '.join(keys)}."


def _checked(row: PromptRow) -> PromptRow:
    if row.prompt is not None:
        if not row.prompt:
            raise row.error("the prompt is empty: give at least one character of text to continue.")
        try:
            row.prompt.encode("utf-8")
        except UnicodeEncodeError:
            raise row.error("the prompt is not valid Unicode: give it as UTF-8.") from None
    elif not row.tokens:
        raise row.error("prompt_tokens is empty: give at least one token id.")
    return row
