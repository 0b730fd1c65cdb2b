"""Choice between a kernel, for one device or inside `shard_map`, and another form if XLA partitions the program.

XLA cannot partition a Mosaic call. Whether it will partition a program is known only during lowering, and jax exposes
it only in private attributes; `is_partitioned` is the only function of this package that depends on them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.sharding import PartitionSpec as P

_whole_p = Primitive("whole_or_partitioned")
_whole_p.multiple_results = True


def whole_or_partitioned(whole: Callable[..., Any], partitioned: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs `partitioned` if XLA partitions its operands, and `whole` otherwise.

    Both take the same arrays, return results of the same structure, shapes and dtypes, and support vmap.
    """

    def call(*operands: Any) -> Any:
        leaves, structure = jax.tree.flatten(operands)
        result = jax.eval_shape(partitioned, *operands)

        def on_leaves(form: Callable[..., Any]) -> Callable[..., list[Any]]:
            return lambda *leaves: jax.tree.leaves(form(*structure.unflatten(leaves)))

        out = _whole_p.bind(*leaves, whole=on_leaves(whole), partitioned=on_leaves(partitioned))
        return jax.tree.unflatten(jax.tree.structure(result), out)

    return call


@_whole_p.def_impl
def _impl(*leaves: Any, **forms: Any) -> list[Any]:
    # Lowering chooses the form, so this compiles even under `jax.disable_jit`, which would call `_impl` again.
    with jax.disable_jit(False):
        return jax.jit(functools.partial(_whole_p.bind, **forms))(*leaves)


@_whole_p.def_abstract_eval
def _abstract_eval(*leaves: Any, whole: Any, partitioned: Any) -> list[Any]:
    """Return the types of the results of `partitioned`, which inside `shard_map` include the axes they vary over."""
    del whole
    return [x.update(weak_type=False) for x in jax.make_jaxpr(partitioned)(*leaves).out_avals]


def _batch(leaves: Any, axes: Any, *, whole: Any, partitioned: Any) -> tuple[list[Any], list[int]]:
    forms = {"whole": jax.vmap(whole, axes), "partitioned": jax.vmap(partitioned, axes)}
    out = _whole_p.bind(*leaves, **forms)
    return out, [0] * len(out)


def _lower(ctx: Any, *leaves: Any, whole: Any, partitioned: Any) -> Any:
    form = partitioned if is_partitioned(ctx) else whole
    if form is whole and jax.sharding.get_abstract_mesh().manual_axes:
        # With check_vma, `shard_map` requires a kernel to declare the axes that each result varies over.
        # `_abstract_eval` has declared them, so wrap the kernel in a `shard_map` without the check, which maps no
        # further axis.
        form = jax.shard_map(whole, in_specs=P(), out_specs=P(), check_vma=False)
    return mlir.lower_fun(form, multiple_results=True)(ctx, *leaves)


def is_partitioned(ctx: Any) -> bool:
    """Return whether XLA will partition the operations that a lowering rule emits.

    Uses private jax: no public name gives a lowering rule its number of devices. jax's own rule for Mosaic calls also
    reads `ctx.module_context.axis_context` (`jax/_src/tpu_custom_call.py`; the same from 0.10 to 0.12), but a later jax
    may move it. An unknown context counts as partitioned, because that form is correct everywhere and only slower;
    tests/kernels/test_whole.py then fails.
    """
    context: Any = getattr(getattr(ctx, "module_context", None), "axis_context", None)
    if hasattr(context, "manual_axes"):
        # Inside shard_map, possibly nested. If all axes of the mesh are manual, no axis is left to partition over.
        manual = context.manual_axes | set(getattr(context.mesh, "manual_axes", ()))
        return manual != set(context.mesh.axis_names)
    return getattr(context, "num_devices", None) != 1


batching.primitive_batchers[_whole_p] = _batch
mlir.register_lowering(_whole_p, _lower)
