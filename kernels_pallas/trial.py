"""Decide whether a kernel that was not named runs: a switch for all of them, and a trial compilation of each.

A program holds its kernels when it is compiled, and one that does not compile would take all of the program with it.
So each is compiled alone first, on the chip that is there. Where there is none, as when a program is compiled ahead of
time for a TPU, nothing is tried: a failure is then an error that the user sees.
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
"""The environment variable that turns kernels off, where it is 0: then none runs that is not named. It is read when a
program is traced, so set it before the process starts."""

_log = logging.getLogger("kernels_pallas")
_told: set[str] = set()


def switched_on() -> bool:
    """True where kernels may run unasked.

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
    """A function that is `kernel` where it may run and compiles, and `plain` elsewhere.

    The trial is of the shapes that are asked for, once each in a process, and only where the device of this process is
    one of `platform`. A failure is logged once for each kernel, by the logger "kernels_pallas". Processes that decode
    as one compile alike, and so decide alike.

    Args:
      kernel: a function of arrays, or `functools.partial` of one with keywords that can be hashed. An attribute `trial`
        is such a function to try instead, where the kernel is part of what only compiles inside `shard_map`.
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
    """True where this process has started JAX on a device of the platform.

    To ask for the platform would start it, and a process that compiles ahead of time may not take a chip from another.
    Private jax: no public name tells whether that has happened. Without this one a later jax starts what it would start
    for the first array.
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
    if failure is not None and name not in _told:
        _told.add(name)
        shown = ", ".join(f"{dtype.name}{list(shape)}" for shape, dtype in shapes[:1])
        _log.warning(
            "the kernel %s does not compile for %s on %s (%s): the XLA form runs in its place; %s=0 leaves all kernels "
            "out.",
            *(name, shown, jax.local_devices()[0].device_kind, failure, SWITCH),
        )
    return failure is None


@functools.cache
def _failure(
    function: Callable[..., Any],
    options: tuple[tuple[str, Any], ...],
    structure: Any,
    shapes: tuple[Any, ...],
) -> str | None:
    """Why the kernel does not compile for such operands, in a line; None where it does."""
    operands = structure.unflatten([jax.ShapeDtypeStruct(*shape) for shape in shapes])
    found: list[str] = []

    def attempt() -> None:
        try:
            jax.jit(functools.partial(function, **dict(options))).lower(*operands).compile()
        except (
            Exception
        ) as error:  # of Pallas, Mosaic, XLA or the driver: whatever it is, the program must not die
            lines = str(error).strip().splitlines() or [""]
            found.append(f"{type(error).__name__}: {lines[0][:200].rstrip('.')}")

    # JAX keeps meshes and what it is tracing by thread. This is called while a program is lowered, possibly inside
    # shard_map; a thread of its own sees one device and nothing around it.
    thread = threading.Thread(target=attempt, name="trial of a kernel")
    thread.start()
    thread.join()
    return found[0] if found else None
