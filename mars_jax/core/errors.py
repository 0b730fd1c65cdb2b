"""The one exception this package raises for bad input, and what its sentences are made of."""

import difflib
from collections.abc import Iterable


class MarsError(Exception):
    """Bad input, in one sentence that names the thing, its value and the cure.

    It is no ValueError, so that code which turns the ValueErrors of other libraries into sentences leaves it alone.
    """


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """The known name that is nearest to a mistyped one, as a part of a sentence; "" where none is near.

    >>> did_you_mean("--temprature", ["--temperature", "--theta"])
    ' (did you mean --temperature?)'
    >>> did_you_mean("frequency", ["theta"])
    ''
    """
    near = difflib.get_close_matches(given, list(known), n=1)
    return f" (did you mean {near[0]}?)" if near and near[0] != given else ""


def first_line(error: BaseException) -> str:
    """The first line of what an error of another library says, else its type."""
    return next(iter(str(error).strip().splitlines()), "").rstrip(".:") or type(error).__name__
