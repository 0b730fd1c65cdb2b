"""Decision whether default kernels run: a switch for all of them, and a trial compilation of each.

Kernels are compiled as part of a program, so one that does not compile would make the whole program fail. So each
kernel is first compiled separately, on the local chip. Without a chip, as when a program is compiled ahead of time for
a TPU, there is no trial, and a failure is an error that the user sees.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Callable
from typing import Any

import jax
from jax._src import xla_bridge

SWITCH = "MARS_JAX_PALLAS"
"""Environment variable that disables default kernels if it is 0. It is read while a program is traced, so set it
before the process starts."""

_log = logging.getLogger("kernels_pallas")
_logged: set[str] = set()


def switched_on() -> bool:
    """Return whether default kernels are enabled.

    Raises:
      ValueError: the variable is neither 0 nor 1.

    >>> switched_on()
    True
    """
    value = os.environ.get(SWITCH) or "1"
    if value not in ("0", "1"):
        raise ValueError(f"{SWITCH} is {value!r}: expected 0, which turns Pallas kernels off, or 1.")
    return value == "1"


def kernel_or(kernel: Callable[..., Any], plain: Callable[..., Any], *, platform: str) -> Callable[..., Any]:
    """Return a function that calls `kernel` if it is enabled and compiles, and `plain` otherwise.

    The trial uses the actual shapes. It runs once per process for each of them, and only if the process has a device of
    `platform`. A failure is logged once per kernel, by the logger "kernels_pallas". Processes that decode together
    compile the same kernels, and so make the same choice.

    Args:
      kernel: a function of arrays, or `functools.partial` of one with keywords that can be hashed. An attribute `trial`
        is such a function to try instead, for a kernel that compiles only inside `shard_map`.
      plain: of the same arrays, with results of the same shapes and dtypes.
      platform: of `jax.default_backend()`, that the kernel is for.
    """
    if kernel is plain or not switched_on():
        return plain

    def call(*operands: Any) -> Any:
        if not runs_here(platform) or _compiles(getattr(kernel, "trial", kernel), operands):
            return kernel(*operands)
        return plain(*operands)

    return call


def runs_here(platform: str) -> bool:
    """Return whether this process has started JAX on a device of the platform.

    Querying the platform would start it, and a process that compiles ahead of time must not take a chip from another.
    Uses private jax, because no public name gives this. Without it, a later jax starts the default backend, as the
    first array would.
    """
    started = getattr(xla_bridge, "backends_are_initialized", lambda: True)
    return started() and jax.default_backend() == platform


def _compiles(kernel: Callable[..., Any], operands: Any) -> bool:
    leaves, structure = jax.tree.flatten(operands)
    shapes = tuple((x.shape, x.dtype) for x in leaves)
    function, options = kernel, ()
    if isinstance(kernel, functools.partial):
        function, options = kernel.func, tuple(sorted(kernel.keywords.items()))
    failure = _failure(function, options, structure, shapes)
    name = function.__name__.strip("_")
    if failure is not None and name not in _logged:
        _logged.add(name)
        operand_text = ", ".join(f"{dtype.name}{list(shape)}" for shape, dtype in shapes[:1])
        _log.warning(
            "the kernel %s does not compile for %s on %s (%s): the XLA form runs in its place; %s=0 leaves all kernels "
            "out.",
            *(name, operand_text, jax.local_devices()[0].device_kind, failure, SWITCH),
        )
    return failure is None


@functools.cache
def _failure(
    function: Callable[..., Any],
    options: tuple[tuple[str, Any], ...],
    structure: Any,
    shapes: tuple[Any, ...],
) -> str | None:
    """Return the first line of the error if the kernel does not compile for such operands, else None."""
    operands = structure.unflatten([jax.ShapeDtypeStruct(*shape) for shape in shapes])
    errors: list[str] = []

    def attempt() -> None:
        try:
            jax.jit(functools.partial(function, **dict(options))).lower(*operands).compile()
        except Exception as error:  # any error of Pallas, Mosaic, XLA or the driver selects the fallback
            lines = str(error).strip().splitlines() or [""]
            errors.append(f"{type(error).__name__}: {lines[0][:200].rstrip('.')}")

    # JAX's meshes and traces are thread-local. This runs while a program is lowered, possibly inside shard_map, so use
    # a new thread, which has neither.
    thread = threading.Thread(target=attempt, name="trial of a kernel")
    thread.start()
    thread.join()
    return errors[0] if errors else None
