"""Acceptance drawn at random with a given tau, to size hardware before there is a drafter worth its name.

B batch, N nodes, D depth. Oracle: the mean over many steps in tests/verify/test_simulated.py.
"""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
from jax import Array, lax

from mars_jax.core.errors import MarsError
from mars_jax.core.sampling import node_uniforms, sample
from mars_jax.core.tree import ancestors, walk
from mars_jax.core.types import Controls, DraftTree, Verdict

HALVINGS = 24
"""Of the interval that holds the acceptance rate; what is left of it is below float32's resolution of a tau."""


@dataclasses.dataclass(frozen=True)
class Simulated:
    """See `simulated`."""

    tau: float

    @property
    def name(self) -> str:
        return f"simulated tau={self.tau:g}"

    def __call__(self, keys: Array, tree: DraftTree, logits: Array, controls: Controls) -> Verdict:
        if self.tau > tree.max_depth + 1:
            raise MarsError(
                f"tau is {self.tau:g}, and a draft of depth {tree.max_depth} gives {tree.max_depth + 1} tokens a step "
                "at most: ask for less, or draft deeper."
            )
        real = tree.tokens >= 0
        depths = jnp.where(real, tree.depths, -1)
        height = jnp.max(depths, axis=1)  # i32[B]
        if tree.is_chain:
            on_path = real
        else:
            # The first of the deepest nodes, and its ancestors.
            deepest = jnp.argmax(depths, axis=1)[:, None, None]
            on_path = jnp.take_along_axis(ancestors(tree.parents, tree.max_depth), deepest, axis=1)[:, 0]
        rate = acceptance_rate(jnp.full(height.shape, self.tau), height, tree.max_depth)
        # u < rate ** d for d = 1, 2, ...: accepted that far.
        uniform = jnp.maximum(node_uniforms(keys, 1), jnp.finfo(jnp.float32).tiny)
        accepted = on_path & (uniform < rate[:, None] ** tree.depths.astype(jnp.float32))
        path, num_accepted, relaxed = walk(tree, accepted, jnp.zeros_like(accepted), controls.max_relaxed_run)
        # The tokens of the target, though nothing depends on them, for they cost what they cost in `exact`.
        y = sample(keys, logits, controls)
        next_token = jnp.take_along_axis(y, path[:, -1:], axis=1)[:, 0]
        return Verdict(path=path, num_accepted=num_accepted, next_token=next_token, relaxed=relaxed)


def acceptance_rate(tau: Array, height: Array, max_depth: int) -> Array:
    """The rate a f32[B] with 1 + a + ... + a ** height = tau (2211.17192, equation 1); 1 where no rate reaches tau.

    Args:
      tau: f32[B], at least 1.
      height: i32[B], at most `max_depth`.

    >>> round(float(acceptance_rate(jnp.float32([1.75]), jnp.int32([2]), 2)[0]), 4)
    0.5
    """
    power = jnp.arange(max_depth + 1, dtype=jnp.float32)[None]
    last = height.astype(jnp.float32)

    def reached(a: Array) -> Array:
        return jnp.sum(jnp.where(power <= last[:, None], a[:, None] ** power, 0.0), axis=1)

    def halve(_, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = (low + high) / 2
        below = reached(middle) < tau
        return jnp.where(below, middle, low), jnp.where(below, high, middle)

    ends = jnp.zeros(height.shape, jnp.float32), jnp.ones(height.shape, jnp.float32)
    low, high = lax.fori_loop(0, HALVINGS, halve, ends)
    return jnp.where(tau >= 1 + last, 1.0, (low + high) / 2)


def simulated(tau: float) -> Simulated:
    """Accept by chance, so that a step gives `tau` tokens in expectation, bonus token included. The text means nothing.

    In each step one path of the draft, to the first of its deepest nodes, is followed as far as a constant rate of
    acceptance per depth leads; the rate is solved for from tau and from that path's length, step by step. So tau is
    met by chains, by trees, and by trees that differ from step to step, unless a draft is too short to reach it: then
    all of that path is accepted. What is emitted is what was drafted, whatever the target says, and the target's token
    behind it. Everything costs what it costs under `exact`. A drafted stop token ends a text, so decode past it
    (`ignore_eos`) where a length is wanted, and a last step that the limit cuts short counts less.

    Args:
      tau: tokens per target forward, from 1 to the depth of the draft plus 1.

    Raises:
      MarsError: tau below 1 or not finite; when called, tau above what the draft's depth allows.

    >>> import jax
    >>> from mars_jax.core.controls import make_controls
    >>> from mars_jax.core.tree import chain
    >>> z = jnp.eye(4, dtype=jnp.float32)[None, 1:4]
    >>> keys = jax.random.split(jax.random.key(0), 1)
    >>> verdict = simulated(3)(keys, chain(jnp.asarray([[0, 3, 3]], jnp.int32)), z, make_controls(1, limit=9))
    >>> verdict.num_accepted.tolist(), verdict.next_token.tolist()
    ([2], [3])
    """
    if not (math.isfinite(tau) and tau >= 1):
        raise MarsError(f"tau is {tau}: expected a number of at least 1, the token that every step gives.")
    return Simulated(float(tau))
