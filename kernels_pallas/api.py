"""The operations `margin_stats`, the two largest logits of each row, and `margin_accept`, MARS's decision from them.

B batch, N tree nodes, D tree depth, V vocabulary, M stop tokens. Both read the vocabulary once. Oracles:
`reference.margin_stats` and `reference.decide`; numpy and a walk in plain Python in tests/kernels/.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from jax import Array

from kernels_pallas import margin_rule, mosaic, reference, xla
from kernels_pallas.blocks import TpuBlocks
from kernels_pallas.dispatch import dispatch
from kernels_pallas.margin_rule import Acceptance, AcceptControls, as_arrays, check_margin
from kernels_pallas.stats import MarginStats


def margin_stats(
    logits: Array,
    *,
    logsumexp: bool = False,
    implementation: str | None = None,
    blocks: TpuBlocks | None = None,
    interpret: Any = False,
) -> MarginStats:
    """Compute the statistics of logits [..., V] (bfloat16 or float32, V >= 1) over the last axis, in float32.

    They are for decisions, so no gradient flows through them.

    Args:
      logits: raw logits; `-inf` for masked tokens.
      logsumexp: also compute the logsumexp, which greedy decoding does not need.
      implementation: "pallas_tpu" (Mosaic), "xla", "partitioned", "reference", or None. None is "partitioned" on GPUs
        and if XLA partitions the program over devices; otherwise "pallas_tpu" if the program is lowered for a TPU, else
        "xla". A named implementation is never replaced: on another platform it fails.
      blocks: block sizes of the named kernel.
      interpret: run the named kernel on CPU: True, or `pltpu.InterpretParams(...)`.

    Raises:
      ValueError: unknown implementation, illegal block sizes, or options the implementation does not have.

    >>> import jax.numpy as jnp
    >>> margin_stats(jnp.asarray([[1.0, 3.0, 2.0]])).id2.tolist()
    [2]
    """
    forms = {
        "reference": reference.margin_stats,
        "xla": xla.margin_stats,
        "partitioned": xla.partitioned_margin_stats,
        "pallas_tpu": mosaic.margin_tpu.margin_stats,
    }
    forms = {name: functools.partial(form, logsumexp=logsumexp) for name, form in forms.items()}
    return dispatch(implementation, blocks, interpret, (logits,), forms)


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
    interpret: Any = False,
) -> Acceptance:
    """Margin-aware acceptance (MARS, arXiv 2601.15498, Algorithm 1) over a tree of drafted tokens.

    At every node the target has one token y. The walk descends from the root to the child with token y. If there is
    none and the margin of the node is low, it descends to the first child whose token is one of the two largest logits.
    It relaxes nothing in strict rows, on strict edges, if the drafted token, y or the largest logit is a stop token, or
    after `max_relaxed_run` consecutive relaxed tokens. On TPU one kernel does all of this; its last block decides and
    walks.

    Args:
      logits: raw target logits [B, N, V], bfloat16 or float32.
      tokens: i32[B, N]; node 0 is the last committed token; -1 is padding and is never accepted.
      parents: i32[B, N]; -1 for node 0, else the index of an earlier node.
      y: i32[B, N]; a negative value, as at temperature 0, or None stands for the token of the largest logit.
      controls: numbers per row: `AcceptControls`, or any object with its fields.
      max_depth: D.
      margin: "ratio" (z2 / z1 > theta and z1 > 0) or "gap" (z1 - z2 < theta nats). `theta = inf` is strict for both.
      logsumexp: also return it per node.
      implementation, blocks, interpret: as in `margin_stats`.

    Raises:
      ValueError: an unknown margin, or as `margin_stats`.

    >>> import jax.numpy as jnp
    >>> z = jnp.asarray([[[9.0, 10.0, 0.0], [0.0, 9.0, 0.0]]])  # the draft is 0, the target's second best token
    >>> row = AcceptControls(jnp.asarray([0.85]), jnp.asarray([False]), jnp.asarray([8]), jnp.asarray([[-1]]))
    >>> out = margin_accept(z, jnp.asarray([[2, 0]]), jnp.asarray([[-1, 0]]), None, row, max_depth=1)
    >>> out.relaxed.tolist(), out.next_token.tolist()
    ([[True]], [1])
    """
    check_margin(margin)
    controls = as_arrays(controls)
    options = {"max_depth": max_depth, "margin": margin}

    def two_steps(
        stats: Callable[..., MarginStats], decide: Callable[..., Acceptance]
    ) -> Callable[..., Acceptance]:
        def form(logits, tokens, parents, y, controls, **kernel_options):
            margin_statistics = stats(logits, logsumexp=logsumexp, **kernel_options)
            return decide(margin_statistics, tokens, parents, y, controls, **options)

        return form

    forms = {
        "reference": two_steps(reference.margin_stats, reference.decide),
        "xla": two_steps(xla.margin_stats, margin_rule.decide),
        "partitioned": two_steps(xla.partitioned_margin_stats, margin_rule.decide),
        "pallas_tpu": functools.partial(mosaic.margin_tpu.margin_accept, logsumexp=logsumexp, **options),
    }
    return dispatch(implementation, blocks, interpret, (logits, tokens, parents, y, controls), forms)
