"""Margin-aware verification: relax a strict rule where the target is nearly indifferent.

B batch, N nodes, V vocabulary. Oracle: a literal transcription of the paper's Algorithm 1 in
tests/verify/test_mars.py.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import Array

from kernels_pallas import (
    MARGINS,
    AcceptControls,
    MarginStats,
    margin_accept,
    margin_stats,
    sharded_margin_accept,
    sharded_margin_stats,
)
from mars_jax.core.errors import MarsError
from mars_jax.core.mesh import vocabulary_axes
from mars_jax.core.sampling import is_greedy, process, sample_processed
from mars_jax.core.tree import at_parent
from mars_jax.core.types import NO_TOKEN, Controls, DraftTree, Verdict
from mars_jax.verify.context import Context
from mars_jax.verify.exact import Exact
from mars_jax.verify.rejection import Rejection
from mars_jax.verify.stops import is_stop


@dataclasses.dataclass(frozen=True)
class Mars:
    """See `mars`."""

    base: Exact | Rejection
    margin: str
    # Only what `generate` puts into Controls; the rule reads controls.theta, so it takes no part in equality.
    theta: float = dataclasses.field(compare=False)
    context: Context | None = None

    @property
    def name(self) -> str:
        inside = [self.margin] if self.margin != "ratio" else []
        inside += [f"by {self.context.by}"] if self.context else []
        rule = f"mars({', '.join(inside)})" if inside else "mars"
        return rule if self.base == Exact() else f"{rule} over {self.base.name}"

    def __call__(self, keys: Array, tree: DraftTree, logits: Array, controls: Controls) -> Verdict:
        if isinstance(self.base, Rejection) or self.context is not None:
            return self.base.relax(keys, tree, logits, controls, self.relaxable(tree, logits, controls))
        # The kernel itself finds the argmax, so a batch of greedy rows names no token here. A cond over two calls
        # of the kernel would compile it twice.
        y = jax.lax.cond(
            jnp.all(is_greedy(controls)),
            lambda: jnp.full(tree.tokens.shape, NO_TOKEN, jnp.int32),
            lambda: sample_processed(keys, process(logits, controls)),
        )
        rows = AcceptControls(controls.theta, controls.strict, controls.max_relaxed_run, controls.stop_tokens)
        axes = vocabulary_axes(logits.shape[-1])
        accept = functools.partial(sharded_margin_accept, axis=axes) if axes else margin_accept
        done = accept(
            logits, tree.tokens, tree.parents, y, rows, max_depth=tree.max_depth, margin=self.margin
        )
        return Verdict(
            path=done.path, num_accepted=done.num_accepted, next_token=done.next_token, relaxed=done.relaxed
        )

    def relaxable(self, tree: DraftTree, logits: Array, controls: Controls) -> Array:
        """bool[B, N]: the edge into node i may be relaxed, as far as the margin, `strict` and stop tokens say;
        for what decides outside of the kernel."""
        stats = node_stats(logits)
        if self.context is None:
            theta = jnp.broadcast_to(controls.theta[:, None], stats.top1.shape)
        else:
            theta = self.context.theta(tree, logits, stats, controls.theta, self.margin)
        return relaxable_edges(tree, stats, MARGINS[self.margin](stats.top1, stats.top2, theta), controls)


def node_stats(logits: Array, *, logsumexp: bool = False) -> MarginStats:
    """The margin statistics of every node, [B, N] each, of logits that may be divided by vocabulary."""
    axes = vocabulary_axes(logits.shape[-1])
    if axes:
        return sharded_margin_stats(logits, axis=axes, logsumexp=logsumexp)
    return margin_stats(logits, logsumexp=logsumexp)


def relaxable_edges(tree: DraftTree, stats: MarginStats, low: Array, controls: Controls) -> Array:
    """bool[B, N]: the edges into one of the target's two best tokens at nodes where `low` bool[B, N], unless the row is
    strict or a stop token is involved."""
    low = low & ~controls.strict[:, None] & ~is_stop(stats.id1, controls)
    best = (tree.tokens == at_parent(tree, stats.id1)) | (tree.tokens == at_parent(tree, stats.id2))
    return at_parent(tree, low) & best & ~is_stop(tree.tokens, controls) & (tree.tokens >= 0)


def mars(
    base: Exact | Rejection | None = None,
    *,
    theta: float = 0.9,
    margin: str = "ratio",
    context: Context | None = None,
) -> Mars:
    """MARS (arXiv 2601.15498): where the target's margin is low, its runner-up is accepted too.

    An edge that `base` would not take is taken as relaxed where, at its parent, the margin of the two largest
    raw float32 target logits is low and the drafted token x is one of the two. At temperature 0 over
    `exact()` this is Algorithm 1 of the paper. Guards: never where x, the target's top token, or the token
    that `base` would emit instead is a stop token of the row; never in a row with `strict`; at most
    `max_relaxed_run` in a row; an exact sibling goes first. Lossy by design; with `controls.theta = inf` it
    equals `base` bit for bit.

    Args:
      base: the strict rule, `exact()` by default, or `rejection(...)`.
      theta: what `mars_jax.generate` puts into `Controls.theta` unless told otherwise. The rule itself always
        reads `controls.theta` ([B], changing it compiles nothing), so this takes no part in equality or hash.
      margin: "ratio" (z2 / z1 > theta, the paper's), "gap" (z1 - z2 < theta nats) or "prob_ratio"
        (p2 / p1 > theta).
      context: what scales the looseness of theta node by node, see `context`; its thresholds are compared outside
        of the kernel.

    Raises:
      MarsError: unknown margin, theta out of its range, or a base that cannot be relaxed.

    >>> import jax
    >>> from mars_jax.core.controls import make_controls
    >>> from mars_jax.core.tree import chain
    >>> z = jnp.asarray([[[9.0, 10.0, 0.0], [0.0, 9.0, 0.0]]])
    >>> keys = jax.random.split(jax.random.key(0), 1)
    >>> verdict = mars()(keys, chain(jnp.asarray([[2, 0]], jnp.int32)), z, make_controls(1, limit=9, theta=0.85))
    >>> verdict.relaxed.tolist(), verdict.next_token.tolist()
    ([[True]], [1])
    """
    if margin not in MARGINS:
        raise MarsError(f"margin is {margin!r}: expected one of {', '.join(MARGINS)}.")
    if not theta > 0 or (margin != "gap" and 1 < theta < math.inf):
        most = "" if margin == "gap" else " and at most 1"  # a ratio of the two is never above 1
        raise MarsError(
            f"theta is {theta} for the margin {margin}: expected above 0{most}, or inf, which is strict."
        )
    if base is not None and not isinstance(base, Exact | Rejection):
        raise MarsError(
            f"base is {base!r}: expected exact() or rejection(...), the rules that mars can relax."
        )
    return Mars(base=Exact() if base is None else base, margin=margin, theta=float(theta), context=context)
