"""Functions that load a user's functions from files and describe the exceptions they raise, without importing jax."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
import types
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from mars_jax.utils.errors import MarsError, first_line
from mars_jax.utils.paths import read_bytes

MODULES: set[str] = set()
"""Names of the modules that users specified as FILE.py:NAME or package.module:NAME."""

_PURPOSES = {
    "rule": "that makes a rule",
    "judge": "of a prompt and an answer that returns a number from 0 to 1",
}
"""Descriptions of users' functions, by kind, for use in messages."""


def is_user_module(name: str) -> bool:
    """Return True if a module belongs to the user and not to this package.

    >>> is_user_module("gates"), is_user_module("mars_jax.verify.mars")
    (True, False)
    """
    return name.partition(".")[0] not in ("mars_jax", "kernels_pallas")


def frames_in(modules: Collection[str], error: BaseException) -> list[tuple[types.CodeType, int]]:
    """Return the frames of an error's traceback that belong to `modules`, as (code, line) pairs, innermost last."""
    return [
        (frame.f_code, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        # Methods that `dataclasses` generates have no source file.
        if frame.f_globals.get("__name__") in modules and frame.f_code.co_filename != "<string>"
    ]


def failure(
    error: BaseException,
    frames: Sequence[tuple[types.CodeType, int]],
    code: Callable[..., object] | None = None,
) -> str | None:
    """Return "FILE, line N: FUNCTION raised ERROR (MESSAGE)" for the innermost of `frames`, which `frames_in` returned.

    If `frames` is empty, name the file and line at which `code` is defined, or return None if `code` is None.
    """
    if frames:
        deepest_code, line = frames[-1]
        return f"{deepest_code.co_filename}, line {line}: {deepest_code.co_name} raised {reason(error)}"
    return None if code is None else f"{location_of(code)}: it raised {reason(error)}"


def reason(error: BaseException) -> str:
    """Return "ERROR (MESSAGE)" with the type and message of an error, or only the type if it has no message.

    >>> reason(ValueError("no entropy")), reason(ValueError())
    ('ValueError (no entropy)', 'ValueError')
    """
    message, name = first_line(error), type(error).__name__
    return name if message == name else f"{name} ({message})"


def location_of(code: Callable[..., object]) -> str:
    """Return "FILE, line N" for the definition of a function or class, or its name if it has no source file."""
    try:
        return f"{inspect.getsourcefile(code)}, line {inspect.getsourcelines(code)[1]}"
    except (OSError, TypeError):
        return getattr(code, "__qualname__", type(code).__qualname__)


def described(value: Any) -> str:
    """Describe a value for an error message. Arrays are described by their dtype and shape.

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


def load_function(spec: str, kind: str = "rule") -> Callable[..., Any]:
    """Load the function that a user specified as FILE.py:NAME or package.module:NAME. The file is executed.

    Raises:
      MarsError: the file, module or name does not exist, the named object is not callable, or the file raises an error.
    """
    # A path may contain colons, but a name cannot.
    source, _, name = spec.rpartition(":")
    module = _from_file(source, kind) if source.endswith(".py") else _from_module(source, spec, kind)
    function = getattr(module, name, None)
    if not callable(function):
        problem = "is not callable" if hasattr(module, name) else "is not in it"
        raise MarsError(f"the {kind} is {spec}: {name} {problem}; name a function {_PURPOSES[kind]}.")
    return function


def spec_file_digest(spec: str) -> str | None:
    """Return a digest of the file that defines a user's function, without the files that it imports."""
    source = spec.rpartition(":")[0]
    path = source if source.endswith(".py") else _from_module(source, spec, "rule").__file__
    return None if path is None else hashlib.sha256(read_bytes(path)).hexdigest()[:16]


def _from_file(path: str, kind: str) -> types.ModuleType:
    try:
        source = read_bytes(path)
    except OSError as error:
        raise MarsError(
            f"the file of a {kind} '{path}' cannot be read ({error.strerror}): check the path."
        ) from None
    # The name of the module contains a digest of the file, so that an edited file is executed again and an unchanged
    # file yields the same classes.
    digest = hashlib.sha256(os.path.abspath(path).encode() + b"\0" + source).hexdigest()[:16]
    name = f"mars_jax_own_{Path(path).stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    module_spec = importlib.util.spec_from_file_location(name, path)
    assert module_spec is not None and module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module  # `dataclasses` looks up modules here
    MODULES.add(name)
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise MarsError(
            f"the file of a {kind} '{path}' does not run: {_import_failure(error, name, path)}; expected a file that "
            f"defines a function {_PURPOSES[kind]}."
        ) from error
    return module


def _import_failure(error: BaseException, module: str, name: str) -> str:
    """Describe the error that made an import fail, with the file and line at which it was raised."""
    if isinstance(error, SyntaxError):  # raised before any line was executed
        return f"{error.filename}, line {error.lineno}: SyntaxError ({error.msg})"
    return failure(error, frames_in({module}, error)) or f"{name}: {reason(error)}"


def _from_module(name: str, spec: str, kind: str) -> types.ModuleType:
    # Unlike `python -m`, a console script does not add the current directory to `sys.path`.
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    if is_user_module(name):
        MODULES.add(name)
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        problem = error if isinstance(error, ImportError) else _import_failure(error, name, name)
        raise MarsError(
            f"the {kind} is {spec}: the module '{name}' cannot be imported ({problem}); expected FILE.py:NAME or "
            "package.module:NAME."
        ) from error


def summary(documented: object) -> str:
    """Return the first line of an object's docstring without its period, or "" if there is no docstring."""
    return (inspect.getdoc(documented) or "").partition("\n")[0].strip().rstrip(".")
