"""Simulated acceptance at a given tau, to estimate hardware requirements before a good drafter exists.

B batch, N nodes, D depth. Tested against the mean number of tokens over many steps, in tests/contrib/test_simulated.py.
"""

from __future__ import annotations

from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from mars_jax.core import struct
from mars_jax.core.drafter import Drafter
from mars_jax.core.pick import pick
from mars_jax.core.sampling import node_uniforms, sample
from mars_jax.core.tree import ancestors, walk
from mars_jax.core.types import Verdict
from mars_jax.utils.errors import MarsError
from mars_jax.verify import Evidence, Lossy, Range, at_parent, register
from mars_jax.verify.lossy import below_strict

HALVINGS = 24
"""Number of bisection steps for the acceptance rate. More steps would not change tau in float32."""


@register("simulated", paper="the rate: 2211.17192, equation 1")
@struct.dataclass(kw_only=True)
class Simulated(Lossy):
    """Accept draft tokens at random, to measure speed at a given acceptance rate; the text is meaningless.

    A step emits `tau` tokens on average, including the bonus token. In each step, the path to the first of the deepest
    nodes is accepted up to a random depth, with a constant acceptance rate per token. The rate is computed from tau and
    the length of that path. Chains and trees therefore reach tau even if their shapes change from step to step. If a
    draft is too short for tau, its whole path is accepted. The step emits the accepted tokens and then the target's
    token. A step costs as much as with `exact`. Strict rows and the exact prefix are verified as with `exact`. A
    drafted stop token ends a completion, so use `ignore_eos` to reach a given length. The last step of a completion
    emits fewer tokens if the length limit cuts it off.

    >>> from mars_jax import verify
    >>> from mars_jax.core.tree import chain
    >>> z = jnp.eye(4, dtype=jnp.float32)[None, 1:4]
    >>> evidence = verify.evidence(chain(jnp.asarray([[0, 3, 3]], jnp.int32)), z)
    >>> verdict, _ = verify.for_rows(Simulated(3), 1)(evidence)
    >>> verdict.num_accepted.tolist(), verdict.next_token.tolist()
    ([2], [3])
    """

    # f32[] or [B]; expected tokens per step
    tau: Any = struct.setting(
        ranges=Range("a number of at least 1, the token that every step gives", 1, 1024),
        help="mean number of tokens per forward pass of the target",
        flag=True,
        kw_only=False,
    )
    needs: ClassVar[tuple[str, ...]] = ("draft", "long")

    @property
    def name(self) -> str:
        return f"simulated tau={self.tau:g}" if np.ndim(self.tau) == 0 else "simulated"

    def check_drafter(self, drafter: Drafter) -> None:
        """Raise MarsError if the drafter's drafts are too short for tau, or if they are often empty."""
        if drafter.sparse:
            raise MarsError(
                f"the rule simulated does not apply to the drafter '{drafter.name}', which often drafts nothing: draft "
                "with a model or a head."
            )
        max_tokens = drafter.max_depth + 1
        if np.max(np.asarray(self.tau)) > max_tokens:
            raise MarsError(
                f"tau is {np.max(np.asarray(self.tau)):g}, and this draft gives {max_tokens} tokens a step at most: "
                "ask for less, or draft deeper."
            )

    def __call__(self, evidence: Evidence) -> tuple[Verdict, Simulated]:
        tree = evidence.tree
        is_real = tree.tokens >= 0
        depths = jnp.where(is_real, tree.depths, -1)
        height = jnp.max(depths, axis=1)  # i32[B]
        if tree.is_chain:
            on_path = is_real
        else:
            # Mark the deepest node (the first, if there are several) and its ancestors.
            end_node = jnp.argmax(depths, axis=1)[:, None, None]
            on_path = jnp.take_along_axis(ancestors(tree.parents, tree.max_depth), end_node, axis=1)[:, 0]
        acceptance = acceptance_rate(self.tau, height, tree.max_depth)
        # Draw one u per row. The token at depth d is accepted if u < acceptance ** d.
        uniform = node_uniforms(evidence.keys, evidence.start[:, None])
        uniform = jnp.maximum(uniform, jnp.finfo(jnp.float32).tiny)
        is_accepted = on_path & (uniform < acceptance[:, None] ** tree.depths.astype(jnp.float32))
        # Sample the target's tokens at all nodes, so that a step costs as much as with `exact`.
        y = sample(evidence.keys, evidence.positions, evidence.logits, evidence.controls)
        is_strict = (tree.depths <= self.strict_edges(evidence)[:, None]) | below_strict(evidence)
        is_accepted = jnp.where(is_strict, tree.tokens == at_parent(tree, y), is_accepted)
        path, num_accepted, relaxed = walk(tree, is_accepted, None)
        next_token = pick(y, path[:, -1:])[:, 0]
        verdict = Verdict(path=path, num_accepted=num_accepted, next_token=next_token, relaxed=relaxed)
        return verdict, self


def acceptance_rate(tau: Array, height: Array, max_depth: int) -> Array:
    """Return the rate a f32[B] that solves 1 + a + ... + a ** height = tau (2211.17192, equation 1), or 1 if none does.

    Args:
      tau: f32[B], at least 1; mean number of tokens per step.
      height: i32[B], at most `max_depth`; length of the path.

    >>> round(float(acceptance_rate(jnp.float32([1.75]), jnp.int32([2]), 2)[0]), 4)
    0.5
    """
    power = jnp.arange(max_depth + 1, dtype=jnp.float32)[None]
    exponent_limit = height.astype(jnp.float32)

    def expected_tokens(a: Array) -> Array:
        return jnp.sum(jnp.where(power <= exponent_limit[:, None], a[:, None] ** power, 0.0), axis=1)

    def halve(_, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = (low + high) / 2
        is_below = expected_tokens(middle) < tau
        return jnp.where(is_below, middle, low), jnp.where(is_below, high, middle)

    bounds = jnp.zeros(height.shape, jnp.float32), jnp.ones(height.shape, jnp.float32)
    low, high = lax.fori_loop(0, HALVINGS, halve, bounds)
    return jnp.where(tau >= 1 + exponent_limit, 1.0, (low + high) / 2)
