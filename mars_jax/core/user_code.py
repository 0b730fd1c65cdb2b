"""One-sentence reports of exceptions in user code, such as a rule in a file. No jax here."""

from __future__ import annotations

import inspect
import traceback
import types
from collections.abc import Callable, Collection, Sequence
from typing import Any

from mars_jax.core.errors import first_line

MODULES: set[str] = set()
"""Names of the modules that the user named, as FILE.py:NAME or package.module:NAME."""


def is_user_module(name: str) -> bool:
    """True for a module outside of this package, whose errors are the user's.

    >>> is_user_module("gates"), is_user_module("mars_jax.verify.mars")
    (True, False)
    """
    return name.partition(".")[0] not in ("mars_jax", "kernels_pallas")


def frames_in(modules: Collection[str], error: BaseException) -> list[tuple[types.CodeType, int]]:
    """Return (code, line) of the traceback's frames in some modules, the deepest one last."""
    return [
        (frame.f_code, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        # The methods that a dataclass generates are in no file.
        if frame.f_globals.get("__name__") in modules and frame.f_code.co_filename != "<string>"
    ]


def failure(
    error: BaseException,
    frames: Sequence[tuple[types.CodeType, int]],
    code: Callable[..., Any] | None = None,
) -> str | None:
    """Return "FILE, line N: FUNCTION raised ERROR (MESSAGE)" for the deepest of the frames from `frames_in`.

    If there is no frame, name the definition of `code`; without `code` return None.
    """
    if frames:
        deepest, line = frames[-1]
        return f"{deepest.co_filename}, line {line}: {deepest.co_name} raised {reason(error)}"
    return None if code is None else f"{definition(code)}: it raised {reason(error)}"


def reason(error: BaseException) -> str:
    """Return "ERROR (MESSAGE)", or only the type of an error without a message.

    >>> reason(ValueError("no entropy")), reason(ValueError())
    ('ValueError (no entropy)', 'ValueError')
    """
    message, name = first_line(error), type(error).__name__
    return name if message == name else f"{name} ({message})"


def definition(code: Callable[..., Any]) -> str:
    """Return "FILE, line N" for where a function or a class is defined, or its name if it has no source file."""
    try:
        return f"{inspect.getsourcefile(code)}, line {inspect.getsourcelines(code)[1]}"
    except (OSError, TypeError):
        return getattr(code, "__qualname__", type(code).__qualname__)


def described(value: Any) -> str:
    """Return a value as messages show it: an array by its dtype and shape.

    >>> import numpy as np
    >>> described(np.zeros((2, 3), np.float32)), described(None), described({"a": 1})
    ('float32[2, 3]', 'None', 'an object of type dict')
    """
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{value.dtype}{list(value.shape)}"
    if isinstance(value, tuple):
        return f"({', '.join(map(described, value))})"
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)[:60]
    return f"an object of type {type(value).__name__}"
