"""Margin thresholds that depend on context: one theta, and a factor per bin of contexts that scales its looseness.

B batch, N nodes, V vocabulary, C bins. Tested in tests/contrib/test_context.py against chains that are walked in Python
with the threshold of each node's bin.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import jax.numpy as jnp
import numpy as np
from jax import Array

from mars_jax.core import struct
from mars_jax.core.types import Verdict
from mars_jax.utils.errors import MarsError
from mars_jax.verify import MARGINS, Evidence, Mars, entropy
from mars_jax.verify.relaxed import over

KINDS = ("entropy", "position", "class")
CLASSES = ("word", "number", "punctuation")
"""Classes of tokens, in the order of their ids in `Context.classes`. All tokens except numbers and punctuation are
words."""


@struct.dataclass(kw_only=True)
class Context:
    """A table of factors for `by_context`, made by `context` and passed as the rule's weights, `Params.verify`."""

    by: str = struct.field(pytree_node=False)
    factors: Array  # f32[C]; factor of each bin
    edges: Array  # f32[C - 1], ascending; bin c covers edges[c - 1] <= value < edges[c]
    classes: Array  # u8[V]; the class of each token; u8[0] for other contexts


@struct.dataclass(kw_only=True)
class ByContext(Mars):
    """The rule `Mars`, with a theta that the table in `Params.verify` loosens or tightens at each node."""

    by: str = struct.field(pytree_node=False)
    needs: ClassVar[tuple[str, ...]] = ("draft", "weights")

    @property
    def name(self) -> str:
        margin = "" if self.margin == "ratio" else f"{self.margin}, "
        return over(f"mars({margin}by {self.by})", self.base)

    def low(self, evidence: Evidence) -> Array:
        stats, theta, factor = evidence.stats, self.theta[:, None], _factor(self.by, evidence)
        # A factor multiplies the looseness of the threshold: 0 is strict, and larger factors relax more.
        if self.margin == "gap":
            scaled_theta = theta * factor
        else:
            looseness = 1 / theta - 1  # the largest accepted gap in units of z2
            scaled_theta = 1 / (1 + looseness * factor)
        return MARGINS[self.margin](stats.top1, stats.top2, jnp.where(jnp.isinf(theta), theta, scaled_theta))

    def __call__(self, evidence: Evidence) -> tuple[Verdict, Self]:
        # Bypass the kernel of `Mars`, which supports only one theta per row.
        return super(Mars, self).__call__(evidence)


def by_context(by: str, **settings: Any) -> ByContext:
    """Make the rule `ByContext`: margin-aware verification with a threshold that depends on context.

    Args:
      by: "entropy", "position" or "class". Pass the rule together with a table from `context`, as
        `LoadedRule(by_context("entropy"), table)`.
      **settings: settings of `verify.mars`.

    Raises:
      MarsError: the context is unknown; see also `verify.mars`.

    >>> by_context("position", theta=0.8).name
    'mars(by position)'
    """
    check_kind(by)
    return ByContext(by=by, **settings)


def _factor(by: str, evidence: Evidence) -> Array:
    """Return the factor at each node, f32[B, N], from the table in `Params.verify`.

    Raises:
      MarsError: the table is missing, or was made for a kind of context other than `by`.
    """
    table = evidence.params
    if not isinstance(table, Context) or table.by != by:
        table_text = f"one by {table.by}" if isinstance(table, Context) else "none"
        raise MarsError(
            f"the rule has a context by {by} and Params.verify holds {table_text}: pass "
            f'LoadedRule(by_context("{by}"), contrib.context("{by}", ...)).'
        )
    if table.by == "class":
        token_factors = table.factors[table.classes.astype(jnp.int32)]
        stats = evidence.stats
        return jnp.minimum(token_factors[stats.id1], token_factors[stats.id2])
    if table.by == "entropy":
        context_value = entropy(evidence.logits)
    else:
        context_value = evidence.tree.depths.astype(jnp.float32)
    return table.factors[jnp.searchsorted(table.edges, context_value, side="right")]


def check_kind(by: str) -> None:
    """Raise MarsError if `by` is not a known kind of context."""
    if by not in KINDS:
        raise MarsError(f"context is by {by!r}: expected one of {', '.join(KINDS)}.")


def context(
    by: str, factors: Sequence[float], *, edges: Sequence[float] = (), classes: bytes = b""
) -> Context:
    """Make a table for `by_context(by)` that scales the looseness of its threshold at each node.

    The looseness of a threshold is the largest gap between the two best logits at which the runner-up is accepted. It
    is measured in nats for the margin "gap", and relative to the second logit for "ratio". In bin c of the context, it
    is multiplied by `factors[c]`: 0 is strict, and 1 leaves theta unchanged. So theta is still the only number to
    choose for a request. It can be calibrated, and changing it does not trigger recompilation.

    Args:
      by: kind of context: "entropy" for the entropy of the target's distribution at the node, in nats at temperature 1;
        "position" for the depth in the draft, counted from 0 for the first drafted token; or "class" for the classes of
        the target's two best tokens.
      factors: [C], each at least 0. For "class", these are the factors of words, numbers and punctuation, and the
        smaller of the two tokens' factors is used.
      edges: [C - 1], ascending; boundaries between the bins of entropy or position.
      classes: u8[V] as bytes; only for "class"; see `token_classes`.

    Raises:
      MarsError: the kind of context is unknown, or another argument is invalid for it.

    >>> context("position", (1.0, 0.5), edges=(2,)).factors.tolist()
    [1.0, 0.5]
    """
    check_kind(by)
    factors, edges = tuple(map(float, factors)), tuple(map(float, edges))
    bins = len(CLASSES) if by == "class" else len(edges) + 1
    if len(factors) != bins:
        raise MarsError(f"a context by {by} has {len(factors)} factors: expected {bins}, one for each bin.")
    if not all(math.isfinite(f) and f >= 0 for f in factors):
        raise MarsError(f"the factors of a context are {list(factors)}: expected finite numbers, at least 0.")
    if list(edges) != sorted(set(edges)) or (by == "class") == bool(edges):
        raise MarsError(
            f"the edges of a context by {by} are {list(edges)}: expected ascending numbers, or none for class."
        )
    if (by == "class") != bool(classes):
        raise MarsError("classes belong to a context by class, and to no other: see token_classes.")
    return Context(
        by=by,
        factors=jnp.asarray(factors, jnp.float32),
        edges=jnp.asarray(edges, jnp.float32),
        classes=jnp.asarray(np.frombuffer(classes, np.uint8)),
    )


def token_classes(texts: Sequence[str]) -> bytes:
    """Classify every token by its string. Return u8[V] as bytes: indices into `CLASSES`.

    A token that contains a digit is a number. A token without letters or digits, other than white space, is
    punctuation.

    >>> list(token_classes([" sea", "7", " (", "x1", "\\n"]))
    [0, 1, 2, 1, 0]
    """

    def class_of(text: str) -> int:
        if any(c.isdigit() for c in text):
            return CLASSES.index("number")
        if text.strip() and not any(c.isalpha() for c in text):
            return CLASSES.index("punctuation")
        return CLASSES.index("word")

    return bytes(class_of(text) for text in texts)
