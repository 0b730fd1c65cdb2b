"""Rows of user-defined rules, with specs FILE.py:NAME or package.module:NAME. Does not import jax.

Naming a file executes it as the user's code. No other operation executes it.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mars_jax.core import user_code
from mars_jax.core.errors import MarsError
from mars_jax.core.home import check_path
from mars_jax.core.reading import read_bytes
from mars_jax.core.settings import CONTROLS, LARGEST_INT, Range, Setting
from mars_jax.specs.row import RuleRow
from mars_jax.specs.rules import RULES, rule

_RANGES = {
    float: Range("a number"),
    int: Range(f"a whole number from {-LARGEST_INT} to {LARGEST_INT}", -LARGEST_INT, LARGEST_INT),
}


_TAKEN = {*CONTROLS, "seed", "max_new_tokens", "id", "prompt", "prompt_tokens"}
"""Keys of a row of a prompts file that already have a meaning."""


PURPOSES = {"rule": "that makes a rule", "judge": "of a prompt and an answer that gives a number from 0 to 1"}
"""Purpose of a user's function, by its kind."""


def split(spec: str) -> tuple[str, str]:
    """Split a spec into the name of a rule of the table and the path of its weights, "" if there is none.

    >>> split("learned:some/folder"), split("mars")
    (('learned', 'some/folder'), ('mars', ''))
    """
    name, _, path = spec.partition(":")
    return name, path


def is_own(spec: str) -> bool:
    """Return True if a spec names a user-defined rule.

    >>> is_own("gates.py:entropy_gate"), is_own("mars"), is_own("learned:some/folder")
    (True, False, False)
    """
    where, colon, name = spec.rpartition(":")
    return bool(colon and where and name) and split(where)[0] not in RULES


def find(spec: str) -> RuleRow:
    """Return the row of a rule: from the table, or made from the signature of a user's factory.

    Args:
      spec: a name of `RULES`, with `:PATH` for a rule with weights, or FILE.py:NAME or package.module:NAME. NAME takes
        its settings as keywords: floats, ints, bools, strings, and `Literal` for a choice. Their types are read from
        annotations or defaults.

    Raises:
      MarsError: no such rule, file or name; a factory with a required argument that no flag can set.

    >>> find("mars").name
    'mars'
    """
    if not is_own(spec):
        name, path = split(spec)
        check_path(path, "the rule's path")
        row = rule(name)
        if ":" in spec and not (path and "weights" in row.needs):
            raise MarsError(f"the rule is {spec}: {name} has no weights, so name it alone.")
        return row
    make_rule = factory(spec)
    doc = (inspect.getdoc(make_rule) or "").partition("\n")[0].strip().rstrip(".")
    settings = {s.name: s for s in _settings(spec, make_rule)}
    name = spec.rpartition(":")[2]
    return RuleRow(
        name=name, factory=spec, help=doc or "a rule of your own", lossless=False, settings=settings
    )


def factory(spec: str, kind: str = "rule") -> Callable[..., Any]:
    """Return the function named by a row's `factory` or by a user's spec; messages call it `kind`.

    Raises:
      MarsError: no such file, module or name; not callable; or the file raises an error.
    """
    where, _, name = spec.rpartition(":")
    module = _from_file(where, kind) if where.endswith(".py") else _from_module(where, spec, kind)
    target = getattr(module, name, None)
    if not callable(target):
        problem = "is nothing that can be called" if hasattr(module, name) else "is not in it"
        raise MarsError(f"the {kind} is {spec}: {name} {problem}; name a function {PURPOSES[kind]}.")
    return target


def source_digest(spec: str) -> str | None:
    """Return a digest of the file that defines a user's rule or judge, or None for a rule of the table.

    The digest changes if the file is edited. It does not cover modules that the file imports.
    """
    if not is_own(spec):
        return None
    where = spec.rpartition(":")[0]
    path = where if where.endswith(".py") else _from_module(where, spec, "rule").__file__
    return None if path is None else hashlib.sha256(read_bytes(path)).hexdigest()[:16]


def _from_file(path: str, kind: str) -> types.ModuleType:
    try:
        source = read_bytes(path)
    except OSError as error:
        raise MarsError(
            f"the file of a {kind} '{path}' cannot be read ({error.strerror}): check the path."
        ) from None
    # Key modules by content, so that an edited file is executed again and an unedited one gives the same classes.
    digest = hashlib.sha256(os.path.abspath(path).encode() + b"\0" + source).hexdigest()[:16]
    name = f"mars_jax_own_{Path(path).stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module here
    user_code.MODULES.add(name)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise MarsError(
            f"the file of a {kind} '{path}' does not run: {_import_failure(error, name, path)}; expected a file that "
            f"defines a function {PURPOSES[kind]}."
        ) from error
    return module


def _import_failure(error: BaseException, module: str, name: str) -> str:
    """Return the error of a failed import with its file and line."""
    if isinstance(error, SyntaxError):  # raised before any line ran
        return f"{error.filename}, line {error.lineno}: SyntaxError ({error.msg})"
    frames = user_code.frames_in({module}, error)
    return user_code.failure(error, frames) or f"{name}: {user_code.reason(error)}"


def _from_module(name: str, spec: str, kind: str) -> types.ModuleType:
    # Unlike `python -m`, a console script does not put the current directory on the path.
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    if user_code.is_user_module(name):
        user_code.MODULES.add(name)
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        problem = error if isinstance(error, ImportError) else _import_failure(error, name, name)
        expected = {"rule": f"a rule of the table ({', '.join(RULES)}), ", "judge": ""}
        raise MarsError(
            f"the {kind} is {spec}: the module '{name}' cannot be imported ({problem}); expected "
            f"{expected[kind]}FILE.py:NAME or package.module:NAME."
        ) from error


def _settings(spec: str, made: Callable[..., Any]) -> list[Setting]:
    try:
        signature = inspect.signature(made)
        # Evaluation fails if an annotation exists only for type checkers.
        with contextlib.suppress(Exception):
            signature = inspect.signature(made, eval_str=True)
    except (TypeError, ValueError):
        raise MarsError(
            f"the rule is {spec}: it has no signature; name a function that makes a rule."
        ) from None
    settings = []
    for parameter in signature.parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        setting = None if parameter.kind is parameter.POSITIONAL_ONLY else _setting(parameter)
        if setting is not None:
            settings.append(setting)
        elif parameter.default is parameter.empty:
            raise MarsError(
                f"the rule is {spec}: its argument '{parameter.name}' has no default and is annotated neither as "
                "float, int, bool, str nor Literal, so that no flag can set it: give it a default, or annotate it."
            )
    return settings


def _setting(parameter: inspect.Parameter) -> Setting | None:
    """Return a keyword argument as a setting; None if no text can represent its value."""
    default = None if parameter.default is parameter.empty else parameter.default
    kind, choices = _kind(parameter.annotation)
    if kind is None and type(default) in (float, int, bool, str):
        kind = type(default)
    if kind is None:
        return None
    return Setting(
        name=parameter.name,
        kind=kind,
        default=float(default) if kind is float and type(default) is int else default,
        optional=parameter.default is None,
        ranges=_RANGES.get(kind, Range("a number")),
        choices=choices,
        # Reserved names, such as temperature and seed, belong to the row and not to the rule.
        per_row=kind in _RANGES and parameter.name not in _TAKEN,
        help="",
    )


def _kind(annotation: Any) -> tuple[type | None, dict[str, str]]:
    """Return the type of an annotation and its choices; `float | None` is a float."""
    if typing.get_origin(annotation) is typing.Literal:
        names = typing.get_args(annotation)
        return (str, dict.fromkeys(names, "")) if all(isinstance(n, str) for n in names) else (None, {})
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        kinds = [_kind(part) for part in typing.get_args(annotation) if part is not type(None)]
        return kinds[0] if len(kinds) == 1 else (None, {})
    return (annotation if annotation in (float, int, bool, str) else None), {}
