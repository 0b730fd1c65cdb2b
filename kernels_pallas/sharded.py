"""`margin_stats` and `margin_accept` of a sharded vocabulary: devices exchange only a few numbers per node.

B batch, N tree nodes, V vocabulary. Oracle: the operations on one device.

By default XLA gathers the whole logits for a `top_k` over a sharded vocabulary, and it cannot partition a Mosaic
kernel at all. Inside `shard_map` each device folds its own shard, and one all-gather joins the shards.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh, PartitionSpec

from kernels_pallas.api import margin_stats
from kernels_pallas.margin_rule import Acceptance, AcceptControls, as_arrays, check_margin, decide
from kernels_pallas.stats import MarginStats, bits, from_bits, merge

Axis = str | tuple[str, ...]


def merge_over(stats: MarginStats, axis: Axis, *, local_vocab: int) -> MarginStats:
    """Merge the statistics of all shards on every device. Call it inside `shard_map`.

    Args:
      stats: statistics of this device's shard, with ids counted from 0; shard i holds tokens
        `[i * local_vocab, (i + 1) * local_vocab)`.
      axis: mesh axis, or axes, that shard the vocabulary.
    """
    # Local ids count from 0; -1 marks a token that does not exist.
    first = lax.axis_index(axis) * local_vocab
    offset = lambda ids: jnp.where(ids < 0, ids, ids + first)  # noqa: E731
    stats = stats._replace(id1=offset(stats.id1), id2=offset(stats.id2))
    # Stack into one array, so that one collective suffices.
    columns = [bits(x) for x in stats if x is not None]
    parts = lax.all_gather(jnp.stack(columns), axis)  # i32[shards, 4 or 5, ...]

    return functools.reduce(merge, (from_bits(list(part)) for part in parts))


def sharded_margin_stats(
    logits: Array, *, mesh: Mesh | None = None, axis: Axis, batch_axis: Axis | None = None, **options: Any
) -> MarginStats:
    """Compute `margin_stats` of logits [B, ..., V], sharded by `axis` in V and by `batch_axis` in B.

    Args:
      mesh: mesh of the devices; None uses the one set by `jax.set_mesh`.
      options: as for `margin_stats`; each device runs that implementation on its own shard.

    Raises:
      ValueError: V does not divide over the devices, or `margin_stats` raises it.

    Example: with `mesh = jax.make_mesh((8,), ("model",))` and logits [B, N, V] placed as
    `PartitionSpec(None, None, "model")`, `sharded_margin_stats(logits, mesh=mesh, axis="model")`.
    """
    local = functools.partial(_local, axis=axis, options=options)
    return _map(local, mesh, axis, batch_axis, logits.shape[-1], (logits,), _spec(logits, axis, batch_axis))


def sharded_margin_accept(
    logits: Array,
    tokens: Array,
    parents: Array,
    y: Array | None,
    controls: AcceptControls,
    *,
    mesh: Mesh | None = None,
    axis: Axis,
    batch_axis: Axis | None = None,
    max_depth: int,
    margin: str = "ratio",
    **options: Any,
) -> Acceptance:
    """Compute `margin_accept` of logits [B, N, V] sharded as in `sharded_margin_stats`.

    The other arguments are sharded by `batch_axis`. Every device walks the tree: that costs less than sending the
    result.

    Raises:
      ValueError: as in `sharded_margin_stats`, or an unknown margin.
    """
    check_margin(margin)
    controls = as_arrays(controls)

    def local(logits, tokens, parents, y, controls):
        stats = _local(logits, axis=axis, options=options)
        return decide(stats, tokens, parents, y, controls, max_depth, margin)

    operands = (logits, tokens, parents, y, controls)
    return _map(local, mesh, axis, batch_axis, logits.shape[-1], operands, _spec(logits, axis, batch_axis))


def _local(logits: Array, *, axis: Axis, options: dict[str, Any]) -> MarginStats:
    stats = margin_stats(logits, **options)
    return merge_over(stats, axis, local_vocab=logits.shape[-1])


def _spec(logits: Array, axis: Axis, batch_axis: Axis | None) -> PartitionSpec:
    if logits.ndim < 2:
        raise ValueError(f"logits have shape {logits.shape}: expected [B, ..., V].")
    return PartitionSpec(batch_axis, *[None] * (logits.ndim - 2), axis)


def _map(
    function: Callable[..., Any],
    mesh: Mesh | None,
    axis: Axis,
    batch_axis: Axis | None,
    vocab: int,
    operands: tuple[Any, ...],
    logits_spec: PartitionSpec,
) -> Any:
    where = jax.sharding.get_abstract_mesh() if mesh is None else mesh
    sizes = where.shape
    names = (axis,) if isinstance(axis, str) else axis
    unknown = [name for name in names if name not in sizes]
    if unknown:
        raise ValueError(
            f"axis is {axis!r} and the mesh has {tuple(sizes)}: pass mesh=, or enter "
            "jax.set_mesh(mesh) first."
        )
    shards = math.prod(sizes[name] for name in names)
    if vocab % shards:
        raise ValueError(
            f"a vocabulary of {vocab} does not divide over {shards} devices: pad the unembedding, with "
            "-inf logits."
        )
    rows = PartitionSpec(batch_axis)
    specs = (logits_spec, *jax.tree.map(lambda _: rows, operands[1:]))
    # check_vma is off because pallas_call does not declare how its results vary over a mesh. The merged results are
    # equal along `axis`.
    mapped = jax.shard_map(
        function,
        mesh=mesh,
        in_specs=specs,
        out_specs=rows,
        axis_names=set(where.axis_names) - set(where.manual_axes),  # those that an outer shard_map has left
        check_vma=False,
    )
    return mapped(*operands)
