"""Margin-aware verification: relax a strict rule if the target has no clear preference between its two best tokens.

Tested against a literal transcription of the paper's Algorithm 1 (tests/verify/test_mars.py).

Dimensions: B batch, N nodes, V vocabulary.
"""

from __future__ import annotations

import functools
from typing import Any, Self

import jax.numpy as jnp
from jax import Array

from kernels_pallas import MARGINS, AcceptControls, margin_accept, sharded_margin_accept
from mars_jax.core import struct
from mars_jax.core.axes import vocabulary_axes
from mars_jax.core.rule import Evidence
from mars_jax.core.sampling import if_greedy, process, sample_processed
from mars_jax.core.types import NO_TOKEN, Verdict
from mars_jax.utils.settings import Range
from mars_jax.verify.definition import register
from mars_jax.verify.exact import Exact
from mars_jax.verify.ranges import RATIOS, share
from mars_jax.verify.relaxed import Relaxed, over

# Thresholds for the margin `gap` that `calibrate` tries, from strict to loose.
GAPS = (0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0)


@register("mars", paper="2601.15498")
@struct.dataclass(kw_only=True)
class Mars(Relaxed):
    """Also accept the target's runner-up if its two best tokens are nearly tied.

    MARS (arXiv 2601.15498): accept a drafted token that `base` rejects if it is one of the target's two best tokens,
    and the margin between these two is low. The margin is computed from the raw float32 logits at the token's parent.
    At temperature 0 and with the base `exact()`, the rule is Algorithm 1 of the paper.

    A token is never relaxed if it, the target's top token, or the token that `base` would emit instead is a stop token
    of the row. No token is relaxed in a row with `strict` set, or among the first `exact_prefix` tokens. At most
    `max_relaxed_run` consecutive tokens are relaxed. In a tree, an exact sibling has priority over a relaxed one.

    The rule is lossy by design. At theta = inf, it equals `base` bit for bit. Because the margin is computed from raw
    logits, a sampled row may emit a token that top-k or top-p excludes.

    >>> from mars_jax import verify
    >>> from mars_jax.core.tree import chain
    >>> z = jnp.asarray([[[9.0, 10.0, 0.0], [0.0, 9.0, 0.0]]])
    >>> inputs = verify.evidence(chain(jnp.asarray([[2, 0]], jnp.int32)), z)
    >>> verdict, _ = verify.for_rows(mars(theta=0.85), 1)(inputs)
    >>> verdict.relaxed.tolist(), verdict.next_token.tolist()
    ([[True]], [1])
    """

    # f32[] or [B]; threshold of the margin, in the units that `margin` selects; inf is strict
    theta: Any = struct.setting(
        default=0.9,
        ranges={
            "ratio": share(
                "a number above 0 and at most 1 for the margin ratio, or inf, which is strict", RATIOS
            ),
            "gap": Range("a number above 0 for the margin gap (inf is strict)", 0, above=True, grid=GAPS),
        },
        by="margin",
        help="threshold of the margin; inf never relaxes",
        flag=True,
        kw_only=False,
    )
    # a key of MARGINS, which determines the units of theta
    margin: str = struct.setting(
        default="ratio",
        choices={"ratio": "second logit / best > theta", "gap": "nats between them < theta"},
        help="measure of the margin, which is compared with theta",
        flag=True,
    )

    @property
    def name(self) -> str:
        return over("mars" if self.margin == "ratio" else f"mars({self.margin})", self.base)

    def low(self, evidence: Evidence) -> Array:
        # The margin is low if z_2 / z_1 > theta (`ratio`, as in the paper) or z_1 - z_2 < theta (`gap`).
        stats = evidence.stats
        return MARGINS[self.margin](stats.top1, stats.top2, self.theta[:, None])

    def __call__(self, evidence: Evidence) -> tuple[Verdict, Self]:
        # With the base `exact`, one fused operation computes the margins, the guards and the walk. Its verdict is the
        # same as that of `Relaxed.__call__`. It supports strict rows and the exact prefix, but not spans.
        if not isinstance(self.base, Exact) or evidence.strict_nodes is not None:
            return super().__call__(evidence)
        tree, logits, controls = evidence.tree, evidence.logits, evidence.controls
        # If all rows are greedy, pass NO_TOKEN, and the kernel uses its own argmax. A cond around two calls to the
        # kernel would compile the kernel twice.
        y = if_greedy(
            controls,
            lambda: jnp.full(tree.tokens.shape, NO_TOKEN, jnp.int32),
            lambda: sample_processed(evidence.keys, evidence.positions, process(logits, controls)),
        )
        strict_edges = self.strict_edges(evidence)
        # The kernel compares the margin with theta (see `kernels_pallas.margin.rule`).
        row_controls = AcceptControls(self.theta, strict_edges, self.max_relaxed_run, controls.stop_tokens)
        axes = vocabulary_axes(logits.shape[-1])
        accept = functools.partial(sharded_margin_accept, axis=axes) if axes else margin_accept
        acceptance = accept(
            logits, tree.tokens, tree.parents, y, row_controls, max_depth=tree.max_depth, margin=self.margin
        )
        verdict = Verdict(
            path=acceptance.path,
            num_accepted=acceptance.num_accepted,
            next_token=acceptance.next_token,
            relaxed=acceptance.relaxed,
        )
        return verdict, self


mars = Mars
