"""Automatic choice, during lowering, between implementations of an operation, such as a kernel and XLA operations.

`margin` and `top_k` call `dispatch`. The layers of `mars_jax.models` call the other functions of this module directly.

A kernel is compiled as part of a program, so the whole program would fail if the kernel did not compile. Each kernel is
therefore first compiled separately for the local chip. If this trial fails, XLA operations replace the kernel. Without
a local chip, for example when a program is compiled ahead of time for a TPU, there is no trial, and a kernel that does
not compile raises an error.

XLA cannot partition a Mosaic kernel over devices. JAX knows whether XLA will partition a program only while it lowers
the program, and only in private attributes. `is_partitioned` and `runs_here` are the only functions that use private
APIs of JAX.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
from jax import Array, lax
from jax._src import xla_bridge
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.sharding import PartitionSpec as P

from kernels_pallas.common import Interpret

Form = Callable[..., Any]
"""An implementation of an operation: a function of arrays, or of pytrees of arrays."""
KERNELS = {"tpu": "pallas_tpu"}
"""Name of the default kernel of each platform."""
GPUS = ("cuda", "rocm")
"""Platforms whose fastest implementation is "partitioned", even on a single device (docs/kernels.md)."""
SWITCH = "MARS_JAX_PALLAS"
"""Environment variable that disables the default kernels if it is 0. It is read when a program is traced, so set it
before the process starts."""

_log = logging.getLogger("kernels_pallas")
_logged: set[str] = set()


def dispatch(
    implementation: str | None,
    interpret: Interpret,
    operands: tuple[object, ...],
    forms: Mapping[str, Form],
    *,
    blocks: object | None = None,
) -> Any:
    """Call the named implementation of an operation, or the best one for the platform if none is named.

    The default is "partitioned" on GPUs, and in programs that XLA partitions over devices. Otherwise it is the
    platform's kernel, provided that `KERNELS` has one, `SWITCH` does not disable it, and it compiles (see `kernel_or`).
    If there is no such kernel, the default is "xla".

    Args:
      implementation: name of the implementation, or None.
      interpret: see `Interpret`; allowed only with "pallas_tpu".
      operands: arrays, or pytrees of arrays.
      forms: implementations by name, including "xla", "partitioned" and "pallas_tpu".
      blocks: block sizes of the kernel; allowed only with "pallas_tpu".

    Raises:
      ValueError: the name is unknown, `blocks` or `interpret` is used without a named kernel, or the environment
        variable `SWITCH` is neither 0 nor 1.
    """
    check_options(implementation, forms, blocks, interpret)
    # Decisions based on these operations have no gradient. Without `stop_gradient`, JAX could not differentiate a loss
    # that includes decoding.
    operands = jax.tree.map(lax.stop_gradient, operands)
    if implementation == "pallas_tpu":
        kernel = functools.partial(forms["pallas_tpu"], interpret=interpret)
        if blocks is not None:
            kernel = functools.partial(kernel, blocks=blocks)
        return kernel(*operands)
    if implementation is not None:
        return forms[implementation](*operands)
    xla, partitioned = forms["xla"], forms["partitioned"]
    platform_forms = {on: kernel_on(on, forms[name], xla, partitioned) for on, name in KERNELS.items()}
    platform_forms |= dict.fromkeys(GPUS, partitioned)
    # Platforms without an entry, such as CPUs, use the default.
    default = whole_or_partitioned(xla, partitioned)
    return lax.platform_dependent(*operands, **platform_forms, default=default)


def check_options(
    implementation: str | None, names: Collection[str], blocks: object | None, interpret: Interpret
) -> None:
    """Check the arguments of an operation that select its implementation.

    Raises:
      ValueError: the implementation is unknown, or options of the kernel are set for another implementation.
    """
    if implementation is not None and implementation not in names:
        raise ValueError(f"implementation is {implementation!r}: expected None or one of {', '.join(names)}.")
    if implementation != "pallas_tpu" and (blocks is not None or interpret):
        raise ValueError(
            f"blocks and interpret belong to a kernel, and implementation is {implementation!r}: "
            "name 'pallas_tpu' as well."
        )


def kernel_on(platform: str, kernel: Form, xla: Form, partitioned: Form | None = None) -> Form:
    """Return a function that chooses between a kernel and XLA operations, for programs lowered for `platform`.

    On one device or inside `shard_map`, the function runs `kernel` if the kernel is enabled and compiles, and `xla`
    otherwise. If XLA partitions the program over devices, the function runs `partitioned`, or `xla` if `partitioned` is
    None. All three functions must support vmap.
    """
    return whole_or_partitioned(kernel_or(kernel, xla, platform=platform), partitioned or xla)


def with_gradient_of(xla: Form, form: Form) -> Form:
    """Return `form` with the gradient of `xla`, which computes the same function. Kernels have no gradient."""
    differentiable = jax.custom_jvp(form)
    differentiable.defjvp(lambda primals, tangents: jax.jvp(xla, primals, tangents))
    return differentiable


def switched_on() -> bool:
    """Return whether the environment variable `SWITCH` enables the default kernels.

    Raises:
      ValueError: the variable is neither 0 nor 1.

    >>> switched_on()
    True
    """
    switch = os.environ.get(SWITCH) or "1"
    if switch not in ("0", "1"):
        raise ValueError(f"{SWITCH} is {switch!r}: expected 0, which turns Pallas kernels off, or 1.")
    return switch == "1"


def kernel_or(kernel: Form, fallback: Form, *, platform: str) -> Form:
    """Return a function that calls `kernel` if it is enabled and compiles, and `fallback` otherwise.

    As a trial, the kernel is first compiled for the actual shapes. The trial runs once per process for each set of
    shapes, and only if the process has a device of `platform`. The first failure of a kernel is logged by the logger
    "kernels_pallas". Processes that decode together compile the same kernels, so they make the same choice.

    Args:
      kernel: a function of arrays, or a `functools.partial` of one with hashable keyword arguments. If the kernel can
        only be compiled inside `shard_map`, its attribute `trial` is a function that the trial compiles in its place.
      fallback: a function that takes the same arrays, and whose results have the same shapes and dtypes.
      platform: platform of the kernel, as named by `jax.default_backend()`.
    """
    if kernel is fallback or not switched_on():
        return fallback

    def call(*operands: object) -> Any:
        if not runs_here(platform) or _compiles(getattr(kernel, "trial", kernel), operands):
            return kernel(*operands)
        return fallback(*operands)

    return call


def runs_here(platform: str) -> bool:
    """Return whether this process has already started JAX on a device of the platform.

    Querying the platform would start it, and a process that compiles ahead of time must not take a chip from another
    process. This function uses a private function of JAX, because there is no public one. If a later version of JAX
    lacks it, this function starts the default backend, as creating the first array would.
    """
    backends_started = getattr(xla_bridge, "backends_are_initialized", lambda: True)
    return backends_started() and jax.default_backend() == platform


def _compiles(kernel: Form, operands: tuple[object, ...]) -> bool:
    """Return whether the kernel compiles for operands of these shapes. Log the first failure of each kernel."""
    leaves, structure = jax.tree.flatten(operands)
    shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves)
    # Two partials of the same function with the same keywords are different objects, so look up the trial by function
    # and keywords.
    function, options = kernel, ()
    if isinstance(kernel, functools.partial):
        function, options = kernel.func, tuple(sorted(kernel.keywords.items()))
    failure = _failure(function, options, structure, shapes)
    name = function.__name__.strip("_")
    if failure is not None and name not in _logged:
        _logged.add(name)
        operand, chip = shapes[0], jax.local_devices()[0].device_kind
        _log.warning(
            f"the kernel {name} does not compile for {operand.dtype.name}{list(operand.shape)} on {chip} ({failure}): "
            f"XLA operations replace it; {SWITCH}=0 disables all kernels."
        )
    return failure is None


@functools.cache
def _failure(
    function: Form,
    options: tuple[tuple[str, object], ...],
    structure: Any,
    shapes: tuple[jax.ShapeDtypeStruct, ...],
) -> str | None:
    """Compile the kernel for operands of these shapes; return the first line of the error, or None if it compiles."""
    operands = structure.unflatten(shapes)
    errors: list[str] = []

    def attempt() -> None:
        try:
            jax.jit(functools.partial(function, **dict(options))).lower(*operands).compile()
        # Use the fallback after any error from Pallas, Mosaic, XLA or the driver.
        except Exception as error:
            error_lines = str(error).strip().splitlines() or [""]
            errors.append(f"{type(error).__name__}: {error_lines[0][:200].rstrip('.')}")

    # This function runs while another program is lowered, possibly inside shard_map. JAX's meshes and traces are
    # thread-local, so compile in a new thread, which has neither a mesh nor a trace.
    thread = threading.Thread(target=attempt, name="trial of a kernel")
    thread.start()
    thread.join()
    return next(iter(errors), None)


# A primitive is necessary because only a lowering rule can find out whether XLA partitions the program. Its parameters
# are the two implementations, as functions that take the flattened operands and return lists of arrays.
_choice_p = Primitive("whole_or_partitioned")
_choice_p.multiple_results = True


def whole_or_partitioned(unpartitioned: Form, partitioned: Form) -> Form:
    """Return a function that runs `partitioned` if XLA partitions its operands, and `unpartitioned` otherwise.

    Both functions must accept the same arrays, return results with the same structure, shapes and dtypes, and support
    vmap.
    """

    def call(*operands: object) -> Any:
        leaves, structure = jax.tree.flatten(operands)
        result_shapes = jax.eval_shape(partitioned, *operands)

        def on_leaves(form: Form) -> Form:
            return lambda *leaves: jax.tree.leaves(form(*structure.unflatten(leaves)))

        forms = {"unpartitioned": on_leaves(unpartitioned), "partitioned": on_leaves(partitioned)}
        return jax.tree.unflatten(jax.tree.structure(result_shapes), _choice_p.bind(*leaves, **forms))

    return call


@_choice_p.def_impl
def _impl(*leaves: Array, **forms: Form) -> list[Array]:
    # Enable jit, because the implementation is chosen during lowering. Under `jax.disable_jit`, `_impl` would call
    # itself.
    with jax.disable_jit(False):
        return jax.jit(functools.partial(_choice_p.bind, **forms))(*leaves)


@_choice_p.def_abstract_eval
def _abstract_eval(*leaves: Any, unpartitioned: Form, partitioned: Form) -> list[Any]:
    """Return the result types of `partitioned`, including the axes over which results vary inside `shard_map`."""
    del unpartitioned
    return [x.update(weak_type=False) for x in jax.make_jaxpr(partitioned)(*leaves).out_avals]


def _batch(
    leaves: Sequence[Array], axes: Sequence[int | None], **forms: Form
) -> tuple[list[Array], list[int]]:
    """Apply vmap to both implementations. The mapped axis becomes the first axis of every result."""
    mapped_forms = {name: jax.vmap(form, axes) for name, form in forms.items()}
    batched_results = _choice_p.bind(*leaves, **mapped_forms)
    return batched_results, [0] * len(batched_results)


def _lower(ctx: mlir.LoweringRuleContext, *leaves: Any, unpartitioned: Form, partitioned: Form) -> Any:
    """Lower whichever implementation suits the program."""
    if is_partitioned(ctx):
        form = partitioned
    elif jax.sharding.get_abstract_mesh().manual_axes:
        # If check_vma is True, `shard_map` requires a kernel to declare the axes over which each result varies.
        # `_abstract_eval` has already declared them. Wrap the kernel in a `shard_map` that maps no axis and has this
        # check turned off.
        form = jax.shard_map(unpartitioned, in_specs=P(), out_specs=P(), check_vma=False)
    else:
        form = unpartitioned
    return mlir.lower_fun(form, multiple_results=True)(ctx, *leaves)


def is_partitioned(ctx: mlir.LoweringRuleContext) -> bool:
    """Return whether XLA will partition the operations that a lowering rule emits.

    This function uses a private attribute of JAX, because there is no public way to get the number of devices in a
    lowering rule. JAX's own rule for Mosaic calls reads the same attribute, `ctx.module_context.axis_context`
    (`jax/_src/tpu_custom_call.py`, in jax 0.10 to 0.12). If a later version changes this attribute,
    tests/kernels/test_whole.py fails, and all programs are treated as partitioned, because that implementation is
    always correct, only slower.
    """
    context: Any = getattr(getattr(ctx, "module_context", None), "axis_context", None)
    if hasattr(context, "manual_axes"):
        # The program is inside one or more shard_maps. If all axes of the mesh are manual, XLA does not partition it.
        manual_axes = context.manual_axes | set(getattr(context.mesh, "manual_axes", ()))
        return manual_axes != set(context.mesh.axis_names)
    return getattr(context, "num_devices", None) != 1


batching.primitive_batchers[_choice_p] = _batch
mlir.register_lowering(_choice_p, _lower)
