"""The operations `margin_stats`, the two largest logits of each row, and `margin_accept`, MARS's decision from them.

B batch, N tree nodes, D tree depth, V vocabulary, M stop tokens. Both read the vocabulary once. Oracles:
`reference.margin_stats` and `reference.accept_by_edges`; numpy and a walk in plain Python in tests/kernels/; for a
sharded vocabulary, the operations on one device.

By default XLA gathers all logits for a `top_k` over a sharded vocabulary, and it cannot partition a Mosaic
kernel at all. Inside `shard_map` each device folds its own shard, and one all-gather of a few numbers per node joins
the shards.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh, PartitionSpec

from kernels_pallas.common import Axis, Interpret, bits
from kernels_pallas.dispatch import Form, dispatch
from kernels_pallas.margin import reference, rule, xla
from kernels_pallas.margin.rule import Acceptance, AcceptControls, MarginStats
from kernels_pallas.margin.shapes import TpuBlocks

Result = TypeVar("Result")
_STATS_FORMS: dict[str, Callable[..., MarginStats]] = {
    "reference": reference.margin_stats,
    "xla": xla.margin_stats,
    "partitioned": xla.partitioned_margin_stats,
}


def margin_stats(
    logits: Array,
    *,
    logsumexp: bool = False,
    implementation: str | None = None,
    blocks: TpuBlocks | None = None,
    interpret: Interpret = False,
) -> MarginStats:
    """Compute the statistics of logits [..., V] (bfloat16 or float32, V >= 1) over the last axis, in float32.

    Only decisions use the statistics, so they have no gradient.

    Args:
      logits: raw logits; `-inf` for masked tokens.
      logsumexp: also compute the logsumexp, which greedy decoding does not need.
      implementation: "pallas_tpu" (Mosaic), "xla", "partitioned", "reference", or None. By default, "partitioned" on
        GPUs and in programs that XLA partitions over devices, otherwise "pallas_tpu" in programs lowered for a TPU, and
        "xla" elsewhere. A named implementation is never replaced: on another platform it fails.
      blocks: block sizes of the named kernel.
      interpret: True or `pltpu.InterpretParams(...)` runs the named kernel on a CPU.

    Raises:
      ValueError: unknown implementation, illegal block sizes, or options that the implementation does not support.

    >>> import jax.numpy as jnp
    >>> margin_stats(jnp.asarray([[1.0, 3.0, 2.0]])).id2.tolist()
    [2]
    """
    # Imported at the first call, because it imports Pallas.
    from kernels_pallas.margin import mosaic

    forms = _STATS_FORMS | {"pallas_tpu": mosaic.margin_stats}
    forms = {name: functools.partial(form, logsumexp=logsumexp) for name, form in forms.items()}
    return dispatch(implementation, interpret, (logits,), forms, blocks=blocks)


def margin_accept(
    logits: Array,
    tokens: Array,
    parents: Array,
    y: Array | None,
    controls: AcceptControls,
    *,
    max_depth: int,
    margin: str = "ratio",
    logsumexp: bool = False,
    implementation: str | None = None,
    blocks: TpuBlocks | None = None,
    interpret: Interpret = False,
) -> Acceptance:
    """Apply margin-aware acceptance (MARS, arXiv 2601.15498, Algorithm 1) to a tree of drafted tokens.

    At every node, y is the target's token. The walk descends from the root to the child with token y. If there is none
    and the margin of the node is low, it descends to the first child whose token is one of the two largest logits.
    Nothing is relaxed in strict rows, on strict edges, if the drafted token, y or the token of the largest logit is a
    stop token, or after `max_relaxed_run` consecutive relaxed tokens. On TPU one kernel does all of this; its last
    block decides and walks.

    Args:
      logits: raw target logits [B, N, V], bfloat16 or float32.
      tokens: i32[B, N]; node 0 is the last committed token; -1 is padding and is never accepted.
      parents: i32[B, N]; -1 for node 0, else the index of an earlier node.
      y: i32[B, N]; a negative value (as at temperature 0) or None stands for the token of the largest logit.
      controls: per-row settings: `AcceptControls`, or any object with its fields.
      max_depth: D.
      margin: "ratio" (z2 / z1 > theta and z1 > 0) or "gap" (z1 - z2 < theta nats). `theta = inf` is strict for both.
      logsumexp: also return the logsumexp of each node.
      implementation, blocks, interpret: as in `margin_stats`.

    Raises:
      ValueError: an unknown margin, or as for `margin_stats`.

    >>> import jax.numpy as jnp
    >>> z = jnp.asarray([[[9.0, 10.0, 0.0], [0.0, 9.0, 0.0]]])  # the draft is 0, the target's second best token
    >>> row = AcceptControls(jnp.asarray([0.85]), jnp.asarray([False]), jnp.asarray([8]), jnp.asarray([[-1]]))
    >>> out = margin_accept(z, jnp.asarray([[2, 0]]), jnp.asarray([[-1, 0]]), None, row, max_depth=1)
    >>> out.relaxed.tolist(), out.next_token.tolist()
    ([[True]], [1])
    """
    from kernels_pallas.margin import mosaic

    rule.check_margin(margin)
    options = {"max_depth": max_depth, "margin": margin}

    # XLA computes the statistics and then the decision. The kernel decides in the last block of its pass over the
    # vocabulary.
    def two_steps(name: str, logits: Array, *tree: Any) -> Acceptance:
        decide = reference.accept_by_edges if name == "reference" else rule.accept_from_stats
        return decide(_STATS_FORMS[name](logits, logsumexp=logsumexp), *tree, **options)

    forms: dict[str, Form] = {name: functools.partial(two_steps, name) for name in _STATS_FORMS}
    forms["pallas_tpu"] = functools.partial(mosaic.margin_accept, logsumexp=logsumexp, **options)
    operands = (logits, tokens, parents, y, rule.as_arrays(controls))
    return dispatch(implementation, interpret, operands, forms, blocks=blocks)


def merge_over(stats: MarginStats, axis: Axis, *, local_vocab: int) -> MarginStats:
    """Merge the statistics of all shards on every device. Call it inside `shard_map`.

    Args:
      stats: statistics of this device's shard, with ids counted from 0; shard i holds tokens
        `[i * local_vocab, (i + 1) * local_vocab)`.
      axis: mesh axis, or axes, that shard the vocabulary.
    """
    first_id = lax.axis_index(axis) * local_vocab
    # Local ids count from 0. -1, the id of a token that does not exist, stays -1.
    id1, id2 = (jnp.where(ids < 0, ids, ids + first_id) for ids in (stats.id1, stats.id2))
    stats = stats._replace(id1=id1, id2=id2)
    # Stack into one array, so that one collective suffices.
    packed_fields = [bits(x) for x in stats if x is not None]
    packed_shards = lax.all_gather(jnp.stack(packed_fields), axis)  # i32[shards, 4 or 5, ...]
    return functools.reduce(rule.merge, (rule.from_bits(list(part)) for part in packed_shards))


def sharded_margin_stats(
    logits: Array, *, mesh: Mesh | None = None, axis: Axis, batch_axis: Axis | None = None, **options: Any
) -> MarginStats:
    """Compute `margin_stats` of logits [B, ..., V], sharded by `axis` in V and by `batch_axis` in B.

    Args:
      mesh: device mesh; None uses the one set by `jax.set_mesh`.
      options: as for `margin_stats`; each device runs that implementation on its own shard.

    Raises:
      ValueError: V is not divisible by the number of devices, or as for `margin_stats`.

    Example: with `mesh = jax.make_mesh((8,), ("model",))` and logits [B, N, V] placed as
    `PartitionSpec(None, None, "model")`, `sharded_margin_stats(logits, mesh=mesh, axis="model")`.
    """
    local = functools.partial(_local, axis=axis, options=options)
    return _map(local, mesh, axis, batch_axis, logits)


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

    The other arguments are sharded by `batch_axis`. Every device walks the tree itself, which costs less than receiving
    the result.

    Raises:
      ValueError: as in `sharded_margin_stats`, or an unknown margin.
    """
    rule.check_margin(margin)

    def local(logits: Array, *tree: Any) -> Acceptance:
        stats = _local(logits, axis=axis, options=options)
        return rule.accept_from_stats(stats, *tree, max_depth=max_depth, margin=margin)

    return _map(local, mesh, axis, batch_axis, logits, tokens, parents, y, rule.as_arrays(controls))


def _local(logits: Array, *, axis: Axis, options: dict[str, Any]) -> MarginStats:
    """Compute the statistics of this device's shard and merge them with those of the other shards."""
    stats = margin_stats(logits, **options)
    return merge_over(stats, axis, local_vocab=logits.shape[-1])


def _map(
    function: Callable[..., Result],
    mesh: Mesh | None,
    axis: Axis,
    batch_axis: Axis | None,
    logits: Array,
    *operands: object,
) -> Result:
    """Run a function on each device's shard of the logits [B, ..., V] and of other operands [B, ...]."""
    if logits.ndim < 2:
        raise ValueError(f"logits have shape {logits.shape}: expected [B, ..., V].")
    current_mesh = mesh or jax.sharding.get_abstract_mesh()
    axis_sizes = current_mesh.shape
    vocab_axes = (axis,) if isinstance(axis, str) else axis
    if not set(vocab_axes) <= set(axis_sizes):
        raise ValueError(
            f"axis is {axis!r} and the mesh has {tuple(axis_sizes)}: pass mesh=, or enter jax.set_mesh(mesh) first."
        )
    vocab, shards = logits.shape[-1], math.prod(axis_sizes[name] for name in vocab_axes)
    if vocab % shards:
        raise ValueError(
            f"a vocabulary of {vocab} does not divide over {shards} devices: pad the unembedding, with -inf logits."
        )
    # The logits are sharded in the first and the last dimension, all other operands and the result only in the first.
    rows_spec = PartitionSpec(batch_axis)
    logits_spec = PartitionSpec(batch_axis, *[None] * (logits.ndim - 2), axis)
    # check_vma is off because pallas_call does not declare how its results vary over a mesh. The merged results are
    # equal along `axis`.
    mapped_function = jax.shard_map(
        function,
        mesh=mesh,
        in_specs=(logits_spec, *jax.tree.map(lambda _: rows_spec, operands)),
        out_specs=rows_spec,
        # An outer `shard_map` has already mapped its own axes.
        axis_names=set(current_mesh.axis_names) - set(current_mesh.manual_axes),
        check_vma=False,
    )
    return mapped_function(logits, *operands)
