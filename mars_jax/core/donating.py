"""Jitted functions that donate arguments, keep the original type signature, and reject arguments already donated.

Tests: tests/test_wrong_types.py, with donated states and weights.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

import jax
from jax.core import Tracer

from mars_jax.utils.errors import MarsError

P = ParamSpec("P")
R = TypeVar("R")


class Donating(Generic[P, R]):
    """A function compiled by `jax.jit` that donates some of its arguments. It has the methods of a jitted function.

    Raises (when called):
      MarsError: an argument was already donated to an earlier call.
    """

    def __init__(self, function: Callable[P, R], check: Callable[..., None] | None = None, **options: Any):
        self._check = check
        self._jitted: Any = jax.jit(function, **options)
        functools.update_wrapper(self, function)
        self.__wrapped__ = function

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if self._check is not None:
            self._check(*args, **kwargs)
        try:
            return self._jitted(*args, **kwargs)
        except (RuntimeError, ValueError):
            # jaxlib does not name the argument whose buffer was deleted, so search all arguments for a deleted leaf.
            arguments = inspect.signature(self.__wrapped__).bind(*args, **kwargs).arguments
            for name, value in arguments.items():
                for x in jax.tree.leaves(value):
                    check_held(x, name, self.__name__.removeprefix("_"))
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_jitted"], name)


def donating(
    *donated: int, check: Callable[..., None] | None = None, **options: Any
) -> Callable[[Callable[P, R]], Donating[P, R]]:
    """Return a decorator that jits a function, with argument 0 (a decoder) static and the arguments `donated` donated.

    The compiled function first calls `check` with its arguments. `check` raises an error if an argument has the wrong
    type.

    >>> @donating(1)
    ... def double(decoder, x):
    ...     return 2 * x
    >>> x = jax.numpy.ones(3)
    >>> double(None, x).tolist()
    [2.0, 2.0, 2.0]
    """
    return lambda function: Donating(function, check, static_argnums=0, donate_argnums=donated, **options)


def check_held(x: object, name: str, by: str) -> None:
    """Raise MarsError if `x`, an array in the argument `name` of the function `by`, was already donated."""
    if isinstance(x, jax.Array) and not isinstance(x, Tracer) and x.is_deleted():
        raise MarsError(
            f"the {name} given to {by} was donated before, to a function that reuses its memory: continue with the "
            f"{name} that it returned."
        ) from None
