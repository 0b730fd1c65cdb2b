"""Thresholds that depend on where they are applied: one theta, and a factor on its looseness by context.

B batch, N nodes, V vocabulary, C bins. Oracle: tests/verify/test_context.py.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from kernels_pallas import MarginStats
from mars_jax.core.errors import MarsError
from mars_jax.core.types import DraftTree

KINDS = ("entropy", "position", "class")
CLASSES = ("word", "number", "punctuation")
"""Classes of tokens, by the ids in `Context.classes`; what is neither number nor punctuation is word."""

# The looseness of a threshold, on which factors act: 0 is strict, and it grows with what is let through.
_TO_LOOSENESS: dict[str, Callable[[Array], Array]] = {
    "ratio": lambda theta: 1 / theta - 1,  # the gap in units of z2
    "gap": lambda theta: theta,
    "prob_ratio": lambda theta: -jnp.log(theta),  # the gap in nats
}
_TO_THETA: dict[str, Callable[[Array], Array]] = {
    "ratio": lambda looseness: 1 / (1 + looseness),
    "gap": lambda looseness: looseness,
    "prob_ratio": lambda looseness: jnp.exp(-looseness),
}


@dataclasses.dataclass(frozen=True)
class Context:
    """See `context`."""

    by: str
    factors: tuple[float, ...]  # [C]
    edges: tuple[float, ...] = ()  # [C - 1], ascending; bin c holds edges[c - 1] <= value < edges[c]
    classes: bytes = b""  # u8[V]: the class of each token

    def theta(self, tree: DraftTree, logits: Array, stats: MarginStats, theta: Array, margin: str) -> Array:
        """f32[B, N]: the threshold at every node, from that of its row.

        Args:
          tree, logits: as a verifier gets them.
          stats: of the logits.
          theta: f32[B].
          margin: what theta bounds.
        """
        theta = jnp.broadcast_to(theta[:, None], stats.top1.shape)
        scaled = _TO_THETA[margin](_TO_LOOSENESS[margin](theta) * self._factor(tree, logits, stats))
        return jnp.where(jnp.isinf(theta), theta, scaled)

    def _factor(self, tree: DraftTree, logits: Array, stats: MarginStats) -> Array:
        factors = jnp.asarray(self.factors, jnp.float32)
        if self.by == "class":
            of_token = factors[jnp.asarray(np.frombuffer(self.classes, np.uint8).astype(np.int32))]
            return jnp.minimum(of_token[stats.id1], of_token[stats.id2])
        value = entropy(logits) if self.by == "entropy" else tree.depths.astype(jnp.float32)
        edges = jnp.asarray(self.edges, jnp.float32)
        return factors[jnp.searchsorted(edges, value, side="right")]


def context(
    by: str, factors: Sequence[float], *, edges: Sequence[float] = (), classes: bytes = b""
) -> Context:
    """A context for `verify.mars`: what scales the looseness of its threshold, node by node.

    The looseness of a threshold is the gap between the two best logits that it lets through: in nats for the margins
    gap and prob_ratio, as a share of the second logit for ratio. Bin c of the context multiplies it by `factors[c]`: 0
    is strict there, 1 is theta itself. So theta stays the one number of a request that changes without compiling, and
    that a calibration chooses.

    Args:
      by: "entropy" of the target's distribution at the node, nats, at temperature 1; "position" in the draft, its
        depth, where 0 is the first drafted token; or "class", of the target's two best tokens.
      factors: [C], at least 0. By class, of words, numbers and punctuation; the smaller of the two tokens' counts.
      edges: [C - 1], ascending, between the bins of entropy or position.
      classes: u8[V] as bytes, by class; see `token_classes`.

    Raises:
      MarsError: unknown context, or numbers that do not fit it.

    >>> context("position", (1.0, 0.5), edges=(2,)).factors
    (1.0, 0.5)
    """
    if by not in KINDS:
        raise MarsError(f"context is by {by!r}: expected one of {', '.join(KINDS)}.")
    factors, edges = tuple(map(float, factors)), tuple(map(float, edges))
    bins = len(CLASSES) if by == "class" else len(edges) + 1
    if len(factors) != bins:
        raise MarsError(f"a context by {by} has {len(factors)} factors: expected {bins}, one for each bin.")
    if not all(math.isfinite(f) and f >= 0 for f in factors):
        raise MarsError(
            f"the factors of a context are {list(factors)}: expected finite numbers of at least 0."
        )
    if list(edges) != sorted(set(edges)) or (by == "class") == bool(edges):
        raise MarsError(
            f"the edges of a context by {by} are {list(edges)}: expected ascending numbers, or none for class."
        )
    if (by == "class") != bool(classes):
        raise MarsError("classes belong to a context by class, and to no other: see token_classes.")
    return Context(by=by, factors=factors, edges=edges, classes=classes)


def entropy(logits: Array) -> Array:
    """Entropy in nats of softmax(logits): [..., V] -> f32[...].

    >>> round(float(entropy(jnp.zeros((4,)))), 4)
    1.3863
    """
    log_p = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    return -jnp.sum(jnp.where(jnp.isfinite(log_p), jnp.exp(log_p) * log_p, 0.0), axis=-1)


def token_classes(texts: Sequence[str]) -> bytes:
    """The class of every token by its text, u8[V] as bytes; ids as in `CLASSES`.

    A token with a digit is a number; one without letters or digits, but with something to see, is punctuation.

    >>> list(token_classes([" sea", "7", " (", "x1", "\\n"]))
    [0, 1, 2, 1, 0]
    """

    def of(text: str) -> int:
        if any(c.isdigit() for c in text):
            return 1
        return 2 if text.strip() and not any(c.isalpha() for c in text) else 0

    return bytes(of(text) for text in texts)
