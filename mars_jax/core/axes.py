"""Device meshes: the roles of mesh axes, and functions that use the mesh of the current trace.

Tested against the same program on one device (tests/mesh/test_shardings.py).

Each axis has one of three roles: `data` shards the rows of a batch; `model` shards heads, hidden units and the
vocabulary; `expert` shards the experts of a mixture of experts. A mesh may have any subset of these axes, under these
names or under names registered with `name_axes`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mars_jax.utils.errors import MarsError, check_type
from mars_jax.utils.types import PyTree

AnyMesh = Mesh | AbstractMesh
REPLICATED = P()

RULES: Mapping[str, tuple[str, ...]] = {
    "rows": ("data",),
    "vocab": ("model", "expert"),
    "heads": ("model", "expert"),
    "kv_heads": ("model", "expert"),
    "delta_heads": ("model", "expert"),
    "hidden": ("model", "expert"),
    "features": ("model", "expert"),
    "experts": ("expert", "model"),
    "expert_hidden": ("model",),
}
"""Roles of the mesh axes that shard each logical axis, outermost first. A logical axis is sharded over fewer mesh axes
if its size is not divisible by the number of devices."""

AXES = ("data", "model", "expert")
"""The roles of mesh axes. Each role is also the default name of its axis."""

_ROLES: dict[str, str] = {name: name for name in AXES}  # role of each axis name; entries are never removed


def name_axes(**names: str | Sequence[str]) -> None:
    """Register additional names for mesh axes in this process, such as the names "fsdp" and "tp" of a training library.

    Repeated calls add names. Names are never removed, so compiled programs remain valid.

    Args:
      **names: maps a role (one of `AXES`) to the name of an axis, or to several names with this role, outermost first.

    Raises:
      MarsError: a role is unknown, or a name already has a different role.

    >>> name_axes(data="fsdp", model="tp")
    >>> axes_of("heads", 8, AbstractMesh((2, 4), ("fsdp", "tp")))
    ('tp',)
    """
    for role, axis_names in names.items():
        if role not in AXES:
            raise MarsError(f"'{role}' is not a role of a mesh axis: expected {', '.join(AXES)}.")
        check_type(f"the name of the axis for {role}", axis_names, (str, Sequence), "a string, or several")
        for name in [axis_names] if isinstance(axis_names, str) else axis_names:
            check_type(f"the name of the axis for {role}", name, str, "a string")
            if _ROLES.get(name, role) != role:
                raise MarsError(
                    f"the mesh axis '{name}' cannot have the role {role}, because its role is {_ROLES[name]}: give the "
                    "axis of your mesh another name."
                )
            _ROLES[name] = role


def check_named(mesh: AnyMesh) -> None:
    """Raise MarsError if a mesh axis has no role. All arrays would be replicated over such an axis."""
    for name, size in mesh.shape.items():
        if size > 1 and name not in _ROLES:
            raise MarsError(
                f"the mesh axis '{name}' of {size} devices has no role: give it one, as in "
                f"mars_jax.sharding.name_axes(model='{name}'); roles are {', '.join(AXES)}."
            )


def names_of(role: str, mesh: AnyMesh | None) -> tuple[str, ...]:
    """Return the names of the mesh axes with this role and more than one device, outermost first."""
    if mesh is None:
        return ()
    return tuple(name for name, size in mesh.shape.items() if size > 1 and _ROLES.get(name) == role)


def size_of(role: str, mesh: AnyMesh | None) -> int:
    """Return the number of devices along the mesh axes with this role, or 1 without a mesh.

    >>> size_of("data", AbstractMesh((2, 4), ("data", "model")))
    2
    """
    if mesh is None:
        return 1
    return math.prod(mesh.shape[name] for name in names_of(role, mesh))


def parse_mesh(text: str, devices: Sequence[Any] | None = None) -> Mesh:
    """Build the mesh described by a `--mesh` value from the first devices, with axes of type Auto.

    Args:
      text: the axes and their sizes, outermost first, such as "data=2,model=4".
      devices: the available devices. Default: `jax.devices()`.

    Raises:
      MarsError: the name of an axis is unknown, or the mesh needs more devices than are available.

    >>> dict(parse_mesh("model=1").shape)
    {'model': 1}
    """
    check_type("the mesh", text, str, "axes with their sizes, such as 'data=2,model=4'")
    axis_sizes: dict[str, int] = {}
    for axis_text in text.split(","):
        name, _, size_text = (piece.strip() for piece in axis_text.partition("="))
        # Nine digits are enough for any mesh, and `int` raises an error for more than 4,300.
        is_whole = size_text.isascii() and size_text.isdigit() and len(size_text) < 10
        if name not in _ROLES or name in axis_sizes or not is_whole or not int(size_text):
            raise MarsError(
                f"the mesh is {text!r}: expected axes among {', '.join(_ROLES)}, each once with its number of devices, "
                "such as data=2,model=4."
            )
        axis_sizes[name] = int(size_text)
    if devices is None:
        devices = jax.devices()
    num_devices = math.prod(axis_sizes.values())
    if num_devices > len(devices):
        raise MarsError(
            f"the mesh {text} needs {num_devices} devices and there are {len(devices)}: make it smaller."
        )
    mesh_shape = tuple(axis_sizes.values())
    try:
        # On a TPU, place neighbours along an axis next to each other on the slice, if jax supports the shape.
        device_grid = mesh_utils.create_device_mesh(mesh_shape, devices[:num_devices])
    except (NotImplementedError, ValueError, AssertionError):
        device_grid = np.array(devices[:num_devices]).reshape(mesh_shape)
    return Mesh(device_grid, tuple(axis_sizes), axis_types=(AxisType.Auto,) * len(axis_sizes))


def axes_of(logical: str, size: int, mesh: AnyMesh, *, without: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Return the mesh axes that shard a logical axis of this size; () if it is replicated.

    >>> axes_of("kv_heads", 8, AbstractMesh((2, 4), ("data", "model"))), axes_of(
    ...     "kv_heads", 2, AbstractMesh((4,), ("model",)))
    (('model',), ())
    """
    axes = [name for role in RULES[logical] for name in names_of(role, mesh) if name not in without]
    # Drop the innermost axes until the size is divisible by the number of devices along the remaining axes. The array
    # is replicated over the dropped axes.
    while axes and size % math.prod(mesh.shape[name] for name in axes):
        axes.pop()
    return tuple(axes)


def current() -> AbstractMesh | None:
    """Return the mesh of the current trace, which `jax.set_mesh` or `by_rows` has set, or None for a single device."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return None
    check_named(mesh)
    return mesh


def device_kind() -> str:
    """Return JAX's name for the kind of device that the current program is traced for.

    The device comes from the current mesh; without a mesh, it is the default device. The devices of an abstract mesh,
    which `plan` uses, need not be on this machine.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]
    return device.device_kind


def on_cpu() -> bool:
    """Return True if the current program is traced for a CPU."""
    return device_kind() == "cpu"


def on_tpu() -> bool:
    """Return True if the current program is traced for a TPU."""
    return device_kind().startswith("TPU")


def on_gpu() -> bool:
    """Return True if the current program is traced for a GPU."""
    return not (on_cpu() or on_tpu())


def by_rows(function: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Map `function(params, *rows)` over the `data` axis of the current mesh.

    The first dimension of all arrays in `rows` and in the result is B, which is sharded over `data`. Rows are
    independent, so devices along `data` need not communicate, and each device leaves a loop as soon as its own rows are
    done. XLA partitions the program over the other axes according to the sharding of the weights. Without a mesh,
    `function` is called directly.

    Raises (when called):
      MarsError: B is not divisible by the number of devices along `data`.
    """

    @functools.wraps(function)
    def call(params: PyTree, *rows: PyTree) -> PyTree:
        # Arrays with explicit shardings carry their mesh, even if no mesh is set.
        meshes = [jax.typeof(x).sharding.mesh for x in jax.tree.leaves((params, rows))]
        explicit_mesh = next((mesh for mesh in meshes if mesh.explicit_axes), None)
        if explicit_mesh is not None:
            return _as_auto(explicit_mesh, call, params, *rows)
        mesh = current()
        if mesh is None:
            return function(params, *rows)

        def with_shardings(params: PyTree, *rows: PyTree) -> PyTree:
            return _map_nodes(_hold, function(params, *rows))

        data_axes = names_of("data", mesh)
        # True if no mesh axis shards rows, or an outer `by_rows` has already mapped these axes.
        if not set(data_axes) - set(mesh.manual_axes):
            return with_shardings(params, *rows)
        check_rows(jax.tree.leaves(rows)[0].shape[0], mesh)
        # No result is replicated over `data`, so check_vma is not needed.
        mapped_function = jax.shard_map(
            with_shardings,
            in_specs=(P(), *[P(data_axes)] * len(rows)),
            out_specs=P(data_axes),
            axis_names=set(data_axes),
            check_vma=False,
        )
        return mapped_function(params, *rows)

    return call


def over_rows(count: Array) -> Array:
    """Sum a per-device count over all shards of the rows. Call this function inside `by_rows`."""
    mesh = current()
    data_axes = names_of("data", mesh)
    if mesh is None or not data_axes or set(data_axes) - set(mesh.manual_axes):
        return count
    return jax.lax.psum(count, data_axes)


def check_rows(batch: int, mesh: AnyMesh) -> None:
    """Raise MarsError if the number of rows is not divisible by the size of the mesh axis `data`."""
    num_shards = size_of("data", mesh)
    if batch % num_shards:
        raise MarsError(
            f"a batch of {batch} rows does not divide over data={num_shards}: pad it to a multiple of {num_shards}."
        )


Axes = tuple[str | None, ...]


def logical_axes(x: object) -> Axes | None:
    """Return the logical axis of each dimension of the arrays in a container, or None if the container declares none.

    Logical axes are keys of `RULES`. If the arrays of a cache are also sharded along dimensions other than the rows,
    the cache lists their axes in an attribute `logical_axes`.
    """
    return getattr(x, "logical_axes", None)


def row_specs(tree: PyTree, mesh: AnyMesh) -> PyTree:
    """Return partition specs that shard the rows (dimension 0), and any other axes that a container declares."""
    return _map_nodes(lambda x, axes: _spec(x, axes or ("rows",), mesh), tree)


def state_shardings(state: PyTree, mesh: AnyMesh) -> PyTree:
    """Return the `NamedSharding`s of a `DecodeState`, or of any tree of arrays whose first axis is the batch.

    Args:
      state: arrays or their shapes. A cache may declare additional sharded axes, such as its heads.

    Raises:
      MarsError: the number of rows is not divisible by the size of the mesh axis `data`, or a mesh axis has no role.
    """

    check_named(mesh)
    for x in jax.tree.leaves(state):
        check_rows(x.shape[0], mesh)
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), row_specs(state, mesh))


def _map_nodes(function: Callable[[Array, Axes | None], PyTree], tree: PyTree) -> PyTree:
    """Call `function(array, axes)` on every array of a tree, with the logical axes that its container declares."""

    def node(x: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: function(leaf, logical_axes(x)), x)

    return jax.tree.map(node, tree, is_leaf=lambda x: logical_axes(x) is not None)


def _spec(x: Array, axes: Axes, mesh: AnyMesh, *, rows: bool = True) -> P:
    """Return the partition spec of an array; `rows` is False if `by_rows` has already sharded the rows."""

    def of(name: str | None, size: int) -> tuple[str, ...] | None:
        if name is None or (name == "rows" and not rows):
            return None
        # `check_rows` raises an error if the rows do not divide evenly over the devices. Any other axis that does not
        # divide evenly is replicated.
        if name == "rows":
            return names_of("data", mesh) or None
        return axes_of(name, size, mesh) or None

    # Trailing dimensions without a logical axis are replicated.
    return P(*[of(name, size) for name, size in zip(axes, x.shape, strict=False)])


def _hold(x: Array, axes: Axes | None) -> Array:
    """Constrain an array to the sharding of its logical axes, and replicate all other dimensions."""
    mesh = _ready()
    if not axes or mesh is None or not mesh.auto_axes:
        return x
    return jax.lax.with_sharding_constraint(x, _spec(x, axes, mesh, rows=False))


def hold_heads(buffer: PyTree) -> PyTree:
    """Shard keys or values [B, S, K, ...] by heads, or replicate them if the number of devices does not divide K.

    Without this constraint, if the heads do not divide evenly, XLA would shard them over only some of the devices, and
    move the whole buffer between devices.
    """
    return jax.tree.map(lambda x: _hold(x, (None, None, "kv_heads")), buffer)


def hold_whole(x: Array) -> Array:
    """Replicate activations [B, N, E] over all devices that share the same rows.

    Without this constraint, XLA may shard activations along E to match a later matmul and gather them again in every
    layer, or exchange data between devices to shard a concatenation.
    """
    return _hold(x, (None,) * x.ndim)


def _as_auto(mesh: AbstractMesh, function: Callable[..., PyTree], *arguments: PyTree) -> PyTree:
    """Call `function` with the axes of an explicit mesh changed to Auto, as `jax.sharding.auto_axes` does.

    The results are resharded according to `row_specs` after tracing, when their shapes are known.
    """
    auto_mesh = mesh.update_axis_types(dict.fromkeys(mesh.explicit_axes, AxisType.Auto))
    with jax.sharding.use_abstract_mesh(auto_mesh):
        outputs = function(*jax.sharding.reshard(arguments, jax.tree.map(lambda _: P(), arguments)))
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.sharding.reshard(outputs, row_specs(outputs, mesh))


def _ready() -> AbstractMesh | None:
    """Return the current mesh if its axes other than those of the rows can be mapped manually; otherwise None."""
    mesh = current()
    data_axes = set(names_of("data", mesh))
    # The row axes, and no others, must already be mapped. Outside `by_rows`, no axis is mapped; inside `map_devices`,
    # all axes are.
    if mesh is None or mesh.explicit_axes or set(mesh.manual_axes) != data_axes:
        return None
    return mesh


def vocabulary_axes(vocab: int) -> tuple[str, ...]:
    """Return the mesh axes that shard logits over `vocab` tokens in the current trace; () if logits are replicated."""
    return axes_here("vocab", vocab) or ()


def devices_of(logical: str, size: int) -> int:
    """Return the number of shards of a logical axis of this size in the current trace, or 1 without a mesh."""
    mesh = _ready()
    if mesh is None:
        return 1
    return math.prod(mesh.shape[name] for name in axes_of(logical, size, mesh))


def axes_here(logical: str, size: int) -> tuple[str, ...] | None:
    """Return the mesh axes that shard a logical axis of this size in the current trace; () if it is replicated.

    Return None if axes cannot be mapped manually: on a single device, and outside of `by_rows`.
    """
    mesh = _ready()
    if mesh is None:
        return None
    return axes_of(logical, size, mesh)


def alone(logical: str, size: int) -> tuple[str, ...]:
    """Return the mesh axes that shard a logical axis, or () if the mesh also shards rows.

    If rows are sharded, a loop may end at different steps on different devices. The devices must then not communicate
    inside the loop, because on CPUs a transfer to one device waits for all devices.
    """
    mesh = _ready()
    if mesh is None or names_of("data", mesh):
        return ()
    return axes_of(logical, size, mesh)


def in_order(axes: Sequence[str]) -> bool:
    """Return True if `axes` are in mesh order, the order in which `lax.ppermute` numbers the devices."""
    mesh = _ready()
    return mesh is not None and tuple(axes) == tuple(name for name in mesh.axis_names if name in axes)


def expert_axes(experts: int, size: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the mesh axes that shard the experts in the current trace, and those that shard an expert's hidden
    units."""
    mesh = _ready()
    if mesh is None:
        return (), ()
    shard_axes = axes_of("experts", experts, mesh)
    # The remaining axes shard the matrices within each expert.
    return shard_axes, axes_of("expert_hidden", size, mesh, without=shard_axes)


def map_devices(
    function: Callable[..., PyTree], in_specs: PyTree, out_specs: PyTree = REPLICATED
) -> Callable[..., PyTree]:
    """Apply `jax.shard_map` over all mesh axes except those of the rows. By default, results are replicated."""
    mesh = jax.sharding.get_abstract_mesh()
    free = set(mesh.axis_names) - set(mesh.manual_axes)
    # Disable check_vma: it cannot infer that the devices compute identical results when they start from the same
    # gathered arrays.
    return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, axis_names=free, check_vma=False)


def over_vocabulary(
    local: Callable[..., PyTree], unsharded: Callable[..., PyTree], logits: Array, *others: PyTree
) -> PyTree:
    """Call `unsharded(logits, *others)`, or `local(axes, shard, *others)` on each device if the vocabulary is sharded.

    Args:
      local: function `(axes, shard, *others)` that receives the mesh axes that shard the vocabulary, and this device's
        shard of the logits. It must return the same result on all devices.
      unsharded: function that computes the same result if the vocabulary is not sharded.
      logits: [..., V].
      others: further arguments, which are replicated over the devices.
    """
    axes = vocabulary_axes(logits.shape[-1])
    if not axes:
        return unsharded(logits, *others)
    specs = (P(*[None] * (logits.ndim - 1), axes), *[P()] * len(others))
    return map_devices(functools.partial(local, axes), specs)(logits, *others)
