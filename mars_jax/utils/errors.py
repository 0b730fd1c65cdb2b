"""The exception for invalid input, the warning for probable mistakes, and helpers that check values."""

import contextlib
import difflib
import errno
import math
import numbers
import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

LONGEST = 20_000
"""Maximum length of a message in characters."""


class MarsError(Exception):
    """Error for invalid input. Its message is one sentence that names the argument, its value and a fix.

    It does not derive from ValueError, because some code catches the ValueErrors of other libraries to reword them.
    """

    def __str__(self) -> str:
        text = super().__str__()
        if len(text) > LONGEST:  # a quoted value may be megabytes long
            text = f"{text[: LONGEST // 2]} ... {text[-LONGEST // 2 :]}"
        return printable(text)  # messages contain text from untrusted files, templates and paths


@contextlib.contextmanager
def prefixed(prefix: str) -> Iterator[None]:
    """Prepend a prefix and a colon to the message of a MarsError that is raised in the `with` block.

    >>> with prefixed("'a'"):
    ...     raise MarsError("it is empty.")
    Traceback (most recent call last):
    mars_jax.utils.errors.MarsError: 'a': it is empty.
    """
    try:
        yield
    except MarsError as error:
        raise MarsError(f"{prefix}: {error}") from None


class MarsWarning(UserWarning):
    """Warning about a probable mistake in the input. Decoding continues."""


def warn(sentence: str) -> None:
    """Issue a MarsWarning that points to the line of user code that called this package."""
    # Skip the frames of this package, so that the warning shows the line of the caller.
    frame, stack_level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("mars_jax."):
        frame, stack_level = frame.f_back, stack_level + 1
    warnings.warn(printable(sentence), MarsWarning, stacklevel=stack_level)


_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
"""`errno` values of failed writes: disk full, quota exceeded, file too large, read-only file system."""


def unwritable(error: BaseException, path: str | os.PathLike[str] | None = None) -> MarsError | None:
    """Return the MarsError to raise if `error` was caused by a full disk or a file limit, otherwise None.

    Libraries may wrap an OSError in another type but keep its text. Only explicit causes (`raise ... from error`) are
    searched, so that a bug in the code that handles a full disk is not hidden.

    Args:
      error: an error from any library.
      path: the path that the message reports if the error contains no file name.

    >>> print(unwritable(ValueError("RESOURCE_EXHAUSTED: No space left on device [os_error_code='28']"), "out"))
    cannot write to 'out': No space left on device; make room, or choose another path.
    """
    cause: BaseException | None = error
    while cause is not None:
        text = str(cause)
        if isinstance(cause, OSError) and cause.errno is not None:
            text = os.strerror(cause.errno)
        reason = next((os.strerror(code) for code in _UNWRITABLE if os.strerror(code) in text), None)
        if reason is not None:
            name = path or getattr(cause, "filename", None)
            quoted_path = "the disk" if name is None else f"'{os.fsdecode(name)}'"
            return MarsError(f"cannot write to {quoted_path}: {reason}; make room, or choose another path.")
        cause = cause.__cause__
    return None


def check_type(name: str, value: object, kinds: type | tuple[type, ...], expected: str) -> None:
    """Raise MarsError unless `value` is an instance of `kinds`, which `expected` describes.

    >>> check_type("the text", 3, str, "a string")
    Traceback (most recent call last):
    mars_jax.utils.errors.MarsError: the text is of type int: expected a string.
    """
    if not isinstance(value, kinds):
        raise MarsError(f"{name} is of type {type(value).__name__}: expected {expected}.")


def check_count(name: str, value: object, least: int = 1, most: int | None = None) -> None:
    """Raise MarsError unless `value` is an integer (and not a bool) from `least` to `most`; None means no maximum.

    >>> check_count("batch_size", 0.5)
    Traceback (most recent call last):
    mars_jax.utils.errors.MarsError: batch_size is 0.5: expected a whole number of at least 1.
    """
    limit, range_text = math.inf, f"of at least {least}"
    if most is not None:
        limit, range_text = most, f"from {least} to {most}"
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or not least <= int(value) <= limit:
        raise MarsError(f"{name} is {short_repr(value)}: expected a whole number {range_text}.")


def check_text(name: str, value: object) -> None:
    """Raise MarsError unless `value` is a string that can be encoded as UTF-8.

    >>> check_text("the prompt", 5)
    Traceback (most recent call last):
    mars_jax.utils.errors.MarsError: the prompt is 5: expected a string.
    """
    if not isinstance(value, str):
        raise MarsError(f"{name} is {short_repr(value)}: expected a string.")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise MarsError(f"{name} is {short_repr(value)}, not valid Unicode: give it as UTF-8.") from None


def check_switch(name: str, value: Any) -> None:
    """Raise MarsError unless `value` is a Python, NumPy or JAX bool."""
    is_array = getattr(value, "dtype", None) == "bool" and not value.shape
    if not isinstance(value, bool) and not is_array:
        raise MarsError(f"{name} is {short_repr(value)}: expected True or False.")


def short_repr(value: object) -> str:
    """Format a value for a message in at most 100 characters: its `repr`, or only its type for most objects.

    >>> short_repr("ab"), short_repr(object()), len(short_repr("a" * 1000))
    ("'ab'", 'of type object', 100)
    """
    type_text = f"of type {type(value).__name__}"
    if not isinstance(value, numbers.Number | str | bytes | list | tuple | dict | set | type(None)):
        return type_text
    if isinstance(value, int) and value.bit_length() > 999:  # Python refuses to format thousands of digits
        return f"a number of {value.bit_length()} bits"
    try:
        text = repr(value)
    except ValueError:  # a huge number inside a list
        return type_text
    if "\n" in text:  # an array inside a list
        return type_text
    return shortened(text, 100)


def shortened(text: str, most: int) -> str:
    """Shorten a text to at most `most` characters. If the text was longer, the result ends in three dots.

    >>> shortened("abcdef", 6), shortened("abcdefg", 6)
    ('abcdef', 'abc...')
    """
    if len(text) <= most:
        return text
    return f"{text[: most - 3]}..."


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return a suggestion: the valid name that is most similar to a mistyped name, or "" if no name is similar.

    >>> did_you_mean("--temprature", ["--temperature", "--theta"])
    ' (did you mean --temperature?)'
    >>> did_you_mean("frequency", ["theta"])
    ''
    """
    matches = difflib.get_close_matches(name, list(names), n=1)
    return "".join(f" (did you mean {match}?)" for match in matches if match != name)


def printable(text: str) -> str:
    """Escape unprintable characters, so that a terminal does not execute escape sequences in untrusted text.

    >>> printable("lm_head\\x1b[2J")
    'lm_head\\\\x1b[2J'
    """
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def say(sentence: str) -> None:
    """Print a sentence to stderr with unprintable characters escaped."""
    print(printable(sentence), file=sys.stderr, flush=True)


def first_line(error: BaseException) -> str:
    """Return the first line of an error message, or the name of the error's type if the message is empty.

    >>> first_line(ValueError("..the file is bad.\\nsee above")), first_line(OSError())
    ('..the file is bad', 'OSError')
    """
    return next(iter(str(error).strip().splitlines()), "").rstrip(".:") or type(error).__name__
