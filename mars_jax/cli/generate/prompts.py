"""Functions that read prompts from text, JSON lines, parquet files and datasets.

JSON and parquet rows may contain settings.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from mars_jax.cli import remote
from mars_jax.hub.conversation import as_conversation
from mars_jax.utils.errors import MarsError, did_you_mean, first_line, say
from mars_jax.utils.limits import LINE_BYTES, PROMPT_BYTES
from mars_jax.utils.paths import check_path, open_file
from mars_jax.utils.settings import REQUEST
from mars_jax.utils.types import JsonObject
from mars_jax.utils.user_code import load_function
from mars_jax.verify import RuleChoice, not_in, rules

CONSTRAINTS = ("regex", "json_schema", "choice", "allowed_tokens")
"""Keys that set a constraint."""
SPANS = ("relax_in", "strict_in")
_PIPES = ("/dev/stdin", "/dev/fd/")
"""Prefixes of the paths of inherited open files. Shells replace <(...) with a path such as /dev/fd/63."""
_PROMPTS = ("prompt", "messages", "prompt_tokens")
_KEYS = (*_PROMPTS, "id", *REQUEST, "stop_strings", "logit_bias", *CONSTRAINTS, *SPANS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptRow:
    """One prompt, as text, messages or token ids, with its own settings."""

    where: str  # origin for messages: "prompts.jsonl, line 3", or "" for a prompt from the command line
    prompt: str | None = None
    messages: tuple[JsonObject, ...] | None = None  # a conversation
    tokens: tuple[int, ...] | None = None
    id: str | int | None = None
    settings: JsonObject = dataclasses.field(default_factory=dict)  # settings of the request
    numbers: JsonObject = dataclasses.field(default_factory=dict)  # settings of the rule

    @property
    def given(self) -> JsonObject:
        """Values that the row sets, keyed as in a prompts file."""
        return self.settings | {"messages": self.messages, "prompt_tokens": self.tokens}

    def error(self, message: object) -> MarsError:
        """Return an error whose message begins with the origin of the prompt."""
        return MarsError(": ".join(filter(None, (self.where, str(message)))))


def from_texts(texts: Iterable[str]) -> list[PromptRow]:
    """Return prompts from the command line as rows.

    Raises:
      MarsError: a prompt is empty, or not Unicode.
    """
    return [_checked(PromptRow(where="", prompt=text)) for text in texts]


def read_prompts(path: str, rule: RuleChoice) -> list[PromptRow]:
    """Read the rows of a file; `-` is stdin. Blank lines are ignored.

    Files named *.jsonl, *.ndjson or *.json are read as JSON lines, and so is stdin if it begins with "{". The columns
    of a *.parquet file correspond to the keys of a JSON line; null means a missing key. From a dataset, only the
    prompts and their ids are read.

    Args:
      path: path or URL of the file; or a dataset on the hub as OWNER/NAME[:CONFIG[:SPLIT]]; or the folder of a dataset.
      rule: the rule, whose settings rows may override.

    Raises:
      MarsError: the file does not exist or contains no prompts, or a line is not a prompt.
    """
    shown_name = "stdin" if path == "-" else path
    is_stream = path == "-" or remote.is_url(path) or path.startswith(_PIPES)
    if not is_stream:
        check_path(path, "the prompts file")
    dataset_rows = None
    if not (is_stream or Path(path).is_file()):
        # None if the path does not have the form of a dataset's name.
        dataset_rows = load_function("mars_jax.lab.evaluate.tasks.catalogue:columns")(path)
    if dataset_rows is not None:
        rows = list(_of_dataset(path, dataset_rows, rule))
    elif path.lower().endswith(".parquet"):
        rows = [_from_columns(row, f"{path}, row {i}", rule) for i, row in enumerate(_parquet(path))]
    else:
        rows = list(_lines(path, shown_name, rule))
    if not rows:
        raise MarsError(f"the prompts file '{shown_name}' holds no prompts: give one per line.")
    return list(map(_checked, rows))


@contextlib.contextmanager
def _opened(path: str) -> Iterator[IO[bytes]]:
    """Open a prompts file: stdin, an object in a store, an inherited pipe, or a regular file."""
    try:
        if path == "-":
            yield sys.stdin.buffer
            return
        if remote.is_url(path):
            yield io.BytesIO(remote.read_remote(path))
            return
        with open(path, "rb") if path.startswith(_PIPES) else open_file(path) as file:
            yield file
    except FileNotFoundError:
        raise MarsError(f"there is no prompts file '{path}': check the path.") from None
    except OSError as error:
        raise MarsError(f"the prompts file '{path}' cannot be read ({error.strerror}): check it.") from None


def _parquet(path: str) -> Iterator[JsonObject]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise MarsError("a .parquet file needs the package pyarrow: pip install pyarrow.") from None
    try:
        with _opened(path) as file:
            # Read small batches, because dictionary encoding lets a small file expand to many copies of one long text.
            for batch in parquet.ParquetFile(file).iter_batches(batch_size=64):
                yield from batch.to_pylist(maps_as_pydicts="strict")
    except (ArrowException, OSError, ValueError, KeyError) as error:
        raise MarsError(
            f"the prompts file '{path}' cannot be read ({first_line(error)}): give an intact parquet file."
        ) from None


def _of_dataset(
    path: str, columns: Iterator[tuple[str, JsonObject]], rule: RuleChoice
) -> Iterator[PromptRow]:
    """Yield the prompts and ids of a dataset, and print the names of its other columns."""
    other_columns: set[str] = set()
    for where, values in columns:
        # Use the first kind of prompt that the dataset has. Other columns are never read as settings, even if a setting
        # has the same name.
        prompt_columns = [key for key in _PROMPTS if values.get(key) is not None]
        if not prompt_columns:
            raise MarsError(
                f"{where}: its columns are {', '.join(values)}, and none of {', '.join(_PROMPTS)}: write its "
                "prompts to a .jsonl file."
            )
        used_columns = {prompt_columns[0], "id"} & values.keys()
        other_columns |= values.keys() - used_columns
        yield _from_columns({key: values[key] for key in used_columns}, where, rule)
    if other_columns:
        say(
            f"note: only prompts and ids are read from a dataset; other columns of '{path}' are ignored: "
            f"{', '.join(sorted(other_columns))}."
        )


def _from_columns(columns: JsonObject, where: str, rule: RuleChoice) -> PromptRow:
    # pandas writes an index column, and stores integers as floats if a column has nulls.
    fields = {key: x for key, x in _without_nulls(columns).items() if not key.startswith("__index_level_")}
    integer_fields = {key: int(x) for key, x in fields.items() if isinstance(x, float) and x.is_integer()}
    return _from_fields(fields | integer_fields, PromptRow(where=where), rule)


def _without_nulls(value: Any) -> Any:
    """Remove nulls, which stand for missing keys in a table."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def _lines(path: str, name: str, rule: RuleChoice) -> Iterator[PromptRow]:
    is_jsonl = None if path == "-" else path.lower().endswith((".jsonl", ".ndjson", ".json"))
    with _opened(path) as file:
        # Split bytes into lines: str.splitlines would also split at other characters, which prompts may contain.
        for number, line in enumerate(iter(lambda: file.readline(LINE_BYTES + 1), b""), start=1):
            row = PromptRow(where=f"{name}, line {number}")
            # `readline` stops one byte past the limit, so a huge line is never read in full.
            if len(line) > LINE_BYTES:
                raise row.error(f"it has more than {LINE_BYTES:,} bytes: give shorter prompts, one per line.")
            # Only the first line may begin with a byte order mark.
            encoding = "utf-8-sig" if number == 1 else "utf-8"
            try:
                text = line.decode(encoding).removesuffix("\n").removesuffix("\r")
            except UnicodeDecodeError:
                raise row.error("it is not UTF-8: convert the file.") from None
            if not text.strip():
                continue
            if is_jsonl is None:  # stdin has no file extension: detect the format from the first line
                is_jsonl = text.lstrip().startswith("{")
            if not is_jsonl:
                yield dataclasses.replace(row, prompt=text)
                continue
            try:
                yield _from_fields(_json_object(text, row), row, rule)
            except RecursionError:  # raised by the JSON parser or by the checks
                raise row.error("it is nested too deeply: give flatter values.") from None


def _json_object(line: str, row: PromptRow) -> JsonObject:
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise row.error(f"it is not JSON ({error}): a .jsonl file has one object per line.") from None
    if not isinstance(fields, dict):
        raise row.error('it is not an object: write {"prompt": "..."}.')
    return fields


def _from_fields(fields: JsonObject, row: PromptRow, rule: RuleChoice) -> PromptRow:
    """Return the prompt of a JSON object; `row` holds its origin."""
    _check_values(fields, row)
    rule_keys = [name for name, setting in rule.options.items() if setting.per_row]
    known_keys = (*_KEYS, *rule_keys)
    for name in sorted(fields.keys() - set(known_keys)):
        raise row.error(_unknown(name, rule, known_keys))
    # Read the prompt, which has exactly one of three forms.
    if sum(key in fields for key in _PROMPTS) != 1:
        raise row.error("it needs one of prompt, messages and prompt_tokens, and no two of them.")
    prompt, tokens, messages = (fields.get(key) for key in ("prompt", "prompt_tokens", "messages"))
    if "prompt" in fields and not isinstance(prompt, str):
        raise row.error(f"prompt is {prompt!r}: expected a string.")
    # `type(i) is int` also rejects true and false, which are integers in Python.
    if "prompt_tokens" in fields:
        if not (isinstance(tokens, list) and all(type(i) is int for i in tokens)):
            raise row.error("prompt_tokens is not a list of whole numbers: give token ids.")
        tokens = tuple(tokens)
    row_id = fields.get("id")
    if type(row_id) not in (str, int, type(None)):
        raise row.error(f"id is {row_id!r}: expected a string or a whole number.")
    try:
        if "messages" in fields:
            as_conversation(messages)
        # Read the settings of the request, then those of the rule.
        settings = {key: row.from_json(fields[key]) for key, row in REQUEST.items() if key in fields}
        if "stop_strings" in fields:
            settings["stop_strings"] = fields["stop_strings"]
        if "logit_bias" in fields:
            settings["logit_bias"] = logit_bias_of(fields["logit_bias"])
        settings |= {key: fields[key] for key in (*CONSTRAINTS, *SPANS) if fields.get(key) is not None}
        if not isinstance(settings.get("json_schema", {}), dict):
            # Accepting the path of a schema would let a row read any file.
            raise MarsError(f"json_schema is {settings['json_schema']!r}: expected an object, the schema.")
        rule_numbers = {}
        for key in fields.keys() & set(rule_keys):
            # The range of a setting may depend on the rule's structure: theta's depends on the margin.
            setting, structural_settings = rule.setting(key)
            rule_numbers[key] = setting.from_json(fields[key], **structural_settings)
    except MarsError as error:
        raise row.error(error) from None
    return PromptRow(
        where=row.where,
        prompt=prompt,
        messages=messages and tuple(messages),
        tokens=tokens,
        id=row_id,
        settings=settings,
        numbers=rule_numbers,
    )


def _check_values(fields: JsonObject, row: PromptRow) -> None:
    """Raise MarsError if a value, such as a date or a lone surrogate, cannot be written as JSON in UTF-8."""
    for key, value in fields.items():
        try:
            json.dumps({key: value}, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            # JSON can escape a lone surrogate, which UTF-8 cannot encode.
            raise row.error(f"{ascii(key)[1:-1]} is not valid Unicode: give it as UTF-8.") from None
        except TypeError:  # such as a date or bytes in a table
            raise row.error(f"{key} is of a type that JSON does not have: use strings or numbers.") from None


def logit_bias_of(value: Any) -> dict[int, float]:
    """Return biases by token id, from a JSON object or from the flags.

    Raises:
      MarsError: a key is not a whole number, or a value is not a number.

    >>> logit_bias_of({"42": "-inf"})
    {42: -inf}
    """
    try:
        return {int(token): float(x) for token, x in value.items()}
    except (AttributeError, TypeError, ValueError):
        raise MarsError(
            f"the logit bias is {value!r}: expected numbers by token id, such as --logit-bias 42=-inf, or in a file "
            '{"42": "-inf"}.'
        ) from None


def _unknown(name: str, rule: RuleChoice, keys: Sequence[str]) -> str:
    """Return an explanation of why a row cannot have a key."""
    if name in rule.options:
        return f"{name} is the same for all prompts: leave it out, and give --rule-option {name}=VALUE."
    if any(name in row.settings for row in rules().values()):
        return f"{name} does not apply to {not_in(rule, name)}."
    return f"unknown key '{name}'{did_you_mean(name, keys)}: the keys are {', '.join(keys)}."


def _checked(row: PromptRow) -> PromptRow:
    """Check a prompt as far as possible without a tokenizer, before anything is loaded, and return its row."""
    if row.prompt is None:
        if row.messages is None and not row.tokens:
            raise row.error("prompt_tokens is empty: give at least one token id.")
        return row
    if not row.prompt:
        raise row.error("the prompt is empty: give at least one character of text to continue.")
    try:
        num_bytes = len(row.prompt.encode("utf-8"))
    except UnicodeEncodeError:
        raise row.error("the prompt is not valid Unicode: give it as UTF-8.") from None
    if num_bytes > PROMPT_BYTES:
        raise row.error(f"the prompt has {num_bytes:,} bytes: expected at most {PROMPT_BYTES:,}; shorten it.")
    return row
