"""User-defined rules, specified as FILE.py:NAME or package.module:NAME, and their definitions.

A file is executed only if the user names it.
"""

from __future__ import annotations

import contextlib
import inspect
import types
import typing
from collections.abc import Callable
from typing import Any

from mars_jax.utils import user_code
from mars_jax.utils.errors import MarsError
from mars_jax.utils.paths import check_path
from mars_jax.utils.settings import LARGEST_INT, REQUEST, Range, Setting
from mars_jax.utils.user_code import load_function, summary
from mars_jax.verify.definition import Definition, rule, rules

_RANGES = {
    float: Range("a number"),
    int: Range(f"a whole number from {-LARGEST_INT} to {LARGEST_INT}", -LARGEST_INT, LARGEST_INT),
}


_TAKEN = {*REQUEST, "id", "prompt", "prompt_tokens"}
"""Keys that already have another meaning in a row of a prompts file."""


def split(spec: str) -> tuple[str, str]:
    """Split a spec into the name of a registered rule and the path of its weights, or "" if there is no path.

    >>> split("learned:some/folder"), split("mars")
    (('learned', 'some/folder'), ('mars', ''))
    """
    name, _, path = spec.partition(":")
    return name, path


def is_own(spec: str) -> bool:
    """Return True if a spec refers to a user-defined rule.

    >>> is_own("gates.py:entropy_gate"), is_own("mars"), is_own("learned:some/folder")
    (True, False, False)
    """
    location, colon, name = spec.rpartition(":")
    return bool(colon and location and name) and split(location)[0] not in rules()


def find(spec: str) -> Definition:
    """Return the definition of a rule. For a user's rule, derive the definition from the signature of the function.

    Args:
      spec: name of a rule in `rules()`, followed by `:PATH` if the rule has weights; or a user's rule, as FILE.py:NAME
        or package.module:NAME. NAME is then a function whose keyword arguments are the settings: floats, ints, bools,
        strings, and `Literal` for a choice. Their types come from annotations or defaults.

    Raises:
      MarsError: the rule, the file or the function does not exist, or the function has a required argument that no
        flag can set.

    >>> find("mars").name
    'mars'
    """
    if not is_own(spec):
        name, path = split(spec)
        check_path(path, "the rule's path")
        definition = rule(name)
        if ":" in spec and not (path and "weights" in definition.needs):
            raise MarsError(f"the rule is {spec}: {name} has no weights, so give only its name.")
        return definition
    # A user's function has no fields, so its signature declares the settings.
    factory = load_function(spec)
    return Definition(
        name=spec.rpartition(":")[2],
        make=factory,
        help=summary(factory) or "a rule of your own",
        settings={s.name: s for s in _settings(spec, factory)},
    )


def source_digest(spec: str) -> str | None:
    """Return a digest of the file that defines a user's rule or judge. Return None for a registered rule."""
    if not is_own(spec):
        return None
    return user_code.spec_file_digest(spec)


def _settings(spec: str, factory: Callable[..., Any]) -> list[Setting]:
    try:
        signature = inspect.signature(factory)
        # Evaluating an annotation fails if it refers to a name that is imported only for type checkers.
        with contextlib.suppress(Exception):
            signature = inspect.signature(factory, eval_str=True)
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
    """Return the setting of a keyword argument, or None if its value cannot be written as text."""
    default = parameter.default
    if default is parameter.empty:
        default = None
    kind, choices = _kind(parameter.annotation)
    if kind is None and type(default) in (float, int, bool, str):
        kind = type(default)
    if kind is None:
        return None
    if kind is float and type(default) is int:
        default = float(default)
    return Setting(
        name=parameter.name,
        kind=kind,
        default=default,
        optional=parameter.default is None,
        ranges=_RANGES.get(kind, Range("a number")),
        choices=choices,
        # In a prompts file, names such as `temperature` and `seed` are settings of the request, not of the rule.
        per_row=kind in _RANGES and parameter.name not in _TAKEN,
        help="",
    )


def _kind(annotation: Any) -> tuple[type | None, dict[str, str]]:
    """Return the type that an annotation stands for, and the choices of a `Literal`. `float | None` counts as float."""
    if typing.get_origin(annotation) is typing.Literal:
        choice_names = typing.get_args(annotation)
        if all(isinstance(name, str) for name in choice_names):
            return str, dict.fromkeys(choice_names, "")
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        member_kinds = [_kind(part) for part in typing.get_args(annotation) if part is not type(None)]
        if len(member_kinds) == 1:
            return member_kinds[0]
    if annotation in (float, int, bool, str):
        return annotation, {}
    return None, {}
