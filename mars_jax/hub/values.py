"""Readers for values in a config.json. A key whose value is null counts as absent; a value of 0 does not."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from mars_jax.utils.errors import MarsError
from mars_jax.utils.types import JsonObject


def value_or_default(data: JsonObject, key: str, default: Any) -> Any:
    """Return the value of a key; `default` if the key is absent or null.

    >>> [value_or_default({"rope_theta": value}, "rope_theta", 10000.0) for value in (0, None)]
    [0, 10000.0]
    """
    value = data.get(key)
    if value is None:
        return default
    return value


def count(data: JsonObject, key: str, default: int) -> int:
    """Return a key's value, a whole number of at least 1; `default`, which may be 0, if the key is absent or null.

    Raises:
      MarsError: the value is not a whole number of at least 1.
    """
    value = data.get(key)
    if value is None:
        return default
    if type(value) is not int or value < 1:  # not isinstance, which would accept JSON's true
        raise MarsError(f"{key} is {value!r}: expected a whole number of at least 1.")
    return value


def config_token_ids(data: JsonObject, key: str, file: str) -> tuple[int, ...]:
    """Return a key's value, one token id or a list of them, as a tuple; () if the key is absent or null.

    Raises:
      MarsError: the value is neither a token id nor a list of them. The message names `file`.

    >>> config_token_ids({"eos_token_id": [1, 106]}, "eos_token_id", "config.json")
    (1, 106)
    """
    ids = value = value_or_default(data, key, [])
    if not isinstance(value, list):
        ids = [value]
    if any(type(i) is not int or not 0 <= i < 2**31 for i in ids):
        raise MarsError(f"{key} of {file} is {value!r}: expected a token id, or a list of token ids.")
    return tuple(ids)


@contextlib.contextmanager
def of_its_kind(subject: str, cure: str) -> Iterator[None]:
    """Convert Python's errors about values of an unexpected type, such as a string for a number, into a MarsError."""
    try:
        yield
    except (TypeError, AttributeError, LookupError, ValueError, ArithmeticError) as error:
        raise MarsError(f"{subject} of the wrong kind ({error}): {cure}.") from None
