"""The operations: `margin_stats`, the two largest logits of each row, and `margin_accept`, what MARS makes of them.

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
    """Statistics of logits [..., V] (bfloat16 or float32, V >= 1) over the last axis, in float32.

    They serve decisions, so no gradient flows through them.

    Args:
      logits: raw logits; `-inf` where a token is masked.
      logsumexp: also return it. Greedy decoding needs none, and without it none is computed.
      implementation: "pallas_tpu" (Mosaic), "xla", "partitioned", "reference", or None. None is "partitioned"
        where XLA spreads the program over devices by itself and on GPUs, else "pallas_tpu" where the program
        is lowered for a TPU, and "xla" everywhere else. A named one is never replaced: on another platform it
        fails.
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

    At every node the target names one token y. The walk descends from the root to the child that carries y;
    where there is none, to the lowest child whose token is one of the two largest logits of a node with a low
    margin. It relaxes nothing in strict rows, on strict edges, over stop tokens (the drafted token, y or the
    largest), or beyond `max_relaxed_run` in a row. On TPU all of it happens in one kernel, whose last block
    decides and walks.

    Args:
      logits: raw target logits [B, N, V], bfloat16 or float32.
      tokens: i32[B, N]; node 0 is the last committed token; -1 is padding and is never accepted.
      parents: i32[B, N]; -1 for node 0, else the index of an earlier node.
      y: i32[B, N]; the largest logit where it is negative, as at temperature 0, and everywhere for None.
      controls: per-row numbers: `AcceptControls`, or anything that has its fields.
      max_depth: D.
      margin: "ratio" (z2 / z1 > theta and z1 > 0) or "gap" (z1 - z2 < theta nats). `theta = inf` is strict for both.
      logsumexp: also return it per node.
      implementation, blocks, interpret: as in `margin_stats`.

    Raises:
      ValueError: unknown margin, or what `margin_stats` raises.

    >>> import jax.numpy as jnp
    >>> z = jnp.asarray([[[9.0, 10.0, 0.0], [0.0, 9.0, 0.0]]])  # the draft says 0, the target's second best
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
            found = stats(logits, logsumexp=logsumexp, **kernel_options)
            return decide(found, tokens, parents, y, controls, **options)

        return form

    forms = {
        "reference": two_steps(reference.margin_stats, reference.decide),
        "xla": two_steps(xla.margin_stats, margin_rule.decide),
        "partitioned": two_steps(xla.partitioned_margin_stats, margin_rule.decide),
        "pallas_tpu": functools.partial(mosaic.margin_tpu.margin_accept, logsumexp=logsumexp, **options),
    }
    return dispatch(implementation, blocks, interpret, (logits, tokens, parents, y, controls), forms)
