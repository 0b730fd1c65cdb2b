"""Reader of JSON-lines files, plain or compressed. Each object keeps its line number, for error messages."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator

from mars_jax.lab.training.data import UNREADABLE
from mars_jax.utils.errors import MarsError
from mars_jax.utils.paths import unpacked
from mars_jax.utils.types import JsonObject


@dataclasses.dataclass(frozen=True)
class Fields:
    """The JSON object on one line of a file."""

    where: str  # "gsm8k.jsonl, line 3"
    values: JsonObject

    def error(self, message: str) -> MarsError:
        """Return an error with `message`, prefixed with the file and line of this object."""
        return MarsError(f"{self.where}: {message}")

    def has(self, *keys: str) -> bool:
        """Return whether all of `keys` are present and not null."""
        return all(self.values.get(key) is not None for key in keys)

    def text(self, *keys: str) -> str:
        """Return the string under the first of `keys` that is present.

        Raises:
          MarsError: all keys are missing, or the value is blank or not a string.
        """
        for key in keys:
            value = self.values.get(key)
            if isinstance(value, str) and value.strip():
                return value
            if value is not None:
                raise self.error(f"{key} is {value!r}: expected a string.")
        raise self.error(f"it has no {' or '.join(keys)}: give one.")

    def texts(self, key: str) -> list[str]:
        """Return the list of strings under `key`. A single string becomes a list of one.

        Raises:
          MarsError: the list is missing or empty, or an element is not a string.
        """
        value = self.values.get(key)
        if isinstance(value, str):
            return [value]
        if not isinstance(value, list) or not value or not all(isinstance(v, str) for v in value):
            raise self.error(f"{key} is {value!r}: expected a list of strings.")
        return value

    def first_text(self, key: str, list_key: str) -> str:
        """Return the string under `key` or, without that key, the first string of the list under `list_key`."""
        if self.has(key):
            return self.text(key)
        return self.texts(list_key)[0]


def read_jsonl(path: str) -> Iterator[Fields]:
    """Yield the objects of a file, skipping blank lines. Files with the suffix .xz or .gz are decompressed.

    Raises:
      MarsError: the file cannot be read, or a line is not a JSON object.

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
    ...     _ = file.write('{"prompt": "Hello"}'); file.flush()
    ...     [fields.text("prompt") for fields in read_jsonl(file.name)]
    ['Hello']
    """
    try:
        file_bytes = unpacked(path)
    except FileNotFoundError:
        raise MarsError(f"there is no file '{path}': check the path.") from None
    except UNREADABLE as error:
        raise MarsError(f"'{path}' cannot be read ({error}): name an intact file of JSON lines.") from None
    for number, line in enumerate(file_bytes.split(b"\n"), start=1):
        where = f"{path}, line {number}"
        if not line.strip():
            continue
        try:
            values = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise MarsError(f"{where}: it is not JSON ({error}): give one object a line.") from None
        if not isinstance(values, dict):
            raise MarsError(f"{where}: it is not an object: give one object a line.")
        yield Fields(where, values)
