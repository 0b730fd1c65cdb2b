"""Margin-aware verification: relax a strict rule at nodes where the target is nearly indifferent.

B batch, N nodes, V vocabulary. Oracle: a literal transcription of the paper's Algorithm 1 in
tests/verify/test_mars.py.
"""

from __future__ import annotations

import functools
from typing import Any, Self

import jax.numpy as jnp
from jax import Array

from kernels_pallas import MARGINS, AcceptControls, margin_accept, sharded_margin_accept
from mars_jax import specs
from mars_jax.core import struct
from mars_jax.core.evidence import Evidence
from mars_jax.core.mesh import vocabulary_axes
from mars_jax.core.sampling import if_greedy, process, sample_processed
from mars_jax.core.types import NO_TOKEN, Verdict
from mars_jax.specs import UNLIMITED_RUN
from mars_jax.verify.exact import Exact
from mars_jax.verify.lossy import numbers
from mars_jax.verify.relaxed import Relaxed, base_of, over


@struct.dataclass(kw_only=True)
class Mars(Relaxed):
    """MARS (arXiv 2601.15498): if the target's margin is low, accept its runner-up too.

    An edge that `base` rejects is accepted as relaxed if, at its parent, the margin of the two largest raw float32
    target logits is low and the drafted token x is one of the two. At temperature 0 over `exact()` this is Algorithm 1
    of the paper. Guards: never relax if x, the target's top token, or the token that `base` would emit instead is a
    stop token of the row; never in a row with `strict`, nor among its first `exact_prefix` tokens; at most
    `max_relaxed_run` consecutive edges; an exact sibling has priority. Lossy by design; at theta = inf it equals `base`
    bit for bit. The margin is of raw logits, so a sampled row may emit a token that top-k or top-p excludes.
    """

    theta: Any  # f32[] or [B]; threshold in the units of the margin; inf is strict
    margin: str = struct.field(pytree_node=False, default="ratio")  # of MARGINS

    @property
    def name(self) -> str:
        return over("mars" if self.margin == "ratio" else f"mars({self.margin})", self.base)

    def low(self, evidence: Evidence) -> Array:
        stats = evidence.stats
        return MARGINS[self.margin](stats.top1, stats.top2, self.theta[:, None])

    def __call__(self, evidence: Evidence) -> tuple[Verdict, Self]:
        # The kernel supports strict rows and the exact prefix, but not spans.
        if not isinstance(self.base, Exact) or evidence.strict_nodes is not None:
            return super().__call__(evidence)
        tree, logits, controls = evidence.tree, evidence.logits, evidence.controls
        # The kernel computes the argmax itself, so a batch of greedy rows passes NO_TOKEN. A cond over two calls of the
        # kernel would compile it twice.
        y = if_greedy(
            controls,
            lambda: jnp.full(tree.tokens.shape, NO_TOKEN, jnp.int32),
            lambda: sample_processed(evidence.keys, evidence.positions, process(logits, controls)),
        )
        strict = self.strict_edges(evidence)
        # The kernel compares the margin with theta: `kernels_pallas.margin_rule`.
        rows = AcceptControls(self.theta, strict, self.max_relaxed_run, controls.stop_tokens)
        axes = vocabulary_axes(logits.shape[-1])
        accept = functools.partial(sharded_margin_accept, axis=axes) if axes else margin_accept
        result = accept(
            logits, tree.tokens, tree.parents, y, rows, max_depth=tree.max_depth, margin=self.margin
        )
        verdict = Verdict(
            path=result.path,
            num_accepted=result.num_accepted,
            next_token=result.next_token,
            relaxed=result.relaxed,
        )
        return verdict, self


def mars(
    theta: Any = 0.9,
    *,
    base: Any = None,
    margin: str = "ratio",
    max_relaxed_run: Any = UNLIMITED_RUN,
    exact_prefix: Any = 0,
) -> Mars:
    """Build the rule of margin-aware verification; see `Mars`.

    Args:
      base: the strict rule, `exact()` by default, or `rejection(...)`.
      theta: the threshold, one number or one per row. It is traced, so changing it does not recompile.
      margin: "ratio" (z2 / z1 > theta, as in the paper) or "gap" (z1 - z2 < theta nats).
      max_relaxed_run: maximum consecutive relaxed tokens, one number or one per row; default: unlimited.
      exact_prefix: number of generated tokens at the start that are strict, one number or one per row; see `Lossy`.

    Raises:
      MarsError: the margin is unknown, a number is out of range, or the base cannot be relaxed.

    >>> from mars_jax import verify
    >>> from mars_jax.core.tree import chain
    >>> z = jnp.asarray([[[9.0, 10.0, 0.0], [0.0, 9.0, 0.0]]])
    >>> inputs = verify.evidence(chain(jnp.asarray([[2, 0]], jnp.int32)), z)
    >>> verdict, _ = verify.for_rows(mars(theta=0.85), 1)(inputs)
    >>> verdict.relaxed.tolist(), verdict.next_token.tolist()
    ([[True]], [1])
    """
    specs.check_setting("mars", "margin", margin)
    settings = {"theta": theta, "max_relaxed_run": max_relaxed_run, "exact_prefix": exact_prefix}
    return Mars(
        base=base_of(base, "mars"),
        margin=margin,
        **numbers("mars", settings, margin=margin),
    )
