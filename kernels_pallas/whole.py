"""A kernel where a program runs on one device or inside `shard_map`, and another form where XLA partitions
it.

XLA cannot look into a kernel, and refuses to partition a Mosaic call. Which case it is, is known when the
program is lowered and not before, and jax says so only in a private place: `is_partitioned` is all of this package
that depends on it.
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
    """A function that is `whole` where its operands are whole, and `partitioned` where XLA partitions them.

    Both take the same arrays and give results of one structure, shape and dtype; both can be vmapped.
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
    """Return the types that `partitioned` gives: inside `shard_map` they say over which axes a result varies."""
    del whole
    return [x.update(weak_type=False) for x in jax.make_jaxpr(partitioned)(*leaves).out_avals]


def _batch(leaves: Any, axes: Any, *, whole: Any, partitioned: Any) -> tuple[list[Any], list[int]]:
    forms = {"whole": jax.vmap(whole, axes), "partitioned": jax.vmap(partitioned, axes)}
    out = _whole_p.bind(*leaves, **forms)
    return out, [0] * len(out)


def _lower(ctx: Any, *leaves: Any, whole: Any, partitioned: Any) -> Any:
    form = partitioned if is_partitioned(ctx) else whole
    if form is whole and jax.sharding.get_abstract_mesh().manual_axes:
        # Where `shard_map` checks over which axes arrays vary, a kernel has to say it of each result. `_abstract_eval`
        # has said it, so the kernel is put into one that does not check, which maps nothing that is not mapped already.
        form = jax.shard_map(whole, in_specs=P(), out_specs=P(), check_vma=False)
    return mlir.lower_fun(form, multiple_results=True)(ctx, *leaves)


def is_partitioned(ctx: Any) -> bool:
    """True where XLA will partition what a lowering rule is about to emit.

    Private jax: no public name tells a lowering rule for how many devices it lowers. jax's own rule for Mosaic calls
    reads `ctx.module_context.axis_context` in the same way (`jax/_src/tpu_custom_call.py`; the same from 0.10 to
    0.12), and a later jax may keep it elsewhere. A context that is not understood counts as partitioned: that
    form is right everywhere and only slower, and tests/kernels/test_whole.py fails.
    """
    context: Any = getattr(getattr(ctx, "module_context", None), "axis_context", None)
    if hasattr(context, "manual_axes"):
        # Inside shard_map, whose mesh names the axes of those around it. Over every axis of the mesh nothing is left
        # to partition.
        manual = context.manual_axes | set(getattr(context.mesh, "manual_axes", ()))
        return manual != set(context.mesh.axis_names)
    return getattr(context, "num_devices", None) != 1


batching.primitive_batchers[_whole_p] = _batch
mlir.register_lowering(_whole_p, _lower)
