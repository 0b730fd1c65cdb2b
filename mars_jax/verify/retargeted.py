"""Base class of rules that apply rejection sampling with a distribution other than the target's.

Tested against exact enumeration (tests/verify/test_distributions.py).

Dimensions: B batch, N nodes, V vocabulary.
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
    """Base class of rules that verify drafts by rejection sampling with a distribution v in place of the target's p.

    The output follows v. To write a rule such as a mixture, lenience, or a cascade of distributions, derive from this
    class and define v in the method `target`. This class excludes from v the tokens that a constraint or a ban forbids.
    It uses p instead of v in strict rows, in the exact prefix, in rows at temperature 0, and for the token after the
    draft, which has no q. A draft that is a tree must have been sampled from q. If v depends on the drafted token, add
    "chain" to `needs`, because a node of a tree may have several children with different tokens.
    """

    block: bool = block_setting()  # verify whole blocks instead of single tokens; chains only
    needs: ClassVar[tuple[str, ...]] = ("draft", "q")

    @property
    def base(self) -> Rejection:
        """The lossless rule that is used in strict rows."""
        return Rejection(block=self.block)

    def target(self, log_p: Array, log_q: Array, evidence: Evidence) -> Array:
        """Return log v, f32[B, N, V], which need not be normalised.

        Args:
          log_p: f32[B, N, V]; log probabilities of the target, after temperature and filters.
          log_q: f32[B, N, V]; log probabilities of the draft. They are -inf for tokens that the draft cannot sample,
            and for all tokens except the drafted one in a deterministic draft. At nodes without children, log_q is
            log_p.
          evidence: the inputs of the rule in this step.
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
            # p is the target's distribution after temperature and filters. `follows_p` marks the nodes that use p, and
            # all other nodes use v. The logits of a node verify its children, which are one level deeper.
            log_p = jax.nn.log_softmax(process(evidence.logits, evidence.controls))
            is_leaf = ~_has_children(evidence.tree)
            follows_p = evidence.tree.depths < self.strict_edges(evidence)[:, None]
            follows_p |= is_greedy_row[:, None] | is_leaf
            if evidence.strict_nodes is not None:
                follows_p |= evidence.strict_nodes
            log_v = self.target(log_p, _log_q(evidence, is_leaf, log_p), evidence)
            check_array(self, "target", log_v, "floating", log_p.shape)
            if evidence.controls.guides is not None or evidence.controls.edits is not None:
                # The draft may assign a positive probability to forbidden tokens. Exclude these tokens from v.
                log_v = jnp.where(evidence.logits > -jnp.inf, log_v, -jnp.inf)
                # If v then excludes all tokens, use p.
                is_empty = jnp.max(log_v, axis=-1, keepdims=True) == -jnp.inf
                log_v = jnp.where(is_empty, log_p, log_v)
            return verify_draft(evidence, jnp.where(follows_p[..., None], log_p, log_v), None, self.block)

        return if_greedy(evidence.controls, lambda: Exact().relax(evidence, None), retargeted), self


def _has_children(tree: DraftTree) -> Array:
    """Return bool[B, N], True if a node has a child that is not padding."""
    if tree.is_chain:
        return jnp.pad(tree.tokens[:, 1:] >= 0, ((0, 0), (0, 1)))
    # Compute bool[B, N, N]. Entry [b, i, j] is True if node j is a child of node i and is not padding.
    node_ids = jnp.arange(tree.tokens.shape[1], dtype=jnp.int32)[None, :, None]
    return jnp.any((tree.parents[:, None] == node_ids) & (tree.tokens >= 0)[:, None], axis=2)


def _log_q(evidence: Evidence, ends: Array, log_p: Array) -> Array:
    """Return the draft's log probabilities at each node, f32[B, N, V]. `ends` marks the nodes without children."""
    if evidence.tree.draft_logits is None:
        # Use the one-hot distribution of the token drafted after each node. NO_TOKEN matches no token.
        ids = jnp.arange(log_p.shape[-1], dtype=jnp.int32)[None, None]
        log_q = jnp.where(ids == following(evidence.tree)[..., None], 0.0, -jnp.inf)
    else:
        log_q = jax.nn.log_softmax(evidence.tree.draft_logits, axis=-1)
    # Nodes without children have no q. Use log p as a placeholder, because v is not used at these nodes.
    return jnp.where(ends[..., None], log_p, log_q)
