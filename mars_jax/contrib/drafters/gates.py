"""Verdicts of a proxy of the target on drafted tokens: they stand, another stands there, or the target is to be asked.

B batch, P places of a draft, V vocabulary. Oracle: the same decisions in Python, in tests/contrib/test_cascade.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from mars_jax.core.sampling import argmax, at_tokens, top_k
from mars_jax.core.types import NO_TOKEN


class Said(NamedTuple):
    """A proxy's verdict on every place, [B, P] each."""

    own: Array  # i32; the proxy's best token
    differs: Array  # bool; its own takes the place of the drafted one, which may be NO_TOKEN
    unsure: Array  # bool; the target decides


class Gate(NamedTuple):
    """A way of vouching. `judge` takes (logits f32[B, P, V], drafted i32[B, P], numbers)."""

    judge: Callable[[Array, Array, Any], Said]
    numbers: Any  # the usual ones: values, so that others compile nothing
    names: tuple[str, ...]  # of the numbers


def margin(logits: Array, drafted: Array, least: Any) -> Said:
    """TriSpec (arXiv 2601.23180): the proxy is sure where the difference of its two largest probabilities is at least
    `least`, f32[]; above 1 it never is."""
    best = top_k(logits, 2)
    p = jnp.exp(best.values - best.logsumexp[..., None])
    own = argmax(logits)
    return Said(own, drafted != own, ~(p[..., 0] - p[..., 1] >= least))


def ratio(logits: Array, drafted: Array, bounds: Any) -> Said:
    """VIA-SD (arXiv 2606.12243): r = q'(x) / max q' of the drafted x under the slim verifier. From `accept` on x
    stands; from `escalate` on the verifier's own token does; below it the target is asked.

    `bounds` are (accept, escalate), f32[] each. Where nothing is drafted the verifier's own token has r = 1; so with
    `escalate` above 1 the target is always asked. The published (.5, .3) have no use for their middle, says the
    project's survey of re-implementations, which take (.6, .3).
    """
    accept, escalate = bounds
    own = argmax(logits)
    batch, places = drafted.shape
    nodes = jnp.broadcast_to(jnp.arange(places, dtype=jnp.int32), (batch, places))
    token = jnp.where(drafted == NO_TOKEN, own, drafted)
    r = jnp.exp(at_tokens(logits, nodes, token) - jnp.max(logits, axis=-1))
    return Said(own, (drafted == NO_TOKEN) | ~(r >= accept), ~(r >= escalate))


GATES: Mapping[str, Gate] = {
    "margin": Gate(margin, np.float32(0.5), ("margin",)),
    "ratio": Gate(ratio, (np.float32(0.6), np.float32(0.3)), ("accept", "escalate")),
}
"""Gates by the names that `cascade` takes."""
