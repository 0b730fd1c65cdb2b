"""Shardings of weights on a mesh: trees of `NamedSharding` with the structure of params.

Tensor parallelism follows Megatron (arXiv 1909.08053): heads, hidden units and the vocabulary are sharded, so a layer
needs one all-reduce after attention and one after its MLP. Whole experts are distributed over devices. If the mesh axis
`model` is not used for this, it shards the hidden units of each expert. The rows of a batch are sharded over `data`,
which needs no communication.

Tested against an unsharded run (tests/mesh/test_shardings.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from mars_jax.core.axes import (
    AnyMesh,
    axes_of,
    check_named,
    name_axes,
    names_of,
    parse_mesh,
    size_of,
    state_shardings,
)
from mars_jax.core.types import PyTree
from mars_jax.models import weights
from mars_jax.models.config import ModelConfig
from mars_jax.models.heads import HeadConfig, LayeredHead
from mars_jax.models.quantize import Quantized, bits_of, form_of
from mars_jax.models.weights import Weight, build_rows, get
from mars_jax.utils import hosts
from mars_jax.utils.errors import MarsError, check_type, first_line

__all__ = [
    "abstract_params",
    "name_axes",
    "params_shardings",
    "parse_mesh",
    "place",
    "replication_notes",
    "state_shardings",
    "weight_spec",
]

AnyConfig = ModelConfig | HeadConfig

# Logical axes of arrays, by name. Matrices are [out, in]. All other arrays, such as norms and routers, are replicated.
_LOGICAL: dict[str, tuple[str | None, ...]] = {
    name: axes
    for axes, names in {
        ("vocab", None): "embed unembed",
        ("heads", None): "q kv_b",
        ("heads",): "q_bias sinks",
        ("kv_heads", None): "k v",
        ("kv_heads",): "k_bias v_bias",
        (None, "heads"): "o",
        ("hidden", None): "gate up shared_gate shared_up",
        ("hidden",): "gate_bias up_bias",
        (None, "hidden"): "down shared_down",
        ("experts", "expert_hidden", None): "expert_gate expert_up",
        ("experts", "expert_hidden"): "expert_gate_bias expert_up_bias",
        ("experts", None, "expert_hidden"): "expert_down",
        ("delta_heads", None): "delta_q delta_k delta_v delta_z delta_b delta_a delta_qkvz delta_ba",
        ("delta_heads", None, None): "delta_q_conv delta_k_conv delta_v_conv",
        ("delta_heads",): "delta_log_rate delta_bias",
        (None, "delta_heads"): "delta_o",
    }.items()
    for name in names.split()
}


def weight_spec(config: AnyConfig, mesh: AnyMesh, row: Weight) -> P:
    """Return the `PartitionSpec` of one array of params.

    Args:
      config: config of the model or head.
      mesh: the mesh.
      row: key of the array in `models.weights.leaves(config)`, or in `HeadConfig.leaves()` for a head.

    >>> from jax.sharding import AbstractMesh
    >>> from mars_jax.models import ModelConfig
    >>> config = ModelConfig(vocab_size=32, hidden_size=16, intermediate_size=24, num_layers=1, num_heads=4)
    >>> tuple(weight_spec(config, AbstractMesh((4,), ("model",)), list(weights.leaves(config))[2]))
    ('model', None)
    """
    name = next(key for key in reversed(row.path) if isinstance(key, str))
    head_axes = config.axes if isinstance(config, HeadConfig) else {}
    logical = head_axes.get(name, _LOGICAL.get(name))
    if logical is None:
        return P()
    layer = config.layer if isinstance(config, LayeredHead) else config
    spec: list[tuple[str, ...]] = []
    for axis, size in zip(logical, row.shape, strict=True):
        if axis in ("heads", "kv_heads"):
            assert isinstance(layer, ModelConfig)
            # Shard whole heads instead of single rows of the matrix.
            size = layer.num_heads if axis == "heads" else layer.num_kv_heads
        elif axis == "delta_heads":
            assert isinstance(layer, ModelConfig) and layer.delta is not None
            size = layer.delta.key_heads
        used_axes = tuple(itertools.chain(*spec))
        spec.append(() if axis is None else axes_of(axis, size, mesh, without=used_axes))
    return P(*spec)


def params_shardings(config: AnyConfig, mesh: AnyMesh) -> PyTree:
    """Return the shardings of all params of a model or head, as a tree with the structure of the params.

    If the size of an array is not a multiple of the size of its mesh axis, the array is replicated, and
    `replication_notes` mentions it. This mostly happens for key-value heads.

    Raises:
      MarsError: the number of experts is not divisible by the size of the axis `expert`, or an axis has no role
        (`name_axes`).

    >>> from jax.sharding import AbstractMesh
    >>> from mars_jax.models import ModelConfig
    >>> config = ModelConfig(vocab_size=32, hidden_size=16, intermediate_size=24, num_layers=1, num_heads=4)
    >>> tuple(params_shardings(config, AbstractMesh((2, 4), ("data", "model")))["layers"][0]["down"].spec)
    (None, 'model')
    """
    check_named(mesh)
    axis = size_of("expert", mesh)
    if isinstance(config, ModelConfig) and config.num_experts % axis:
        raise MarsError(
            f"{config.num_experts} experts do not divide over expert={axis}: choose a divisor of {config.num_experts}."
        )
    shardings = build_rows(_table(config), lambda row: NamedSharding(mesh, weight_spec(config, mesh, row)))
    if isinstance(config, LayeredHead) and config.is_narrow:
        shardings["ids"] = NamedSharding(mesh, P())
    return shardings


def _table(config: AnyConfig) -> Iterable[Weight]:
    """Return the table rows of all arrays of the params."""
    if isinstance(config, HeadConfig):
        return config.leaves()
    return weights.leaves(config)


def abstract_params(
    config: AnyConfig,
    dtype: str,
    *,
    bits: int | None = None,
    packed_experts: bool = False,
    shardings: PyTree = None,
) -> PyTree:
    """Return the params of a model or head as `jax.ShapeDtypeStruct`s with shardings, without allocating arrays.

    Args:
      config: config of the model or head.
      dtype: floating-point dtype of the params.
      bits: number of bits per weight of quantised matrices (see `quantize.bits_of`); None: no quantisation.
      packed_experts: keep experts in MXFP4, as in the checkpoints of gpt-oss.
      shardings: tree of shardings with the structure of the params; default: JAX's default device.

    >>> from mars_jax.models import ModelConfig
    >>> config = ModelConfig(vocab_size=32, hidden_size=16, intermediate_size=24, num_layers=1, num_heads=4)
    >>> abstract_params(config, "bfloat16", bits=8)["embed"].scale.shape
    (32,)
    """
    default = None
    if shardings is None:
        default = SingleDeviceSharding(jnp.zeros(()).devices().pop())

    def shape(row: Weight) -> PyTree:
        place: Sharding = default or get(shardings, row.path)
        row_bits = bits_of(row, bits)
        if packed_experts and row.path[-1] in ("expert_gate", "expert_up", "expert_down"):
            row_bits = 4
        if row_bits is None:
            return jax.ShapeDtypeStruct(row.shape, jnp.dtype(weights.dtype_of(row, dtype)), sharding=place)
        form = form_of(row_bits, row.shape)
        arrays: list[PyTree] = [
            jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(leaf.dtype), sharding=leaf.sharding)
            for leaf in form.leaves(row.shape, place)
        ]
        return form(*arrays, dtype=jnp.dtype(dtype))

    params = build_rows(_table(config), shape)
    if isinstance(config, LayeredHead) and config.is_narrow:
        place = default or get(shardings, ("ids",))
        params["ids"] = jax.ShapeDtypeStruct((config.draft_vocab_size,), jnp.int32, sharding=place)
    return params


def replication_notes(config: AnyConfig, mesh: AnyMesh) -> list[str]:
    """Return a sentence for each logical axis that the mesh cannot shard evenly and therefore replicates.

    >>> from jax.sharding import AbstractMesh
    >>> from mars_jax.models import ModelConfig
    >>> config = ModelConfig(vocab_size=32, hidden_size=16, intermediate_size=24, num_layers=1, num_heads=4,
    ...                      num_kv_heads=2)
    >>> replication_notes(config, AbstractMesh((4,), ("model",)))
    ['2 key-value heads do not divide over model=4: every device holds all of them.']
    """
    layer = config.layer if isinstance(config, LayeredHead) else config
    counts = [("vocab", layer.vocab_size, "tokens of the vocabulary")]
    if isinstance(layer, ModelConfig):
        counts += [
            ("heads", layer.num_heads, "attention heads"),
            ("kv_heads", layer.num_kv_heads, "key-value heads"),
        ]
        if not layer.num_experts or layer.dense_layers:
            counts.append(("hidden", layer.intermediate_size, "hidden units"))
        if layer.delta is not None:
            counts.append(("delta_heads", layer.delta.key_heads, "key heads of the recurrent layers"))
        if layer.shared_expert_size:
            counts.append(("hidden", layer.shared_expert_size, "hidden units of the shared expert"))
    model, model_axes = size_of("model", mesh), names_of("model", mesh)
    return [
        f"{size} {name} do not divide over model={model}: every device holds all of them."
        for logical, size, name in counts
        if model > 1 and not set(model_axes).intersection(axes_of(logical, size, mesh))
    ]


def place(params: PyTree, config: AnyConfig, mesh: Mesh) -> PyTree:
    """Transfer the params of a model or head to a mesh, with the shardings of `params_shardings`.

    Raises:
      MarsError: the params do not have the structure of the config, or an argument has a wrong type.
    """

    def put(sharding: NamedSharding, weight: PyTree) -> PyTree:
        if not isinstance(weight, Quantized):
            return hosts.put(weight, sharding)
        form = type(weight)
        leaves = form.leaves(weight.shape, sharding, weight.group)
        arrays = [
            hosts.put(x, leaf.sharding) for x, leaf in zip(jax.tree.leaves(weight), leaves, strict=True)
        ]
        return form(*arrays, dtype=weight.dtype)

    check_type("the mesh", mesh, Mesh, "a jax.sharding.Mesh, such as mars_jax.sharding.parse_mesh makes")
    check_type(
        "the config", config, (ModelConfig, HeadConfig), "the config of the model, such as target.config"
    )
    places = params_shardings(config, mesh)
    try:
        return jax.tree.map(put, places, params)
    except ValueError as error:
        structure = jax.tree.structure(params, is_leaf=lambda x: isinstance(x, Quantized))
        if jax.tree.structure(places) == structure:
            raise
        raise MarsError(
            f"the params do not have the structure of this config ({first_line(error)}): give the weights that "
            "belong to it."
        ) from None
