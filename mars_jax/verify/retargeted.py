"""Rejection against a distribution other than the target's.

B batch, N nodes, V vocabulary. Oracle: exact enumeration in tests/verify/test_distributions.py.
"""

from __future__ import annotations

from typing import ClassVar, Self

import jax
import jax.numpy as jnp
from jax import Array

from mars_jax.core import struct
from mars_jax.core.rule import Evidence, check_array
from mars_jax.core.sampling import if_greedy, is_greedy, process
from mars_jax.core.tree import following
from mars_jax.core.types import DraftTree, Verdict
from mars_jax.utils.errors import MarsError
from mars_jax.verify.exact import Exact
from mars_jax.verify.lossy import Lossy
from mars_jax.verify.rejection import Rejection, block_setting, check_chain, verify_draft


@struct.dataclass(kw_only=True)
class Retargeted(Lossy):
    """Base class of rules that verify drafts by rejection against a distribution v instead of the target's p.

    The output follows v. Subclass it to write a rule such as a mixture, lenience or a cascade of distributions: define
    v in `target`. This class masks tokens of v that a constraint or a ban forbids, and uses p for strict rows, the
    exact prefix, rows at temperature 0 and the token after the draft, which has no q. A tree must be sampled from its
    q. If v depends on the drafted token, add "chain" to `needs`, because a tree node may have several.
    """

    block: bool = block_setting()  # verify by blocks, along chains
    needs: ClassVar[tuple[str, ...]] = ("draft", "q")

    @property
    def base(self) -> Rejection:
        """The lossless rule for strict rows."""
        return Rejection(block=self.block)

    def target(self, log_p: Array, log_q: Array, evidence: Evidence) -> Array:
        """Return log v, unnormalised, f32[B, N, V].

        Args:
          log_p: f32[B, N, V]; normalised, of the processed target.
          log_q: f32[B, N, V]; normalised, of the draft; -inf for tokens it cannot draw, one-hot for a deterministic
            draft. At nodes without children it is log_p.
          evidence: evidence of the step.
        """
        raise MarsError(f"the rule {type(self).__name__} defines no target: give it a method target.")

    def __call__(self, evidence: Evidence) -> tuple[Verdict, Self]:
        if "chain" in self.needs or self.block:
            check_chain(evidence.tree, self.name)
        if not evidence.tree.is_chain and evidence.tree.draft_logits is None:
            raise MarsError(
                f"{self.name} needs a sampled tree, and this one was not sampled: draft it with sample=True, "
                "or draft a chain."
            )
        is_greedy_row = is_greedy(evidence.controls)

        def retargeted() -> Verdict:
            # p, after temperature and filters. v replaces it where the rule may deviate from the target.
            log_p = jax.nn.log_softmax(process(evidence.logits, evidence.controls))
            is_leaf = ~_has_children(evidence.tree)
            # Node i judges the edges below it, whose depth is one larger.
            follows_p = evidence.tree.depths < self.strict_edges(evidence)[:, None]
            follows_p |= is_greedy_row[:, None] | is_leaf
            if evidence.strict_nodes is not None:
                follows_p |= evidence.strict_nodes
            log_v = self.target(log_p, _log_q(evidence, is_leaf, log_p), evidence)
            check_array(self, "target", log_v, "floating", log_p.shape)
            if evidence.controls.guides is not None or evidence.controls.edits is not None:
                # The draft may give probability to forbidden tokens, which v must not inherit from q.
                log_v = jnp.where(evidence.logits > -jnp.inf, log_v, -jnp.inf)
                # If nothing is left of v, fall back to p.
                is_empty = jnp.max(log_v, axis=-1, keepdims=True) == -jnp.inf
                log_v = jnp.where(is_empty, log_p, log_v)
            return verify_draft(evidence, jnp.where(follows_p[..., None], log_p, log_v), None, self.block)

        return if_greedy(evidence.controls, lambda: Exact().relax(evidence, None), retargeted), self


def _has_children(tree: DraftTree) -> Array:
    """Return bool[B, N]: whether the node has a child that is not padding."""
    if tree.is_chain:
        return jnp.pad(tree.tokens[:, 1:] >= 0, ((0, 0), (0, 1)))
    # bool[B, N, N], entry [b, i, j]: node j is a child of node i and not padding.
    node_ids = jnp.arange(tree.tokens.shape[1], dtype=jnp.int32)[None, :, None]
    return jnp.any((tree.parents[:, None] == node_ids) & (tree.tokens >= 0)[:, None], axis=2)


def _log_q(evidence: Evidence, ends: Array, log_p: Array) -> Array:
    """Return f32[B, N, V]: normalised log q at each node."""
    if evidence.tree.draft_logits is None:
        # The one-hot of the token drafted after each node; NO_TOKEN matches no token.
        ids = jnp.arange(log_p.shape[-1], dtype=jnp.int32)[None, None]
        log_q = jnp.where(ids == following(evidence.tree)[..., None], 0.0, -jnp.inf)
    else:
        log_q = jax.nn.log_softmax(evidence.tree.draft_logits, axis=-1)
    # Nodes without children have no q; log p is a placeholder, since v is not used at them.
    return jnp.where(ends[..., None], log_p, log_q)
