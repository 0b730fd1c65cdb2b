"""Meshes: which of their axes holds what, and the mesh a program is being traced for.

Oracle: the same program on one device (tests/placement/test_shardings.py).

Axes have one of three roles: `data` holds rows of the batch, `model` heads, hidden units and vocabulary, `expert` the
experts of a mixture. A mesh has any of them, under these names or under others that `name_axes` gives a role.
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
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

from mars_jax.core.errors import MarsError, check_type
from mars_jax.core.types import PyTree

AnyMesh = Mesh | AbstractMesh

RULES: Mapping[str, tuple[str, ...]] = {
    "rows": ("data",),
    "vocab": ("model", "expert"),
    "heads": ("model", "expert"),
    "kv_heads": ("model", "expert"),
    "hidden": ("model", "expert"),
    "features": ("model", "expert"),
    "experts": ("expert", "model"),
    "expert_hidden": ("model",),
}
"""Roles of mesh axes for each logical axis, the outermost first. Sizes that do not divide over all of them are divided
over fewer."""

AXES = ("data", "model", "expert")
"""The roles, each the name of an axis too."""

_ROLES: dict[str, str] = {name: name for name in AXES}  # by the name of an axis; it only grows


def name_axes(**names: str | Sequence[str]) -> None:
    """Give a role to mesh axes of other names, for this process: a trainer's `("fsdp", "tp")`, say.

    Once is enough, and saying it again is no error. Names are added and never taken away, so whatever was compiled
    stays right.

    Args:
      **names: by the role, one of `AXES`, the name of an axis, or some that hold it together, the outermost first.

    Raises:
      MarsError: no such role, or a name that has another one.

    >>> name_axes(data="fsdp", model="tp")
    >>> axes_of("heads", 8, AbstractMesh((2, 4), ("fsdp", "tp")))
    ('tp',)
    """
    for role, given in names.items():
        if role not in AXES:
            raise MarsError(f"'{role}' is no role of a mesh axis: expected {', '.join(AXES)}.")
        check_type(f"the name of the axis for {role}", given, (str, Sequence), "a text, or some")
        for name in [given] if isinstance(given, str) else given:
            check_type(f"the name of the axis for {role}", name, str, "a text")
            if _ROLES.get(name, role) != role:
                raise MarsError(
                    f"the mesh axis '{name}' is to be {role} and holds {_ROLES[name]} already: give the axes of your "
                    "mesh other names."
                )
            _ROLES[name] = role


def check_named(mesh: AnyMesh) -> None:
    """Raise MarsError for an axis without a role, over which everything would be copied whole."""
    for name, size in mesh.shape.items():
        if size > 1 and name not in _ROLES:
            raise MarsError(
                f"the mesh axis '{name}' of {size} devices has no role: say what it holds, as in "
                f"mars_jax.sharding.name_axes(model='{name}'); roles are {', '.join(AXES)}."
            )


def names_of(role: str, mesh: AnyMesh | None) -> tuple[str, ...]:
    """The mesh's axes of a role over which anything is divided, the outermost first."""
    if mesh is None:
        return ()
    return tuple(name for name, size in mesh.shape.items() if size > 1 and _ROLES.get(name) == role)


def size_of(role: str, mesh: AnyMesh | None) -> int:
    """The number of devices over which a mesh divides what its axes of a role hold; 1 without a mesh.

    >>> size_of("data", AbstractMesh((2, 4), ("data", "model")))
    2
    """
    return 1 if mesh is None else math.prod(mesh.shape[name] for name in names_of(role, mesh))


def parse_mesh(text: str, devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh that `--mesh` names, over the first devices, with axes of type Auto.

    Args:
      text: axes with their sizes, the outermost first, such as "data=2,model=4".
      devices: default: all of `jax.devices()`.

    Raises:
      MarsError: no such axis, or more devices than there are.

    >>> dict(parse_mesh("model=1").shape)
    {'model': 1}
    """
    check_type("the mesh", text, str, "axes with their sizes, such as 'data=2,model=4'")
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = (piece.strip() for piece in part.partition("="))
        # Python converts no text of more than 4,300 digits, and there are not a billion devices.
        whole = size.isascii() and size.isdigit() and len(size) < 10
        if name not in _ROLES or name in sizes or not whole or not int(size):
            raise MarsError(
                f"the mesh is {text!r}: expected axes among {', '.join(_ROLES)}, each once with its number of devices, "
                "such as data=2,model=4."
            )
        sizes[name] = int(size)
    devices = list(jax.devices() if devices is None else devices)
    count = math.prod(sizes.values())
    if count > len(devices):
        raise MarsError(
            f"the mesh {text} is of {count} devices and there are {len(devices)}: make it smaller."
        )
    shape = tuple(sizes.values())
    try:
        # On a TPU neighbours along an axis are neighbours on the slice, for the shapes whose order jax knows.
        grid = mesh_utils.create_device_mesh(shape, devices[:count])
    except (NotImplementedError, ValueError, AssertionError):
        grid = np.array(devices[:count]).reshape(shape)
    return Mesh(grid, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def axes_of(logical: str, size: int, mesh: AnyMesh, *, without: tuple[str, ...] = ()) -> tuple[str, ...]:
    """The mesh axes over which `size` things of a logical axis are divided; () where each device has them all.

    >>> axes_of("kv_heads", 8, AbstractMesh((2, 4), ("data", "model"))), axes_of(
    ...     "kv_heads", 2, AbstractMesh((4,), ("model",)))
    (('model',), ())
    """
    axes = [name for role in RULES[logical] for name in names_of(role, mesh) if name not in without]
    while axes and size % math.prod(mesh.shape[name] for name in axes):
        axes.pop()
    return tuple(axes)


def current() -> AbstractMesh | None:
    """The mesh that a program is being traced for, as `jax.set_mesh` and `by_rows` set it; None for one device."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return None
    check_named(mesh)
    return mesh


def device_kind() -> str:
    """The kind of device that what is traced here is for, as jax names it: of the current mesh, or else the default's.

    A plan traces for the devices of its mesh, which are not on this machine.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.devices()[0].device_kind if device is None else device.device_kind


def on_cpu() -> bool:
    """Tell whether what is traced here is for a CPU."""
    return device_kind() == "cpu"


def on_tpu() -> bool:
    """Tell whether what is traced here is for a TPU."""
    return device_kind().startswith("TPU")


def on_gpu() -> bool:
    """Tell whether what is traced here is for a GPU."""
    return not (on_cpu() or on_tpu())


def by_rows(function: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """`function(params, *rows)` on the mesh it is traced for, each device on rows of its own.

    Arrays that begin with the rows of the batch are divided over the mesh's axis `data`. No row needs another, so
    nothing travels there; a loop ends on each device when its own rows are done. The other axes are left to
    XLA, which divides the work as the weights are. Without a mesh it is `function`.

    Every array of `rows` and of the result begins with B.

    Raises (when called):
      MarsError: B does not divide over `data`.
    """

    @functools.wraps(function)
    def call(params: PyTree, *rows: PyTree) -> PyTree:
        explicit = _explicit_mesh((params, rows))
        if explicit is not None:
            return _as_auto(explicit, call, params, *rows)
        mesh = current()
        if mesh is None:
            return function(params, *rows)

        def placed(params: PyTree, *rows: PyTree) -> PyTree:
            return _map_nodes(lambda x, axes: _hold(x, axes) if axes else x, function(params, *rows))

        data = names_of("data", mesh)
        if not set(data) - set(mesh.manual_axes):
            return placed(params, *rows)
        check_rows(jax.tree.leaves(rows)[0].shape[0], mesh)
        # check_vma: what is equal on all devices of `data` is nothing that this returns.
        mapped = jax.shard_map(
            placed,
            in_specs=(P(), *[P(data)] * len(rows)),
            out_specs=P(data),
            axis_names=set(data),
            check_vma=False,
        )
        return mapped(params, *rows)

    return call


def over_rows(count: Array) -> Array:
    """The sum of what the mesh's parts of the rows have each, where this is traced inside of `by_rows`."""
    mesh = current()
    data = names_of("data", mesh)
    divided = mesh is not None and data and not set(data) - set(mesh.manual_axes)
    return jax.lax.psum(count, data) if divided else count


def check_rows(batch: int, mesh: AnyMesh) -> None:
    """Raise MarsError where rows do not divide over the mesh's axis `data`."""
    size = size_of("data", mesh)
    if batch % size:
        raise MarsError(
            f"a batch of {batch} rows does not divide over data={size}: pad it to a multiple of {size}."
        )


Axes = tuple[str | None, ...]


def logical_axes(x: Any) -> Axes | None:
    """The logical axis of each dimension of a container's arrays, as `RULES` names them; None where it says none.

    A cache whose arrays are divided by more than the rows of the batch has an attribute of this name.
    """
    return getattr(x, "logical_axes", None)


def row_specs(tree: PyTree, mesh: AnyMesh) -> PyTree:
    """Partition specs of arrays that begin with the rows of the batch; a container may divide further dimensions."""
    return _map_nodes(lambda x, axes: _spec(x, axes or ("rows",), mesh), tree)


def _map_nodes(function: Callable[[Any, Axes | None], Any], tree: PyTree) -> PyTree:
    """`function(array, what its container says of it)` of every array."""

    def node(x: Any) -> Any:
        return jax.tree.map(lambda leaf: function(leaf, logical_axes(x)), x)

    return jax.tree.map(node, tree, is_leaf=lambda x: logical_axes(x) is not None)


def _spec(x: Any, axes: Axes, mesh: AnyMesh, *, rows: bool = True) -> P:
    """The parts of an array; `rows` is False where `by_rows` has divided those already."""

    def of(name: str | None, size: int) -> Any:
        if name == "rows":
            data = names_of("data", mesh) if rows else ()
            return data[0] if len(data) == 1 else data or None
        return None if name is None else axes_of(name, size, mesh) or None

    return P(*[of(name, size) for name, size in zip(axes, x.shape, strict=False)])


def _hold(x: Array, axes: Axes) -> Array:
    """An array divided as its container says, if that divides and else whole."""
    mesh = _ready()
    if mesh is None or not mesh.auto_axes:
        return x
    return jax.lax.with_sharding_constraint(x, _spec(x, axes, mesh, rows=False))


def hold_heads(buffer: PyTree) -> PyTree:
    """A layer's keys or values, whose arrays are [B, S, K, ...], divided by their heads if those divide and else whole.

    Left to itself XLA divides heads that do not divide over part of an axis, and sends the buffer around for it.
    """
    return jax.tree.map(lambda x: _hold(x, (None, None, "kv_heads")), buffer)


def hold_whole(x: Array) -> Array:
    """Activations [B, N, E] on every device of `model`, whatever reads them next.

    Left to itself XLA may divide them by E where a later product is, and then gathers them again in every layer, or
    divide a concatenation by sending its parts.
    """
    return _hold(x, (None,) * x.ndim)


def _explicit_mesh(arrays: PyTree) -> AbstractMesh | None:
    """The mesh of arrays whose types say how they are divided (`AxisType.Explicit`)."""
    meshes = [jax.typeof(x).sharding.mesh for x in jax.tree.leaves(arrays)]
    return next((mesh for mesh in meshes if mesh.explicit_axes), None)


def _as_auto(mesh: AbstractMesh, function: Callable[..., PyTree], *arguments: PyTree) -> PyTree:
    """`function` with the axes of an explicit mesh left to XLA inside, as `jax.sharding.auto_axes` does it.

    Shardings of the results follow `row_specs` and are only known after tracing.
    """
    auto = mesh.update_axis_types(dict.fromkeys(mesh.explicit_axes, AxisType.Auto))
    with jax.sharding.use_abstract_mesh(auto):
        out = function(*jax.sharding.reshard(arguments, jax.tree.map(lambda _: P(), arguments)))
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.sharding.reshard(out, row_specs(out, mesh))


def _ready() -> AbstractMesh | None:
    """The mesh of a program whose rows `by_rows` has divided already, so that the rest of it can be mapped by hand."""
    mesh = current()
    data = set(names_of("data", mesh))
    if mesh is None or mesh.explicit_axes or set(mesh.manual_axes) - data:
        return None
    return None if data - set(mesh.manual_axes) else mesh


def vocabulary_axes(vocab: int) -> tuple[str, ...]:
    """The mesh axes over which logits of `vocab` tokens are divided where this is traced; () where they are whole."""
    return axes_here("vocab", vocab) or ()


def devices_of(logical: str, size: int) -> int:
    """The number of devices that `size` things of a logical axis are divided over in this trace; 1 without a mesh."""
    mesh = _ready()
    return 1 if mesh is None else math.prod(mesh.shape[name] for name in axes_of(logical, size, mesh))


def axes_here(logical: str, size: int) -> tuple[str, ...] | None:
    """The mesh axes over which `size` things of a logical axis are divided where this is traced, () where every device
    has them all; None where nothing is mapped by hand: on one device, or where XLA divides rows as it sees fit."""
    mesh = _ready()
    return None if mesh is None else axes_of(logical, size, mesh)


def alone(logical: str, size: int) -> tuple[str, ...]:
    """The mesh axes over which `size` things are divided where no rows of the batch are; () on any other mesh.

    Only there devices may send to one another in a loop that ends when some rows do: on a CPU what is sent to one
    waits for all.
    """
    mesh = _ready()
    return () if mesh is None or names_of("data", mesh) else axes_of(logical, size, mesh)


def in_order(axes: Sequence[str]) -> bool:
    """Tell whether axes stand as in the mesh this is traced for: `lax.ppermute` counts devices in the mesh's order."""
    mesh = _ready()
    return mesh is not None and tuple(axes) == tuple(name for name in mesh.axis_names if name in axes)


def expert_axes(experts: int, size: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The mesh axes over which experts are divided where this is traced, and over which the hidden units of each."""
    mesh = _ready()
    if mesh is None:
        return (), ()
    axes = axes_of("experts", experts, mesh)
    return axes, axes_of("expert_hidden", size, mesh, without=axes)


def map_devices(
    function: Callable[..., PyTree], in_specs: Any, out_specs: Any = None
) -> Callable[..., PyTree]:
    """`jax.shard_map` over all axes of the mesh but that of the rows; by default results are equal on all devices."""
    mesh = jax.sharding.get_abstract_mesh()
    free = set(mesh.axis_names) - set(mesh.manual_axes)
    # check_vma: it cannot see that what every device computes from what all of them gathered is equal.
    return jax.shard_map(
        function,
        in_specs=in_specs,
        out_specs=P() if out_specs is None else out_specs,
        axis_names=free,
        check_vma=False,
    )


def over_vocabulary(
    local: Callable[..., PyTree], whole: Callable[..., PyTree], logits: Array, *others: PyTree
) -> PyTree:
    """`whole(logits, *others)`, or where the vocabulary is divided `local(axes, part, *others)` on each device.

    Args:
      local: gets the mesh axes to join the parts over and its device's part of logits [..., V]; its results are to be
        equal on all devices.
      whole: the same for a vocabulary in one piece.
      logits: [..., V].
      others: what every device gets whole.
    """
    axes = vocabulary_axes(logits.shape[-1])
    if not axes:
        return whole(logits, *others)
    specs = (P(*[None] * (logits.ndim - 1), axes), *[P()] * len(others))
    return map_devices(functools.partial(local, axes), specs)(logits, *others)
