"""Jitted functions that take the memory of their arguments, with the types of what they compile, and a sentence for
an argument that is used again.

Oracle: states and weights that were given away (tests/test_wrong_types.py).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

import jax
from jax.core import Tracer

from mars_jax.core.errors import MarsError

P = ParamSpec("P")
R = TypeVar("R")


class Donating(Generic[P, R]):
    """A function that `jax.jit` compiles, some of whose arguments it takes over. It has the methods of a jitted one.

    Raises (when called):
      MarsError: one of the arguments was given away before.
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
            given = inspect.signature(self.__wrapped__).bind(*args, **kwargs).arguments
            for name, value in given.items():
                for x in jax.tree.leaves(value):
                    check_held(x, name, self.__name__.removeprefix("_"))
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_jitted"], name)


def donating(
    *donated: int, check: Callable[..., None] | None = None, **options: Any
) -> Callable[[Callable[P, R]], Donating[P, R]]:
    """Compile a function of a decoder, whose arguments of these numbers are taken over.

    `check` sees the arguments first, and raises where they are of a wrong type.

    >>> @donating(1)
    ... def double(decoder, x):
    ...     return 2 * x
    >>> x = jax.numpy.ones(3)
    >>> double(None, x).tolist()
    [2.0, 2.0, 2.0]
    """
    return lambda function: Donating(function, check, static_argnums=0, donate_argnums=donated, **options)


def check_held(x: Any, name: str, by: str) -> None:
    """Raise MarsError for an array of the argument `name` whose memory was taken over."""
    if isinstance(x, jax.Array) and not isinstance(x, Tracer) and x.is_deleted():
        raise MarsError(
            f"the {name} given to {by} was given away before, to a function that takes its memory: go on with the "
            f"{name} that it returned."
        ) from None
