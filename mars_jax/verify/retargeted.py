"""The seam of distributions: rejection against another distribution than the target's.

B batch, N nodes, V vocabulary. Oracle: exact enumeration in tests/verify/test_retargeted.py.
"""

from __future__ import annotations

from typing import ClassVar, Self

import flax.struct
import jax
import jax.numpy as jnp
from jax import Array

from mars_jax.core.errors import MarsError
from mars_jax.core.evidence import Evidence
from mars_jax.core.sampling import is_greedy, process
from mars_jax.core.types import NO_TOKEN, Verdict
from mars_jax.verify.exact import Exact
from mars_jax.verify.lossy import Lossy
from mars_jax.verify.rejection import Rejection, check_chain, verify_chain


@flax.struct.dataclass(kw_only=True)
class Retargeted(Lossy):
    """Verify drafted chains against a distribution v in place of the target's p, by rejection: the output follows v.

    Subclass it to write a rule of distributions (mixtures, lenience, cascades of distributions): `target` says what v
    is. What no rule has to think of: strict rows, the exact prefix, rows at temperature 0 and the token after the
    draft, which has no q, follow p by the same rule.
    """

    block: bool = flax.struct.field(pytree_node=False, default=False)
    needs: ClassVar[tuple[str, ...]] = ("chain",)

    @property
    def name(self) -> str:
        return type(self).__name__.lower()

    @property
    def base(self) -> Rejection:
        """What strict rows get."""
        return Rejection(block=self.block)

    def target(self, log_p: Array, log_q: Array, evidence: Evidence) -> Array:
        """log v, unnormalised, f32[B, N, V].

        Args:
          log_p: f32[B, N, V]; normalised, of the processed target.
          log_q: f32[B, N, V]; normalised, of the draft, -inf for what it cannot draw; one-hot where the draft is
            deterministic. At nodes without a drafted token it is log_p.
          evidence: of the step.
        """
        raise MarsError(f"the rule {type(self).__name__} says nothing: give it a method target.")

    def __call__(self, evidence: Evidence) -> tuple[Verdict, Self]:
        check_chain(evidence.tree, self.name)
        greedy = is_greedy(evidence.controls)

        def retargeted() -> Verdict:
            log_p = jax.nn.log_softmax(process(evidence.logits, evidence.controls), axis=-1)
            drafted = following(evidence)
            # Node i decides on the edge below it, which is one deeper.
            follows_p = evidence.tree.depths < self.strict_edges(evidence)[:, None]
            follows_p |= greedy[:, None] | (drafted < 0)
            log_v = self.target(log_p, _log_q(evidence, drafted, log_p), evidence)
            return verify_chain(evidence, jnp.where(follows_p[..., None], log_p, log_v), None, self.block)

        return jax.lax.cond(jnp.all(greedy), lambda: Exact().relax(evidence, None), retargeted), self


def following(evidence: Evidence) -> Array:
    """i32[B, N]: the token that is drafted after each node of a chain; NO_TOKEN where none is."""
    return jnp.pad(evidence.tree.tokens[:, 1:], ((0, 0), (0, 1)), constant_values=NO_TOKEN)


def _log_q(evidence: Evidence, drafted: Array, log_p: Array) -> Array:
    if evidence.tree.draft_logits is None:
        ids = jnp.arange(log_p.shape[-1], dtype=jnp.int32)[None, None]
        log_q = jnp.where(ids == drafted[..., None], 0.0, -jnp.inf)
    else:
        log_q = jax.nn.log_softmax(evidence.tree.draft_logits, axis=-1)
    return jnp.where((drafted < 0)[..., None], log_p, log_q)
