"""The operations `margin_stats` (the two largest logits of each row) and `margin_accept` (acceptance by MARS).

Both operations read the logits only once. For a `top_k` over a sharded vocabulary, XLA would gather all logits, and it
cannot partition a Mosaic kernel at all. The sharded versions therefore use `shard_map`: each device processes its own
shard, and one all-gather of a few numbers per node combines the results.

Tested against `reference.margin_stats` and `reference.accept_by_edges`, and against numpy and a walk in plain Python
(tests/kernels). The sharded versions are tested against the same operation on one device.

Dimensions: B batch, N tree nodes, D tree depth, V vocabulary, M stop tokens.
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
    """Find the two largest logits of each row and, optionally, the logsumexp, in float32.

    The statistics have no gradient.

    Args:
      logits: bfloat16 or float32 [..., V] with V >= 1; raw logits, `-inf` for masked tokens.
      logsumexp: also compute the logsumexp, which greedy decoding does not need.
      implementation: "pallas_tpu" (Mosaic), "xla", "partitioned", "reference", or None. None selects "partitioned" on
        GPUs and in programs that XLA partitions over devices, "pallas_tpu" in other programs for a TPU, and "xla"
        otherwise. A named implementation is never replaced, so it fails on a platform that does not support it.
      blocks: block sizes of the kernel; allowed only with "pallas_tpu".
      interpret: True or `pltpu.InterpretParams(...)` to run "pallas_tpu" on a CPU.

    Raises:
      ValueError: the implementation is unknown, the block sizes are invalid, or the implementation does not support one
        of the options.

    >>> import jax.numpy as jnp
    >>> margin_stats(jnp.asarray([[1.0, 3.0, 2.0]])).id2.tolist()
    [2]
    """
    # Import this module only when it is needed, because it imports Pallas.
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

    At every node, y is the target's token. The walk starts at the root and repeatedly moves to the child whose token is
    y. If there is no such child and the margin of the node is low, the walk moves to the first child whose token has
    one of the two largest logits. Such an edge is called relaxed. Nothing is relaxed in strict rows, on strict edges,
    or after `max_relaxed_run` consecutive relaxed tokens. An edge is never relaxed if the drafted token, y, or the
    token with the largest logit is a stop token. On a TPU, one kernel performs the whole operation.

    Args:
      logits: bfloat16 or float32 [B, N, V]; raw logits of the target.
      tokens: i32[B, N]; node 0 is the last committed token. -1 is padding, which is never accepted.
      parents: i32[B, N]; index of each node's parent, which precedes the node; -1 for node 0.
      y: i32[B, N]; the target's tokens. A negative value or None stands for the token with the largest logit, which is
        the target's token at temperature 0.
      controls: settings of each row: `AcceptControls`, or any object with the same fields.
      max_depth: D, the depth of the tree.
      margin: "ratio" (low if z2 / z1 > theta and z1 > 0) or "gap" (low if z1 - z2 < theta, in nats). With either
        margin, `theta = inf` relaxes nothing.
      logsumexp: also return the logsumexp of each node.
      implementation, blocks, interpret: as in `margin_stats`.

    Raises:
      ValueError: the margin is unknown; see also `margin_stats`.

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

    # With XLA, first compute the statistics, then accept and walk. The kernel does both in one pass over the logits.
    def two_steps(name: str, logits: Array, *tree: Any) -> Acceptance:
        decide = reference.accept_by_edges if name == "reference" else rule.accept_from_stats
        return decide(_STATS_FORMS[name](logits, logsumexp=logsumexp), *tree, **options)

    forms: dict[str, Form] = {name: functools.partial(two_steps, name) for name in _STATS_FORMS}
    forms["pallas_tpu"] = functools.partial(mosaic.margin_accept, logsumexp=logsumexp, **options)
    operands = (logits, tokens, parents, y, rule.as_arrays(controls))
    return dispatch(implementation, interpret, operands, forms, blocks=blocks)


def merge_over(stats: MarginStats, axis: Axis, *, local_vocab: int) -> MarginStats:
    """Merge the statistics of all shards of a vocabulary. Call this function inside `shard_map`.

    Args:
      stats: statistics of this device's shard, with ids relative to the start of the shard.
      axis: mesh axis or axes that shard the vocabulary.
      local_vocab: number of tokens per shard. Shard i contains the tokens from `i * local_vocab` to
        `(i + 1) * local_vocab - 1`.

    Returns:
      The statistics of the whole vocabulary, identical on all devices.
    """
    first_id = lax.axis_index(axis) * local_vocab
    # Convert local ids to ids of the whole vocabulary. The id of a missing entry, -1, does not change.
    id1, id2 = (jnp.where(ids < 0, ids, ids + first_id) for ids in (stats.id1, stats.id2))
    stats = stats._replace(id1=id1, id2=id2)
    # Stack all fields into one array, so that one all-gather is enough.
    packed_fields = [bits(x) for x in stats if x is not None]
    packed_shards = lax.all_gather(jnp.stack(packed_fields), axis)  # i32[shards, 4 or 5, ...]
    return functools.reduce(rule.merge, (rule.from_bits(list(part)) for part in packed_shards))


def sharded_margin_stats(
    logits: Array, *, mesh: Mesh | None = None, axis: Axis, batch_axis: Axis | None = None, **options: Any
) -> MarginStats:
    """Compute `margin_stats` of logits [B, ..., V] with a sharded vocabulary.

    For example, with `mesh = jax.make_mesh((8,), ("model",))` and logits [B, N, V] with the sharding
    `PartitionSpec(None, None, "model")`, call `sharded_margin_stats(logits, mesh=mesh, axis="model")`.

    Args:
      logits: [B, ..., V].
      mesh: device mesh; None: the mesh set by `jax.set_mesh`.
      axis: mesh axis or axes that shard the vocabulary.
      batch_axis: mesh axis or axes that shard the batch; None: the batch is not sharded.
      options: arguments of `margin_stats`, which each device calls on its own shard.

    Raises:
      ValueError: V is not divisible by the number of devices; see also `margin_stats`.
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
    """Compute `margin_accept` of logits [B, N, V] that are sharded as in `sharded_margin_stats`.

    The other arrays are sharded over `batch_axis`. Every device walks the tree itself, which is faster than receiving
    the result from another device.

    Raises:
      ValueError: the margin is unknown; see also `sharded_margin_stats`.
    """
    rule.check_margin(margin)

    def local(logits: Array, *tree: Any) -> Acceptance:
        stats = _local(logits, axis=axis, options=options)
        return rule.accept_from_stats(stats, *tree, max_depth=max_depth, margin=margin)

    return _map(local, mesh, axis, batch_axis, logits, tokens, parents, y, rule.as_arrays(controls))


def _local(logits: Array, *, axis: Axis, options: dict[str, Any]) -> MarginStats:
    """Compute the statistics of this device's shard, and merge them with the statistics of the other shards."""
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
    """Run a function on each device's shard of the logits [B, ..., V] and of the other operands [B, ...]."""
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
    # The first and last dimensions of the logits are sharded. The other operands and the result are sharded only over
    # the batch.
    rows_spec = PartitionSpec(batch_axis)
    logits_spec = PartitionSpec(batch_axis, *[None] * (logits.ndim - 2), axis)
    # `check_vma` is False because pallas_call does not declare how its results vary over a mesh. After the merge, the
    # results are identical on all devices along `axis`.
    mapped_function = jax.shard_map(
        function,
        mesh=mesh,
        in_specs=(logits_spec, *jax.tree.map(lambda _: rows_spec, operands)),
        out_specs=rows_spec,
        # Exclude the axes that an outer `shard_map` has already mapped.
        axis_names=set(current_mesh.axis_names) - set(current_mesh.manual_axes),
        check_vma=False,
    )
    return mapped_function(logits, *operands)
