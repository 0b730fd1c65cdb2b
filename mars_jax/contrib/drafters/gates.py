"""Gates of a cascade, by which the proxy accepts a drafted token, replaces it, or defers to the target.

B batch, P positions per draft, V vocabulary. Oracle: the same decisions in Python, in tests/contrib/test_cascade.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from mars_jax.core.sampling import argmax, at_tokens, top_k_logits
from mars_jax.core.types import NO_TOKEN, PyTree


class ProxyVerdict(NamedTuple):
    """A proxy's verdict on every position; each field is [B, P]."""

    token: Array  # i32; the proxy's best token
    differs: Array  # bool; the proxy's token replaces the drafted one, which may be NO_TOKEN
    unsure: Array  # bool; the target decides


Gate = Callable[[Array, Array, PyTree], ProxyVerdict]
"""A criterion of the proxy: (logits f32[B, P, V], drafted i32[B, P], thresholds) -> verdict."""


def margin_gate(logits: Array, drafted: Array, least: ArrayLike) -> ProxyVerdict:
    """Apply TriSpec's gate (arXiv 2601.23180): the proxy is sure if its top two probabilities differ by `least`.

    `least` is f32[]; above 1 the proxy is never sure.
    """
    top_two = top_k_logits(logits, 2)
    p = jnp.exp(top_two.values - top_two.logsumexp[..., None])
    best_token = argmax(logits)
    # The comparison is negated, so that the proxy is unsure if a probability is NaN.
    return ProxyVerdict(best_token, drafted != best_token, ~(p[..., 0] - p[..., 1] >= least))


def ratio_gate(logits: Array, drafted: Array, bounds: tuple[ArrayLike, ArrayLike]) -> ProxyVerdict:
    """Apply VIA-SD's gate (arXiv 2606.12243) to r = q'(x) / max q', for the drafted x and the slim verifier's q'.

    If r >= accept, x is accepted. Else if r >= escalate, the verifier's best token replaces it. Otherwise the target
    decides. `bounds` are (accept, escalate), f32[] each. Padding counts as the verifier's best token, with r = 1, so
    with `escalate` above 1 the target always decides. The published (.5, .3) leave the middle range nearly unused;
    re-implementations use (.6, .3), the default of `system_files`.
    """
    accept, escalate = bounds
    best_token = argmax(logits)
    batch, num_positions = drafted.shape
    position_index = jnp.broadcast_to(jnp.arange(num_positions, dtype=jnp.int32), (batch, num_positions))
    judged_tokens = jnp.where(drafted == NO_TOKEN, best_token, drafted)
    r = jnp.exp(at_tokens(logits, position_index, judged_tokens) - jnp.max(logits, axis=-1))
    return ProxyVerdict(best_token, (drafted == NO_TOKEN) | ~(r >= accept), ~(r >= escalate))


GATES: Mapping[str, Gate] = {"margin": margin_gate, "ratio": ratio_gate}
"""Gates, keyed by the names that `cascade` accepts."""
