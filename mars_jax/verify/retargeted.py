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
from mars_jax.core.sampling import process
from mars_jax.core.types import Verdict
from mars_jax.verify.rejection import check_chain, verify_chain


@flax.struct.dataclass(kw_only=True)
class Retargeted:
    """Verify drafted chains against a distribution v in place of the target's p, by rejection: the output follows v.

    Subclass it to write a rule of distributions (mixtures, lenience, cascades of distributions): `target` says what v
    is. Strict rows follow p, by the same rule.
    """

    block: bool = flax.struct.field(pytree_node=False, default=False)
    lossless: ClassVar[bool] = False
    needs: ClassVar[tuple[str, ...]] = ("chain",)

    @property
    def name(self) -> str:
        return type(self).__name__.lower()

    def target(self, log_p: Array, log_q: Array, evidence: Evidence) -> Array:
        """log v, unnormalised, f32[B, N, V].

        Args:
          log_p: f32[B, N, V]; normalised, of the processed target; one-hot in greedy rows.
          log_q: f32[B, N, V]; normalised, of the draft, -inf for what it cannot draw; one-hot where the draft is
            deterministic. At nodes without a drafted token it is log_p.
          evidence: of the step.
        """
        raise MarsError(f"the rule {type(self).__name__} says nothing: give it a method target.")

    def __call__(self, evidence: Evidence) -> tuple[Verdict, Self]:
        check_chain(evidence.tree, self.name)
        log_p = jax.nn.log_softmax(process(evidence.logits, evidence.controls), axis=-1)
        log_v = self.target(log_p, _log_q(evidence, log_p), evidence)
        log_v = jnp.where(evidence.controls.strict[:, None, None], log_p, log_v)
        return verify_chain(evidence, log_v, None, self.block), self


def _log_q(evidence: Evidence, log_p: Array) -> Array:
    tokens = evidence.tree.tokens
    following = jnp.pad(tokens[:, 1:], ((0, 0), (0, 1)), constant_values=-1)
    if evidence.tree.draft_logits is None:
        ids = jnp.arange(log_p.shape[-1], dtype=jnp.int32)[None, None]
        log_q = jnp.where(ids == following[..., None], 0.0, -jnp.inf)
    else:
        log_q = jax.nn.log_softmax(evidence.tree.draft_logits, axis=-1)
    return jnp.where((following < 0)[..., None], log_p, log_q)
