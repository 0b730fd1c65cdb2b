"""Acceptance drawn at random with a given tau, to size hardware before there is a drafter worth its name.

B batch, N nodes, D depth. Oracle: the mean over many steps in tests/contrib/test_simulated.py.
"""

from __future__ import annotations

from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from mars_jax.core import struct
from mars_jax.core.drafter import SPARSE, Drafter
from mars_jax.core.errors import MarsError
from mars_jax.core.evidence import Evidence
from mars_jax.core.pick import pick
from mars_jax.core.sampling import node_uniforms, sample
from mars_jax.core.tree import ancestors, at_parent, walk
from mars_jax.core.types import Verdict
from mars_jax.verify.lossy import Lossy, below_strict, numbers

HALVINGS = 24
"""Halvings of the interval that holds the acceptance rate; the last interval is below float32's resolution of a tau."""


@struct.dataclass(kw_only=True)
class Simulated(Lossy):
    """Accept by chance, so that a step gives `tau` tokens in expectation, bonus token included. The text means nothing.

    In each step one path of the draft, to the first of its deepest nodes, is followed as far as a constant rate of
    acceptance per depth leads; the rate is solved for from tau and from that path's length, step by step. So tau is
    met by chains, by trees, and by trees that differ from step to step, unless a draft is too short to reach it: then
    all of that path is accepted. What is emitted is what was drafted, whatever the target says, and the target's token
    after it. Everything costs what it costs under `exact`, which strict rows and the exact prefix get. A
    drafted stop token ends a text, so decode past it (`ignore_eos`) where a length is wanted, and a last step that the
    limit cuts short counts less.
    """

    tau: Any  # f32[] or [B]
    needs: ClassVar[tuple[str, ...]] = ("draft", "long")

    @property
    def name(self) -> str:
        return f"simulated tau={self.tau:g}" if np.ndim(self.tau) == 0 else "simulated"

    def check_drafter(self, drafter: Drafter) -> None:
        """Raise MarsError where drafts are too short for tau, or often none at all."""
        if SPARSE in drafter.traits:
            raise MarsError(
                f"the rule simulated does not apply to the drafter '{drafter.name}', which often drafts nothing: draft "
                "with a model or a head."
            )
        most = drafter.max_depth + 1
        if np.max(np.asarray(self.tau)) > most:
            raise MarsError(
                f"tau is {np.max(np.asarray(self.tau)):g}, and this draft gives {most} tokens a step at most: ask for "
                "less, or draft deeper."
            )

    def __call__(self, evidence: Evidence) -> tuple[Verdict, Simulated]:
        tree = evidence.tree
        real = tree.tokens >= 0
        depths = jnp.where(real, tree.depths, -1)
        height = jnp.max(depths, axis=1)  # i32[B]
        if tree.is_chain:
            on_path = real
        else:
            # The first of the deepest nodes, and its ancestors.
            deepest = jnp.argmax(depths, axis=1)[:, None, None]
            on_path = jnp.take_along_axis(ancestors(tree.parents, tree.max_depth), deepest, axis=1)[:, 0]
        rate = acceptance_rate(self.tau, height, tree.max_depth)
        # u < rate ** d for d = 1, 2, ...: accepted that far.
        uniform = node_uniforms(evidence.keys, evidence.start[:, None])
        uniform = jnp.maximum(uniform, jnp.finfo(jnp.float32).tiny)
        accepted = on_path & (uniform < rate[:, None] ** tree.depths.astype(jnp.float32))
        # The tokens of the target, though little depends on them, for they cost what they cost in `exact`.
        y = sample(evidence.keys, evidence.positions, evidence.logits, evidence.controls)
        strict = (tree.depths <= self.strict_edges(evidence)[:, None]) | below_strict(evidence)
        accepted = jnp.where(strict, tree.tokens == at_parent(tree, y), accepted)
        path, num_accepted, relaxed = walk(tree, accepted, None)
        next_token = pick(y, path[:, -1:])[:, 0]
        verdict = Verdict(path=path, num_accepted=num_accepted, next_token=next_token, relaxed=relaxed)
        return verdict, self


def acceptance_rate(tau: Array, height: Array, max_depth: int) -> Array:
    """Return the rate a f32[B] with 1 + a + ... + a ** height = tau (2211.17192, equation 1); 1 if none reaches tau.

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


def simulated(tau: Any, *, exact_prefix: Any = 0) -> Simulated:
    """Acceptance by chance; see `Simulated`.

    Args:
      tau: tokens per target forward, from 1 to the depth of the draft plus 1; one number or one per row.
      exact_prefix: generated tokens at the start that are strict, one number or one per row; see `Lossy`.

    Raises:
      MarsError: tau below 1 or not finite.

    >>> from mars_jax import verify
    >>> from mars_jax.core.tree import chain
    >>> z = jnp.eye(4, dtype=jnp.float32)[None, 1:4]
    >>> given = verify.evidence(chain(jnp.asarray([[0, 3, 3]], jnp.int32)), z)
    >>> verdict, _ = verify.for_rows(simulated(3), 1)(given)
    >>> verdict.num_accepted.tolist(), verdict.next_token.tolist()
    ([2], [3])
    """
    return Simulated(**numbers("simulated", {"tau": tau, "exact_prefix": exact_prefix}))
